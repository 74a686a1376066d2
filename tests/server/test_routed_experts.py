"""Experts of tokens over HTTP: base64 of the array that the engine reports."""

import threading
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specjax import Engine
from specjax.models.routes import Routes, RoutesPiece
from specjax.server import answers, generating, make_app, native
from specjax.testing import Client, Files, running
from specjax.testing.files import CONFIG

from ..support.mixture_files import write_mixture

pytestmark = pytest.mark.slow
GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
ASKED = {"return_routed_experts": True, "routed_experts_start_len": 3}
GREEDY: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
PARAMS: dict[str, Any] = {"max_new_tokens": 9, "temperature": 0.0, "ignore_eos": True}
PROMPT = "hello hello"


@pytest.fixture(scope="module")
def mixture(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = write_mixture(tmp_path_factory.mktemp("mixture") / "target", files.target)
    with files.engine(target=target, enable_return_routed_experts=True, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def client(mixture: Engine) -> Iterator[Client]:
    with running(make_app(mixture, served_model_name="tiny")) as port:
        yield Client(port)


def decoded(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), "<i4").reshape(-1, CONFIG.num_layers, 2)


@pytest.fixture
def expected(mixture: Engine) -> np.ndarray:
    experts = mixture.generate(PROMPT, PARAMS, **ASKED)["meta_info"]["routed_experts"]
    assert experts.shape == (len(PROMPT) + 9 - 1 - 3, CONFIG.num_layers, 2)
    return experts


def test_generate_has_them_in_meta_info(client: Client, expected: np.ndarray) -> None:
    body = {"text": PROMPT, "sampling_params": PARAMS} | ASKED
    meta = client.post(GENERATE, body).json()["meta_info"]
    np.testing.assert_array_equal(decoded(meta["routed_experts"]), expected)
    for flags in ({}, {"incremental": True}):
        *parts, last = client.stream(GENERATE, body | flags)
        assert all("routed_experts" not in part["meta_info"] for part in parts)
        np.testing.assert_array_equal(decoded(last["meta_info"]["routed_experts"]), expected)
    both = body | {"text": [PROMPT, PROMPT], "return_routed_experts": [False, True]}
    both |= {"routed_experts_start_len": [0, 3], "return_logprob": True}
    metas = [result["meta_info"] for result in client.post(GENERATE, both).json()]
    assert "routed_experts" not in metas[0]
    np.testing.assert_array_equal(decoded(metas[1]["routed_experts"]), expected)
    assert len(metas[1]["output_token_logprobs"]) == 9


def test_completions_have_them_once(client: Client, expected: np.ndarray) -> None:
    body = {"prompt": PROMPT} | GREEDY | ASKED
    answer = client.post(COMPLETIONS, body).json()
    np.testing.assert_array_equal(decoded(answer["sglext"]["routed_experts"]), expected)
    assert "routed_experts" not in answer["choices"][0]["meta_info"]
    texts = client.post(COMPLETIONS, body | {"n": 2}).json()["sglext"]["routed_experts"]
    assert texts == [answer["sglext"]["routed_experts"]] * 2
    events = client.stream(COMPLETIONS, body | {"n": 2})
    found = {x["choices"][0]["index"]: x["sglext"] for x in events if "sglext" in x}
    assert found == dict.fromkeys(range(2), answer["sglext"])
    plain = client.post(COMPLETIONS, {"prompt": PROMPT} | GREEDY)
    assert "sglext" not in plain.json()


def test_chats_have_them(client: Client, mixture: Engine) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]} | GREEDY | ASKED
    rendered = "<user>hello<assistant>"
    experts = mixture.generate(rendered, PARAMS, **ASKED)["meta_info"]["routed_experts"]
    answer = client.post(CHAT, body).json()
    np.testing.assert_array_equal(decoded(answer["sglext"]["routed_experts"]), experts)
    *parts, last = client.stream(CHAT, body)
    assert not any("sglext" in part for part in parts)
    assert last["sglext"] == answer["sglext"]


def test_no_caller_waits_for_the_experts_of_another(client: Client, monkeypatch: Any) -> None:
    """Neither the event loop nor the engine's thread makes arrays and their texts."""
    threads = set()

    def recorded(function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            threads.add(threading.current_thread().name.partition("_")[0])
            return function(*arguments)

        return run

    monkeypatch.setattr(Routes, "array", recorded(Routes.array))
    for module in (answers, native):
        monkeypatch.setattr(module, "encoded", recorded(answers.encoded))
    monkeypatch.setattr(generating, "INLINE_LOGPROBS", 1)
    for route, text in ((COMPLETIONS, "prompt"), (GENERATE, "text")):
        asked: dict[str, Any] = {text: [PROMPT, PROMPT], "return_routed_experts": True}
        params = GREEDY if route == COMPLETIONS else {"sampling_params": PARAMS}
        assert client.post(route, asked | params).status == 200
        assert len([*client.stream(route, asked | params)]) > 1
    assert threads <= {"asyncio", "uvloop"}  # names of the loop's other threads


def test_few_pieces_stay_on_the_device(mixture: Engine, monkeypatch: Any) -> None:
    readers, read = [], RoutesPiece.read

    def counted(piece: RoutesPiece) -> np.ndarray:
        readers.append(threading.current_thread())
        return read(piece)

    mixture.generate([PROMPT] * 3, PARAMS, return_routed_experts=True)
    monkeypatch.setattr("specjax.runtime.runner.MAX_PIECES", 3)
    monkeypatch.setattr(RoutesPiece, "read", counted)
    results = mixture.generate([PROMPT] * 5, PARAMS, return_routed_experts=True)
    here = threading.current_thread()
    assert (len(readers), sum(thread is here for thread in readers)) == (10, 5)
    first, *others = (result["meta_info"]["routed_experts"] for result in results)
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_an_answer_that_would_be_too_large(client: Client, monkeypatch: Any) -> None:
    most = 2 * (len(PROMPT) + 9 - 3) * CONFIG.num_layers * 2
    monkeypatch.setattr(generating, "MAX_EXPERTS", most)
    body = {"prompt": PROMPT, "n": 2} | GREEDY | ASKED
    assert client.post(COMPLETIONS, body).status == 200
    error = client.post(COMPLETIONS, body | {"routed_experts_start_len": 2}).error
    assert f"the limit is {most}; lower max_tokens" in error["message"]


def test_who_is_refused(client: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for route, body in ((COMPLETIONS, {"prompt": "abc"}), (CHAT, chat), (GENERATE, {"text": "a"})):
        asked = body | {"return_routed_experts": True, "routed_experts_start_len": 99}
        error = client.post(route, asked).error
        assert "routed_experts_start_len=99 must be" in error["message"]
        error = client.post(route, body | {"return_routed_experts": "yes"}).error
        assert "return_routed_experts" in error["message"]
    error = client.post("/v1/responses", {"input": "a", "return_routed_experts": True}).error
    assert error["message"].startswith("this route does not accept return_routed_experts")
