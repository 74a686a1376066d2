"""A warm-up compiles what a start needs, so that the start compiles nothing."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from specjax.cli import commands, main
from specjax.compiling.cache import FOLDER, open_compile_cache
from specjax.engine import build, plan, warmup
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.runtime.runner import ModelRunner
from specjax.testing.files import write_head, write_target

from ..support.compilation import counted_compilations, kept_cache_settings

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "max_new_tokens": 12, "sampling_seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("warmup")
    write_target(root / "target")
    write_head(root / "head")
    with kept_cache_settings():
        yield root


def options(files: Path, **changes) -> dict:
    return {
        "model": files / "target",
        "draft": files / "head",
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 1,
        "page_size": 4,
        "max_running_requests": 1,
        "chunked_prefill_size": 1,
        "compile_cache_dir": files / "cache",
        "skip_tokenizer_init": True,
    } | changes


def texts(engine) -> list[list[int]]:
    with engine:
        return [
            engine.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]
            for params in (GREEDY, SAMPLED)
        ]


@pytest.fixture(scope="module")
def warmed(files):
    """The first warm-up, without weights, under the settings of every test."""
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("strict"):
        patch.setattr(build, "load_weights", lambda *_, **__: pytest.fail("weights read"))
        patch.setattr(build.ModelRunner, "load", lambda *_: pytest.fail("the pools were allocated"))
        return warmup.warm_up(EngineArgs(**options(files)))


@pytest.mark.slow
def test_a_warm_up_compiles_and_describes_every_function(files, warmed) -> None:
    names = {function.key.split()[0] for function in warmed.functions}
    assert {"round", "prefill"} <= names
    assert warmed.num_compiled == len(warmed.functions)
    assert warmed.is_complete
    assert warmed.folder == str(files / "cache" / FOLDER)
    on_disk = sum(path.stat().st_size for path in Path(warmed.folder).glob("*.xla"))
    assert warmed.num_bytes == on_disk > 0
    for function in warmed.functions:
        assert function.seconds > 0
        assert function.argument_bytes > 0
    lines = warmed.table().splitlines()
    assert len(lines) == len(warmed.functions) + 3
    assert all(line.endswith("compiled") for line in lines[1:-2])
    assert lines[1].startswith(warmed.functions[0].key)
    assert warmed.state_bytes == 0
    assert "states" not in lines[-1]
    with_states = replace(warmed, state_bytes=3 * 10**9)
    assert " GB, states 3.00 GB, KV " in with_states.table()


@pytest.mark.slow
def test_an_interrupted_warm_up_resumes(files, warmed) -> None:
    paths = sorted(Path(warmed.folder).glob("*round*.xla"))
    paths[0].unlink()
    again = warmup.warm_up(EngineArgs(**options(files)))
    assert again.num_compiled == 1
    states = [line.split()[-1] for line in again.table().splitlines()[1:-2]]
    assert sorted(states) == ["compiled"] + ["present"] * (len(states) - 1)
    assert warmup.warm_up(EngineArgs(**options(files))).num_compiled == 0


@pytest.mark.slow
def test_a_start_after_it_compiles_no_function_and_gives_the_same_texts(files, warmed) -> None:
    from specjax import Engine

    warm = Engine(**options(files))
    assert all(f.is_hit for f in warm.runner.compiled.report)
    unused = {"draft": None, "speculative_algorithm": None, "speculative_num_steps": None}
    with kept_cache_settings():
        plain = Engine(
            **options(files, compile_cache_dir=os.environ["JAX_COMPILATION_CACHE_DIR"], **unused)
        )
        assert texts(warm) == texts(plain)


@pytest.mark.slow
def test_compiling_after_it_traces_nothing(files, warmed) -> None:
    planned = plan_engine(EngineArgs(**options(files)))
    cache = open_compile_cache(files / "cache", *planned.cache_facts)
    runner = ModelRunner(planned.networks, planned.config, cache)
    with counted_compilations() as events:
        runner.compile(show_progress=False)
    assert not [event for event in events if "backend_compile" in event or "mlir" in event]
    assert len(runner.compiled) == len(warmed.functions)


@pytest.mark.parametrize("extra", [0, 1, plan.MEMORY_GRANULE - 1])
def test_a_plan_does_not_follow_small_changes_of_memory(files, monkeypatch, extra) -> None:
    """Sized by memory: the contexts of all requests do not fit."""
    args = EngineArgs(**options(files, max_running_requests=2**12, batch_buckets=[2**12]))
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: plan.MEMORY_GRANULE)
    planned = plan_engine(args)
    assert planned.config.num_pages < 2**12 * planned.config.pages_per_request
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: plan.MEMORY_GRANULE + extra)
    assert plan_engine(args).config == planned.config
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: 2 * plan.MEMORY_GRANULE)
    assert plan_engine(args).config.num_pages > planned.config.num_pages


def compiled_with(monkeypatch, temporary_bytes: int) -> list[Any]:
    """Let all functions need this much memory without compiling them; return their plans."""
    plans: list[Any] = []

    def compiled(planned: Any, **_: Any) -> Any:
        plans.append(planned)
        pool = SimpleNamespace(temporary_bytes=temporary_bytes)
        return SimpleNamespace(compiled=pool, config=planned.config)

    monkeypatch.setattr(build, "_compiled", compiled)
    monkeypatch.setattr(plan.sizing, "device_memory", lambda _: plan.MEMORY_GRANULE)
    return plans


@pytest.mark.parametrize(("share", "times"), [(0.0, 1), (0.49, 1), (0.6, 2), (0.9, 2)])
def test_a_pool_leaves_the_memory_that_functions_need(files, monkeypatch, share, times) -> None:
    """On a CPU, weights and KV take half of the memory, or less if functions need the rest."""
    args = EngineArgs(**options(files, max_running_requests=2**12, batch_buckets=[2**12]))
    plans = compiled_with(monkeypatch, int(share * plan.MEMORY_GRANULE))
    fitted, runner = build.compile_plan(plan_engine(args))
    assert len(plans) == times
    assert runner.config == fitted.config == plans[-1].config
    needs = fitted.needs
    free = plan.MEMORY_GRANULE - needs.weight_bytes - fitted.kv_bytes - needs.temporary_bytes
    assert free >= 0
    if times == 2:
        assert free < fitted.config.page_size * needs.token_bytes


def test_tokens_that_leave_too_little_memory_are_refused(files, monkeypatch) -> None:
    args = EngineArgs(**options(files, max_total_tokens=2**10))
    compiled_with(monkeypatch, plan.MEMORY_GRANULE)
    with pytest.raises(ValueError, match="no KV page fits"):
        build.compile_plan(plan_engine(args))
    needs = plan_engine(args).needs
    compiled_with(monkeypatch, plan.MEMORY_GRANULE - needs.weight_bytes - 2**9 * needs.token_bytes)
    with pytest.raises(ValueError, match=r"max_total_tokens=1024 .* lower max_total_tokens"):
        build.compile_plan(plan_engine(args))


def command(files: Path, *extra: str) -> list[str]:
    return [
        "warmup",
        f"--model={files / 'target'}",
        f"--draft={files / 'head'}",
        "--speculative-num-steps=1",
        "--page-size=4",
        "--max-running-requests=1",
        "--chunked-prefill-size=1",
        f"--compile-cache-dir={files / 'cache'}",
        *extra,
    ]


@pytest.mark.slow
def test_the_command_compiles_all_engine_functions(files, warmed, tmp_path, capsys) -> None:
    assert main(command(files, f"--json={tmp_path / 'result.json'}")) == 0
    out, err = capsys.readouterr()
    assert "0 compiled" in out
    # a bar is for terminals
    assert "4 read from the cache" in err
    assert "\r" not in err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["num_compiled"] == 0
    assert result["num_bytes"] == sum(f["num_bytes"] for f in result["functions"]) > 0
    assert [f["key"] for f in result["functions"]] == [f.key for f in warmed.functions]


@pytest.mark.long_after(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [
        "--speculative-algorithm=none",
        "--speculative-num-steps=2",
        "--speculative-adaptive --speculative-num-steps=0",
        "--speculative-num-steps=2 --speculative-eagle-topk=2",
        "--logprobs-mode=processed",
        "--base-gpu-id=1",
        "--disaggregation-mode=decode",
        "--disaggregation-mode=prefill",
        "--disaggregation-mode=prefill --base-gpu-id=1 --speculative-algorithm=ngram",
    ],
)
def test_a_start_with_the_options_of_the_command_compiles_nothing(
    files, monkeypatch, extra: str
) -> None:
    from specjax import Engine

    made: list[EngineArgs] = []

    def parse(**options: Any) -> EngineArgs:
        made.append(EngineArgs(**options))
        return made[0]

    monkeypatch.setattr(commands, "EngineArgs", parse)
    base = command(files)
    if "algorithm" in extra:
        base = [option for option in base if "draft" not in option and "num-steps" not in option]
    assert main([*base, *extra.split(), "--quiet"]) == 0
    options = {field.name: getattr(made[0], field.name) for field in fields(EngineArgs)}
    if "disaggregation" in extra:
        options["disaggregation_address"] = "127.0.0.1:0" if "prefill" in extra else "127.0.0.1:1"
    with Engine(**options) as engine:
        assert [f.key for f in engine.runner.compiled.report if not f.is_hit] == []


@pytest.mark.slow
def test_a_quiet_command_says_nothing(files, warmed, capsys) -> None:
    assert main(command(files, "--quiet")) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_the_command_deletes_old_entries(files, warmed, capsys) -> None:
    assert main(command(files, "--prune=30")) == 0
    assert "deleted 0 old cache entries" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--preset=llama3.1-8b"], "--preset=llama3.1-8b and --model, --draft cannot be combined"),
        (["--batch-buckets=0"], r"batch_buckets=(0,)"),
        (["--compile-cache-dir=none"], "pass a folder that you own"),
    ],
)
def test_the_command_refuses_bad_input(files, capsys, extra, message) -> None:
    assert main(command(files, *extra)) == 2
    assert message in capsys.readouterr().err


def test_a_preset_needs_no_checkpoint(monkeypatch, tmp_path, capsys) -> None:
    from specjax.checkpoints import presets
    from specjax.testing import EAGLE3, TARGET

    monkeypatch.setitem(presets.PRESETS, "tiny", (TARGET, EAGLE3))
    seen = []
    monkeypatch.setattr(warmup, "warm_up", lambda args: seen.append(args) or _Done())
    for algorithm in ("EAGLE3", "none"):
        assert main(["warmup", "--preset=tiny", f"--speculative-algorithm={algorithm}"]) == 0
    assert [args.load_format for args in seen] == ["dummy", "dummy"]
    assert [args.draft is None for args in seen] == [False, True]
    assert main(["warmup", "--preset=unknown"]) == 2


class _Done:
    is_complete = True

    def table(self) -> str:
        return ""


def test_an_incomplete_warm_up_fails(files, monkeypatch) -> None:

    monkeypatch.setattr(_Done, "is_complete", False)
    monkeypatch.setattr(warmup, "warm_up", lambda args: _Done())
    assert main(command(files, "--quiet")) == 1


@pytest.mark.slow
def test_the_script_is_the_command() -> None:
    script = Path(__file__).parents[2] / "scripts" / "warmup_compile_cache.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True
    )
    assert "specjax warmup" in done.stdout.replace("warmup_compile_cache.py ", "specjax ")
