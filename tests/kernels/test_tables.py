"""Checks for all kernels, in one table each: lowering for CUDA, donated pools, rejected inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from specjax.kernels.accept_tree import compact_tree
from specjax.kernels.add_norm import add_norm
from specjax.kernels.choose_experts import choose_experts
from specjax.kernels.draw_tokens import draw_tokens
from specjax.kernels.filter_logits import logit_thresholds
from specjax.kernels.kv_rows import gather_rows, move_kv, scatter_rows
from specjax.kernels.markov_draft import markov_draft
from specjax.kernels.paged import PagedInputs
from specjax.kernels.prefill_attention import prefill_attention
from specjax.kernels.rope_store import rope_store
from specjax.kernels.token_logprobs import token_logprobs
from specjax.kernels.tree_attention import tree_attention

from ..support.lowering import TRITON_CALL, lower_for_cuda

Kernel = Callable[..., Any]
Spec = tuple[tuple[int, ...], str]
F32, I32, U32, BF16 = "float32", "int32", "uint32", "bfloat16"
ROWS: Spec = ((4,), F32)
INTS: Spec = ((4,), I32)
LOGITS: Spec = ((4, 128256), F32)
DRAW: tuple[Spec, ...] = (LOGITS, ROWS, ROWS, ((4, 2), U32), INTS)
POOL: Spec = ((32, 4096, 2, 8, 128), BF16)
PATHS: Spec = ((5, 6), I32)
add = partial(add_norm, eps=1e-5)
best = partial(token_logprobs, limit=20)
experts = partial(choose_experts, top_k=8)
grouped: dict[str, Any] = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5}
SCALE: Spec = ((128,), BF16)


def markov(batch: int, rank: int, dtype: str) -> tuple[Spec, ...]:
    """Logits, tokens, embeddings and output of ``markov_draft``, for one draft."""
    weights: list[Spec] = [((151936, rank), dtype), ((rank, 151936), dtype)]
    return ((batch, 1, 151936), F32), ((batch,), I32), *weights


def rows_to_store(batch: int, rows: int, heads: int, kv_heads: int, dim: int) -> tuple[Spec, ...]:
    """Queries, keys, values, cosine, sine, pool and slots of ``rope_store``."""
    qkv: list[Spec] = [((batch, rows, n, dim), BF16) for n in (heads, kv_heads, kv_heads)]
    table: Spec = ((batch, rows, 1, dim // 2), F32)
    return (*qkv, table, table, ((3, 4096, 2, kv_heads, dim), BF16), ((batch, rows), I32))


def store(*args: Any, implementation: str) -> Any:
    """``rope_store``, with the scales of its norms last if there are any."""
    norms = (*args[7:], 1e-6) if args[7:] else None
    return rope_store(*args[:6], 1, args[6], norms=norms, implementation=implementation)


def call_name(kernel: Kernel) -> str:
    return kernel.func.__name__ if isinstance(kernel, partial) else kernel.__name__


def shapes(specs: tuple[Spec, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in specs]


@pytest.mark.parametrize(
    ("kernel", "specs", "is_donated"),
    [
        (gather_rows, (POOL, ((512,), I32)), False),
        (scatter_rows, (POOL, ((512,), I32), ((32, 512, 2, 8, 128), BF16)), True),
        (move_kv, (POOL, PATHS, PATHS), True),
        (move_kv, (((2, 50, 2, 3, 10), F32), ((3, 1), I32), ((3, 1), I32)), False),
        (move_kv, (((2, 50, 2, 3, 64), BF16), ((3, 40), I32), ((3, 40), I32)), False),
        (move_kv, (((2, 50, 2, 1, 8), "float16"), ((3, 3), I32), ((3, 3), I32)), False),
        (compact_tree, (((5, 13), "bool"), PATHS), False),
        (compact_tree, (((5, 13), I32), PATHS), False),
        (compact_tree, (((5, 13, 7), "int8"), PATHS), False),
        (compact_tree, (((5, 13, 7), "float16"), PATHS), False),
        (compact_tree, (((5, 13, 3, 5), F32), PATHS), False),
        (compact_tree, (((5, 13, 12288), BF16), PATHS), False),
        (compact_tree, (((5, 13, 12288), "float8_e4m3fn"), PATHS), False),
        (draw_tokens, DRAW, False),
        (draw_tokens, (*DRAW, ((128256,), I32)), False),
        (markov_draft, markov(2, 32, BF16), False),
        (markov_draft, markov(40, 256, BF16), False),
        (markov_draft, (*markov(2, 48, F32), ((151936,), I32)), False),
        (logit_thresholds, (((4, 32000), F32), ROWS, INTS, ROWS, ROWS), False),
        (logit_thresholds, (((4, 49152), F32), ROWS, INTS, ROWS, ROWS), False),
        (logit_thresholds, (LOGITS, ROWS, INTS, ROWS, ROWS), False),
        (best, (LOGITS, INTS, ROWS, ROWS, INTS), False),
        (experts, (((32, 128), F32),), False),
        (partial(experts, is_normalised=False), (((1, 60), F32),), False),
        (partial(experts, **grouped), (((512, 256), F32),), False),
        (add, (((32, 576), F32), ((32, 576), F32), ((576,), F32)), False),
        (add, (((32, 576), F32), ((8, 32, 576), F32), ((576,), F32)), False),
        (add, (((32, 4096), BF16), ((32, 4096), BF16), ((4096,), BF16)), False),
        (add, (((32, 4096), BF16), ((8, 32, 4096), F32), ((4096,), BF16)), False),
        (store, rows_to_store(1, 1, 9, 3, 64), False),
        (store, rows_to_store(8, 40, 4, 1, 16), False),
        (store, rows_to_store(1, 1024, 32, 8, 128), False),
        (store, (*rows_to_store(8, 5, 32, 8, 128), SCALE, SCALE), False),
        (store, (*rows_to_store(1, 1024, 32, 8, 128), SCALE, SCALE), False),
    ],
)
def test_lowers_for_cuda_in_one_launch(
    kernel: Kernel, specs: tuple[Spec, ...], is_donated: bool
) -> None:
    call = partial(kernel, implementation="pallas")
    text = lower_for_cuda(call, *shapes(specs), donate_argnums=(0,) if is_donated else ())
    assert text.count(f"custom_call @{TRITON_CALL}") == 1
    assert f"specjax_{'rope_store' if kernel is store else call_name(kernel)}" in text
    if is_donated:
        assert "tf.aliasing_output = 0" in text
        assert "operand_index = 0" in text  # of output_operand_aliases


# query rows, heads, KV heads, head dim, requests, pages per request, dtype, new keys of a mask
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "batch", "pages", "dtype", "num_masked"),
    [
        (8, 9, 3, 64, 2, 20, F32, None),
        (8, 9, 3, 64, 2, 20, BF16, 8),
        (4, 32, 8, 128, 32, 70, BF16, None),
        (4, 32, 8, 128, 32, 70, F32, 4),
        (16, 32, 8, 128, 32, 70, BF16, 80),
        (16, 32, 8, 128, 8, 70, BF16, "window"),
        (8, 9, 3, 64, 2, 20, F32, "window"),
        (8192, 32, 8, 128, 64, 128, BF16, "prefill"),
        (8192, 32, 8, 128, 64, 128, F32, "prefill"),
        (512, 9, 3, 64, 4, 20, BF16, "prefill"),
        (512, 9, 3, 64, 4, 20, F32, "prefill"),
        (4, 32, 32, 96, 32, 70, BF16, None),
        (8, 16, 8, 256, 2, 70, BF16, "options"),
        (8, 9, 3, 64, 32, 20, F32, "options"),
        (512, 32, 32, 96, 4, 20, BF16, "prefill with options"),
        (512, 16, 8, 256, 4, 20, F32, "prefill with options"),
        (4, 32, 8, 128, 32, 70, BF16, "options and first tokens"),
        (512, 9, 3, 64, 4, 20, F32, "prefill with options and first tokens"),
    ],
)
def test_attention_lowers_for_cuda_and_its_layers_share_one_kernel(
    rows, heads, kv_heads, dim, batch, pages, dtype, num_masked
) -> None:
    """The layer index is an operand."""
    pool: Spec = ((2, (batch * pages + 1) * 16, 2, kv_heads, dim), dtype)
    lens: Spec = ((batch,), I32)
    if str(num_masked).startswith("prefill"):
        attention, q, last = prefill_attention, ((rows, heads, dim), dtype), (lens, lens)
    else:
        attention, q, last = tree_attention, ((batch, rows, heads, dim), dtype), (lens,)
    options: dict[str, Any] = {}
    if num_masked == "window":  # of a block whose rows see each other
        options, num_masked = {"window": 512}, rows
    if "options" in str(num_masked):  # all of them
        options = {"window": 64, "softcap": 50.0, "sinks": jnp.zeros(heads, dtype)}
    if "first tokens" in str(num_masked):
        options["sink_tokens"] = 4
    if str(num_masked).startswith("options"):
        places = jnp.zeros((batch, rows), jnp.int32)
        attention, num_masked = partial(attention, positions=places), rows
    if isinstance(num_masked, int):
        last = (*last, ((batch, rows, num_masked), "bool"))
    elif num_masked is None:
        attention = partial(attention, tree_mask=None)
    kernels = []
    for layer in (0, 1):

        def call(q, pool, table, *ints, layer=layer):
            inputs = PagedInputs(pool, layer, table, 16, **options)
            return attention(q, inputs, *ints, implementation="pallas")

        text = lower_for_cuda(call, *shapes((q, pool, ((batch, pages), I32), *last)))
        lines = [line for line in text.splitlines() if f"specjax_{call_name(attention)}" in line]
        kernels.append([line.split("backend_config")[-1] for line in lines])
    assert kernels[0]
    assert kernels[0] == kernels[1]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize(
    ("kernel", "specs"),
    [
        (scatter_rows, (((64,), I32), ((4, 64, 2, 8, 128), BF16))),
        (move_kv, (((8, 6), I32), ((8, 6), I32))),
    ],
)
def test_a_donated_pool_is_not_copied(
    kernel: Kernel, specs: tuple[Spec, ...], implementation: str
) -> None:
    pool = jax.ShapeDtypeStruct((4, 4096, 2, 8, 128), jnp.bfloat16)
    call = jax.jit(partial(kernel, implementation=implementation), donate_argnums=0)
    memory = call.lower(pool, *shapes(specs)).compile().memory_analysis()
    size = pool.size * pool.dtype.itemsize
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 2


SMALL: Spec = ((2, 8, 2, 1, 4), F32)


@pytest.mark.parametrize(
    ("kernel", "specs", "message"),
    [
        (gather_rows, (SMALL, ((3, 1), I32)), r"index \(3, 1\) \[W\]"),
        (scatter_rows, (SMALL, ((3,), I32), SMALL), r"rows float32\(2, 8, 2, 1, 4\)"),
        (move_kv, (SMALL, ((3, 4), I32), ((3, 5), I32)), r"destination \(3, 5\) both \[B, A\]"),
        (move_kv, (((8, 2), F32), PATHS, PATHS), r"pool \(8, 2\)"),
        (compact_tree, (((2, 5), F32), PATHS), r"values \(2, 5\) must be \[B, T, ...\]"),
        (compact_tree, (((3,), F32), PATHS), r"values \(3,\)"),
        (add, (((2, 8), F32), ((1, 8), F32), ((8,), F32)), "partial sums"),
    ],
)
def test_bad_shapes_are_refused(kernel: Kernel, specs: tuple[Spec, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernel(*(jnp.zeros(*spec) for spec in specs))
