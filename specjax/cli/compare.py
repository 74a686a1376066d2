"""The same request with and without speculation: timed, and where the two texts part."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.engine.requests import tokenize_inputs
from specjax.sampling.params import SamplingParams

NUM_TIMED_RUNS = 3
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token at which two completions part, and how close the decision was."""

    index: int  # of the completion's tokens, from 0
    speculative_id: int | None  # None where the completion ends before
    plain_id: int | None
    top_ids: tuple[int, int]  # the two best tokens of the plain pass there
    gap: float  # of their logits

    def describe(self, decode: Decode | None = None) -> str:
        """The difference in words; ``decode`` adds the tokens' text to their ids."""

        def name(token_id: int | None) -> str:
            if token_id is None:
                return "the end"
            return f"{token_id}" if decode is None else f"{token_id} {decode([token_id])!r}"

        return (
            f"token {self.index} is {name(self.speculative_id)} with speculation and "
            f"{name(self.plain_id)} without; the two best logits there are {self.gap:.4g} apart "
            f"({name(self.top_ids[0])} and {name(self.top_ids[1])})"
        )


def find_difference(
    speculative_ids: Sequence[int],
    plain_ids: Sequence[int],
    prompt_ids: Sequence[int],
    logit_gap: Callable[[list[int]], tuple[int, int, float]],
) -> Difference:
    """Where two unequal completions part; ``logit_gap`` is :meth:`Engine.logit_gap`."""
    shorter = min(len(speculative_ids), len(plain_ids))
    index = next((i for i in range(shorter) if speculative_ids[i] != plain_ids[i]), shorter)
    first, second, gap = logit_gap([*prompt_ids, *plain_ids[:index]])
    return Difference(
        index=index,
        speculative_id=speculative_ids[index] if index < len(speculative_ids) else None,
        plain_id=plain_ids[index] if index < len(plain_ids) else None,
        top_ids=(first, second),
        gap=gap,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Speed of one request with and without speculation, and whether the outputs are equal."""

    dtype: str
    is_exact: bool  # the texts have to be equal
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    speed_up: float
    equal: bool
    difference: Difference | None

    @property
    def is_acceptable(self) -> bool:
        """False for a difference where the outputs have to be identical."""
        return self.equal or not self.is_exact

    def report(self, decode: Decode) -> str:
        texts = "the texts are equal"
        if self.difference is not None:
            texts = f"the texts differ: {self.difference.describe(decode)}"
        if not self.is_acceptable:
            texts += f"\nin {self.dtype} the texts have to be equal: this is a defect"
        return (
            f"\nplain        {self.plain_tokens_per_second:8.1f} tok/s"
            f"\nspeculative  {self.speculative_tokens_per_second:8.1f} tok/s"
            f"\nspeed-up     {self.speed_up:8.2f}x  (median of {NUM_TIMED_RUNS} runs each, "
            f"prefill included, start-up not)\n{texts}"
        )


def compare_with_plain(
    engine: Any,
    engine_args: dict[str, Any],
    make_engine: Callable[..., Any],
    request: dict[str, Any],
) -> Comparison:
    """Decode a request, which the warm ``engine`` has answered before, also with a plain engine.

    That shares the weights and the arguments that are not about drafts. The ``request`` is keyword
    arguments of :meth:`Engine.generate`, seeded where it samples.
    """
    plain_args = {
        name: value
        for name, value in engine_args.items()
        if not name.startswith(("speculative_", "draft", "simulate_"))
    }
    with make_engine(**plain_args, speculative_algorithm=None, share_weights_with=engine) as plain:
        plain.generate(**request)
        engines = {"speculative": engine, "plain": plain}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        ids: dict[str, list[int]] = {}
        # alternating, so that a change of clock speed falls on both
        for _ in range(NUM_TIMED_RUNS):
            for name, one in engines.items():
                start = time.perf_counter()
                ids[name] = one.generate(**request)["output_ids"]
                seconds[name].append(time.perf_counter() - start)
        difference = None
        if ids["speculative"] != ids["plain"]:
            (prompt_ids,), _ = tokenize_inputs(
                engine.tokenizer, request.get("prompt"), None, request.get("messages")
            )
            difference = find_difference(
                ids["speculative"], ids["plain"], prompt_ids, plain.logit_gap
            )
    dtype = engine.target.config.dtype
    samples = SamplingParams.of(request["sampling_params"]).temperature > 0
    is_lossless = engine.args.acceptance.is_coupled or not samples
    speculative, plainly = (len(ids[one]) / statistics.median(seconds[one]) for one in engines)
    return Comparison(
        dtype=dtype,
        is_exact=dtype == "float32" and is_lossless,
        plain_tokens_per_second=plainly,
        speculative_tokens_per_second=speculative,
        speed_up=speculative / plainly,
        equal=difference is None,
        difference=difference,
    )
