import contextlib
import dataclasses
import inspect
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.cli import commands
from specjax.cli.generate import SAMPLING_ARGUMENTS, report
from specjax.cli.main import build_parser, main
from specjax.cli.painting import ACCEPTED, RESET, AcceptPainter, use_colour
from specjax.engine.args import EngineArgs
from specjax.sampling.accept_draws import COUPLED, Acceptance
from specjax.testing import Files
from specjax.text.tokenizer import IncrementalDecoder

from ..support.tokenizers import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE


class FakeEngine:
    """Fake engine that answers every request with one text, two tokens per round."""

    made: list[dict[str, Any]]
    closed: int

    def __init__(
        self,
        *,
        answer: str,
        plain_answer: str | None = None,
        dtype: str = "float32",
        acceptance: Acceptance = COUPLED,
        deterministic: bool = False,
    ) -> None:
        self.acceptance, self.deterministic = acceptance, deterministic
        self.answers = {False: plain_answer or answer, True: answer}
        self.dtype = dtype
        self.made = []
        self.requests: list[dict[str, Any]] = []
        self.gap_inputs: list[list[int]] = []
        self.closed = 0
        self.num_flushed = 0  # requests before the prefix cache was flushed
        self.fail: BaseException | None = None

    def __call__(self, **engine_args: Any) -> "FakeEngine":
        self.made.append(engine_args)
        speculative = engine_args["speculative_algorithm"] not in (None, "NONE")
        return _Running(self, speculative)  # type: ignore[return-value]


class _Running:
    def __init__(self, owner: FakeEngine, speculative: bool) -> None:
        self.owner, self.speculative = owner, speculative
        self.tokenizer = TOKENIZER
        self.target = SimpleNamespace(config=SimpleNamespace(dtype=owner.dtype))
        self.args = SimpleNamespace(
            acceptance=owner.acceptance, enable_deterministic_inference=owner.deterministic
        )

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, *exc: object) -> None:
        self.owner.closed += 1

    def flush_cache(self) -> None:
        self.owner.num_flushed = len(self.owner.requests)

    def generate(
        self, *, sampling_params: dict[str, Any], stream: bool = False, **request: Any
    ) -> Any:
        if request.get("return_logprob"):
            self.owner.gap_inputs.append(request["input_ids"])
            [first], [second] = map(TOKENIZER.encode, "ab")
            best = [(-0.5, first, None), (-0.53125, second, None)]
            return {"meta_info": {"output_top_logprobs": [best]}}
        self.owner.requests.append({"sampling_params": sampling_params, **request})
        outputs = self._stream()
        return outputs if stream else list(outputs)[-1]

    def _stream(self) -> Iterator[dict[str, Any]]:
        ids = TOKENIZER.encode(self.owner.answers[self.speculative])
        decoder = IncrementalDecoder(TOKENIZER)
        text = ""
        for end in [*range(1, len(ids), 2), len(ids)]:
            text += decoder.push(ids[max(0, end - 2) if end % 2 else end - 1 : end])
            done = end == len(ids)
            if self.owner.fail is not None and end > 2:
                raise self.owner.fail
            yield {
                "text": text,
                "output_ids": ids[:end],
                "meta_info": self._meta(end, done),
            }

    def _meta(self, num_tokens: int, done: bool) -> dict[str, Any]:
        meta = {
            "prompt_tokens": 7,
            "completion_tokens": num_tokens,
            "finish_reason": {"type": "stop"} if done else None,
            "e2e_latency": 0.5,
            "output_is_draft": [i % 2 == 1 for i in range(num_tokens)],
        }
        if self.speculative:
            verifies = num_tokens // 2
            meta |= {
                "spec_verify_ct": verifies,
                "spec_accept_length": num_tokens / verifies if verifies else 0.0,
                "spec_accept_rate": 0.25,
            }
        return meta


def run(*argv: str, engine: FakeEngine) -> int:
    return main(["generate", *argv], make_engine=engine)


