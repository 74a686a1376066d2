"""A worker of Dynamo: called as its runtime calls it, and served by Dynamo's own frontend.

Use a separate environment: ``pip install -e '.[dev]' 'ai-dynamo==1.6.*'``.
"""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from specjax.testing import Client, Files

from ..support.server_process import flags, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("dynamo") is None, reason="needs ai-dynamo"),
]
PROMPT = [0, 1, 2] * 6
LONG = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 100, "ignore_eos": True}}
SECONDS = 180.0


@pytest.fixture(scope="module")
def options(files: Files) -> dict[str, Any]:
    return files.arguments(dtype="float32", compile_on_use=True)


@contextmanager
def started(options: dict[str, Any], shutdown_timeout: float = 30.0) -> Iterator[Any]:
    """A started worker and a function that runs coroutines."""
    from specjax.integrations.dynamo import Worker

    worker = Worker(options, "tiny", shutdown_timeout)
    with asyncio.Runner() as runner:
        config = runner.run(worker.start(1))
        yield worker, config, runner.run
        runner.run(worker.cleanup())
        runner.run(worker.cleanup())  # as Dynamo may


def context() -> Any:
    from dynamo._core import Context

    return Context()


async def chunks(worker: Any, request: dict[str, Any], stopped_after: int = 10**9) -> list[Any]:
    """All chunks; the context is stopped, and the request aborted, after some of them."""
    state, received = context(), []
    async for chunk in worker.generate(dict(request), state):
        received.append(chunk)
        if len(received) == stopped_after:
            state.stop_generating()
            await worker.abort(state)
    return received


def ids(received: list[Any]) -> list[int]:
    return [token for chunk in received for token in chunk["token_ids"]]


def test_tokens_are_those_of_the_engine(files: Files, options) -> None:
    with files.engine(dtype="float32") as engine:
        params = {"max_new_tokens": 20, "temperature": 0.0}
        direct = engine.generate(
            input_ids=PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=2
        )
    request = {
        "token_ids": b"".join(i.to_bytes(4, "little") for i in PROMPT),  # as Dynamo packs them
        "stop_conditions": {"max_tokens": 20},
        "sampling_options": {"temperature": 0.0},
        "output_options": {"logprobs": 2},
    }
    events = {"endpoint": "tcp://*:0", "topic": "t"}
    with started(options | {"kv_events_config": events}) as (worker, config, run):
        received = run(chunks(worker, request))
        (source,) = run(worker.kv_event_sources())
        probe = run(chunks(worker, run(worker.health_check_payload())))
        with pytest.raises(Exception, match="n=2"):
            run(chunks(worker, {"token_ids": PROMPT, "sampling_options": {"n": 2}}))
    sizes = config.llm.context_length, config.llm.kv_cache_block_size, config.llm.total_kv_blocks
    assert sizes == (128, 4, 64)
    assert (source.topic, source.dp_rank) == ("t", 0)
    assert source.endpoint.startswith("tcp://")
    assert len(ids(probe)) == 1
    assert ids(received) == direct["output_ids"]
    values = [value for chunk in received for value in chunk["log_probs"]]
    meta = direct["meta_info"]
    assert values == pytest.approx([x for x, *_ in meta["output_token_logprobs"]])
    tops = [[x["token_id"] for x in top] for chunk in received for top in chunk["top_logprobs"]]
    assert tops == [[token for _, token, _ in top] for top in meta["output_top_logprobs"]]
    assert [chunk.get("finish_reason") for chunk in received][-1] == meta["finish_reason"]["type"]
    assert not any("finish_reason" in chunk for chunk in received[:-1])


def test_log_probabilities_of_the_prompt(files: Files, options) -> None:
    with files.engine(dtype="float32") as engine:
        params = {"max_new_tokens": 1, "temperature": 0.0}
        reports = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
        meta = engine.generate(input_ids=PROMPT, sampling_params=params, **reports)
    request = {
        "token_ids": PROMPT,
        "stop_conditions": {"max_tokens": 1},
        "output_options": {"prompt_logprobs": 1},
    }
    with started(options) as (worker, _, run):
        *_, last = run(chunks(worker, request))
    first, *others = last["engine_data"]["prompt_logprobs"]
    assert first is None
    entries = meta["meta_info"]["input_token_logprobs"][1:]
    for position, (value, token, _) in zip(others, entries, strict=True):
        assert position[str(token)]["logprob"] == pytest.approx(value)
        assert 1 <= len(position) <= 2


