"""What a caller gives to generate from: raw text, token ids or conversations, one or many."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


def tokenize_inputs(
    tokenizer: Tokenizer | None, prompt: Any, input_ids: Any, messages: Any
) -> tuple[list[list[int]], bool]:
    """Token ids of the one input kind that is given.

    Args:
        tokenizer: ``None`` where only ``input_ids`` can be served.
        prompt: raw text or a list of texts; special tokens are added as the checkpoint asks.
        input_ids: token ids or a list of such lists, arrays included.
        messages: a conversation or a list of them, rendered by the chat template.

    Returns:
        Ids of every input, and whether a list of inputs was given.

    Raises:
        ValueError: if not exactly one kind is given, or it is not of the form above.
    """
    given = {"prompt": prompt, "input_ids": input_ids, "messages": messages}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"give exactly one of prompt, input_ids and messages, not {names}")
    if input_ids is not None:
        return _id_lists(input_ids)
    tokenizer = need_tokenizer(tokenizer, names[0])
    if prompt is not None:
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not _is_list(texts) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"prompt={prompt!r} must be a text or a list of texts")
        return [tokenizer.encode(text) for text in texts], not isinstance(prompt, str)
    is_batch = _is_list(messages) and len(messages) > 0 and _is_list(messages[0])
    conversations = messages if is_batch else [messages]
    if not all(_is_list(one) for one in conversations):
        raise ValueError(f"messages={messages!r} must be a list of turns or a list of such lists")
    rendered = [tokenizer.apply_chat_template(one) for one in conversations]
    return [tokenizer.encode(text, add_special_tokens=False) for text in rendered], is_batch


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer, or an error that names what needs it."""
    if tokenizer is None:
        raise ValueError(f"{what} needs a tokenizer; with skip_tokenizer_init give input_ids")
    return tokenizer


def check_ids(ids: Sequence[int], vocab_size: int, context_length: int) -> None:
    """Refuse a prompt that the model cannot read or that leaves no room for a completion.

    Raises:
        ValueError: naming the value and the limit.
    """
    if not ids:
        raise ValueError("an input has no tokens; give at least one")
    check_vocabulary("input_ids", ids, vocab_size)
    if len(ids) >= context_length:
        raise ValueError(
            f"a prompt of {len(ids)} tokens leaves no room in context_length={context_length}; "
            "shorten it or raise context_length"
        )


def check_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: naming the argument, the ids and the vocabulary size.
    """
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise ValueError(f"{name} {wrong[:5]} are outside the vocabulary of {vocab_size}")


def for_each_input(name: str, value: Any, count: int) -> list[Any]:
    """One value for each input: those of a list, or the same for all.

    Raises:
        ValueError: for a list of another length than the inputs.
    """
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} inputs")
    return list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _id_lists(input_ids: Any) -> tuple[list[list[int]], bool]:
    plain = _without_arrays(input_ids)
    is_batch = _is_list(plain) and len(plain) > 0 and not isinstance(plain[0], int | np.integer)
    rows = [_without_arrays(row) for row in plain] if is_batch else [plain]
    for row in rows:
        if not _is_list(row) or not all(_is_id(i) for i in row):
            raise ValueError(
                f"input_ids={input_ids!r} must be a list of token ids or a list of such lists"
            )
    return [[int(i) for i in row] for row in rows], is_batch


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _without_arrays(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value