def test_text_goes_to_stdout_and_metrics_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(answer="Grüße, 世界!")
    assert run("Hi", engine=engine) == 0
    out, err = capsys.readouterr()
    assert out == "Grüße, 世界!\n"
    assert "\ufffd" not in out
    num_tokens = len("Grüße, 世界!".encode())
    assert err.splitlines()[-1] == (
        f"{num_tokens} tokens in 0.50 s | {num_tokens / 0.5:.1f} tok/s | accept length "
        f"{num_tokens / (num_tokens // 2):.2f} | accept rate 0.25 | {num_tokens // 2} verify calls "
        "| finished by stop"
    )
    assert engine.closed == 1


def test_prompts_are_conversations_unless_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a long\nprompt"))
    engine = FakeEngine(answer="ok")
    for options in (["Hi", "--system", "Be brief."], ["Hi", "--raw"], ["-", "--raw"]):
        assert run(*options, engine=engine) == 0
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    given = [(one.get("messages"), one.get("prompt")) for one in engine.requests[1::2]]
    assert given == [(turns, None), (None, "Hi"), (None, "a long\nprompt")]


def test_only_given_options_reach_the_engine() -> None:
    engine = FakeEngine(answer="ok")
    run("Hi", engine=engine)
    assert engine.made == [
        {
            "speculative_algorithm": "EAGLE3",
            "max_running_requests": 1,
            "show_progress": True,
            "compile_on_use": True,
        }
    ]
    assert engine.requests[1]["sampling_params"] == {"temperature": 0.0}


@pytest.mark.parametrize(("options", "most"), [([], 2), (["--max-new-tokens=1"], 1)])
def test_the_functions_of_a_request_are_compiled_before_it(options: list[str], most: int) -> None:
    """A short request comes first, and the prefix cache then forgets its prompt."""
    engine = FakeEngine(answer="ok")
    run("Hi", "--min-new-tokens=1", *options, engine=engine)
    brief, request = engine.requests
    # its seed leaves the seeds of the engine to the request
    changes = {"max_new_tokens": most, "sampling_seed": 0, "ignore_eos": True}
    assert brief["sampling_params"] == request["sampling_params"] | changes
    assert brief["messages"] == request["messages"]
    assert brief["timeout"] > 1e6  # compiling may take longer than request_timeout
    assert engine.num_flushed == 1


# one option of each kind: strings, integers, numbers, switches, lists and disabled options
ENGINE_OPTIONS: dict[str, Any] = {
    "model": "m",
    "draft": "d",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_adaptive": True,
    "draft_rope_theta": 5e5,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "context_length": 64,
    "rounds_per_dispatch": 4,
    "mem_fraction_static": 0.5,
    "request_timeout": 1.5,
    "batch_buckets": [1, 2],
    "overlap": False,
    "compile_cache_dir": None,
    "simulate_accept_length": 2.5,
    "max_running_requests": 2,
}
SAMPLING_OPTIONS: dict[str, Any] = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_k": 40,
    "repetition_penalty": 1.1,
    "sampling_seed": 7,
    "ignore_eos": True,
    "stop": ["a", "b"],
}


def flags(values: dict[str, Any]) -> Iterator[str]:
    """Return option values as a user types them."""
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else flag.replace("--", "--no-")
        elif name == "stop":
            yield from (f"{flag}={one}" for one in value)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{flag}={text}"


def test_options_reach_the_engine_and_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(answer="ok")
    assert run("Hi", "--quiet", *flags(ENGINE_OPTIONS | SAMPLING_OPTIONS), engine=engine) == 0
    # the EMA policy may use any tier
    assert engine.made == [ENGINE_OPTIONS | {"show_progress": False, "compile_on_use": False}]
    assert engine.requests[1]["sampling_params"] == SAMPLING_OPTIONS
    assert capsys.readouterr() == ("ok\n", "")  # --quiet prints the text only


