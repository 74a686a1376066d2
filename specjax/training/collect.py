"""From prompts, or from nothing, to a corpus of the target's own answers."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.text.tokenizer import Tokenizer
from specjax.training.data import Corpus
from specjax.training.generate import Sampler
from specjax.training.openings import text_openings, user_openings

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
_MARK = "\u241fuser-turn\u241f"


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How prompts are sampled and answered.

    Every prompt of a file is answered once greedily and ``file_samples`` times at
    ``answer_temperature``. Of the self-sampled prompts ``sampled_fraction`` are answered at that
    temperature and the others greedily; ``text_fraction`` of them are plain text, continued
    without the chat template.
    """

    self_sample: int = 0
    text_fraction: float = 0.06
    sampled_fraction: float = 0.25
    file_samples: int = 1
    prompt_temperature: float = 0.75
    answer_temperature: float = 0.8
    max_user_tokens: int = 96
    max_answer_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("text_fraction", "sampled_fraction"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name}={value} must be between 0 and 1")
        for name in ("prompt_temperature", "answer_temperature"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and where they come from."""

    ids: tuple[int, ...]
    source: str


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Category and first user message of each line of a Spec-Bench style ``.jsonl`` file.

    Raises:
        ValueError: if a line is not an object with a non-empty list ``turns`` of strings.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            turns = entry["turns"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a JSON object with `turns`: {error}") from error
        if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
            raise ValueError(f"{path}:{number}: turns={turns!r} is not a list of user messages")
        prompts.append((str(entry.get("category", path.stem)), turns[0]))
    return prompts


def chat_frame(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template puts before and after the text of a first user turn.

    Raises:
        ValueError: if there is no chat template, or it changes the user's text.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
    before, found, after = text.partition(_MARK)
    if not found or _MARK in after:
        raise ValueError("the chat template does not contain the user's text exactly once")
    return before, after


def file_prompts(tokenizer: Tokenizer, entries: Sequence[tuple[str, str]]) -> list[Prompt]:
    """Chat prompts of ``(category, message)`` pairs; plain text if there is no chat template."""
    prompts = []
    for category, message in entries:
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(message)
        else:
            text = tokenizer.apply_chat_template([{"role": "user", "content": message}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(Prompt(tuple(ids), category))
    return prompts


def sample_prompts(
    sampler: Sampler, tokenizer: Tokenizer, config: CollectConfig, progress: Progress | None = None
) -> list[Prompt]:
    """Prompts in the target's own words: user turns that continue topic openings, and plain text.

    A user turn ends where the target ends it; one that runs into ``max_user_tokens`` is cut after
    its last full sentence or line. Equal prompts are kept once. Without a chat template all of
    them are plain text.
    """
    text_fraction = config.text_fraction if tokenizer.chat_template is not None else 1.0
    num_text = round(config.self_sample * text_fraction)
    prompts = [
        Prompt(tuple(tokenizer.encode(opening.rstrip(" "))), "text")
        for opening in text_openings(num_text, config.seed + 1)
    ]
    num_turns = config.self_sample - num_text
    if num_turns:
        before, after = chat_frame(tokenizer)
        openings = [
            (topic, opening.rstrip(" ")) for topic, opening in user_openings(num_turns, config.seed)
        ]
        starts = [tokenizer.encode(before + o, add_special_tokens=False) for _, o in openings]
        turns = sampler.generate(
            starts,
            [config.prompt_temperature] * len(starts),
            config.max_user_tokens,
            config.seed,
            progress,
        )
        for (topic, opening), ids in zip(openings, turns, strict=True):
            ended = bool(ids) and ids[-1] in sampler.stop_ids
            words = tokenizer.decode(ids[:-1] if ended else ids)
            text = before + opening + (words.rstrip() if ended else cut_at_sentence(words)) + after
            prompts.append(Prompt(tuple(tokenizer.encode(text, add_special_tokens=False)), topic))
    longest = sampler.config.max_prompt_len
    return [p for p in dict.fromkeys(prompts) if len(p.ids) <= longest]


def cut_at_sentence(text: str) -> str:
    """The text up to its last sentence end or line end; all of it if there is none."""
    ends = [text.rfind(mark) for mark in (". ", "? ", "! ", ".\n", "?\n", "!\n", "\n")]
    end = max(ends)
    return text[: end + 1].rstrip() if end > 0 else text.rstrip()


def answer_prompts(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    config: CollectConfig,
    progress: Progress | None = None,
) -> Corpus:
    """The target's answers as a corpus; answers of fewer than 2 tokens are dropped."""
    answers = sampler.generate(
        [p.ids for p in prompts], temperatures, config.max_answer_tokens, config.seed + 2, progress
    )
    return Corpus.of(
        [
            (prompt.ids, answer, prompt.source)
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) >= 2
        ]
    )


def collect(
    sampler: Sampler,
    tokenizer: Tokenizer,
    config: CollectConfig,
    entries: Sequence[tuple[str, str]] = (),
    progress: Progress | None = None,
) -> Corpus:
    """Sample prompts, add those of ``entries``, and answer all of them.

    Raises:
        ValueError: if there are no prompts at all.
    """
    if config.self_sample < 1 and not entries:
        raise ValueError(
            "nothing to train on: give prompt files (--prompts), or a number of prompts to sample "
            "from the target itself (--self-sample), or both"
        )
    sampled = sample_prompts(sampler, tokenizer, config, progress) if config.self_sample else []
    longest = sampler.config.max_prompt_len
    given = [p for p in file_prompts(tokenizer, entries) if len(p.ids) <= longest]
    if len(given) < len(entries):
        logger.warning(
            "%d prompts longer than %d tokens are left out", len(entries) - len(given), longest
        )
    rng = np.random.default_rng(config.seed)
    warm = rng.random(len(sampled)) < config.sampled_fraction
    prompts = list(sampled)
    temperatures = [config.answer_temperature if w else 0.0 for w in warm]
    for copy in range(1 + config.file_samples):
        prompts += given
        temperatures += [config.answer_temperature if copy else 0.0] * len(given)
    return answer_prompts(sampler, prompts, temperatures, config, progress)
