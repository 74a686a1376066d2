"""Collect the target's answers to prompts read from files and to prompts that it samples.

The target answers every prompt from a file once greedily and ``file_samples`` times at
``ANSWER_TEMPERATURE``. It answers the fraction ``SAMPLED_FRACTION`` of the sampled prompts at that
temperature and the rest greedily. The fraction ``TEXT_FRACTION`` of the sampled prompts is plain
text, which the target continues without the chat template.

To sample a user turn, the target continues an opening from ``openings.json``, whose ``{slots}`` are
filled at random from the lists in that file.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.json_file import read_json_lines
from specjax.text.tokenizer import Tokenizer
from specjax.training.data import Corpus
from specjax.training.generate import Sampler

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_MARK = "\u241fuser-turn\u241f"

TEXT_FRACTION = 0.06
SAMPLED_FRACTION = 0.25
PROMPT_TEMPERATURE = 0.75
ANSWER_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Numbers and maximum lengths of prompts and answers.

    Attributes:
        self_sample: number of prompts to sample from the target.
        file_samples: sampled answers to each prompt in a file, in addition to the greedy answer.
        max_user_tokens: maximum length of a sampled user turn, in tokens.
        max_answer_tokens: maximum length of an answer, in tokens.
    """

    self_sample: int = 0
    file_samples: int = 1
    max_user_tokens: int = 96
    max_answer_tokens: int = 256
    seed: int = 0


class Prompt(NamedTuple):
    """Token ids to continue, and the name of their source."""

    ids: tuple[int, ...]
    source: str


def read_lines(path: Path, required: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line.

    Each object needs ``prompt`` (text), ``messages`` (a conversation) or ``turns`` (user messages),
    and all ``required`` keys. Otherwise, raises ValueError, which names the line.
    """
    fields = " and ".join(required) or "prompt, messages or turns"

    def read(row: Any) -> dict[str, Any]:
        keys = row.keys() if isinstance(row, dict) else set()
        if not {"prompt", "messages", "turns"} & keys or not keys >= set(required):
            raise ValueError(f"it lacks {fields}")
        turns = row.get("turns", [""])
        if not (isinstance(turns, list) and turns and all(isinstance(x, str) for x in turns)):
            raise ValueError(f"turns={turns!r} must be a list of at least one string")
        return row

    rows = read_json_lines(path, read)
    if not rows:
        raise ValueError(f"{path.name} contains no prompts")
    return rows


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Read the category and first user message of each line in a Spec-Bench ``.jsonl`` file."""
    rows = read_lines(path, ["turns"])
    return [(str(row.get("category", path.stem)), row["turns"][0]) for row in rows]


def chat_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text that the chat template puts before and after the first user turn.

    Raises ValueError if the template changes the user's text.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise ValueError(
            "the chat template must render the user's text exactly once; use a model with another "
            "chat template"
        )
    return before, after


def file_prompts(
    tokenizer: Tokenizer, entries: Sequence[tuple[str, str]], longest: int
) -> list[Prompt]:
    """Encode ``(category, message)`` pairs with the chat template, if any, else as plain text.

    Prompts with more than ``longest`` tokens are skipped with a warning.
    """
    prompts = []
    for category, message in entries:
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(message)
        else:
            text = tokenizer.apply_chat_template([{"role": "user", "content": message}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= longest:
            prompts.append(Prompt(tuple(ids), category))
    if left_out := len(entries) - len(prompts):
        logger.warning("skipped %d prompts that are longer than %d tokens", left_out, longest)
    return prompts


def sample_prompts(
    sampler: Sampler, tokenizer: Tokenizer, config: CollectConfig, progress: Progress | None = None
) -> list[Prompt]:
    """Make prompts: openings that the target continues to user turns, and openings of plain text.

    A user turn ends at the target's end token. At ``max_user_tokens`` it is cut after its last
    sentence or line. Without a chat template, all prompts are plain text. Duplicates and prompts
    that are too long are removed.
    """
    text_fraction = TEXT_FRACTION if tokenizer.chat_template is not None else 1.0
    num_text = round(config.self_sample * text_fraction)
    texts = openings({"text": opening_tables()["text"]}, num_text, config.seed + 1)
    prompts = [Prompt(tuple(tokenizer.encode(opening)), topic) for topic, opening in texts]
    num_turns = config.self_sample - num_text
    if num_turns:
        before, after = chat_frame(tokenizer)
        begun = [
            (topic, opening, tokenizer.encode(before + opening, add_special_tokens=False))
            for topic, opening in openings(opening_tables()["topics"], num_turns, config.seed)
        ]
        begun = [entry for entry in begun if len(entry[2]) <= sampler.max_prompt_len]
        starts, warm = [ids for *_, ids in begun], [PROMPT_TEMPERATURE] * len(begun)
        turns = sampler.generate(starts, warm, config.max_user_tokens, config.seed, progress)
        for (topic, opening, _), ids in zip(begun, turns, strict=True):
            ended = ids[-1] in sampler.end_ids
            words = tokenizer.decode(ids[:-1] if ended else ids)
            text = before + opening + (words.rstrip() if ended else cut_at_sentence(words)) + after
            prompts.append(Prompt(tuple(tokenizer.encode(text, add_special_tokens=False)), topic))
    return [p for p in dict.fromkeys(prompts) if len(p.ids) <= sampler.max_prompt_len]


def cut_at_sentence(text: str) -> str:
    """Cut a text after its last complete sentence or line, if it has one."""
    end = max(text.rfind(mark) for mark in (". ", "? ", "! ", "\n"))
    return (text[: end + 1] if end > 0 else text).rstrip()


def collect(
    sampler: Sampler,
    tokenizer: Tokenizer,
    config: CollectConfig,
    entries: Sequence[tuple[str, str]] = (),
    progress: Progress | None = None,
) -> Corpus:
    """Let the target answer sampled prompts and ``entries``; drop answers under 2 tokens."""
    prompts = sample_prompts(sampler, tokenizer, config, progress) if config.self_sample else []
    file_entries = file_prompts(tokenizer, entries, sampler.max_prompt_len)
    warm = np.random.default_rng(config.seed).random(len(prompts)) < SAMPLED_FRACTION
    temperatures = [ANSWER_TEMPERATURE if w else 0.0 for w in warm]
    for copy in range(1 + config.file_samples):
        prompts += file_entries
        temperatures += [ANSWER_TEMPERATURE if copy else 0.0] * len(file_entries)
    answers = sampler.generate(
        [p.ids for p in prompts], temperatures, config.max_answer_tokens, config.seed + 2, progress
    )
    pairs = zip(prompts, answers, strict=True)
    return Corpus.of([(p.ids, answer, p.source) for p, answer in pairs if len(answer) >= 2])


@cache
def opening_tables() -> dict[str, Any]:
    source = files("specjax.training").joinpath("openings.json")
    return json.loads(source.read_text(encoding="utf-8"))


def fill_slots(template: str, rng: np.random.Generator) -> str:
    """Replace each ``{slot}`` in a template with a random entry of the list for this slot."""
    slots = opening_tables()["slots"]
    return re.sub(r"\{(\w+)\}", lambda slot: _choose(slots[slot[1]], rng), template)


def openings(topics: Mapping[str, Any], count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield ``count`` pairs of topic and opening, cycling through the topics."""
    rng = np.random.default_rng(seed)
    for topic in islice(cycle(topics), count):
        yield topic, fill_slots(_choose(topics[topic], rng), rng).rstrip(" ")


def _choose(values: Sequence[str], rng: np.random.Generator) -> str:
    return values[int(rng.integers(len(values)))]
