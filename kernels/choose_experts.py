"""Choose the experts of each row of a mixture, and their weights, in one launch.

A program has all scores of its row in registers and finds the best one k times, which is a chain of
k reductions. It reads no other row and its sums have a fixed order, so a row has the same bits in
any batch.

Axes: R rows, E experts, k chosen experts of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from specjax.kernels.backend import load, power_of_two, resolve, store, triton_call

SCORINGS = ("softmax", "sigmoid")
# added to the sum of the weights, as DeepSeek-V3 does; it changes no sum above 1e-12
TINY = 1e-20
# the rank of NaN and -inf; only what cannot be chosen has -inf
LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclass(frozen=True)
class _Rule:
    """The options of :func:`choose_experts`."""

    top_k: int
    scoring: str
    is_normalised: bool
    scale: float
    num_groups: int
    top_groups: int


def _scores(logits: Array, scoring: str) -> Callable[[Array], Array]:
    """The function from some logits of rows ``[..., E]`` to their scores."""
    if scoring == "sigmoid":
        return lambda some: 1.0 / (1.0 + jnp.exp(-some))
    most = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(jnp.exp(logits - most), axis=-1, keepdims=True)
    return lambda some: jnp.exp(some - most) / total


def _ranks(values: Array) -> Array:
    return jnp.where(values > LOWEST, values, LOWEST)


def _reference(logits: Array, bias: Array, is_real: Array, rule: _Rule) -> tuple[Array, Array]:
    num_groups, scores = rule.num_groups, _scores(logits, rule.scoring)(logits)
    ranks = _ranks(scores + bias)
    if num_groups > 1:
        grouped = ranks.reshape(len(ranks), num_groups, -1)
        sums = _ranks(jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1))
        best = jax.lax.top_k(sums, rule.top_groups)[1]
        is_best = jnp.any(best[:, :, None] == jnp.arange(num_groups), axis=1)
        ranks = jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(ranks.shape)
    ids = jax.lax.top_k(ranks, rule.top_k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if rule.is_normalised:
        weights /= jnp.sum(weights, axis=1, keepdims=True) + TINY
    is_real = is_real[:, None] > 0
    return jnp.where(is_real, ids, -1), jnp.where(is_real, weights * rule.scale, 0.0)


def specjax_choose_experts(
    logits_ref: Any,
    bias_ref: Any,
    is_real_ref: Any,
    ids_ref: Any,
    weights_ref: Any,
    *,
    rule: _Rule,
) -> None:
    """Kernel body: one program per row. A rank of -inf is never the best one."""
    num_groups, top_k = rule.num_groups, rule.top_k
    row, num_experts = pl.program_id(0), logits_ref.shape[1]
    experts = jnp.arange(power_of_two(num_experts), dtype=jnp.int32)
    is_expert = experts < num_experts
    logits = load(logits_ref.at[row, experts], mask=is_expert, other=-jnp.inf)
    to_scores = _scores(logits, rule.scoring)
    bias = load(bias_ref.at[experts], mask=is_expert, other=0.0)
    ranks = jnp.where(is_expert, _ranks(to_scores(logits) + bias), -jnp.inf)

    def pop(ranks: Array, numbers: Array) -> tuple[Array, Array]:
        """The lowest number that has the best rank, and the ranks without it."""
        number = jax.lax.argmax(ranks, 0, jnp.int32)
        return number, jnp.where(numbers == number, -jnp.inf, ranks)

    if num_groups > 1:
        groups = jnp.arange(power_of_two(num_groups), dtype=jnp.int32)
        group_of = experts // (num_experts // num_groups)

        def add(group: Array, sums: Array) -> Array:
            own = jnp.where(group_of == group, ranks, -jnp.inf)
            _, others = pop(own, experts)
            return jnp.where(groups == group, _ranks(jnp.max(own) + jnp.max(others)), sums)

        def keep(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            sums, is_best = carry
            group, sums = pop(sums, groups)
            return sums, is_best | (group_of == group)

        sums = jnp.full(len(groups), -jnp.inf, jnp.float32)
        sums = jax.lax.fori_loop(0, num_groups, add, sums)
        none = jnp.zeros(len(experts), jnp.bool_)
        _, is_best = jax.lax.fori_loop(0, rule.top_groups, keep, (sums, none))
        ranks = jnp.where(is_best, ranks, -jnp.inf)

    places = jnp.arange(power_of_two(top_k), dtype=jnp.int32)

    def choose(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        ranks, ids = carry
        expert, ranks = pop(ranks, experts)
        return ranks, jnp.where(places == j, expert, ids)

    _, ids = jax.lax.fori_loop(0, top_k, choose, (ranks, jnp.zeros(len(places), jnp.int32)))
    # read again, because a reduction for each of them would take longer
    is_stored = places < top_k
    chosen = load(logits_ref.at[row, ids], mask=is_stored, other=0.0)
    weights = jnp.where(is_stored, to_scores(chosen), 0.0)
    if rule.is_normalised:
        weights /= jnp.sum(weights) + TINY
    is_real = is_real_ref[row] > 0
    store(ids_ref.at[row, places], jnp.where(is_real, ids, -1), mask=is_stored)
    store(
        weights_ref.at[row, places], jnp.where(is_real, weights * rule.scale, 0.0), mask=is_stored
    )


def choose_experts(
    logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Array | None = None,
    is_normalised: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    is_real: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Choose the ``top_k`` experts with the highest ``score + bias``; of equals, the lowest ids.

    With NaN among the logits, the chosen ids are any distinct experts. A softmax over the chosen
    logits alone, as in gpt-oss and Granite, equals ``"softmax"`` with normalised weights.

    Args:
        logits: f32 ``[R, E]`` of the router.
        top_k: k.
        scoring: ``"softmax"`` over all experts, or ``"sigmoid"``.
        bias: f32 ``[E]``, which affects the choice but not the weights.
        is_normalised: whether the scores of the chosen experts are divided by their sum.
        scale: factor of the weights.
        num_groups: groups of neighbouring experts, of E / ``num_groups`` each.
        top_groups: groups whose experts may be chosen: those with the highest sum of their two
            highest ``score + bias``.
        is_real: bool ``[R]``, the rows that choose experts; ``None`` if all do.

    Returns:
        Experts i32 ``[R, k]`` in descending order of ``score + bias``, -1 in rows that are not
        real; and weights f32 ``[R, k]``, 0 in these rows.

    Raises:
        ValueError: if the scoring is unknown, or the groups do not fit E and k.
    """
    num_rows, num_experts = logits.shape
    if scoring not in SCORINGS:
        raise ValueError(f"{scoring=} must be one of {list(SCORINGS)}")
    size, remainder = divmod(num_experts, num_groups)
    if remainder or (num_groups > 1 and size < 2):
        raise ValueError(
            f"{num_groups=} must divide {num_experts} experts into groups of 2 or more"
        )
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"{top_groups=} must be from 1 to {num_groups}")
    if not 1 <= top_k <= top_groups * size:
        raise ValueError(f"{top_k=} must be from 1 to {top_groups * size}, the experts to choose")
    implementation = resolve(implementation)
    bias = jnp.zeros(num_experts, jnp.float32) if bias is None else bias
    # as integers, because the lowering types pointers to bool as one bit wide
    real = jnp.ones(num_rows, jnp.int32) if is_real is None else is_real.astype(jnp.int32)
    rule = _Rule(top_k, scoring, is_normalised, scale, num_groups, top_groups)
    if implementation == "xla" or num_rows == 0:
        return _reference(logits, bias, real, rule)
    experts, weights = triton_call(
        partial(specjax_choose_experts, rule=rule),
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, top_k), jnp.float32),
        ),
        num_warps=1,
        implementation=implementation,
    )(logits, bias, real)
    return experts, weights
