"""Parts of the benchmarks: metrics, prompts, clients of a server, profiles."""

import dataclasses
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoints.presets import PRESETS
from specjax.cli.options import engine_arguments
from specjax.config import HotVocabulary
from specjax.engine import plan
from specjax.engine.args import EngineArgs
from specjax.models.experts import MixtureConfig
from specjax.models.gpt_oss import GptOssConfig
from specjax.testing import letter_tokenizer
from specjax.testing.files import CONFIG, HEAD

from ..support.runners import algorithm_of
from ..support.scripts import load_bench

acceptance, common, compare, rounds, serving = (
    load_bench(name) for name in ("acceptance", "common", "compare", "round", "serving")
)
TOKENIZER = letter_tokenizer()


@pytest.mark.slow
def test_both_engines_of_acceptance_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 24 * plan.MEMORY_GRANULE  # less than the requests could use
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: memory)
    args = acceptance.parse_arguments("acceptance", ["--prompts", "p", "--batch-size", "64"])
    options = engine_arguments(args) | {"max_running_requests": args.batch_size}
    total = 0
    for algorithm in (options["speculative_algorithm"], None):
        planned = plan.plan_engine(EngineArgs(**options | {"speculative_algorithm": algorithm}))
        total += planned.config.max_total_tokens * planned.needs.token_bytes
    assert 0.4 * memory < total + planned.networks.weight_bytes < 0.6 * memory


@pytest.mark.parametrize(
    ("bench", "given"),
    [(acceptance, ["--prompts", "p"]), (compare, []), (serving, ["--load", "burst"])],
)
def test_engines_with_quantised_weights_can_be_measured(bench: Any, given: list[str]) -> None:
    own = ["--quantization", "fp8", "--quantize-activations", "--kv-cache-dtype", "fp8_e4m3"]
    name = bench.__name__.rpartition(".")[2]
    options = engine_arguments(bench.parse_arguments(name, given + own))
    expected = {"quantization": "fp8", "quantize_activations": True, "kv_cache_dtype": "fp8_e4m3"}
    assert expected.items() <= options.items()


def meta(tokens: int, verifies: int, plain: int = 0, correct: int = 7) -> dict[str, Any]:
    return {
        "prompt_tokens": 4,
        "completion_tokens": tokens,
        "finish_reason": {"type": "length"},
        "spec_verify_ct": verifies,
        "spec_accept_length": (tokens - plain) / verifies if verifies else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": 3 * verifies,
        "spec_correct_drafts_histogram": [1, 2],
        "spec_rounds_by_steps": {"0": plain, "3": verifies},
        "e2e_latency": 1.0,
        "queue_time": 0.25,
        "time_to_first_token": 0.5,
    }


# metrics


def test_a_summary_has_the_mean_over_requests_and_the_pooled_length() -> None:
    """A request without a verify does not change them."""
    metas = [meta(12, 4, correct=6), meta(5, 5, correct=0), meta(1, 0, correct=0)]
    answers = [acceptance.Answer("q", "a", 0, one, None) for one in metas]
    row = acceptance.summarize([*answers, acceptance.Answer("q", "a", 0, metas[2], "at token 0")])
    assert row["accept_length"] == pytest.approx((3.0 + 1.0) / 2)
    assert row["accept_length_pooled"] == pytest.approx(17 / 9)
    assert row["accept_rate"] == pytest.approx(6 / 27)
    assert row["correct_drafts_histogram"] == [2, 4]
    assert (row["requests"], row["identical"], row["completion_tokens"]) == (4, 3, 19)
    assert acceptance.summarize(answers[2:])["accept_length"] == 0.0