def test_plain_decoding_reports_no_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(answer="ok")
    assert run("Hi", "--speculative-algorithm", "none", engine=engine) == 0
    assert engine.made[0]["speculative_algorithm"] is None
    assert "accept" not in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(answer="Grüße")
    assert run("Hi", "--json", "--compare", engine=engine) == 0
    out = capsys.readouterr().out
    body = json.loads(out)
    assert out.count("\n") == 1
    assert out.isascii()  # ASCII, so that no locale loses a character
    assert body["text"] == "Grüße"
    assert body["output_ids"] == TOKENIZER.encode("Grüße")
    assert body["meta_info"]["finish_reason"] == {"type": "stop"}
    assert body["tokens_per_second"] == pytest.approx(len(body["output_ids"]) / 0.5)
    assert body["compare"]["equal"] is True
    assert body["compare"]["difference"] is None
    assert body["compare"]["speed_up"] == pytest.approx(
        body["compare"]["speculative_tokens_per_second"]
        / body["compare"]["plain_tokens_per_second"]
    )


def test_compare_shares_weights_and_repeats_the_same_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine(answer="ok")
    options = ["--compare", "--temperature", "0.8", "--speculative-num-steps", "3", "--draft", "d"]
    assert run("Hi", *options, "--context-length", "64", engine=engine) == 0
    speculative, plain = engine.made
    shared = plain.pop("share_weights_with")
    assert shared.speculative
    assert plain == {
        "speculative_algorithm": "NONE",
        "context_length": 64,
        "max_running_requests": 1,
        "show_progress": True,
        "compile_on_use": True,
    }
    assert speculative["draft"] == "d"
    # a brief call that compiles, the call, brief ones without and with a cached prompt, and three
    # timed calls each, with a seed
    brief, request, *others = engine.requests
    assert others == 3 * [brief] + 6 * [request]
    assert engine.requests[1]["sampling_params"]["sampling_seed"] == 0
    assert engine.closed == 2
    out = capsys.readouterr().out
    assert "plain" in out
    assert "speculative" in out
    assert "speed-up" in out
    assert out.splitlines()[-1] == "the texts are equal"


