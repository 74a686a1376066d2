"""Requests for a throughput benchmark, from data sets on disk or from a random generator."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.engine.inputs import tokenize_inputs
from specjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BenchRequest:
    """Prompt tokens, and the completion tokens to ask for."""

    input_ids: list[int]
    output_len: int


def random_requests(
    count: int, vocab_size: int, input_len: int, output_len: int, range_ratio: float, seed: int
) -> list[BenchRequest]:
    """Requests of random tokens.

    Args:
        count: requests.
        vocab_size: tokens are drawn from ``0 .. vocab_size - 1``.
        input_len: longest prompt.
        output_len: longest completion.
        range_ratio: shortest lengths as a share of the longest; lengths between are as likely.
        seed: the same seed gives the same requests.

    Raises:
        ValueError: for a ratio outside 0 to 1 or lengths below 1.
    """
    if not 0 <= range_ratio <= 1:
        raise ValueError(f"random_range_ratio={range_ratio} must be from 0 to 1")
    for name, longest in (("random_input_len", input_len), ("random_output_len", output_len)):
        if longest < 1:
            raise ValueError(f"{name}={longest} must be at least 1")
    rng = np.random.default_rng(seed)

    def lengths(longest: int) -> list[int]:
        shortest = max(1, int(longest * range_ratio))
        return rng.integers(shortest, longest, size=count, endpoint=True).tolist()

    return [
        BenchRequest(rng.integers(0, vocab_size, size=num_in).tolist(), num_out)
        for num_in, num_out in zip(lengths(input_len), lengths(output_len), strict=True)
    ]


def sharegpt_requests(
    path: Path,
    count: int,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    output_len: int | None = None,
    apply_chat_template: bool = False,
    seed: int = 0,
) -> list[BenchRequest]:
    """First questions of the conversations of a ShareGPT file, in random order.

    Args:
        path: a JSON list of objects with ``conversations`` (or ``conversation``), a list of
            messages with their text in ``value``.
        count: requests at most.
        tokenizer: that of the model.
        context_length: conversations that are longer, prompt and completion together, are left
            out.
        output_len: completion tokens; by default as many as the first answer of the file has.
        apply_chat_template: put the question through the template.
        seed: of the order.

    Raises:
        ValueError: for a file of another form, or one without a conversation that fits.
    """
    rows = _load_json(path)
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} is no JSON list; expected the ShareGPT form")
    requests: list[BenchRequest] = []
    for index in np.random.default_rng(seed).permutation(len(rows)).tolist():
        if len(requests) == count:
            break
        question, answer = _first_turns(path, index, rows[index])
        if question is None or answer is None:
            continue
        ids = _tokenize(tokenizer, question, apply_chat_template)
        wanted = len(tokenizer.encode(answer)) if output_len is None else output_len
        # as short as that is no question, or no answer
        if len(ids) >= 2 and wanted >= 2 and len(ids) + wanted <= context_length:
            requests.append(BenchRequest(ids, wanted))
    if not requests:
        raise ValueError(
            f"{path.name} holds no conversation of at most {context_length} tokens; raise "
            "context_length"
        )
    return requests


def jsonl_requests(
    path: Path,
    count: int,
    tokenizer: Tokenizer,
    *,
    output_len: int,
    apply_chat_template: bool = False,
) -> list[BenchRequest]:
    """Prompts of a file with one JSON object a line, from the start again where it is short.

    Args:
        path: each object has ``prompt`` (text), ``messages`` (a conversation) or ``turns`` (user
            messages, of which the first is taken), and may have ``output_len``.
        count: requests.
        tokenizer: that of the model.
        output_len: completion tokens where a line names none.
        apply_chat_template: put a ``prompt`` through the template too.

    Raises:
        ValueError: for a line of another form, naming it, or a file without lines.
    """
    prompts = [
        (_tokenize_row(tokenizer, row, apply_chat_template), row.get("output_len", output_len))
        for row in _load_lines(path)
    ]
    if not prompts:
        raise ValueError(f"{path.name} holds no prompts")
    return [BenchRequest(*prompts[i % len(prompts)]) for i in range(count)]


def _first_turns(path: Path, index: int, row: Any) -> tuple[str | None, str | None]:
    """The first question and answer; ``None`` where a conversation is shorter."""
    try:
        turns = row["conversations"] if "conversations" in row else row["conversation"]
        values = [str(turn["value"]) for turn in turns[:2]]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path.name}, conversation {index}: {error!r}; expected the ShareGPT form"
        ) from error
    return (values[0], values[1]) if len(values) == 2 else (None, None)


def _tokenize(tokenizer: Tokenizer, text: str, apply_chat_template: bool) -> list[int]:
    if not apply_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    return tokenize_inputs(tokenizer, None, None, messages)[0][0]


def _tokenize_row(tokenizer: Tokenizer, row: dict[str, Any], apply: bool) -> list[int]:
    if "messages" in row:
        return tokenize_inputs(tokenizer, None, None, row["messages"])[0][0]
    if "turns" in row:
        return _tokenize(tokenizer, row["turns"][0], True)
    return _tokenize(tokenizer, row["prompt"], apply)


def _load_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not {"prompt", "messages", "turns"} & row.keys():
                raise ValueError("it has none of prompt, messages and turns")
            turns = row.get("turns", [""])
            if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
                raise ValueError("turns must be a list of at least one string")
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: {error}") from error
        yield row


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
