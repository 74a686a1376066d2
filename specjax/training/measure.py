"""Accept length of a head on text that the target wrote greedily."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax.models.flat import Weights
from specjax.training.data import Corpus
from specjax.training.trainer import Trainer
from specjax.training.ttt import PackedBatch, hit_lengths, target_outputs


@dataclass(frozen=True)
class Acceptance:
    """Counts of each sequence, i64[sequences].

    Accept length is tokens over rounds. The first token of an answer comes from the prefill and is
    not counted; neither are drafts beyond the answer.
    """

    rounds: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray  # rows from which a round could start
    hits: np.ndarray  # accepted drafts of rounds from every such row

    def length(self, chosen: np.ndarray) -> float:
        """Measured accept length over the rounds of the chosen sequences."""
        return float(self.tokens[chosen].sum() / max(int(self.rounds[chosen].sum()), 1))

    def predicted(self, chosen: np.ndarray) -> float:
        """Accept length if rounds started everywhere alike: ``1 + a_1 + a_1 a_2 + ...``.

        Rounds start behind a miss more often than elsewhere, so the measured one is lower where
        the text has easy and hard stretches.
        """
        return 1.0 + float(self.hits[chosen].sum() / max(int(self.starts[chosen].sum()), 1))


def measure_acceptance(
    trainer: Trainer, params: Any, corpus: Corpus, num_steps: int, row_length: int
) -> Acceptance:
    """Decode a corpus of greedy answers on paper, with chains of ``num_steps`` drafts.

    Exact for text that the target wrote greedily (see :func:`hit_lengths`): nothing is generated.
    """

    def hit_rows(params: Any, target_weights: Weights, batch: PackedBatch) -> jax.Array:
        target = trainer.target.rebuild(target_weights)
        head = trainer.flat.rebuild(trainer.weights(params))
        vocabulary = jax.numpy.asarray(trainer.vocabulary, jax.numpy.int32)
        layers = trainer.draft.feature_layers
        outputs = target_outputs(target, batch, vocabulary, layers, trainer.attention)
        return hit_lengths(head, target, batch, outputs.features, vocabulary, num_steps)

    compiled = jax.jit(hit_rows)
    counts = np.zeros((4, len(corpus)), np.int64)
    size = trainer.config.batch_rows
    for at in range(0, len(corpus), size):
        chosen = np.arange(at, min(at + size, len(corpus)))
        batch = one_per_row(corpus, chosen, row_length, size)
        hits = np.asarray(compiled(params, trainer.target_weights, batch))
        for row, i in enumerate(chosen):
            prompt, length = int(corpus.prompt_lens[i]), min(int(corpus.lengths[i]), row_length)
            starts = max(length - prompt - 1, 0)
            counts[:2, i] = walk_rounds(hits[row], prompt, length)
            counts[2:, i] = starts, hits[row, prompt - 1 : prompt - 1 + starts].sum()
    return Acceptance(*counts)


def walk_rounds(hits: np.ndarray, prompt_len: int, length: int) -> tuple[int, int]:
    """Rounds and tokens of decoding a known text of ``length`` tokens, given ``hits`` per row."""
    rounds = tokens = 0
    row, left = prompt_len - 1, length - prompt_len - 1
    while left > 0:
        produced = min(int(hits[row]) + 1, left)
        rounds, tokens = rounds + 1, tokens + produced
        row, left = row + produced, left - produced
    return rounds, tokens


def one_per_row(corpus: Corpus, indices: np.ndarray, row_length: int, rows: int) -> PackedBatch:
    """The sequences at ``indices``, cut to a row, in rows of their own; ``rows`` rows in all."""
    shape = (rows, row_length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    starts = np.zeros(shape, bool)
    for row, i in enumerate(indices):
        sequence = corpus.sequence(i)[:row_length]
        tokens[row, : len(sequence)] = sequence
        segments[row, : len(sequence)] = 1
        starts[row, corpus.prompt_lens[i] - 1 : len(sequence)] = True
    positions = np.broadcast_to(np.arange(row_length, dtype=np.int32), shape)
    return PackedBatch(tokens, segments, positions, starts)  # type: ignore[arg-type]
