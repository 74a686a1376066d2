"""Reasoning before an answer: ``<think>...</think>`` of Qwen3 and DeepSeek-R1.

A chat template may open the reasoning itself, so that the completion begins inside of it, or close
it at once, so that there is none. Otherwise, a completion that begins with the first tag reasons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from specjax.text.tokenizer import Tokenizer

START, END = "<think>", "</think>"
PARSERS = ("qwen3", "deepseek-r1")
# maximum number of tokens, of white space, after the last tag of a prompt that closes reasoning
NEAR_END = 4
MAX_END = len(START) + NEAR_END  # tokens of a first tag that is not a token, and the white space


@dataclass(frozen=True)
class ReasoningTags:
    """Token ids of the tags."""

    start: int | None
    end: int
    spaces: frozenset[int] = frozenset()  # tokens of white space
    is_special: bool = False  # whether texts without special tokens lack the tags
    decode: Callable[[Sequence[int]], str] | None = None  # if the first tag is not a token

    stop_ids: ClassVar[frozenset[int]] = frozenset()  # tokens that end a completion
    opening: ClassVar = ""  # what an answer without reasoning begins with

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ReasoningTags":
        """Raises ValueError if the tokenizer has no token for the last tag."""
        end = tokenizer.backend.token_to_id(END)
        if end is None:
            raise ValueError(f"reasoning_parser needs a tokenizer with the token {END!r}")
        ids = [x.ids for x in map(tokenizer.backend.encode, ("\n", "\n\n", " ", "\r\n"))]
        spaces = frozenset(token for space_ids in ids for token in space_ids)
        is_special = END in tokenizer.special_ids
        start = tokenizer.backend.token_to_id(START)
        return cls(start, end, spaces, is_special, tokenizer.decode if start is None else None)

    def last(self, prompt: Sequence[int]) -> str | None:
        """The tag at the end of the prompt, before white space; ``None`` if there is none."""
        if self.decode is not None and self.decode(prompt[-MAX_END:]).rstrip().endswith(START):
            return START
        at = len(prompt)
        while at > max(1, len(prompt) - NEAR_END) and prompt[at - 1] in self.spaces:
            at -= 1
        last = prompt[at - 1] if prompt else -1
        return END if last == self.end else START if last == self.start else None

    def parts(self, prompt: Sequence[int], continued: str) -> dict[str, Any]:
        """Return the fields with which ``TextParts`` reads completions of a prompt.

        ``continued`` is the content at its end, if it has no other end.
        """
        is_inside = self.last(prompt) == START or continued.rfind(START) > continued.rfind(END)
        return {"may_reason": True, "is_inside": is_inside, "end_token": self.end}

    def history(
        self, messages: list[dict[str, Any]], variables: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Messages as templates read them."""
        return messages

    def boundary(
        self, prompt: Sequence[int], grammar: str, budget: int | None, *, is_list: bool
    ) -> dict[str, Any] | None:
        """Where the grammar of a completion begins, as the fields of ``sampling.Boundary``.

        ``None`` if it begins at once. A list of tokens limits the reasoning too, unless that has a
        budget.
        """
        last = self.last(prompt)
        # a model begins to reason only with the first tag as a token
        if last == END or (last is None and self.start is None) or (is_list and budget is None):
            return None
        # states: before the first tag, after it, and in an answer that begins otherwise
        edges = [(state, self.end, -1) for state in range(3)]
        edges += [(0, token, 0) for token in sorted(self.spaces)]
        edges += [] if self.start is None else [(0, self.start, 1)]
        first = 1 if last == START else 0
        rules = {"edges": tuple(edges), "others": (2, 1, 2), "end": self.end, "inside": 1}
        return rules | {"first": first, "budget": budget}


def split_reasoning(text: str, *, is_inside: bool, is_final: bool) -> tuple[str, str]:
    """Split a completion into reasoning and content, without the white space around both tags.

    ``is_inside``: the prompt has opened the reasoning. Parts of a text that is not final only grow
    with it.
    """
    body = text.lstrip()
    if body.startswith(START):
        body = body[len(START) :]
    elif not is_inside:
        is_undecided = START.startswith(body) and not is_final
        return "", "" if is_undecided else text
    elif not is_final and START.startswith(body):
        return "", ""
    reasoning, tag, content = body.partition(END)
    if not tag and not is_final:
        reasoning = reasoning[: len(reasoning) - overlap(reasoning, END)]
    return reasoning.strip(), content.lstrip()


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
