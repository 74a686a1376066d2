"""Token sequences for draft training: storage, splitting, packing and the draft vocabulary."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from specjax.training.ttt import PackedBatch


@dataclass(frozen=True)
class Corpus:
    """Prompt and answer token sequences, stored back to back.

    Sequence i is ``tokens[offsets[i]:offsets[i + 1]]``; its first ``prompt_lens[i]`` tokens are the
    prompt. ``sources[i]`` indexes ``source_names``.
    """

    tokens: np.ndarray  # i32[total]
    offsets: np.ndarray  # i64[sequences + 1]
    prompt_lens: np.ndarray  # i32[sequences]
    sources: np.ndarray  # i32[sequences]
    source_names: tuple[str, ...]

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int], str]]) -> "Corpus":
        """Build from ``(prompt, answer, source)`` triples."""
        names = tuple(sorted({source for _, _, source in pairs}))
        lengths = [len(prompt) + len(answer) for prompt, answer, _ in pairs]
        flat = [token for prompt, answer, _ in pairs for part in (prompt, answer) for token in part]
        return cls(
            tokens=np.asarray(flat, np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lens=np.asarray([len(prompt) for prompt, _, _ in pairs], np.int32),
            sources=np.asarray([names.index(source) for _, _, source in pairs], np.int32),
            source_names=names,
        )

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_lens.sum())

    def sequence(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def describe(self) -> dict[str, dict[str, int]]:
        """Number of sequences and of answer tokens by source."""
        found = {}
        for i, name in enumerate(self.source_names):
            part = self.select(np.flatnonzero(self.sources == i))
            found[name] = {"sequences": len(part), "answer_tokens": part.answer_tokens}
        return found

    def select(self, indices: np.ndarray) -> "Corpus":
        parts = [self.sequence(i) for i in indices]
        return Corpus(
            tokens=np.concatenate([np.zeros((0,), np.int32), *parts]),
            offsets=np.concatenate([[0], np.cumsum(self.lengths[indices])]).astype(np.int64),
            prompt_lens=self.prompt_lens[indices],
            sources=self.sources[indices],
            source_names=self.source_names,
        )

    def split(self, fraction: float, seed: int) -> tuple["Corpus", "Corpus"]:
        """A training part and a held-out part of ``fraction`` of the prompts.

        Sequences with equal prompts go to the same part.
        """
        groups: dict[bytes, list[int]] = {}
        for i in range(len(self)):
            groups.setdefault(self.sequence(i)[: self.prompt_lens[i]].tobytes(), []).append(i)
        members = list(groups.values())
        order = np.random.default_rng(seed).permutation(len(members))
        num_held = max(1, round(fraction * len(members))) if fraction > 0 else 0
        if num_held >= len(members):
            raise ValueError(
                f"holding out {fraction} of {len(members)} distinct prompts leaves nothing to "
                "train on; lower --held-out or use more prompts"
            )
        held = np.isin(np.arange(len(self)), [i for g in order[:num_held] for i in members[g]])
        return self.select(np.flatnonzero(~held)), self.select(np.flatnonzero(held))

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file under exactly this name, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                np.savez(file, **vars(self))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read what :meth:`save` wrote."""
        try:
            with path.open("rb") as stream, np.load(stream) as file:
                arrays = {name: file[name] for name in file.files}
            names = tuple(str(name) for name in arrays.pop("source_names"))
            return cls(**arrays, source_names=names)
        except (ValueError, BadZipFile, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no complete corpus: {error!r}") from error


def draft_vocabulary(corpus: Corpus, size: int, vocab_size: int) -> np.ndarray:
    """Target ids i32[size] of the most frequent answer tokens, ascending.

    Ties, and tokens that never occur, are filled with the lowest ids.
    """
    answers = [corpus.sequence(i)[length:] for i, length in enumerate(corpus.prompt_lens)]
    counts = np.bincount(np.concatenate(answers), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def pack(corpus: Corpus, row_length: int, seed: int) -> PackedBatch:
    """All sequences as packed rows ``[R, row_length]`` of numpy arrays, rows in random order.

    Sequences longer than a row are cut at its end; those without an answer after the cut are
    dropped. Best fit, longest first.
    """
    lengths = np.minimum(corpus.lengths, row_length)
    usable = np.flatnonzero(lengths - corpus.prompt_lens >= 2)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(usable)
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    rows: list[list[int]] = []
    # open_rows[space]: rows with exactly so many free tokens
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]
    for i in order:
        length = int(lengths[i])
        space = next((s for s in range(length, row_length) if open_rows[s]), None)
        if space is None:
            rows.append([])
            row, space = len(rows) - 1, row_length
        else:
            row = open_rows[space].pop()
        rows[row].append(int(i))
        open_rows[space - length].append(row)
    places = np.argsort(rng.permutation(len(rows)))
    return place_rows(corpus, [rows[row] for row in places], row_length)


def place_rows(corpus: Corpus, rows: Sequence[Sequence[int]], row_length: int) -> PackedBatch:
    """Numpy arrays ``[len(rows), row_length]`` of the sequences in each row, cut at its end."""
    shape = (len(rows), row_length)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    starts = np.zeros(shape, bool)
    for row, indices in enumerate(rows):
        end = 0
        for segment, i in enumerate(indices, start=1):
            sequence = corpus.sequence(i)[: row_length - end]
            where = slice(end, end + len(sequence))
            tokens[row, where] = sequence
            segments[row, where] = segment
            positions[row, where] = np.arange(len(sequence))
            starts[row, end + corpus.prompt_lens[i] - 1 : where.stop] = True
            end = where.stop
    return PackedBatch(tokens, segments, positions, starts)  # type: ignore[arg-type]


def batches(rows: PackedBatch, batch_rows: int, seed: int, first: int = 0) -> Iterator[PackedBatch]:
    """Endless batches of ``batch_rows`` rows; batch ``first`` is the first one.

    Every epoch visits all rows once, in an order that depends on ``seed`` and the epoch only, so
    a run that resumes at a step sees the batches that it would have seen.
    """
    num_rows = len(rows.tokens)
    if num_rows < batch_rows:
        raise ValueError(
            f"--batch-rows={batch_rows} is more than the {num_rows} packed rows of the training "
            "data; lower --batch-rows or --row-length, or generate more data"
        )
    for index in count(first):
        epoch, at = divmod(index, num_rows // batch_rows)
        if at == 0 or index == first:
            order = np.random.default_rng((seed, epoch)).permutation(num_rows)
        chosen = order[at * batch_rows : (at + 1) * batch_rows]
        yield PackedBatch(*(x[chosen] for x in rows))
