"""Engine arguments that are refused before a model is opened."""

import dataclasses
import inspect
import sys
from typing import Any

import pytest

from specjax import Engine
from specjax.engine.args import EngineArgs
from specjax.types import DraftShape

SPECULATIVE: dict[str, Any] = {"speculative_algorithm": "EAGLE3"}
ADAPTIVE = SPECULATIVE | {"speculative_adaptive": True}
REJECTION = "speculative_use_rejection_sampling"
SINGLE, ACC = (f"speculative_accept_threshold_{name}" for name in ("single", "acc"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_waiting_requests": -1}, "max_waiting_requests=-1 must be an integer of at least 0"),
        ({"max_running_requests": True}, "max_running_requests=True"),
        ({"page_size": None}, "page_size=None must be an integer of at least 1"),
        ({"seed": None}, "seed=None"),
        ({"rounds_per_dispatch": None}, "rounds_per_dispatch=None"),
        ({"request_timeout": 0}, "request_timeout=0 must be above 0"),
        ({"request_timeout": float("inf")}, "request_timeout=inf"),
        ({"request_timeout": True}, "request_timeout=True"),
        ({"max_prefill_stall_ms": 0}, "max_prefill_stall_ms=0 must be above 0"),
        ({"max_prefill_stall_ms": None}, "max_prefill_stall_ms=None"),
        ({"overlap": "yes"}, "overlap='yes' must be a bool"),
        ({"show_progress": 1}, "show_progress=1"),
        ({"model": 5}, "model=5 must be of type str or PathLike"),
        ({"batch_buckets": [1, 2.5]}, r"batch_buckets=\[1, 2.5\] must be a list of integers"),
        ({"mem_fraction_static": 0.0}, "mem_fraction_static=0.0 must be above 0"),
        ({"mem_fraction_static": 1.5}, "mem_fraction_static=1.5 must be .* at most 1"),
        ({"draft_rope_theta": "x"}, "draft_rope_theta='x' must be a finite number"),
        ({"disaggregation_secret": "x"}, "disaggregation_secret needs .*_mode='prefill'"),
        ({"max_total_tokens": 0}, "max_total_tokens=0 must be an integer of at least 1"),
        ({"context_length": 0}, "context_length=0"),
        (
            {"grammar_backend": "xgrammar"},
            "grammar_backend='xgrammar' must be None or 'llguidance'",
        ),
        (
            {"tool_call_parser": "gpt-oss"},
            "tool_call_parser='gpt-oss' and reasoning_parser=None read different formats",
        ),
        (
            {"tool_call_parser": "hermes", "reasoning_parser": "gpt-oss"},
            "set both to 'gpt-oss', or none",
        ),
        *(
            ({name: value, "skip_tokenizer_init": True}, f"{name}='{value}' needs a tokenizer")
            for name, value in (
                ("grammar_backend", "llguidance"),
                ("reasoning_parser", "qwen3"),
                ("tool_call_parser", "hermes"),
            )
        ),
        ({"max_running_requests": 0}, "max_running_requests=0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size=0"),
        ({"rounds_per_dispatch": 0}, "rounds_per_dispatch=0"),
        ({"page_size": 1.5}, "page_size=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"load_format": "magic"}, "load_format='magic'"),
        ({"speculative_algorithm": "MEDUSA"}, "'MEDUSA'"),
        ({"speculative_num_steps": 3}, r"\['speculative_num_steps'\] have no"),
        ({"speculative_num_draft_tokens": 4}, r"\['speculative_num_draft_tokens'\] have no"),
        ({"speculative_eagle_topk": 2}, r"\['speculative_eagle_topk'\] have no"),
        ({"draft_rope_theta": 1e4}, r"\['draft_rope_theta'\] have no"),
        ({"speculative_adaptive": True}, "speculative_algorithm"),
        (SPECULATIVE | {"speculative_adaptive_config": {}}, "needs speculative_adaptive=True"),
        (ADAPTIVE | {"speculative_adaptive_config": {"alpha": 1}}, "'alpha'=1"),
        (ADAPTIVE | {"speculative_num_steps": -1}, "num_steps=-1 must be an integer from 0"),
        (SPECULATIVE | {"speculative_num_steps": 0}, "speculative_num_steps=0"),
        (SPECULATIVE | {"speculative_num_steps": 64}, "speculative_num_steps=64"),
        (SPECULATIVE | {"speculative_num_steps": 2.5}, "speculative_num_steps=2.5"),
        (
            SPECULATIVE | {"speculative_num_steps": 3, "speculative_num_draft_tokens": 9},
            "from 2 to speculative_num_steps",
        ),
        (SPECULATIVE | {"simulate_accept_length": 0.9}, "simulate_accept_length=0.9 .* 1 to 6"),
        (SPECULATIVE | {"simulate_accept_length": 6.1}, "simulate_accept_length=6.1"),
        (SPECULATIVE | {"simulate_accept_length": float("nan")}, "simulate_accept_length=nan"),
        (
            SPECULATIVE | {"speculative_num_steps": 2, "simulate_accept_length": 4},
            "simulate_accept_length=4 must be from 1 to 3, the lower of",
        ),
        ({"simulate_accept_length": 2.0}, r"\['simulate_accept_length'\] have no"),
        ({"simulate_acceptance": 0.0}, r"\['simulate_acceptance'\] have no"),
        (SPECULATIVE | {"simulate_acceptance": 1.1}, "simulate_acceptance=1.1 .* at most 1"),
        (SPECULATIVE | {"simulate_acceptance": -0.1}, "simulate_acceptance=-0.1 .* at least 0"),
        (
            SPECULATIVE | {"simulate_accept_length": 2.0, "simulate_acceptance": 0.0},
            "simulate_accept_length=2.0 and simulate_acceptance=0.0 exclude each other",
        ),
        ({"speculative_draft_window_size": 8}, r"\['speculative_draft_window_size'\] have no"),
        (
            SPECULATIVE | {"speculative_draft_window_size": 0},
            "draft_window_size=0 must be .* at least 1",
        ),
        (
            SPECULATIVE | {"speculative_draft_sink_size": -1},
            "draft_sink_size=-1 must be .* at least 0",
        ),
        (
            SPECULATIVE | {"speculative_draft_sink_size": 4},
            "speculative_draft_sink_size=4 needs speculative_draft_window_size, which is None",
        ),
        ({REJECTION: True}, rf"\['{REJECTION}'\] have no effect with .*=None"),
        ({SINGLE: 0.9}, rf"\['{SINGLE}'\] have no effect with .*=None"),
        ({ACC: 0.9}, rf"\['{ACC}'\] have no effect with .*=None"),
        (SPECULATIVE | {REJECTION: 1}, f"{REJECTION}=1 must be a bool"),
        (SPECULATIVE | {SINGLE: -0.1}, f"{SINGLE}=-0.1 must be at least 0"),
        (SPECULATIVE | {SINGLE: 1.5}, f"{SINGLE}=1.5 must be .* at most 1"),
        (SPECULATIVE | {ACC: float("nan")}, f"{ACC}=nan must be a finite number"),
        (SPECULATIVE | {ACC: -0.5}, f"{ACC}=-0.5 must be at least 0"),
        (
            SPECULATIVE | {REJECTION: True, SINGLE: 0.9},
            f"{REJECTION}=True needs both thresholds at 1, but {SINGLE}=0.9 and {ACC}=1.0",
        ),
        (
            SPECULATIVE | {REJECTION: True, ACC: 0.7},
            f"{REJECTION}=True needs both thresholds at 1, but {SINGLE}=1.0 and {ACC}=0.7",
        ),
        (
            SPECULATIVE | {REJECTION: True, "speculative_eagle_topk": 4},
            f"{REJECTION}=True works for chains only: speculative_eagle_topk=4 must be 1",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(**arguments)


def test_unknown_names_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        EngineArgs(modle="m")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_path", "model_path: this option is called model here; pass model"),
        ("gpu_memory_utilization", "is called mem_fraction_static here"),
        ("tensor_parallel_size", "this option is called tp_size here; pass tp_size"),
        ("pp_size", "pp_size is not supported: tp_size splits a model over GPUs of one host"),
        ("trust_remote_code", "trust_remote_code is not supported: code in a checkpoint never"),
        ("attention_backend", "attention_backend is not supported: the device decides"),
        ("disable_overlap_schedule", "disable_overlap_schedule: pass overlap=False"),
        ("enforce_eager", "compiled; batch_buckets limits"),
    ],
)
def test_names_of_other_engines_are_answered(name: str, text: str) -> None:
    for make in (EngineArgs, Engine):
        with pytest.raises(TypeError, match=text):
            make(**{name: 1})


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_waiting_requests": 0, "request_timeout": 0.5, "overlap": False},
        ADAPTIVE | {"speculative_num_steps": 0},
        SPECULATIVE | {"simulate_accept_length": 1},
        SPECULATIVE | {"simulate_accept_length": 6},
        SPECULATIVE | {"simulate_acceptance": 0},
        SPECULATIVE | {REJECTION: True, SINGLE: 1, ACC: 1.0},
        SPECULATIVE | {SINGLE: 0.3, ACC: 0.9, "speculative_eagle_topk": 4},
        SPECULATIVE | {SINGLE: 0, ACC: 0.0},
        {REJECTION: False, SINGLE: 1.0, ACC: 1.0},
    ],
)
def test_accepted(arguments: dict[str, Any]) -> None:
    args = EngineArgs(**arguments)
    assert all(getattr(args, name) == value for name, value in arguments.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.seed = 1  # type: ignore[misc]


def test_rejection_sampling_needs_draft_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = EngineArgs(**SPECULATIVE).algorithm  # type: ignore[arg-type]
    monkeypatch.setattr(type(algorithm), "supports_rejection_sampling", False)
    with pytest.raises(ValueError, match=f"{REJECTION}=True needs draft prob.*=EAGLE3 has none"):
        EngineArgs(**SPECULATIVE, **{REJECTION: True})  # type: ignore[arg-type]


def test_thresholds_of_1_are_the_coupled_draws() -> None:
    assert EngineArgs(**SPECULATIVE, **{SINGLE: 1, ACC: 1}).acceptance.is_coupled  # type: ignore[arg-type]
    assert not EngineArgs(**SPECULATIVE, **{ACC: 0.99}).acceptance.is_coupled  # type: ignore[arg-type]


def test_speculation_is_resolved() -> None:
    assert EngineArgs().shape == DraftShape.chain(0)
    resolved = EngineArgs(**SPECULATIVE)  # type: ignore[arg-type]
    assert resolved.shape == DraftShape.chain(5)
    assert resolved.shapes == (resolved.shape,)


def test_every_argument_is_described() -> None:
    described = inspect.getdoc(EngineArgs)
    assert described is not None
    for field in dataclasses.fields(EngineArgs):
        assert f"\n    {field.name}: " in described


def test_a_process_without_standard_error_shows_no_progress(monkeypatch) -> None:
    assert EngineArgs(show_progress=True).shows_progress
    monkeypatch.setattr(sys, "stderr", None)
    assert not EngineArgs(show_progress=True).shows_progress
    assert not EngineArgs().shows_progress


def test_a_missing_library_is_named(monkeypatch) -> None:
    monkeypatch.setattr("specjax.engine.args.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs the library llguidance; install specjax\[grammar"):
        EngineArgs(grammar_backend="llguidance")
