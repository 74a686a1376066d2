"""Token sequences for draft training: storage, splitting, packing and the draft vocabulary."""

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from specjax.training.ttt import PackedBatch


class Example(NamedTuple):
    """The token ids of a prompt and its answer."""

    tokens: np.ndarray  # i32[N]
    prompt_len: int
    source: str

    @property
    def prompt(self) -> bytes:
        return self.tokens[: self.prompt_len].tobytes()

    @property
    def answer(self) -> np.ndarray:
        return self.tokens[self.prompt_len :]


class Corpus(list[Example]):
    """A list of prompts with their answers."""

    @classmethod
    def of(cls, triples: Iterable[tuple[Sequence[int], Sequence[int], str]]) -> "Corpus":
        return cls(
            Example(np.asarray([*prompt, *answer], np.int32), len(prompt), source)
            for prompt, answer, source in triples
        )

    @property
    def answer_tokens(self) -> int:
        return sum(len(example.answer) for example in self)

    def describe(self) -> dict[str, dict[str, int]]:
        """Return the numbers of sequences and answer tokens for each source."""
        summary = {}
        for name in sorted({example.source for example in self}):
            subset = Corpus(example for example in self if example.source == name)
            summary[name] = {"sequences": len(subset), "answer_tokens": subset.answer_tokens}
        return summary

    def split(self, fraction: float, seed: int) -> tuple["Corpus", "Corpus"]:
        """Split into a training part and a held-out part with ``fraction`` of the prompts.

        Sequences with equal prompts are in the same part.
        """
        prompts = list(dict.fromkeys(example.prompt for example in self))
        order = np.random.default_rng(seed).permutation(len(prompts))
        num_held = max(1, round(fraction * len(prompts))) if fraction > 0 else 0
        if num_held >= len(prompts):
            raise ValueError(
                f"--held-out={fraction} of {len(prompts)} distinct prompts leaves nothing to "
                "train on; lower --held-out or use more prompts"
            )
        held = {prompts[i] for i in order[:num_held]}
        train = Corpus(example for example in self if example.prompt not in held)
        return train, Corpus(example for example in self if example.prompt in held)

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file atomically, under exactly this name."""
        names, sources = np.unique([example.source for example in self], return_inverse=True)
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([np.zeros(0, np.int32), *(x.tokens for x in self)]),
            "offsets": np.cumsum([0, *(len(x.tokens) for x in self)]),
            "prompt_lens": np.asarray([x.prompt_len for x in self], np.int32),
            "sources": sources,
            "source_names": names,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        try:
            with path.open("rb") as stream, np.load(stream) as file:
                tokens, names = file["tokens"], file["source_names"]
                names_of_columns = ("offsets", "prompt_lens", "sources")
                offsets, lengths, sources = (file[name].tolist() for name in names_of_columns)
            rows = zip(pairwise(offsets), lengths, sources, strict=True)
            return cls(Example(tokens[a:b], n, str(names[source])) for (a, b), n, source in rows)
        except (ValueError, BadZipFile, EOFError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path} is not a complete corpus: {error!r}") from error


def draft_vocabulary(corpus: Corpus, size: int, vocab_size: int) -> np.ndarray:
    """Return the target ids i32[size] of the most frequent answer tokens, in ascending order.

    Among tokens of equal frequency, including unused ones, lower ids are preferred.
    """
    answers = np.concatenate([example.answer for example in corpus])
    counts = np.bincount(answers, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def pack(corpus: Corpus, row_length: int, seed: int, join: float = 0.0) -> PackedBatch:
    """Pack all sequences into rows ``[R, row_length]`` of numpy arrays, in random order.

    Sequences that are longer than a row are cut, and dropped if no answer is left. The longest are
    packed first, each into the row where it fits best. ``join`` is as in :func:`place_rows`.
    """
    lengths = np.asarray([min(len(example.tokens), row_length) for example in corpus], np.int64)
    usable = np.flatnonzero(lengths - [example.prompt_len for example in corpus] >= 2)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(usable)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # number of free tokens and index of each row, ascending
    for i in order:
        length = int(lengths[i])
        at = bisect_left(spaces, (length, 0))
        if at == len(spaces):
            space, row = row_length, len(rows)
            rows.append([])
        else:
            space, row = spaces.pop(at)
        rows[row].append(int(i))
        insort(spaces, (space - length, row))
    placed = [rng.permutation(rows[row]) for row in rng.permutation(len(rows))]
    return place_rows(corpus, placed, row_length, join, seed)


def place_rows(
    corpus: Corpus,
    rows: Sequence[Sequence[int] | np.ndarray],
    row_length: int,
    join: float = 0.0,
    seed: int = 0,
) -> PackedBatch:
    """Place the sequences of each row in arrays ``[len(rows), row_length]``; cut what is too long.

    With probability ``join``, a sequence continues the text of the previous sequence, so that the
    draft also learns from long contexts.
    """
    rng = np.random.default_rng(seed)
    shape = (len(rows), row_length)
    tokens, segments, texts, positions = (np.zeros(shape, np.int32) for _ in range(4))
    starts = np.zeros(shape, bool)
    for row, indices in enumerate(rows):
        end = begin = text = 0
        for segment, i in enumerate(indices, start=1):
            sequence = corpus[i].tokens[: row_length - end]
            where = slice(end, end + len(sequence))
            if segment == 1 or rng.random() >= join:
                text, begin = text + 1, end
            tokens[row, where] = sequence
            segments[row, where] = segment
            texts[row, where] = text
            positions[row, where] = np.arange(where.start, where.stop) - begin
            starts[row, end + corpus[i].prompt_len - 1 : where.stop] = True
            end = where.stop
    return PackedBatch(tokens, segments, texts, positions, starts)  # type: ignore[arg-type]


def batches(rows: PackedBatch, batch_rows: int, seed: int, start: int = 0) -> Iterator[PackedBatch]:
    """Yield batches of ``batch_rows`` rows without end, beginning with batch number ``start``.

    The order in an epoch depends only on ``seed`` and the epoch's number, so a resumed run gets the
    same batches as an uninterrupted one.
    """
    num_rows = len(rows.tokens)
    if num_rows < batch_rows:
        raise ValueError(
            f"--batch-rows={batch_rows} exceeds the {num_rows} packed rows of the training data; "
            "lower --batch-rows or --row-length, or generate more data"
        )
    for index in count(start):
        epoch, at = divmod(index, num_rows // batch_rows)
        if at == 0 or index == start:
            order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        chosen = order[at * batch_rows : (at + 1) * batch_rows]
        yield PackedBatch(*(x[chosen] for x in rows))