def test_a_comparison_uses_the_median_repeat_and_excludes_plain_rounds_from_the_length() -> None:
    def run(seconds: float, *metas: dict[str, Any]) -> Any:
        outputs = [{"meta_info": one, "output_ids": [1]} for one in metas]
        return seconds, outputs

    runs = [run(2.0, meta(10, 4), meta(20, 4, plain=6)), run(3.0, meta(10, 4, plain=9))]
    repeats = [[run(9.0, meta(1, 1))], runs, [run(1.0, meta(1, 1))]]
    row = compare.metrics(repeats, [[1], [1], [2]])
    assert row["seconds"] == [9.0, 5.0, 1.0]
    assert row["accept_length"] == pytest.approx((10 + 14 + 1) / 12)
    assert row["output_throughput"] == pytest.approx(40 / 5)
    assert row["mean_latency"] == pytest.approx(0.75)
    # half a second of decoding each
    assert row["round_ms"] == pytest.approx(1e3 * 1.5 / 27)
    assert row["wasted_drafts"] == 36 - 21
    assert row["row_rounds_by_steps"] == {"0": 15, "3": 12}
    assert row["equal_share"] == pytest.approx(2 / 3)


def test_throughput_ratios() -> None:
    speeds = {"plain": 50, "steps=3": 100, "steps=7": 40, "policy=budget": 120}
    rows: dict[str, Any] = {case: {"output_throughput": x} for case, x in speeds.items()}
    compare.add_ratios(rows, ["policy=budget"])
    assert [row["speedup"] for row in rows.values()] == [1.0, 2.0, 0.8, 2.4]
    # plain decoding is not a fixed number of drafts
    assert (rows["policy=budget"]["over_best"], rows["policy=budget"]["over_worst"]) == (1.2, 3.0)
    assert "over_best" not in rows["steps=3"]


def test_options_of_a_case() -> None:
    given = {"speculative_algorithm": "A", "speculative_num_steps": 4, "draft": "d", "dtype": "x"}
    assert compare.options_of("plain", given) == {"dtype": "x", "speculative_algorithm": "NONE"}
    own = {"dtype": "x", "speculative_algorithm": "B", "speculative_eagle_topk": 2}
    assert compare.options_of("B topk=2", given) == own
    assert compare.options_of("steps=1 overlap=false", given) == given | {
        "speculative_num_steps": 1,
        "overlap": False,
    }
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": {"policy": "ema"}}
    assert compare.options_of("policy=ema", given) == given | adaptive


def test_metrics_of_a_load() -> None:
    traces = [
        serving.Trace(None, [(1.0, 1), (1.4, 4), (1.5, 1)], meta(6, 2), 1.5),
        serving.Trace(None, [(3.0, 2)], meta(2, 1), 4.0),
        serving.Trace(None, [(8.0, 2)], {}, 9.0, "gone"),
        # its client left; its first gap began before all requests decoded
        serving.Trace(2.0, [(0.5, 1), (1.5, 1), (2.1, 1)], {}, 2.1),
    ]
    row = serving.metrics(traces)
    assert (row["done"], row["failed"], row["errors"]) == (2, 1, {"gone": 1})
    assert (row["seconds"], row["tokens_per_second"], row["requests_per_second"]) == (4, 2, 0.5)
    assert row["ttft_ms"]["mean"] == pytest.approx(2000)
    assert row["e2e_ms"]["max"] == pytest.approx(3000)
    assert row["tpot_ms"] == pytest.approx(dict.fromkeys(("mean", "p50", "p99", "max"), 100))
    assert row["chunk_ms"]["max"] == pytest.approx(600)
    assert row["chunk_ms"]["mean"] == pytest.approx((400 + 100 + 600) / 3)
    assert row["itl_ms"]["p50"] == pytest.approx(100)
    assert row["accept_length_pooled"] == pytest.approx(8 / 3)
    assert serving.metrics(traces[2:3])["ttft_ms"] is None


# loads and prompts


