"""``specjax audit``: check over HTTP that a server's texts depend on their own request only.

Each prompt is sent greedy and with a seed: alone, alone again, among all others, and again when its
tokens are in the prefix cache. All answers must be equal. Then the texts of plain decoding must be
equal too, but only if it is certain that the server decoded plainly.
"""

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TASKS = (
    "Explain {} to a child.",
    "List ten facts about {}.",
    "Write a short story in which {} matters.",
    "Write a Python function that has to do with {}.",
)
TOPICS = "the sea, prime numbers, a lighthouse, bread, the moon, chess, rivers, a clock".split(", ")
EQUAL, DIFFERENT, NOTHING = 0, 1, 2  # exit status
SHOWN = 3  # differences to show for each comparison


def add_audit_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="check that the texts of a server do not depend on speculation or other requests",
        description="Send prompts to a server, alone, among others and with a cached prefix, with "
        "and without speculation, and compare the tokens. The exit status is 0 if all are equal, 1 "
        "if some differ, and 2 if plain decoding could not be tested.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", metavar="URL", help="address of a server with SGLang's route /generate")
    text = "address of a server for the same model without speculation"
    add("--plain", metavar="URL2", help=text)
    text = "JSON lines with a prompt each ('prompt', or the first of 'turns'); default: 32 prompts"
    add("--prompts", type=Path, metavar="FILE", help=text)
    add("--limit", type=int, metavar="N", help="number of prompts to use (default: all)")
    text = "maximum tokens of a completion (default: %(default)s)"
    add("--max-new-tokens", type=int, default=128, metavar="N", help=text)
    text = "requests in parallel (default: %(default)s)"
    add("--parallel", type=int, default=32, metavar="N", help=text)
    add("--api-key", help="key of the servers; safer to set SPECJAX_API_KEY")
    parser.set_defaults(run=run_audit, quiet=True)


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling parameters."""

    text: str
    sampling: dict[str, Any]

    @property
    def kind(self) -> str:
        return "seeded" if "sampling_seed" in self.sampling else "greedy"


@dataclass(frozen=True)
class Server:
    """A client of ``/generate``."""

    url: str
    key: str | None

    def ask(self, question: Question, **sampling: Any) -> dict[str, Any]:
        """Return the answer: ``output_ids`` and ``meta_info``."""
        body = {"text": question.text, "sampling_params": question.sampling | sampling}
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = Request(f"{self.url.rstrip('/')}/generate", json.dumps(body).encode(), headers)
        try:
            with urlopen(request) as response:
                answer: dict[str, Any] = json.load(response)
        except HTTPError as error:
            raise ValueError(f"{request.full_url}: {error}: {error.read()[:500]!r}") from error
        if not isinstance(answer, dict) or "output_ids" not in answer:
            raise ValueError(f"{request.full_url} did not answer with output_ids: {answer!r:.200}")
        return answer

    def ask_all(
        self, questions: Sequence[Question], parallel: int = 1, **sampling: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(lambda one: self.ask(one, **sampling), questions))


def run_audit(args: argparse.Namespace, *_: Any) -> int:
    for name in ("max_new_tokens", "parallel", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    key = args.api_key or os.environ.get("SPECJAX_API_KEY")
    server, questions = Server(args.url, key), []
    for i, text in enumerate(prompts_of(args.prompts)[: args.limit]):
        common = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0}
        questions.append(Question(text, common))
        questions.append(Question(text, common | {"temperature": 0.8, "sampling_seed": i}))
    alone = server.ask_all(questions)
    is_equal = True
    for label, parallel in (
        ("alone again", 1),
        ("among others", args.parallel),
        ("with a cached prefix", 1),
    ):
        answers = server.ask_all(questions, parallel)
        notes = ""
        if label == "with a cached prefix":
            notes = f"; {sum(map(_cached_tokens, answers))} prompt tokens were cached"
        is_equal &= compare(label, questions, alone, answers, notes)
    plain = Server(args.plain or args.url, key)
    # not every server knows this parameter, and one that serves plainly does not need it
    sampling = {} if args.plain else {"speculative": False}
    plainly = plain.ask_all(questions, **sampling)
    if reason := why_not_comparable(alone, plainly, has_switch=not args.plain):
        print(f"plain decoding: not tested: {reason}")
        return NOTHING if is_equal else DIFFERENT
    verifies = sum(answer["meta_info"]["spec_verify_ct"] for answer in alone)
    notes = f"; {verifies} verify passes"
    is_equal &= compare("plain decoding", questions, plainly, alone, notes)
    return EQUAL if is_equal else DIFFERENT


def prompts_of(path: Path | None) -> list[str]:
    if path is None:
        return [task.format(topic) for topic, task in product(TOPICS, TASKS)]
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    try:
        return [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path}: each line needs 'prompt' or 'turns'") from error


def why_not_comparable(
    speculative: Iterable[dict[str, Any]], plain: Iterable[dict[str, Any]], *, has_switch: bool
) -> str:
    """Say why answers do not tell speculation from plain decoding; empty if they do.

    Only ``meta_info`` says how an answer was decoded. A server without drafts may leave out
    ``speculative``, but one that was asked to turn them off must confirm it.
    """
    metas = [answer["meta_info"] for answer in speculative]
    if not any(meta.get("spec_verify_ct") for meta in metas):
        return "the server did not verify any drafts"
    for answer in plain:
        meta = answer["meta_info"]
        if has_switch and meta.get("speculative") is not False:
            return "meta_info does not confirm speculative=false; give --plain URL2"
        if meta.get("spec_verify_ct") or meta.get("speculative"):
            return "the server of --plain verifies drafts too"
    return ""


def compare(
    label: str,
    questions: Sequence[Question],
    expected: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    notes: str = "",
) -> bool:
    """Print how many answers are equal, and the first that are not; return whether all are."""
    counts, total, shown = {"greedy": 0, "seeded": 0}, len(questions) // 2, 0
    lines = []
    for question, one, other in zip(questions, expected, answers, strict=True):
        first, second = one["output_ids"], other["output_ids"]
        if first == second:
            counts[question.kind] += 1
        elif shown < SHOWN:
            shown += 1
            pairs = zip(first, second, strict=False)
            shorter = min(len(first), len(second))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
            lines.append(f"  {question.kind}, from token {at} on: {question.text[:60]!r}")
    equal = ", ".join(f"{count} of {total} {kind}" for kind, count in counts.items())
    print(f"{label}: equal: {equal}{notes}", *lines, sep="\n", flush=True)
    return sum(counts.values()) == len(questions)


def _cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"].get("cached_tokens", 0))
