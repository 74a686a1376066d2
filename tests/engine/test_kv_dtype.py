"""Keys and values of 8-bit floats."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels import kv_format
from specjax.kernels.backend import WORD
from specjax.kernels.kv_rows import gather_rows, move_kv, scatter_rows
from specjax.kernels.paged import PagedInputs
from specjax.kernels.prefill_attention import prefill_attention
from specjax.kernels.rope_store import rope_store
from specjax.kernels.tree_attention import tree_attention

from specjax import SamplingParams
from specjax.checkpoints.presets import LLAMA31_8B
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.testing import Files

from ..support.lowering import TRITON_CALL, lower_for_cuda
from ..support.model_files import write_lfm2

PROMPT = [5, 9, 11, 40, 2, 7] * 4
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


@pytest.mark.slow
def test_pools_take_a_quarter_of_float32(files: Files) -> None:
    """Of target and draft; the log-probabilities of the prompt change little, but do change."""
    found = []
    for kind in ("auto", "fp8_e4m3"):
        with files.engine(dtype="float32", kv_cache_dtype=kind, max_total_tokens=128) as engine:
            pools = jax.tree.leaves(engine.runner.on_device.pools)
            call: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": GREEDY}
            meta = engine.generate(**call, return_logprob=True, logprob_start_len=0)["meta_info"]
            values = np.array([x for x, *_ in meta["input_token_logprobs"][1:]])
            assert engine.get_server_info()["kv_cache_dtype"] == kind
            found.append((values, sum(x.nbytes for x in pools)))
            assert ({x.dtype for x in pools} == {WORD}) == (kind != "auto")
    (plain, plain_bytes), (rounded, rounded_bytes) = found
    assert 4 * rounded_bytes == plain_bytes
    assert 1e-4 < np.abs(plain - rounded).max() < 0.1


def test_the_plan_names_the_dtype(files: Files) -> None:
    plan = plan_engine(EngineArgs(**files.arguments(kv_cache_dtype="fp8_e4m3")))
    assert " GB of fp8_e4m3: " in " ".join(plan.describe())


def test_refusals() -> None:
    wrong = "kv_cache_dtype='fp8_e5m2' must be 'auto' or 'fp8_e4m3'"
    with pytest.raises(ValueError, match=wrong):
        EngineArgs(kv_cache_dtype="fp8_e5m2")
    for capability, is_refused in (("8.0", True), ("8.9", False), ("10.0", False)):
        device: Any = SimpleNamespace(compute_capability=capability, device_kind="a GPU")
        model = replace(LLAMA31_8B, kv_cache_dtype="fp8_e4m3")
        assert [*kv_format.refusals(LLAMA31_8B, device, deterministic=False)] == []
        reasons = [*kv_format.refusals(model, device, deterministic=True)]
        assert len(reasons) == is_refused
        assert all(text in reasons[0] for text in ("'fp8_e4m3'", "8.9", "8.0") if is_refused)


def test_narrow_heads_on_a_gpu_are_named() -> None:
    gpu: Any = SimpleNamespace(platform="gpu")
    for dim, is_slow in ((48, True), (64, False), (256, False)):
        model = replace(LLAMA31_8B, head_dim=dim, kv_cache_dtype="fp8_e4m3")
        assert len([*kv_format.warnings(model, gpu)]) == is_slow
        assert not [*kv_format.warnings(replace(model, kv_cache_dtype="auto"), gpu)]
        assert not [*kv_format.warnings(model, jax.devices()[0])]


def test_rows_of_convolutions_are_not_stored_in_8_bits(files: Files, tmp_path: Path) -> None:
    path = write_lfm2(tmp_path / "lfm2", files.target)
    arguments = files.arguments(target=path, speculative=False, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match="'fp8_e4m3' is not supported for model_type='lfm2'"):
        plan_engine(EngineArgs(**arguments))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_lower_for_cuda(dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    pool, ints = shape((2, 64, 2, 2, 32), WORD), partial(shape, dtype=jnp.int32)
    q, k, table = shape((2, 3, 4, 64), dtype), shape((2, 3, 2, 64), dtype), ints((2, 4))
    angles, how = shape((2, 3, 1, 32), jnp.float32), {"implementation": "pallas"}
    inputs = PagedInputs(pool, ints(()), table, page_size=4)  # type: ignore[arg-type]
    for function, *arguments in (
        (partial(gather_rows, **how), pool, ints((8,))),
        (partial(scatter_rows, **how), pool, ints((8,)), pool.update(shape=(2, 8, 2, 2, 32))),
        (partial(move_kv, **how), pool, table, table),
        (
            lambda *x: rope_store(*x[:6], 1, x[6], **how),
            *(q, k, k, angles, angles, pool, ints((2, 3))),
        ),
        (partial(tree_attention, tree_mask=None, **how), q, inputs, ints((2,))),
        (
            partial(prefill_attention, **how),
            *(shape((6, 4, 64), dtype), inputs, ints((2,)), ints((2,))),
        ),
    ):
        assert TRITON_CALL in lower_for_cuda(function, *arguments)