def test_clients_of_a_mix() -> None:
    clients = [one for (one,) in serving.clients_of("mix requests=200 rate=4")]
    lengths = [len(one.prompt) for one in clients]
    assert lengths.count(4096) == 10
    short = {*lengths} - {4096}
    assert 100 <= min(short) < 130
    assert 570 < max(short) <= 600
    params = [one.sampling for one in clients]
    assert all(64 <= one["max_new_tokens"] <= 256 for one in params)
    assert [one["temperature"] for one in params].count(0.8) == 100
    assert [one.get("top_k") for one in params].count(50) == 50
    assert clients[-1].arrival == pytest.approx(200 / 4, rel=0.15)
    plain = serving.clients_of("mix requests=8 temperature=0")
    assert {one.sampling["temperature"] for (one,) in plain} == {0}
    again = [one for (one,) in serving.clients_of("mix requests=200 rate=8")]
    assert [one[:2] for one in again] == [one[:2] for one in clients]
    assert [2 * one.arrival for one in again] == pytest.approx([one.arrival for one in clients])


def test_probabilities_of_acceptance_are_mixed() -> None:
    loads = [serving.clients_of("burst clients=8", chances) for chances in ([], [0.9, 0.3])]
    plain, mixed = ([one for (one,) in load] for load in loads)
    assert [one.prompt for one in plain] == [one.prompt for one in mixed]
    assert not any("simulate_acceptance" in one.sampling for one in plain)
    values = [one.sampling["simulate_acceptance"] for one in mixed]
    assert sorted(values) == [0.3] * 4 + [0.9] * 4
    assert values not in ([0.9, 0.3] * 4, [0.3, 0.9] * 4)
    own = serving.clients_of("burst clients=2 simulate_acceptance=0.5", [0.9])
    assert {one.sampling["simulate_acceptance"] for (one,) in own} == {0.5}
    with pytest.raises(ValueError, match=r"simulate_acceptance=1.5 must be .* at most 1"):
        serving.clients_of("burst", [0.9, 1.5])


def test_every_steady_client_sends_every_prompt() -> None:
    clients = serving.clients_of("steady clients=3 requests=4 prompt=5")
    prompts = [[request.prompt for request in client] for client in clients]
    first = [each[0] for each in prompts]
    assert prompts == [[first[(i + k) % 3] for k in range(4)] for i in range(3)]


def test_a_repeated_category_continues_with_its_next_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.jsonl"
    texts = {"low": ("ab", "cd", "ef"), "high": ("gh", "ij", "kl")}
    rows = [{"category": k, "turns": [text]} for k, found in texts.items() for text in found]
    path.write_text("\n".join(json.dumps(row | {"question_id": 1}) for row in rows))
    monkeypatch.setattr(common, "ADAPTIVE_PROMPTS", path)
    phases = common.phases_of("transition", TOKENIZER, 2)
    assert list(phases) == ["low_1", "high_1", "low_2", "high_2"]
    found = [TOKENIZER.decode(ids) for name in ("low_1", "low_2") for ids in phases[name]]
    assert found == [f"<user>{text}<assistant>" for text in ("ab", "cd", "ef", "ab")]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path, text = tmp_path / "p.jsonl", "a\u2028b\u2029c\u0085d"
    lines: list[dict[str, Any]] = [
        {"prompt": "ab"},
        {"messages": [{"role": "user", "content": "cd"}]},
        {"question_id": "q", "category": "c", "turns": [text, "later"]},
    ]
    path.write_text("\n\n".join(json.dumps(one, ensure_ascii=False) for one in lines), "utf-8")
    assert common.read_lines(path) == lines  # separators inside a text do not end a line
    (prompts,) = common.phases_of(str(path), TOKENIZER, 4).values()
    texts = [TOKENIZER.decode(ids) for ids in prompts]
    assert texts[:2] == ["ab", "<user>cd<assistant>"]
    assert texts[3] == "ab"


