"""Command lines of vLLM's and SGLang's users start, or are answered with what to use instead."""

import dataclasses
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specjax.cli.main import build_parser, main
from specjax.cli.options import engine_arguments
from specjax.engine import names
from specjax.engine.args import EngineArgs

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
# how others start a server -> how it is started here
PROGRAMS = {
    "vllm serve": "serve",
    "sglang serve": "serve",
    "python -m sglang.launch_server": "serve",
    "python -m vllm.entrypoints.openai.api_server": "serve",
    "python -m sglang.check_env": "check-env",
    "python -m sglang.bench_serving": "bench_serving",
    "vllm": "",
    "sglang": "",
}
STARTS = """
vllm serve meta-llama/Llama-3.2-1B-Instruct
vllm serve Qwen/Qwen3-8B --host 0.0.0.0 --port 8000
vllm serve Qwen/Qwen3-8B --dtype auto --max-model-len 4096 --trust-remote-code
vllm serve mistralai/Mistral-7B-v0.1 --gpu-memory-utilization 0.95 --max-model-len 8192
vllm serve meta-llama/Llama-2-7b-hf --enable-prefix-caching
vllm serve Qwen/Qwen3-8B --no-enable-prefix-caching --max-num-seqs 256
vllm serve ./merged --gpu-memory-utilization=0.8 --port 6002 --disable-log-requests
vllm serve Qwen/Qwen3-8B --max-model-len 32k --max-num-batched-tokens 16K
vllm serve Qwen/Qwen3-8B --dtype half --seed 42
vllm serve Qwen/Qwen3-8B --dtype bfloat16 --kv-cache-dtype fp8
vllm serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes
vllm serve Qwen/Qwen3-8B --enable-reasoning --reasoning-parser deepseek_r1
vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json
vllm serve mistralai/Ministral-8B-Instruct-2410 --tokenizer-mode mistral --config-format mistral --load-format auto
vllm serve Qwen/Qwen3-8B --api-key token-abc123 --served-model-name qwen
vllm serve Qwen/Qwen3-8B --tensor-parallel-size 1 --swap-space 16
vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4
vllm serve --trust-remote-code Qwen/Qwen3-8B
vllm serve Qwen/Qwen3-8B --gpu_memory_utilization 0.9 --max_model_len 16384 --max_num_seqs 64
vllm serve Qwen/Qwen3-8B --enable-chunked-prefill --max-num-batched-tokens 2048
vllm serve Qwen/Qwen3-8B --generation-config vllm --uvicorn-log-level warning
vllm serve Qwen/Qwen3-8B --revision main --block-size 16 --chat-template template.jinja
vllm serve Qwen/Qwen3-8B --quantization fp8 --limit-mm-per-prompt '{"image": 0}'
vllm serve Qwen/Qwen3-8B -tp 1 -q fp8 -O3
vllm serve Qwen/Qwen3-8B --async-scheduling --no-enable-log-requests
vllm serve Qwen/Qwen3-8B --task generate --scheduling-policy fcfs
vllm serve Qwen/Qwen3-8B --max-logprobs 20 --enable-prompt-tokens-details
vllm serve Qwen/Qwen3-8B --compilation-config '{"mode": 3}' --cudagraph-capture-sizes 1 2 4 8
vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "eagle3", "model": "AngelSlim/Qwen3-8B_eagle3", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'
vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
vllm serve Qwen/Qwen3-8B --speculative_config '{"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}'
vllm serve Qwen/Qwen3-8B --logprobs-mode processed_logprobs --disable-log-stats
python -m vllm.entrypoints.openai.api_server --model facebook/opt-125m --port 8000
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --model Qwen/Qwen3-8B --seed 42 -tp 1 --speculative_model Qwen/Qwen3-0.6B --use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8
python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --port 30000
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --host 0.0.0.0 --mem-fraction-static 0.8
python -m sglang.launch_server --model Qwen/Qwen3-8B --context-length 8192 --max-running-requests 64
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --chunked-prefill-size 4096 --schedule-policy lpm
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --kv-cache-dtype fp8_e4m3 --quantization fp8
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --reasoning-parser qwen3 --tool-call-parser qwen25
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --attention-backend flashinfer --sampling-backend pytorch
python -m sglang.launch_server --model-path Qwen/Qwen3.5-9B --mamba-ssm-dtype float32 --mamba-scheduler-strategy extra_buffer --tool-call-parser qwen3_coder --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --enable-metrics --enable-cache-report
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disable-radix-cache --disable-overlap-schedule
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 1 --dp-size 1 --random-seed 1
python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction-static 0.6 --cuda-graph-max-bs 2 --dtype float16
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --mem-fraction-static 0.7
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --speculative-algorithm STANDALONE --speculative-draft-model-path Qwen/Qwen3-0.6B --speculative-num-steps 4 --speculative-eagle-topk 1
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --enable-torch-compile --cuda-graph-bs 1 2 4 8 --num-continuous-decode-steps 2
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tokenizer-path Qwen/Qwen3-8B --skip-tokenizer-init --log-level warning
python -m sglang.launch_server --model-path Qwen/Qwen3-8B --enable-deterministic-inference --watchdog-timeout 600
python -m sglang.launch_server --model-path model.gguf --load-format gguf --max-total-tokens 65536 --page-size 64
sglang serve --model-path Qwen/Qwen3-8B --served-model-name qwen --stream-interval 4
sglang serve --model-path Qwen/Qwen3-8B --grammar-backend llguidance --decode-log-interval 40
""".strip().splitlines()  # noqa: E501
# line -> words of the answer; "" for those that name nothing to use instead
ANSWERS = {
    "vllm serve Qwen/Qwen3-8B --data-parallel-size 4 --api-server-count 4": "a server for each",
    "vllm serve Qwen/Qwen3-32B --pipeline-parallel-size 2": "--tp-size splits a model",
    "vllm serve Qwen/Qwen3-30B-A3B --enable_expert_parallel": "experts are not split",
    "vllm serve Qwen/Qwen3-8B --enforce-eager": "--batch-buckets",
    "vllm serve Qwen/Qwen3-8B --enable-lora --lora-modules a=b": "merge their weights",
    "vllm serve TheBloke/Llama-2-13B-AWQ --quantization awq": "'fp8', 'int8', 'int4'",
    "vllm serve Qwen/Qwen3-8B --tool-call-parser deepseek_v3": "'hermes', 'qwen25'",
    "vllm serve Qwen/Qwen3-8B --cpu-offload-gb 10": "--quantization",
    "vllm serve Qwen/Qwen3-8B --hf-overrides '{}'": "change config.json",
    "vllm serve Qwen/Qwen3-8B --rope-scaling '{\"factor\": 4.0}'": "change config.json",
    "vllm serve intfloat/e5-mistral-7b-instruct --runner pooling": "only text is generated",
    "vllm serve Qwen/Qwen3-8B --guided-decoding-backend xgrammar": "--grammar-backend",
    """vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "medusa"}'""": "is not one of [",
    "vllm serve --config config.yaml": "pass @FILE",
    "vllm serve Qwen/Qwen3-8B --download-dir /models": "HF_HOME",
    "vllm bench serve --model Qwen/Qwen3-8B": "use specjax bench serving",
    "vllm chat --url http://localhost:8000/v1": "use specjax generate",
    "vllm collect-env": "use specjax env",
    "vllm run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-8B": "/v1/completions",
    "vllm serve Qwen/Qwen3.5-9B --mamba-ssm-cache-dtype float16": "layers are float32",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --dp 2": "a server for each",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disable-cuda-graph": "--batch-b",
    "python -m sglang.launch_server --model-path m --grammar-backend xgrammar": "'llguidance'",
    "python -m sglang.launch_server --model-path m --kv-cache-dtype fp8_e5m2": "'fp8_e4m3'",
    "python -m sglang.launch_server --model-path m --lora-paths a=b": "merge their weights",
    "python -m sglang.launch_server --model-path m --log-requests": "--access-log",
    "sglang serve --model-path m --max-mamba-cache-size 8": "--max-state-snapshots sets",
    "python -m sglang.check_env": "use specjax env",
}


