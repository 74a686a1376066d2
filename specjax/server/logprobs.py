"""Log-probabilities in the shapes of OpenAI's completions and chats."""

from collections.abc import Sequence
from typing import Any

from specjax.scheduling.request import TokenLogprob
from specjax.server.tokens import TokenTexts

# JSON has no infinity; a token that a filter has removed gets this
LEAST = -9999.0
Tops = Sequence[Sequence[TokenLogprob] | None]


def finite(value: float) -> float:
    return value if value > LEAST else LEAST  # for NaN too


def completion_logprobs(
    texts: TokenTexts, chosen: Sequence[TokenLogprob], tops: Tops, offset: int
) -> tuple[dict[str, Any], int]:
    """The lists over all tokens that ``logprobs`` of a completion has, and the next offset.

    ``chosen`` and ``tops`` are as in ``meta_info``; a first prompt token has no value. ``offset``
    is where the first token begins in the text, in characters.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    best: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for i, (value, token, _) in enumerate(chosen):
        text, data = texts.of(token)
        tokens.append(text)
        offsets.append(offset)
        if not texts.is_special(token):
            # a character begins at a byte that continues no other
            offset += sum(byte & 0xC0 != 0x80 for byte in data)
        if value is None:
            values.append(None)
            best.append(None)
            continue
        values.append(finite(value))
        found: dict[str, float] = {}
        for top, other, _ in (tops[i] or ()) if tops else ():
            assert top is not None
            found.setdefault(texts.of(other)[0], finite(top))
        # of two tokens with one text the better counts
        found[text] = max(found.get(text, LEAST), finite(value))
        best.append(found)
    lists = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": best,
        "text_offset": offsets,
    }
    return lists, offset


def chat_logprobs(texts: TokenTexts, chosen: Sequence[TokenLogprob], tops: Tops) -> dict[str, Any]:
    """``logprobs`` of a chat's choice: an entry for each completion token."""
    content = []
    for i, (value, token, _) in enumerate(chosen):
        entry = _entry(texts, value, token)
        best = (tops[i] or ()) if tops else ()
        content.append(entry | {"top_logprobs": [_entry(texts, v, other) for v, other, _ in best]})
    return {"content": content, "refusal": None}


def _entry(texts: TokenTexts, value: float | None, token: int) -> dict[str, Any]:
    assert value is not None
    text, data = texts.of(token)
    return {"token": text, "logprob": finite(value), "bytes": list(data)}