GOOD = '{"question_id": 1, "category": "c", "turns": ["t"]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"p\.jsonl, line 3: "),
        ("[]", r"p\.jsonl, line 3: it lacks "),
        ('{"question_id": 1, "category": "c"}', r"line 3: it lacks question_id and category"),
        ('{"category": "c", "turns": ["t"]}', r"line 3: it lacks question_id"),
        ('{"question_id": 1, "category": "c", "turns": []}', r"line 3: .* at least one string"),
        ('{"question_id": 1, "category": "c", "turns": [1]}', r"line 3: .* at least one string"),
        (None, "contains no prompts"),
    ],
)
def test_a_bad_line_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n" if text is None else f"{GOOD}\n\n{text}\n")
    with pytest.raises(ValueError, match=message):
        common.read_lines(path, common.SPEC_BENCH)


def test_shipped_prompts_cover_the_categories() -> None:
    prompts = common.read_lines(common.PROMPTS, common.SPEC_BENCH)
    assert len({prompt["category"] for prompt in prompts}) == 8
    assert len({prompt["question_id"] for prompt in prompts}) == len(prompts) >= 36
    assert len({tuple(prompt["turns"]) for prompt in prompts}) == len(prompts)
    assert any(len(prompt["turns"]) > 1 for prompt in prompts)


def test_later_turns_follow_the_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Echo:
        """Answer with the length of the conversation and its last message."""

        tokenizer = None

        def __init__(self) -> None:
            self.calls: list[Any] = []

        tokenizer = None

        def generate(self, *, input_ids: Any) -> list[dict[str, Any]]:
            self.calls.append([(ids[:-1], chats[ids[-1]]) for ids in input_ids])
            texts = [f"{len(chat)}:{chat[-1]['content']}" for _, chat in self.calls[-1]]
            return [{"text": text, "output_ids": [1], "meta_info": {}} for text in texts]

    chats: list[Any] = []

    def tokenize(tokenizer: Any, *, messages: Any) -> tuple[list[list[int]], bool]:
        chats.extend(map(list, messages))
        return [[i] for i in range(len(chats) - len(messages), len(chats))], True

    monkeypatch.setattr(acceptance, "tokenize_inputs", tokenize)

    turns = [["a"], ["b", "c"], ["d", "e"], ["f"]]
    prompts = [{"question_id": 1, "category": "c", "turns": one} for one in turns]
    engine, plain = Echo(), Echo()
    watches = {n: acceptance.Stopwatch(e) for n, e in (("speculative", engine), ("plain", plain))}
    batches = list(acceptance.evaluate(watches, prompts, [[7, 8], [9]], {}, 3))
    assert [[one.turn for one in batch] for batch in batches] == [[0, 0, 0], [0], [1, 1]]
    assert engine.calls == plain.calls
    assert engine.calls[2] == [
        (
            context,
            [
                {"role": "user", "content": first},
                {"role": "assistant", "content": f"1:{first}"},
                {"role": "user", "content": second},
            ],
        )
        for context, first, second in (([9], "b", "c"), ([7, 8], "d", "e"))
    ]


def test_answers_by_the_length_of_their_prompts() -> None:
    lengths = [129, 5, 128, 4000, 4096, 4097]
    answers = [acceptance.Answer("q", "c", 0, {"prompt_tokens": n}, None) for n in lengths]
    groups = acceptance.by_context(answers)
    found = {most: [x.meta_info["prompt_tokens"] for x in group] for most, group in groups.items()}
    assert found == {128: [5, 128], 256: [129], 4096: [4000, 4096], 8192: [4097]}
    assert list(groups) == sorted(groups)


# clients of a server


END = b'"finish_reason":"length","meta_info":{"completion_tokens":%d}}'