@pytest.mark.parametrize(
    ("dtype", "deterministic", "status"),
    [("float32", False, 1), ("bfloat16", False, 0), ("bfloat16", True, 1)],
)
def test_compare_names_the_first_difference(
    dtype: str, deterministic: bool, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    different = {"answer": "xyaz", "plain_answer": "xybz"}
    engine = FakeEngine(**different, dtype=dtype, deterministic=deterministic)
    assert run("Hi", "--compare", engine=engine) == status
    out = capsys.readouterr().out
    a, b = TOKENIZER.encode("ab")
    assert f"token 2 is {a} 'a' with speculation and {b} 'b' without" in out
    assert "differ by 0.03125" in out
    assert ("this is a bug" in out) == bool(status)
    assert engine.gap_inputs == [TOKENIZER.encode("<user>Hi<assistant>xy")]


@pytest.mark.parametrize(("temperature", "status"), [(0.0, 1), (0.9, 0)])
def test_compare_expects_another_text_where_acceptance_is_not_coupled(
    temperature: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(answer="xyaz", plain_answer="xybz", acceptance=Acceptance(True))
    options = ["--temperature", str(temperature), "--sampling-seed", "3"]
    assert run("Hi", "--compare", *options, engine=engine) == status
    assert ("this is a bug" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(("speed_up", "is_gain"), [(1.3, True), (0.97, False)])
def test_a_comparison_without_a_gain_says_so(speed_up: float, is_gain: bool) -> None:
    speeds = {"plain_tokens_per_second": 10.0, "speculative_tokens_per_second": 10.0 * speed_up}
    text = report({**speeds, "speed_up": speed_up}, None, str)
    assert f"{speed_up:.2f}x" in text
    assert ("drafts do not pay" in text) != is_gain


def test_compare_of_a_prefix_names_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(answer="xy", plain_answer="xyz", dtype="bfloat16")
    run("Hi", "--compare", "--raw", engine=engine)
    assert "token 2 is the end with speculation" in capsys.readouterr().out
    assert engine.gap_inputs == [TOKENIZER.encode("Hixy")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--raw", "--system", "s"], "--system"),
        (["--speculative-algorithm", "None", "--compare"], "--compare"),
        (["--speculative-algorithm", "none", "--show-accepts"], "--show-accepts"),
        (["--speculative-algorithm", "none", "--show-tree"], "--show-tree needs speculation"),
        (["--json", "--show-accepts"], "output_is_draft"),
        (["--json", "--show-tree"], "--show-tree"),
        (["--top-k", "0"], "top_k=0 must be -1 (off) or "),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(answer="ok")
    assert run("Hi", *options, engine=engine) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("specjax: error: ")
    assert words in err
    assert engine.made == []


def test_options_are_refused_without_importing_jax() -> None:
    """Importing JAX and the model takes five times the time of all checks."""
    commands = (
        ["generate", "Hi", "--speculative-algorithm=nope"],
        ["generate", "Hi", "--page-size=0"],
        ["generate", "Hi", "--top-p=3"],
        ["serve", "--port=70000"],
    )
    source = (
        "import sys; from specjax.cli import main; "
        f"print([main(words) for words in {commands}], 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[2, 2, 2, 2] False\n"


def test_an_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("context_length=1\n   is too short")

    assert main(["generate", "Hi"], make_engine=refuse) == 2
    assert capsys.readouterr() == ("", "specjax: error: context_length=1 is too short\n")


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_closed_standard_streams(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the interpreter after a shell has closed the streams (``<&-``)."""
    monkeypatch.setattr(sys, name, None)
    engine = FakeEngine(answer="ok")
    prompt = "-" if name == "stdin" else "Hi"
    assert run(prompt, engine=engine) == (0 if name == "stderr" else 2)
    out, err = capsys.readouterr()
    if name == "stderr":
        assert out == "ok\n"  # and no metrics
    else:
        assert err.startswith("specjax: error: ")
        assert "closed" in err
        assert engine.made == []


@pytest.mark.parametrize("options", [[], ["--show-accepts"], ["--json"]])
def test_an_interrupt_ends_with_status_130(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    engine = FakeEngine(answer="a longer answer")
    engine.fail = KeyboardInterrupt()
    assert run("Hi", *options, engine=engine) == 130
    out, err = capsys.readouterr()
    assert err.endswith("specjax: interrupted\n")
    assert out.count(ACCEPTED) == out.count(RESET)
    assert engine.closed == 1


def test_a_closed_pipe_ends_quietly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    engine = FakeEngine(answer="a longer answer")
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run("Hi", "--quiet", engine=engine) == 141
        # the flush of the interpreter at exit must not fail again
        stdout.write("rest")
        stdout.flush()
    assert capsys.readouterr().err == ""
    assert engine.closed == 1


def test_library_log_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    engine = FakeEngine(answer="ok")

    def make(**engine_args: Any) -> Any:
        logging.getLogger("specjax.engine").info("draft head: rope theta 10000")
        return engine(**engine_args)

    main(["generate", "Hi"], make_engine=make)
    out, err = capsys.readouterr()
    assert out == "ok\n"
    assert "draft head: rope theta 10000" in err
    main(["generate", "Hi", "--quiet"], make_engine=make)
    assert capsys.readouterr().err == ""
    assert logging.getLogger("specjax").handlers == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"specjax {version('specjax')}\n"


def test_help_describes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for name in ("compare", "show_accepts", "json", "quiet", "raw", "system", *SAMPLING_ARGUMENTS):
        assert f"--{name.replace('_', '-')}" in out
    described = inspect.getdoc(EngineArgs) or ""
    for field in dataclasses.fields(EngineArgs):
        if field.name in ("show_progress", "disaggregation_secret"):  # with --quiet, into a file
            continue
        assert f"--{field.name.replace('_', '-')} " in out
        text = described.partition(f"{field.name}: ")[2].partition(".")[0]
        assert " ".join(text.split()).replace("``", "")[:40] in out
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert f"(default: {field.default})" in out
    assert "--dtype {auto,float32,bfloat16}" in out
    assert "--no-skip-special-tokens" in out


def test_a_model_without_a_head_is_decoded_plainly() -> None:
    for options, algorithm in (
        ("--model m", None),
        ("--model m --draft d", "EAGLE3"),
        ("--model smollm2-135m", "EAGLE3"),
        ("--model m --speculative-algorithm ngram", "ngram"),
        ("--speculative-algorithm none", None),
    ):
        engine = FakeEngine(answer="ok")
        assert run("Hi", *options.split(), engine=engine) == 0
        assert engine.made[0]["speculative_algorithm"] == algorithm


def test_options_come_from_a_file(tmp_path) -> None:
    (tmp_path / "options").write_text("# sizes\n\n--context-length=64\n--page-size=8\n")
    for command in ("serve", "warmup"):
        args = build_parser().parse_args([command, f"@{tmp_path / 'options'}", "--page-size=4"])
        assert (args.context_length, args.page_size) == (64, 4)
    assert build_parser().parse_args(["generate", "@someone hello"]).prompt == "@someone hello"


SPLIT = ("--disaggregation-mode", "decode", "--disaggregation-address", "10.0.0.1:8998")


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path, monkeypatch) -> None:
    """The file takes precedence; without a mode the environment is ignored."""
    file, engine = tmp_path / "secret", FakeEngine(answer="ok")
    file.write_text("  of the file \nsecond line\n")
    monkeypatch.setenv("SPECJAX_DISAGGREGATION_SECRET", "of the environment")
    for options in ([], SPLIT, [*SPLIT, "--disaggregation-secret-file", str(file)]):
        assert run("Hi", *options, engine=engine) == 0
    monkeypatch.delenv("SPECJAX_DISAGGREGATION_SECRET")
    assert run("Hi", *SPLIT, engine=engine) == 2  # this address needs a secret
    secrets = [made.get("disaggregation_secret") for made in engine.made]
    assert secrets == [None, "of the environment", "of the file"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--temprature 1", "unrecognized arguments: --temprature"),
        ("--context-len 5", "unrecognized arguments: --context-len"),
        ("--tensor-parallel-size x", "--tensor-parallel-size: invalid int value: 'x'"),
        ("--pp-size 2", "--pp-size 2 is not supported: --tp-size splits a model over GPUs"),
        ("--dtype float64", "invalid choice: 'float64'"),
        ("--disaggregation-secret hunter2", "is visible to other users"),
        ("--disaggregation-secret=hunter2", "SPECJAX_DISAGGREGATION_SECRET"),
        ("--disaggregation-secret-file /nowhere", "/nowhere"),
        (f"--disaggregation-secret-file {os.devnull}", "must have the secret in its first line"),
    ],
)
@pytest.mark.parametrize("command", ["generate Hi", "serve", "warmup"])
def test_every_command_refuses_options_with_status_2(command, option, reason, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), *option.split()])
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert reason in err
    assert "hunter2" not in err


@pytest.mark.parametrize(
    ("variables", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_follows_the_environment(
    variables: dict[str, str], terminal: bool, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    assert use_colour(stream) is colour


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_show_accepts_marks_drafts_and_explains(
    variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    run("Hi", "--show-accepts", engine=FakeEngine(answer="abcd"))
    out, err = capsys.readouterr()
    first, last = ("[", "]") if variable == "NO_COLOR" else (ACCEPTED, RESET)
    assert out == f"a{first}b{last}c{first}d{last}\n"
    assert f"{first}like this{last}: accepted draft tokens" in err


@pytest.mark.parametrize(
    ("whole", "flags", "steps"),
    [
        # a character split over tokens belongs to the token that completes it
        ("aé", [False, False, True], [("a", 2, "a"), ("aé", 3, "[é]")]),
        # text that may begin a stop string is painted later
        ("abcd", [False, True, True, False], [("a", 3, "a"), ("abcd", 4, "[bc]d")]),
        # text cut at a stop string stays cut
        ("abcd", [False, True, True, True], [("ab", 4, "a[b]")]),
    ],
)
def test_text_is_painted_by_tokens(whole: str, flags: list[bool], steps: list[Any]) -> None:
    painter = AcceptPainter(IncrementalDecoder(TOKENIZER).push, colour=False)
    ids = TOKENIZER.encode(whole)
    for text, count, painted in steps:
        is_final = (text, count, painted) == steps[-1]
        assert painter.paint(text, ids[:count], flags[:count], final=is_final) == painted


@pytest.mark.slow
@given(
    text=st.text(max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    flags=st.lists(st.booleans(), min_size=48, max_size=48),
)
def test_painted_pieces_join_to_the_text(text: str, cuts: list[int], flags: list[bool]) -> None:
    text = text.replace("[", "").replace("]", "")
    ids = TOKENIZER.encode(text)
    decoder = IncrementalDecoder(TOKENIZER)
    painter = AcceptPainter(IncrementalDecoder(TOKENIZER).push, colour=False)
    painted, shown, done = "", "", 0
    for end in sorted(cut for cut in cuts if cut <= len(ids)):
        shown += decoder.push(ids[done:end])
        done = end
        piece = painter.paint(shown, ids[:end], flags[:end], final=False)
        painted += piece
        assert painted.replace("[", "").replace("]", "") == shown
    shown += decoder.push(ids[done:]) + decoder.flush()
    painted += painter.paint(shown, ids, flags[: len(ids)], final=True)
    assert painted.replace("[", "").replace("]", "") == shown
    assert painted.count("[") == painted.count("]")


@pytest.fixture(scope="module")
def real_options(files: Files) -> list[str]:
    """Options of a tiny model for the real engine, which is compiled once."""
    options = f"--model {files.target} --draft {files.head} --compile-cache-dir {files.cache}"
    sizes = "--page-size 4 --chunked-prefill-size 1 --speculative-num-steps 3"
    return f"{options} {sizes} --max-new-tokens 12 --ignore-eos".split()


@pytest.mark.slow
def test_real_engine_compares_equal_and_reports_json(
    real_options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*real_options, "--json", "--compare", "--temperature", "0.9"]
    assert main(["generate", "hello there", *options]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["compare"]["equal"] is True
    assert body["compare"]["dtype"] == "float32"
    meta = body["meta_info"]
    assert meta["completion_tokens"] == len(body["output_ids"]) == 12
    assert len(meta["output_is_draft"]) == 12
    assert sum(meta["output_is_draft"]) == meta["spec_num_correct_drafts"] > 0
    assert meta["prompt_tokens"] == len("<user>hello there<assistant>")
    # the first token comes from prefill; a round that ends on a draft adds no bonus token
    assert meta["completion_tokens"] == (
        1 + meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] - meta["output_is_draft"][-1]
    )


@pytest.mark.slow
def test_real_engine_shows_accepts(
    real_options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["generate", "hello", "--raw", *real_options]) == 0
    plain_text, figures = capsys.readouterr()
    assert "12 tokens in" in figures
    assert "finished by length" in figures
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["generate", "hello", "--raw", "--show-accepts", *real_options]) == 0
    marked = capsys.readouterr().out
    assert marked.count("[") > plain_text.count("[")
    assert [c for c in marked if c not in "[]"] == [c for c in plain_text if c not in "[]"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["serve"], ["generate", "Hi"], ["warmup"]])
def test_a_platform_without_a_plugin_is_one_line(command, tmp_path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "specjax", *command, f"--compile-cache-dir={tmp_path}"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2, ended.stderr
    assert "install the extra cuda12 or cuda13" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_key_on_the_command_line_wins(monkeypatch) -> None:
    monkeypatch.setenv("A_KEY", "environment")
    assert commands.or_environment("flag", "A_KEY") == "flag"
    assert commands.or_environment(None, "A_KEY") == "environment"


def test_env_prints_a_report_without_secrets(monkeypatch, capsys) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    monkeypatch.setenv("SPECJAX_API_KEY", "hunter2")
    assert main(["env"]) == 0
    out, err = capsys.readouterr()
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert lines["specjax"] == version("specjax")
    assert lines["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=true"
    assert lines["SPECJAX_API_KEY"] == "(set)"
    assert lines["device 0"].endswith(" GB")
    assert {"Python", "OS", "jax", "jaxlib", "flax", "numpy", "compile cache"} <= set(lines)
    assert "hunter2" not in out + err


@pytest.mark.slow
def test_env_reports_a_platform_without_a_plugin() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "specjax", "env"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "devices: none: " in ended.stdout
    assert "JAX_PLATFORMS: cuda" in ended.stdout
