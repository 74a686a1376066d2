"""Where two completions of one prompt part, and how close the decision was."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token at which two completions part, and how close the decision was.

    ``index`` counts completion tokens from 0. ``gap`` is the difference of the two best logits of
    the plain pass there, whose tokens are ``top_ids``. A completion that ends before ``index`` has
    no token there: None.
    """

    index: int
    speculative_id: int | None
    plain_id: int | None
    top_ids: tuple[int, int]
    gap: float

    def describe(self, decode: Callable[[list[int]], str] | None = None) -> str:
        """Returns the difference in words; ``decode`` adds the tokens' text to their ids."""

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
    """Locates the first difference of two unequal completions.

    Args:
        speculative_ids, plain_ids: the completions; one may be a prefix of the other.
        prompt_ids: the prompt's token ids.
        logit_gap: gives the two best token ids after a sequence and the gap of their logits.
    """
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