def whole(tokens: int) -> bytes:
    body = b'{"choices":[{' + END % tokens + b"]}"
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def chunked(*events: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = [b"data: " + event + b"\n\n" for event in (*events, b"[DONE]")]
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


NATIVE = b'{"meta_info":{"completion_tokens":%d,"finish_reason":%s}}'
ANSWERS: dict[str, list[bytes] | None] = {
    "whole": [whole(7)],
    "pieces": [whole(8)[:50], whole(8)[50:]],
    "native": chunked(NATIVE % (2, b"null"), NATIVE % (5, b'{"type":"stop"}')),
    "text": chunked(b'{"choices":[{"finish_reason":null}]}', b'{"choices":[{' + END % 9 + b"]}"),
    "refused": [b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy"],
    "failed": chunked(b'{"error":{}}'),
    "aborted": chunked(NATIVE % (2, b'{"type":"abort"}')),
    "cut": chunked(NATIVE % (2, b"null")),
    "gone": None,
}


@contextmanager
def serving_answers(answer: Callable[[str], list[bytes] | None]) -> Iterator[tuple[str, int]]:
    """Run a server that sends these pieces, and closes the connection for ``None``."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                name = line.split()[1].decode()
                while (line := self.rfile.readline()).strip():
                    pass
                pieces = answer(name)
                if pieces is None:
                    return
                with suppress(OSError):  # the client left
                    for piece in pieces:
                        self.wfile.write(piece)
                        time.sleep(0.001)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield "127.0.0.1", server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_answers_are_counted_and_failures_are_named() -> None:
    """After a failure, a client continues over a new connection."""
    with serving_answers(ANSWERS.__getitem__) as address:
        streams = ("native", "text", "failed", "aborted", "cut", "gone")
        client = [serving.Request((name, None, name in streams)) for name in ANSWERS]
        traces = serving.run_http(address, {}, [client, client[:1]], time.monotonic())
        found = dict(zip(ANSWERS, traces, strict=False))
        tokens = [[count for _, count in found[name].chunks] for name in list(ANSWERS)[:4]]
        assert tokens == [[7], [8], [2, 3], [None, None]]
        assert [found[n].meta["completion_tokens"] for n in ("text", "native")] == [9, 5]
        assert [one.error is None for one in traces] == [True] * 4 + [False] * 5 + [True]
        assert "busy" in found["refused"].error
        assert "abort" in found["aborted"].error
        assert all(one.chunks[0][0] < 5 for one in traces[:4])
        # the client leaves at its ``until``
        endless = serving.Request(("native", None, True), until=0.0)
        (left,) = serving.run_http(address, {}, [[endless]], time.monotonic())
        assert (left.error, len(left.chunks)) == (None, 1)


def test_no_server() -> None:
    with serving_answers(ANSWERS.__getitem__) as address:
        pass
    with pytest.raises(OSError, match=r"refused|Connect"):
        serving.run_http(address, {}, [[serving.Request(("whole", None, False))]], 0.0)


# rounds


def test_dispatches_cover_prefill_and_the_timed_rounds() -> None:
    # two chunks and one, then settling rounds, timed rounds and one more in flight
    assert rounds.dispatches_needed([600, 512], 20) == 3 + rounds.SETTLING_ROUNDS + 20 + 1


def test_layers_with_experts_read_only_the_chosen_ones() -> None:
    sizes = dataclasses.asdict(CONFIG) | {"model_type": "qwen3_moe", "num_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    target = MixtureConfig(**sizes)
    nets = algorithm_of(None).networks(target)
    engine = SimpleNamespace(runner=SimpleNamespace(networks=nets))
    of_experts = target.num_layers * 8 * 3 * target.hidden_size * 16 * 4
    every, some = (rounds.floor_bytes(engine, 0, [1], count) for count in (None, 2.5))
    assert every - some == of_experts * (8 - 2.5) / 8


def test_packed_experts_are_read_with_their_scales_and_biases() -> None:
    sizes = dataclasses.asdict(CONFIG) | {"model_type": "gpt_oss", "num_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "hidden_size": 128}
    target = GptOssConfig(**sizes, has_packed_experts=True)
    nets = algorithm_of(None).networks(target)
    engine = SimpleNamespace(runner=SimpleNamespace(networks=nets))
    of_expert = 3 * 128 * 128 // 2 + 3 * 128 * 128 // 32 + 4 * (2 * 128 + 128)
    every, some = (rounds.floor_bytes(engine, 0, [1], count) for count in (None, 2))
    assert every - some == target.num_layers * of_expert * (8 - 2)


def test_layers_with_a_window_read_only_the_last_keys() -> None:
    empty = SimpleNamespace(names=(), abstract=(), caches=())
    draft = dataclasses.replace(HEAD, windows=(16,))
    for windows, keys in (((), 2 * (100 + 20)), ((0, 32), 100 + 20 + 32 + 20)):
        target = dataclasses.replace(CONFIG, windows=windows)
        nets = SimpleNamespace(target=empty, target_config=target, draft=empty, draft_config=draft)
        engine = SimpleNamespace(runner=SimpleNamespace(networks=nets))
        each = 2 * target.num_kv_heads * target.head_dim * 4
        assert rounds.floor_bytes(engine, 0, [100, 20]) == keys * each
        read = keys + 3 * (16 + 16)  # heads of target and draft have equal sizes
        assert rounds.floor_bytes(engine, 3, [100, 20]) == read * each


def test_states_are_read_and_written() -> None:
    """A round with drafts verifies from the states, and then reads and writes them once."""
    target, _ = PRESETS["qwen3.5-9b"]
    nets = algorithm_of(None).networks(target)
    engine = SimpleNamespace(runner=SimpleNamespace(networks=nets))
    of_request = 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    keys = 8 * 2 * 4 * 256 * 2
    one, two = (rounds.floor_bytes(engine, 0, lengths) for lengths in ([100], [100, 100]))
    assert two - one == 2 * of_request + 100 * keys
    assert one - 2 * of_request - 100 * keys == pytest.approx(15.873e9, rel=1e-4)


def test_drafts_read_the_output_head_or_its_columns() -> None:
    """Once per drafted token, in addition to the head's own weights."""
    floors = []
    for hot in (None, HotVocabulary(10, None, "")):
        head = dataclasses.replace(
            HEAD,
            checkpoint_format="eagle-1",
            feature_layers=(),
            draft_vocab_size=CONFIG.vocab_size,
            has_own_lm_head=False,
            hot=hot,
        )
        nets = algorithm_of(head).networks(CONFIG, head)
        engine: Any = SimpleNamespace(runner=SimpleNamespace(networks=nets))
        plain, *drafting = (rounds.floor_bytes(engine, steps, [5]) for steps in (0, 1, 3))
        assert drafting[1] - plain == 3 * (drafting[0] - plain)
        floors.append(drafting[0] - plain)
    size = CONFIG.hidden_size
    assert floors[0] - floors[1] == 4 * size * CONFIG.vocab_size - 4 * (size + 1) * 10


def test_launches_per_round() -> None:
    def line(name: str, *names_and_ns: tuple[str, float]) -> SimpleNamespace:
        events = [SimpleNamespace(name=name, duration_ns=ns) for name, ns in names_and_ns]
        return SimpleNamespace(name=name, events=events)

    stream = [("gemm", 30e3)] * 6 + [("norm", 4e3)] * 2 + [("MemcpyD2H", 500.0)]
    modules = line("XLA Modules", ("jit_round", 500e3))  # spans events that are counted already
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[line("Stream #17", *stream), modules])
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream of nothing", ("gemm", 1.0))])
    lines = [text.split() for text in rounds.launch_table([gpu, host], 2).splitlines()]
    assert lines[1:] == [
        ["90.0", "3.0", "gemm"],
        ["4.0", "1.0", "norm"],
        ["0.2", "0.5", "MemcpyD2H"],
        ["94.2", "4.5", "all", "3"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_a_real_profile(on_gpu: bool) -> None:
    double = jax.jit(lambda x: x + x)
    x = jnp.ones(1 << 16)
    double(x).block_until_ready()
    planes = rounds.profile(lambda: [double(x) for _ in range(4)][-1].block_until_ready())
    last = rounds.launch_table(planes, 4).splitlines()[-1].split()
    assert last[1:] == (["1.0", "all", "1"] if on_gpu else ["0.0", "all", "0"])
