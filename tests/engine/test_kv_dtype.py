"""Keys and values of 8-bit floats."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels.backend import is_addressed
from specjax.kernels.kv_rows import gather_rows, move_kv, scatter_rows
from specjax.kernels.prefill_attention import prefill_attention
from specjax.kernels.rope_store import rope_store
from specjax.kernels.tree_attention import tree_attention

from specjax import SamplingParams
from specjax.checkpoints.presets import LLAMA31_8B
from specjax.engine.args import EngineArgs
from specjax.engine.plan import check_kv_dtype, plan_engine
from specjax.runtime.runner_config import with_unused
from specjax.speculative.algorithm import kv_pool, target_pool
from specjax.testing import Files

from ..kernels.lowering import TRITON_CALL, lower_for_cuda

PROMPT = [5, 9, 11, 40, 2, 7] * 4
SHAPE = replace(LLAMA31_8B, kv_cache_dtype="fp8_e4m3")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


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
            assert ({x.dtype for x in pools} == {jnp.dtype(jnp.float8_e4m3fn)}) == (kind != "auto")
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
        device = SimpleNamespace(compute_capability=capability, device_kind="a GPU")
        place: Any = SimpleNamespace(device=device)
        check_kv_dtype("auto", place)
        if is_refused:
            with pytest.raises(ValueError, match=r"needs compute capability 8\.9 or .* has 8\.0"):
                check_kv_dtype("fp8_e4m3", place)
        else:
            check_kv_dtype("fp8_e4m3", place)


@pytest.mark.parametrize("num_kv", [32767, 32768, 32769, 50000, 65536, 65537])
def test_kernels_can_address_every_pool(num_kv: int) -> None:
    """In kernels, an offset into an array of up to 4 GiB has 32 bits and a sign."""
    pool = kv_pool(SHAPE, num_kv)
    assert is_addressed(pool)
    assert pool.shape[1] == (num_kv if num_kv <= 32768 or num_kv > 65536 else 65537)
    q = jax.ShapeDtypeStruct((1, 1, 32, 128), jnp.bfloat16)
    ints = jax.ShapeDtypeStruct((1,), jnp.int32)
    unpadded = pool.update(shape=(32, 40000, 2, 8, 128))
    form: dict[str, Any] = {"page_size": 16, "implementation": "pallas"}
    with pytest.raises(ValueError, match="takes 2 to 4 GiB"):
        jax.eval_shape(
            lambda *x: tree_attention(x[0], x[1], 0, x[2], x[3], None, **form),
            *(q, unpadded, jax.ShapeDtypeStruct((1, 4), jnp.int32), ints),
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kernels_lower_for_cuda(dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    pool, ints = shape((2, 64, 2, 2, 64), jnp.float8_e4m3fn), partial(shape, dtype=jnp.int32)
    q, k, table = shape((2, 3, 4, 64), dtype), shape((2, 3, 2, 64), dtype), ints((2, 4))
    angles, how = shape((2, 3, 1, 32), jnp.float32), {"implementation": "pallas"}
    form: dict[str, Any] = {"page_size": 4} | how
    for function, *arguments in (
        (partial(gather_rows, **how), pool, ints((8,))),
        (partial(scatter_rows, **how), pool, ints((8,)), pool.update(shape=(2, 8, 2, 2, 64))),
        (partial(move_kv, **how), pool, table, table),
        (
            lambda *x: rope_store(*x[:6], 1, x[6], **how),
            *(q, k, k, angles, angles, pool, ints((2, 3))),
        ),
        (lambda *x: tree_attention(*x[:2], 1, *x[2:], None, **form), q, pool, table, ints((2,))),
        (
            lambda *x: prefill_attention(*x[:2], 1, *x[2:], **form),
            *(shape((6, 4, 64), dtype), pool, table, ints((2,)), ints((2,))),
        ),
    ):
        assert TRITON_CALL in lower_for_cuda(function, *arguments)


def test_kernels_can_address_both_parts_of_a_split_pool() -> None:
    config = replace(SHAPE, num_layers=48, windows=(1024,) * 40 + (0,) * 8)
    for num_kv, num_window_kv in ((80_000, 20_000), (30_000, 15_000), (600_000, 30_000)):
        pool = target_pool(config, num_kv, num_window_kv)
        for part, layers, wanted in (
            (pool.full, 8, num_kv),
            (pool.windowed, 40, num_window_kv),
        ):
            assert part.shape[0] == layers
            assert is_addressed(part)
            is_fit = is_addressed(part.update(shape=(layers, wanted, 2, 8, 128)))
            assert (part.shape[1] == wanted) == is_fit


def test_the_plan_counts_unused_memory(files: Files) -> None:
    """A pool of 2 to 4 GiB takes 4; if the device has less, it takes 2."""
    options = {"kv_cache_dtype": "fp8_e4m3", "speculative": False, "max_total_tokens": 40_000_000}
    plan = plan_engine(EngineArgs(**files.arguments(**options)))
    pool = target_pool(plan.networks.target_config, plan.config.sizes.num_kv)
    assert plan.config.max_total_tokens == 40_000_000
    assert 2**31 < plan.config.sizes.num_kv * plan.needs.token_bytes < pool.size
    assert 2**32 < pool.size <= plan.kv_bytes < 2**32 + 2**20
    config, needs = with_unused(
        plan.networks,
        plan.config,
        plan.needs._replace(window_bytes=0),
        plan.needs.weight_bytes + plan.needs.temporary_bytes + 3 * 2**30,
    )
    assert 2**30 < config.sizes.num_kv * needs.token_bytes <= 2**31
    assert needs.window_bytes == 0
