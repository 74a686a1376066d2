"""Acceptance of a draft head on a set of prompts, and identity with plain decoding."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.cli.difference import Difference, find_difference
from specjax.engine.inputs import tokenize_inputs


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's messages, to be answered one after the other."""

    question_id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one turn of one conversation gave. ``difference`` is None where plain text is equal."""

    question_id: str
    category: str
    turn: int
    meta_info: dict[str, Any]
    equal: bool | None
    difference: Difference | None


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Reads prompts in Spec-Bench form.

    Raises:
        ValueError: for a line that is not such a prompt, naming file and line.
    """
    prompts = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            turns = row["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(t, str) for t in turns)):
                raise ValueError("turns must be a list of at least one string")
            prompts.append(Prompt(str(row["question_id"]), str(row["category"]), tuple(turns)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path.name}, line {number}: {error!r}; expected a JSON object with question_id, "
                "category and turns"
            ) from error
    if not prompts:
        raise ValueError(f"{path.name} holds no prompts")
    return prompts[:limit]


@dataclass
class Stopwatch:
    """An engine's completion tokens and the time that its calls took."""

    engine: Any
    num_tokens: int = 0
    seconds: float = 0.0

    def generate(
        self, messages: list[list[dict[str, str]]], sampling: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Answers a batch of conversations."""
        start = time.perf_counter()
        outputs = self.engine.generate(messages=messages, sampling_params=sampling)
        self.seconds += time.perf_counter() - start
        self.num_tokens += sum(len(output["output_ids"]) for output in outputs)
        return outputs

    @property
    def tokens_per_second(self) -> float | None:
        """None before the first call."""
        return self.num_tokens / self.seconds if self.seconds else None


def evaluate(
    speculative: Stopwatch,
    plain: Stopwatch | None,
    prompts: list[Prompt],
    sampling: dict[str, Any],
    batch_size: int,
) -> Iterator[list[Answer]]:
    """Answers all turns of all prompts, one batch of requests after the other.

    Conversations go on with the speculative answer, also for plain decoding, so that one difference
    stays one difference.

    Args:
        speculative: the engine under test.
        plain: decodes the same requests without speculation, or None.
        prompts: the conversations.
        sampling: sampling parameters of every request.
        batch_size: requests per call.
    """
    conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        remaining = [i for i, prompt in enumerate(prompts) if len(prompt.turns) > turn]
        for start in range(0, len(remaining), batch_size):
            batch = remaining[start : start + batch_size]
            for i in batch:
                conversations[i].append({"role": "user", "content": prompts[i].turns[turn]})
            messages = [list(conversations[i]) for i in batch]
            outputs = speculative.generate(messages, sampling)
            differences: list[Difference | None] = [None] * len(batch)
            if plain is not None:
                references = plain.generate(messages, sampling)
                differences = [
                    _difference(plain.engine, *row)
                    for row in zip(messages, outputs, references, strict=True)
                ]
            answers = []
            for i, output, difference in zip(batch, outputs, differences, strict=True):
                conversations[i].append({"role": "assistant", "content": output["text"]})
                answers.append(
                    Answer(
                        question_id=prompts[i].question_id,
                        category=prompts[i].category,
                        turn=turn,
                        meta_info=output["meta_info"],
                        equal=None if plain is None else difference is None,
                        difference=difference,
                    )
                )
            yield answers


def _difference(
    plain_engine: Any,
    messages: list[dict[str, str]],
    output: dict[str, Any],
    reference: dict[str, Any],
) -> Difference | None:
    if output["output_ids"] == reference["output_ids"]:
        return None
    (prompt_ids,), _ = tokenize_inputs(plain_engine.tokenizer, None, None, messages)
    return find_difference(
        output["output_ids"], reference["output_ids"], prompt_ids, plain_engine.logit_gap
    )


def summarize(answers: list[Answer]) -> dict[str, Any]:
    """Returns the figures of a set of answers.

    ``accept_length`` is the mean over requests of ``completion_tokens / spec_verify_ct``;
    ``accept_length_pooled`` divides the sums. Requests without a verify call count in neither.
    """
    metas = [answer.meta_info for answer in answers]
    verified = [meta for meta in metas if meta["spec_verify_ct"]]
    histogram: list[int] = []
    for meta in verified:
        counts = meta["spec_correct_drafts_histogram"]
        histogram += [0] * (len(counts) - len(histogram))
        for num_drafts, count in enumerate(counts):
            histogram[num_drafts] += count
    lengths = [meta["completion_tokens"] / meta["spec_verify_ct"] for meta in verified]
    num_verifies = sum(meta["spec_verify_ct"] for meta in verified)
    num_correct = sum(meta["spec_num_correct_drafts"] for meta in verified)
    num_proposed = sum(meta["spec_num_proposed_drafts"] for meta in verified)
    compared = [answer for answer in answers if answer.equal is not None]
    return {
        "requests": len(answers),
        "completion_tokens": sum(meta["completion_tokens"] for meta in metas),
        "verify_calls": num_verifies,
        "accept_length": sum(lengths) / len(lengths) if lengths else 0.0,
        "accept_length_pooled": (
            sum(meta["completion_tokens"] for meta in verified) / num_verifies
            if num_verifies
            else 0.0
        ),
        "accept_rate": num_correct / num_proposed if num_proposed else 0.0,
        "correct_drafts": num_correct,
        "proposed_drafts": num_proposed,
        "correct_drafts_histogram": histogram,
        "compared": len(compared),
        "identical": sum(bool(answer.equal) for answer in compared),
    }


def by_category(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """Returns `summarize` of each category, in order of first appearance."""
    groups: defaultdict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[answer.category].append(answer)
    return {category: summarize(group) for category, group in groups.items()}
