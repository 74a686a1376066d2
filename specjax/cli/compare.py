"""``--compare``: the same request with and without speculation, timed and compared."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specjax.cli.difference import Difference, find_difference
from specjax.engine.inputs import tokenize_inputs

NUM_TIMED_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Speed of one request with and without speculation, and whether the outputs are equal."""

    dtype: str
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    difference: Difference | None
    speculative_text: str
    plain_text: str

    @property
    def speed_up(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    @property
    def is_acceptable(self) -> bool:
        """False for a difference in float32, where the outputs have to be identical."""
        return self.difference is None or self.dtype != "float32"

    def as_dict(self) -> dict[str, Any]:
        """Returns the comparison for JSON."""
        return {
            "dtype": self.dtype,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "speculative_tokens_per_second": self.speculative_tokens_per_second,
            "speed_up": self.speed_up,
            "equal": self.difference is None,
            "difference": self.difference and dataclasses.asdict(self.difference),
        }

    def report(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """Returns the comparison as lines of text; ``decode`` shows tokens as text too."""
        lines = [
            "",
            f"plain        {self.plain_tokens_per_second:8.1f} tok/s",
            f"speculative  {self.speculative_tokens_per_second:8.1f} tok/s",
            f"speed-up     {self.speed_up:8.2f}x  (median of {NUM_TIMED_RUNS} runs each, "
            "prefill included, start-up not)",
        ]
        if self.difference is None:
            return "\n".join([*lines, "the texts are equal"])
        lines.append(f"the texts differ: {self.difference.describe(decode)}")
        if not self.is_acceptable:
            lines.append("in float32 the texts have to be equal: this is a defect")
        return "\n".join(lines)


def compare_with_plain(
    engine: Any,
    engine_args: dict[str, Any],
    make_engine: Callable[..., Any],
    request: dict[str, Any],
    sampling: dict[str, Any],
) -> Comparison:
    """Decodes ``request`` with ``engine`` and with a plain engine that shares its weights.

    Args:
        engine: the speculative engine, already warm: it has answered the request once.
        engine_args: the keyword arguments it was made with.
        make_engine: builds an engine.
        request: the prompt as keyword arguments of `Engine.generate`.
        sampling: sampling parameters; seeded where they sample.
    """
    plain_args = {
        name: value
        for name, value in engine_args.items()
        if not name.startswith("speculative_") and not name.startswith("draft")
    }
    with make_engine(
        **plain_args, speculative_algorithm=None, share_weights_with=engine
    ) as plain_engine:
        plain_engine.generate(sampling_params=sampling, **request)
        runs: dict[str, list[float]] = {"speculative": [], "plain": []}
        outputs = {}
        # alternating, so that a change of clock speed falls on both
        for _ in range(NUM_TIMED_RUNS):
            for name, one in (("speculative", engine), ("plain", plain_engine)):
                start = time.perf_counter()
                outputs[name] = one.generate(sampling_params=sampling, **request)
                runs[name].append(time.perf_counter() - start)
        speculative, plain = outputs["speculative"], outputs["plain"]
        difference = None
        if speculative["output_ids"] != plain["output_ids"]:
            (prompt_ids,), _ = tokenize_inputs(
                engine.tokenizer, request.get("prompt"), None, request.get("messages")
            )
            difference = find_difference(
                speculative["output_ids"],
                plain["output_ids"],
                prompt_ids,
                plain_engine.logit_gap,
            )
    speeds = {
        name: len(outputs[name]["output_ids"]) / statistics.median(seconds)
        for name, seconds in runs.items()
    }
    return Comparison(
        dtype=engine.target.config.dtype,
        plain_tokens_per_second=speeds["plain"],
        speculative_tokens_per_second=speeds["speculative"],
        difference=difference,
        speculative_text=speculative["text"],
        plain_text=plain["text"],
    )
