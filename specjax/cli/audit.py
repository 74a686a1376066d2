"""``specjax audit``: check over HTTP that a server's texts depend on their own request only.

Each prompt is sent greedy and with a seed: alone, alone again, among all others, and again when its
tokens are in the prefix cache. All answers must be equal. Then the texts of plain decoding must be
equal too, but only if it is certain that the server decoded plainly.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specjax.checks import check_integer
from specjax.cli.commands import API_KEY, or_environment

# longer than a page of KV, so that the prefix cache takes part
TASKS = (
    "This is about {}. Explain it to a child who has never heard of it. Use short sentences and "
    "one example from daily life, and say at the end what is still not known about it.",
    "This is about {}. List ten facts, each in one line with a number. Begin with the best known "
    "one, and end with one that would surprise most people who know the others.",
    "This is about {}. Write a short story in which it matters. There are two people, who want "
    "different things, and in the end both of them get something else.",
    "This is about {}. Write a Python function that has to do with it, with a docstring and types. "
    "Then show how it is called, and what it returns for three inputs.",
)
TOPICS = "the sea, prime numbers, a lighthouse, bread, the moon, chess, rivers, a clock".split(", ")
EQUAL, DIFFERENT, NOTHING = 0, 1, 2  # exit status
SHOWN = 3  # differences to show for each comparison
TIMEOUT = 600.0  # seconds for an answer


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
    text = "maximum number of prompts (default: %(default)s)"
    add("--limit", type=int, default=1000, metavar="N", help=text)
    text = "maximum tokens of a completion (default: %(default)s)"
    add("--max-new-tokens", type=int, default=128, metavar="N", help=text)
    text = "requests in parallel (default: %(default)s)"
    add("--parallel", type=int, default=32, metavar="N", help=text)
    add("--api-key", help=f"key of the servers; safer to set {API_KEY}")
    parser.set_defaults(run=run_audit, quiet=True)


class Question(NamedTuple):
    """A prompt with its sampling parameters."""

    text: str
    sampling: dict[str, Any]

    @property
    def kind(self) -> str:
        return "seeded" if "sampling_seed" in self.sampling else "greedy"


class Client:
    """Sends questions to the route ``/generate`` of a server."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = f"{url.rstrip('/')}/generate"
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def ask(self, question: Question, **sampling: Any) -> dict[str, Any]:
        """Return the answer, which has ``output_ids`` and ``meta_info``."""
        body = {"text": question.text, "sampling_params": question.sampling | sampling}
        try:
            request = Request(self.url, json.dumps(body).encode(), self.headers)
            with urlopen(request, timeout=TIMEOUT) as response:
                answer = json.load(response)
            return {name: answer[name] for name in ("output_ids", "meta_info")}
        except HTTPError as error:
            raise ValueError(f"{self.url}: {error}: {error.read()[:500]!r}") from error
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.url} did not answer as /generate does: {error!r}") from error

    def ask_all(
        self, questions: Sequence[Question], parallel: int = 1, **sampling: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(lambda question: self.ask(question, **sampling), questions))


def run_audit(args: argparse.Namespace, *_: Any) -> int:
    for name in ("max_new_tokens", "parallel", "limit"):
        check_integer(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    key = or_environment(args.api_key, API_KEY)
    common = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0}
    questions = []
    for i, text in enumerate(prompts_of(args.prompts)[: args.limit]):
        seeded = common | {"temperature": 0.8, "sampling_seed": i}
        questions += [Question(text, common), Question(text, seeded)]
    client = Client(args.url, key)
    alone = client.ask_all(questions)
    is_equal = compare("alone again", questions, alone, client.ask_all(questions))
    answers = client.ask_all(questions, args.parallel)
    is_equal &= compare("among others", questions, alone, answers)
    answers = client.ask_all(questions)
    num_cached = sum(answer["meta_info"].get("cached_tokens") or 0 for answer in answers)
    notes = f"; {num_cached} prompt tokens were cached" if num_cached else "; not tested: none was"
    is_equal &= compare("with a cached prefix", questions, alone, answers, notes)
    # not every server knows this parameter, and one that decodes plainly does not need it
    sampling = {} if args.plain else {"speculative": False}
    plain = Client(args.plain or args.url, key).ask_all(questions, **sampling)
    if reason := why_not_comparable(alone, plain, has_switch=not args.plain):
        print(f"plain decoding: not tested: {reason}")
        return NOTHING if is_equal else DIFFERENT
    verifies = sum(answer["meta_info"].get("spec_verify_ct") or 0 for answer in alone)
    notes = f"; {verifies} verify passes"
    is_equal &= compare("plain decoding", questions, plain, alone, notes)
    return EQUAL if is_equal else DIFFERENT


def prompts_of(path: Path | None) -> list[str]:
    if path is None:
        return [task.format(topic) for topic, task in product(TOPICS, TASKS)]
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        rows = [json.loads(line) for line in lines if line.strip()]
        prompts = [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--prompts {path}: each line needs 'prompt' or 'turns'") from error
    if not prompts:
        raise ValueError(f"--prompts {path} has no prompts")
    return prompts


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
            return "drafts were verified, although there should be none"
    return ""


def compare(
    label: str,
    questions: Sequence[Question],
    expected: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]],
    notes: str = "",
) -> bool:
    """Print how many answers are equal, and the first that are not; return whether all are."""
    total, lines = len(questions) // 2, list[str]()
    counts = {"greedy": 0, "seeded": 0}
    for question, reference, answer in zip(questions, expected, answers, strict=True):
        expected_ids, ids = reference["output_ids"], answer["output_ids"]
        counts[question.kind] += expected_ids == ids
        if expected_ids != ids and len(lines) < SHOWN:
            shorter = min(len(expected_ids), len(ids))
            at = next((i for i in range(shorter) if expected_ids[i] != ids[i]), shorter)
            lines.append(f"  {question.kind}, from token {at} on: {question.text[:60]!r}")
    equal = ", ".join(f"{count} of {total} {kind}" for kind, count in counts.items())
    print(f"{label}: equal: {equal}{notes}", *lines, sep="\n", flush=True)
    return sum(counts.values()) == len(questions)