_PARSER = build_parser()


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a parser takes most of the time."""
    monkeypatch.setattr(sys.modules[main.__module__], "build_parser", lambda: _PARSER)


def words_of(line: str) -> list[str]:
    program = next(program for program in PROGRAMS if line.startswith(program))
    return shlex.split(PROGRAMS[program] + line.removeprefix(program))


def test_eighty_two_lines_are_tested() -> None:
    assert len(STARTS) + len(ANSWERS) == 82
    assert sum(not answer for answer in ANSWERS.values()) <= 5


def test_lines_of_other_engines_start(capsys: pytest.CaptureFixture[str]) -> None:
    for line in STARTS:
        options = engine_arguments(_PARSER.parse_args(words_of(line)))
        EngineArgs(**options)
        assert options["model"] in line.replace("_path", "_path "), line
    notes = capsys.readouterr().err.splitlines()
    assert all(re.search(r"^specjax( serve)?: --?\w.*: \S", note) for note in notes)
    assert "specjax serve: --trust-remote-code has no effect: code in a checkpoint" in notes[0]
    assert any("--dtype half: float16 is not supported" in note for note in notes)


@pytest.mark.parametrize(("line", "answer"), ANSWERS.items())
def test_other_lines_are_answered(line: str, answer: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words_of(line))
    assert exit_info.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert answer in error.partition(" error: ")[2]
    assert ("unrecognized arguments" in error) == (not answer)
    if words_of(line)[0] == "serve":  # the usage of the command, not of all commands
        assert "usage: specjax serve [-h]" in error


def parse(line: str) -> dict[str, Any]:
    return engine_arguments(_PARSER.parse_args(shlex.split(line)))


def test_names_and_values_of_other_engines_set_the_same_options() -> None:
    assert parse(
        "serve m --max-model-len 32k --max_num_seqs=1K --gpu-memory-utilization .5 -q fp8 "
        "--kv-cache-dtype fp8 --dtype half --cuda-graph-bs 1 2,4 --disable-overlap-schedule "
        "--no-enable-prefix-caching --reasoning-parser deepseek_r1"
    ) == {
        "model": "m",
        "context_length": 32_000,
        "max_running_requests": 1024,
        "mem_fraction_static": 0.5,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "dtype": "bfloat16",
        "batch_buckets": [1, 2, 4],
        "overlap": False,
        "disable_radix_cache": True,
        "reasoning_parser": "deepseek-r1",
        "speculative_algorithm": None,
    }


def test_a_speculative_config_of_vllm_is_read() -> None:
    config = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3'
    config += ', "draft_tensor_parallel_size": 1}'
    assert parse(f"warmup m --speculative-config '{config}'") == {
        "model": "m",
        "draft": "d",
        "speculative_algorithm": "eagle3",
        "speculative_num_steps": 3,
        "draft_tp_size": 1,
    }


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", "'{' is not valid JSON: Expecting property name"),
        ("eagle3", "'eagle3' is not valid JSON"),
        ("eagle3", 'pass a JSON object with a "method"'),
        ("[]", 'a JSON object with a "method"'),
        ('{"method": "eagle", "method": "ngram"}', "the key 'method' is given twice"),
        ('{"method": "medusa"}', "argument --speculative-config: method: "),
        ('{"model": "d"}', 'a JSON object with a "method"'),
        ('{"method": ["eagle3"]}', 'a JSON object with a "method"'),
        ('{"method": "ngram", "quantization": "fp8"}', "quantization='fp8' has no counterpart"),
    ],
)
def test_other_speculative_configs_are_refused(config: str, reason: str, capsys) -> None:
    with pytest.raises(SystemExit):
        _PARSER.parse_args(["serve", "--speculative-config", config])
    assert reason in capsys.readouterr().err


def test_errors_name_the_option_that_was_typed(capsys) -> None:
    for options, message in (
        ("--max-model-len 0", "specjax: error: --max-model-len: context_length=0 must be"),
        ("--max-model-len x", "argument --max-model-len: invalid int value: 'x'"),
        ("--context-length 0", "specjax: error: context_length=0 must be"),
        ("--max-modle-len 5", "--max-modle-len 5; did you mean --max-model-len?"),
        ("--model other", "MODEL=m and --model=other differ"),
        ("--max-num-seqs 4 --max-running-requests 0", "error: max_running_requests=0 must be"),
        ("--max-running-requests 4 --max-num-seqs 0", "error: --max-num-seqs: max_running_req"),
        (
            """--speculative-config {"method":"eagle3","num_speculative_tokens":0}""",
            "error: --speculative-config: num_speculative_tokens: speculative_num_steps=0 must",
        ),
        ("--speculative-algorithm EAGLE3 --num-speculative-tokens 0", "-tokens: speculative_num_"),
        ("--pp", "serve: error: --pp is not supported: --tp-size splits a model over GPUs"),
        ("--tp 0", "error: --tp: tp_size=0 must be"),
        ("--runner pooling", "serve: error: --runner pooling is not supported: only text"),
        ("--runner", "serve: error: --runner is not supported: only text"),
    ):
        with suppress(SystemExit):
            assert main(["serve", "m", *options.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--snake_case name?"], "prompt", "--snake_case name?"),
        (["--seed_a b", "--stop", "--- a_b c"], "stop", ["--- a_b c"]),
        (["--", "--max_new_tokens"], "prompt", "--max_new_tokens"),
        (["p", "--max_new_tokens", "7"], "max_new_tokens", 7),
        (["p", "--stop=--max_new_tokens"], "stop", ["--max_new_tokens"]),
    ],
)
def test_only_names_of_options_are_changed(words: list[str], dest: str, value: Any) -> None:
    assert getattr(_PARSER.parse_args(["generate", *words]), dest) == value


def test_options_of_a_file_have_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_text("# a_b\n\n--max_model_len=5\n--served_model_name=a_b\n--model\n__a_b\n")
    args = _PARSER.parse_args(["serve", f"@{path}"])
    assert (args.context_length, args.served_model_name, args.model) == (5, "a_b", "__a_b")


def test_unknown_options_are_reported_as_typed(capsys) -> None:
    with pytest.raises(SystemExit):
        _PARSER.parse_args(["serve", "m", "--max_modle_len=a_b"])
    error = capsys.readouterr().err
    assert error.endswith(": --max_modle_len=a_b; did you mean --max-model-len?\n")


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("--disaggregation-secre", "; did you mean --disaggregation-secret-file?"),
        ("--speculative-confg", "; did you mean --speculative-config?"),
        ("--enforce-eage", ""),
        ("--hf-override", ""),
    ],
)
def test_a_misspelling_is_answered_with_an_option_that_is_accepted(word, match, capsys) -> None:
    with pytest.raises(SystemExit):
        _PARSER.parse_args(["serve", "m", word])
    assert capsys.readouterr().err.endswith(f" unrecognized arguments: {word}{match}\n")


def test_the_last_switch_of_the_prefix_cache_counts() -> None:
    on, off = "--enable-prefix-caching", "--no-enable-prefix-caching"
    assert not parse(f"serve m {off} {on}")["disable_radix_cache"]
    assert parse(f"serve m {on} {off}")["disable_radix_cache"]


def test_the_same_model_may_be_named_twice() -> None:
    assert parse("serve m --model-path m")["model"] == "m"


def test_the_tables_name_options_that_exist() -> None:
    ours = {field.name for field in dataclasses.fields(EngineArgs)}
    switches = {here for here, _ in names.SWITCHES.values()}
    assert {*names.ALIASES.values(), *switches, *names.VALUES} <= ours
    assert set(names.SPECULATIVE_CONFIG.values()) <= ours
    reasons = " ".join((*names.REFUSED.values(), *names.WITHOUT_EFFECT.values()))
    assert set(re.findall(r"\{(\w+)\}", reasons)) <= ours
    theirs = [x.rstrip("=") for x in (*names.ALIASES, *names.SWITCHES, *names.WITHOUT_EFFECT)]
    assert not ours & {*theirs, *names.REFUSED}
    assert len({*theirs, *names.REFUSED}) == len(theirs) + len(names.REFUSED)
    assert set(names.NEUTRAL) <= set(names.REFUSED)


def test_the_document_has_the_tables() -> None:
    """Each row has an option or a value here, and those that mean the same."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("<!-- specjax/engine/names.toml -->\n")[2].partition("\n\n")[0]
    rows: dict[str, set[str]] = {}
    for line in table.splitlines()[2:]:
        here, theirs = line.strip("| ").split(" | ")
        rows[here.strip("`")] = set(re.findall(r"`([^`]+)`", theirs))
    expected: dict[str, set[str]] = {}
    for name, here in names.ALIASES.items():
        option = f"-{name}" if len(name) == 1 else names.flag(name)
        expected.setdefault(names.flag(here), set()).add(option)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    for name, (here, value) in names.SWITCHES.items():
        if value == defaults[here]:
            continue  # no option is needed
        option = names.flag(here) if value else f"--no-{here}"
        expected.setdefault(option, set()).add(names.flag(name))
    for option, values in names.VALUES.items():
        for theirs, value in values.items():
            expected.setdefault(f"{names.flag(option)} {value}", set()).add(theirs)
    assert rows == expected