def test_one_stopped_request_leaves_the_others(options) -> None:
    with started(options) as (worker, _, run):

        async def both() -> Any:
            return await asyncio.gather(chunks(worker, LONG, stopped_after=2), chunks(worker, LONG))

        stopped, other = run(both())
        assert run(worker.is_quiescent())
    assert stopped[-1]["finish_reason"] == "cancelled"
    assert len(ids(stopped)) < 100
    assert other[-1]["finish_reason"] == "length"
    assert len(ids(other)) == 100


@pytest.mark.parametrize("shutdown_timeout", [0.0, 60.0])
def test_cleanup_waits_for_requests(options, shutdown_timeout) -> None:
    """Requests that have not ended are refused, so that another worker may continue them."""
    from dynamo.llm.exceptions import EngineShutdown

    with started(options, shutdown_timeout) as (worker, _, run):

        async def cleaned_up() -> Any:
            stream = worker.generate(dict(LONG), context())
            first = await anext(stream)
            ending = asyncio.create_task(worker.cleanup())
            rest = [chunk async for chunk in stream]
            await ending
            return [first, *rest]

        if shutdown_timeout:
            assert len(ids(run(cleaned_up()))) == 100
        else:
            with pytest.raises(EngineShutdown):
                run(cleaned_up())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tool-call-parser", "hermes"], "--dyn-tool-call-parser"),
        (["--page-size", "0"], "page_size=0"),
        (["smollm2-135m"], "tokenizer"),
        (["model.gguf"], "tokenizer"),
        (["x", "--disaggregation-mode=decode"], "unrecognized"),
        (["x", "--shutdown-timeout", "-1"], "--shutdown-timeout=-1.0"),
        (["x", "--endpoint", "y"], "Invalid endpoint format: 'y'"),
    ],
)
def test_wrong_options_end_the_process(words, message, capsys) -> None:
    from specjax.integrations.dynamo import Worker

    with pytest.raises(SystemExit) as error:
        asyncio.run(Worker.from_args(words))
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_options_of_the_engine_and_of_dynamo() -> None:
    from specjax.integrations.dynamo import Worker

    words = "m --max-num-seqs 4 --served-model-name t --endpoint dyn://a.b.c --chat-template x"
    _, config = asyncio.run(Worker.from_args(words.split()))
    names = config.namespace, config.component, config.endpoint, config.served_model_name
    assert names == ("a", "b", "c", "t")
    assert config.custom_jinja_template == "x"


def ask(client: Client, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "abcabc" * 6, "max_tokens": 20, "temperature": 0} | fields
    return client.post("/v1/completions", body)


def test_dynamos_frontend_gives_the_text_of_the_engine(files: Files, tmp_path: Path) -> None:
    with files.engine(dtype="float32") as engine:
        text = engine.generate("abcabc" * 6, {"temperature": 0, "max_new_tokens": 20})["text"]
    port = free_port()
    variables = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path)}
    events = json.dumps({"endpoint": f"tcp://*:{free_port()}"})
    sizes = {"max_running_requests": 1, "batch_buckets": (1,)}  # to compile few functions
    options = files.arguments(speculative=False, dtype="float32", **sizes)
    worker = [*flags(options), "--served-model-name", "tiny"]
    commands = [
        ["dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"],
        ["specjax.integrations.dynamo", *worker, "--kv-events-config", events],
    ]
    client, processes = Client(port, Content_Type="application/json"), []
    try:
        for words in commands:
            processes.append(
                subprocess.Popen([sys.executable, "-m", *words], env=os.environ | variables)
            )
        deadline = time.monotonic() + SECONDS
        while True:
            with suppress(OSError, HTTPException):
                if ask(client).status == 200:
                    break
            assert processes[1].poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.5)
        answer = ask(client).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        stopped = ask(client, stop=[text[5:7]]).json()["choices"][0]
        expected = text[: text.index(text[5:7])]
        assert (stopped["text"], stopped["finish_reason"]) == (expected, "stop")
        refused = ask(client, n=2)
        assert refused.status == 400
        assert "n=2" in refused.json()["message"]
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(60) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
