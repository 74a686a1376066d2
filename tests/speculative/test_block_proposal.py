"""Block drafters: drafts, confidences and the context, compared with numpy in float64."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import BlockConfig
from specjax.kv.pages import PageView
from specjax.models.block import BlockDraft, MarkovHead
from specjax.models.flat import FlatModel
from specjax.sampling.draw import SamplingConfig
from specjax.speculative.algorithm import Batch
from specjax.speculative.block import DSPARK
from specjax.types import DraftShape

from ..support.numpy_layers import NumpyLayers, random_named

VOCAB, DRAFT_VOCAB, SIZE, DIM, RANK, DRAFTS, PAGE = 23, 19, 8, 4, 3, 3, 4
LENS, BONUS = (5, 9), (7, 11)
GATED = BlockConfig(
    checkpoint_format="DSpark of speculators",
    vocab_size=VOCAB,
    hidden_size=SIZE,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=DIM,
    target_hidden_size=6,
    draft_vocab_size=DRAFT_VOCAB,
    has_own_lm_head=True,
    feature_layers=(0, 2),
    num_drafts=DRAFTS,
    anchor_first=False,
    mask_token_id=20,
    windows=(0, 6),
    causal=(True, False),
    qkv_bias=True,
    markov_head="gated",
    markov_rank=RANK,
    has_confidence_head=True,
    confidence_with_markov=True,
    max_position_embeddings=64,
)
ONE_LAYER: dict[str, Any] = {"num_layers": 1, "windows": (6,), "causal": (True,)}
# without a confidence head, the probability of a draft shows its logits
NO_CONFIDENCE: dict[str, Any] = {"has_confidence_head": False, "confidence_with_markov": False}
CASES = {
    "gated, fill-in": replace(GATED, **ONE_LAYER),
    "rnn, anchor first": replace(GATED, markov_head="rnn", anchor_first=True, **NO_CONFIDENCE),
}
Named = dict[str, np.ndarray]


def weights_of(config: BlockConfig, flat: FlatModel[Any]) -> Named:
    rng = np.random.default_rng(4)
    named = random_named(flat, rng)
    ids = np.sort(rng.choice(VOCAB, DRAFT_VOCAB, replace=False))
    named["d2t"] = (ids - np.arange(DRAFT_VOCAB)).astype(np.int32)
    kv = [named[f"layers.{i}.attention.qkv.kernel"][:, 2 * DIM :] for i in range(config.num_layers)]
    biases = [named[f"layers.{i}.attention.qkv.bias"][2 * DIM :] for i in range(config.num_layers)]
    for key, pairs in (("kernel", kv), ("bias", biases)):
        keys, values = zip(*(np.split(x, 2, axis=-1) for x in pairs), strict=True)
        named[f"context.{key}"] = np.concatenate((*keys, *values), axis=-1)
    return named


class Reference(NumpyLayers):
    """One request's drafter, with keys and values as lists by position."""

    def __init__(self, config: BlockConfig, named: Named, embedding: np.ndarray) -> None:
        self.config, self.embedding = config, embedding.astype(np.float64)
        super().__init__(named, config.rms_norm_eps)

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angles = positions[:, None] * self.config.rope_theta ** (-np.arange(0, DIM, 2) / DIM)
        pairs = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def heads(self, layer: int, x: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """Queries ``[T, 2, H]``, keys and values ``[T, 1, H]`` of rows ``x``."""
        name = f"layers.{layer}.attention"
        joined = self.linear(f"{name}.qkv", x).reshape(len(x), 4, DIM)
        q, k, v = joined[:, :2], joined[:, 2:3], joined[:, 3:]
        q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        return [self.rotated(q, positions), self.rotated(k, positions), v]

    def context(self, features: np.ndarray) -> np.ndarray:
        """Keys and values ``[L, T, 2, 1, H]`` of a text."""
        c, places = self.norm("hidden_norm", self.linear("fc", features)), np.arange(len(features))
        pairs = (self.heads(i, c, places)[1:] for i in range(self.config.num_layers))
        return np.stack([np.stack(pair, axis=1) for pair in pairs])

    def states(self, features: np.ndarray, bonus: int) -> np.ndarray:
        """States ``[N, D]`` from which the drafts are predicted."""
        config, length, rows = self.config, len(features), self.config.block
        places = length + np.arange(rows)
        x = self.embedding[[bonus, *[config.mask_token_id] * (rows - 1)]]
        for i, old in enumerate(self.context(features)):
            inputs = self.norm(f"layers.{i}.input_norm", x)
            q, k, v = self.heads(i, inputs, places)
            k, v = np.concatenate([old[:, 0], k]), np.concatenate([old[:, 1], v])
            gap = places[:, None] - np.arange(length + rows)
            last = 0 if config.causal[i] else -rows
            visible = (gap >= last) & (gap < (config.windows[i] or 10**6))
            scores = np.einsum("tnh,lnh->ntl", q, np.repeat(k, 2, axis=1)) / np.sqrt(DIM)
            shares = np.where(visible, np.exp(scores), 0.0)
            shares /= shares.sum(axis=-1, keepdims=True)
            mixed = np.einsum("ntl,lnh->tnh", shares, np.repeat(v, 2, axis=1)).reshape(rows, -1)
            x = x + self.linear(f"layers.{i}.attention.output", mixed)
            x = x + self.mlp(f"layers.{i}.", x)
        return self.norm("norm", x)[rows - DRAFTS :]

    def drafts(self, features: np.ndarray, bonus: int) -> tuple[list[int], list[float]]:
        """Drafts and their confidences."""
        ids = np.arange(DRAFT_VOCAB) + self.named["d2t"].astype(int)
        memory, tokens, confidences = np.zeros(RANK), [bonus], []
        for state in self.states(features, bonus):
            before = self.named["markov.embedding.table"][tokens[-1]]
            read, memory = self.markov(before, state, memory)
            logits = self.linear("lm_head", state) + self.linear("markov.output", read)
            tokens.append(int(ids[np.argmax(logits)]))
            if self.config.has_confidence_head:
                share = sigmoid(self.linear("confidence_head", np.r_[state, before])[0])
            else:
                share = 1 / np.exp(logits - logits.max()).sum()
            confidences.append(share)
        return tokens[1:], confidences

    def markov(
        self, before: np.ndarray, state: np.ndarray, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The vector that the bias of a draft is read from, and the next recurrent state."""
        if self.config.markov_head == "gated":
            return sigmoid(self.linear("markov.gate", np.r_[state, before])) * before, memory
        gate, candidate, read = np.split(
            self.linear("markov.joint", np.r_[memory, before, state]), 3
        )
        share = sigmoid(gate)
        return np.tanh(read), share * memory + (1 - share) * np.tanh(candidate)


def sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


class Called(SimpleNamespace):
    """Named values, and a function that a call calls."""

    def __init__(self, function: Any, **values: Any) -> None:
        super().__init__(function=function, **values)

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize("name", CASES)
def test_a_markov_head_reads_the_token_before_and_its_state(name: str) -> None:
    rng, config = np.random.default_rng(2), CASES[name]
    sizes = {"gate": (SIZE + RANK, RANK), "joint": (SIZE + 2 * RANK, 3 * RANK)}
    part = "gate" if config.markov_head == "gated" else "joint"
    kernel = rng.normal(size=sizes[part])
    reference = Reference(config, {f"markov.{part}.kernel": kernel}, np.zeros((1, 1)))
    table = rng.normal(size=(VOCAB, RANK))
    parts = dict.fromkeys(sizes) | {part: lambda x: np.asarray(x) @ kernel}
    head: Any = SimpleNamespace(
        embedding=lambda ids: table[ids], output=lambda read, dtype: read, **parts
    )
    hidden, state = rng.normal(size=(3, SIZE)), np.zeros(RANK)
    ours: Any = np.zeros((1, RANK))
    for token, row in zip((3, 7, 5), hidden, strict=True):
        read, state = reference.markov(table[token], row, state)
        bias, ours = MarkovHead.__call__(head, jnp.array([token]), row[None], ours)
        np.testing.assert_allclose(bias[0], read, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(ours[0], state, rtol=1e-4, atol=1e-6)


def test_only_causal_layers_attend_causally() -> None:
    def layer(x: Any, delta: Any, rope: Any, kv: Any, i: int, how: Any) -> tuple[Any, ...]:
        return None, x, delta, (*kv, (i, how))

    for causal in (True, False), (False, True):
        draft: Any = SimpleNamespace(
            config=replace(GATED, causal=causal),
            embed=lambda tokens, target: tokens,
            layers=[layer, layer],
            norm=SimpleNamespace(add=lambda x, delta: (None, x)),
        )
        tokens, hows = np.zeros((1, 2), np.int32), {True: "causal", False: "block"}
        inputs: Any = tokens, tokens, (), "block", "causal", None
        assert BlockDraft.__call__(draft, *inputs)[1] == tuple(enumerate(hows[x] for x in causal))


def test_the_confidence_head_reads_the_token_before_a_draft() -> None:
    rng = np.random.default_rng(3)
    table, kernel = rng.normal(size=(VOCAB, RANK)), rng.normal(size=(SIZE + RANK, 1))
    hidden, before = rng.normal(size=(1, 2, SIZE)), np.array([[4, 9]])
    draft: Any = SimpleNamespace(
        config=GATED,
        markov=SimpleNamespace(embedding=lambda ids: table[ids]),
        confidence_head=lambda x, dtype: np.asarray(x) @ kernel,
    )
    expected = sigmoid(np.concatenate([hidden, table[before]], axis=-1) @ kernel)[..., 0]
    ours = BlockDraft.confidences(draft, hidden, before)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_drafts_read_what_was_drafted_before_them() -> None:
    """The Markov head gets the previous draft and its own state."""
    rng, size = np.random.default_rng(5), GATED.block
    rows = rng.normal(size=(2, size, VOCAB))  # states that are logits
    tables = jnp.asarray(rng.normal(size=(2, VOCAB, VOCAB)) * 2)

    def markov(tokens: Any, hidden: Any, state: Any) -> tuple[Any, Any]:
        return tables[0][tokens] + tables[1][state], (state * 3 + tokens) % VOCAB

    draft = Called(
        lambda *inputs: (jnp.asarray(rows), inputs[:-1]),
        config=GATED,
        vocabulary=None,
        markov=Called(markov, kind="rnn", start=lambda batch: jnp.zeros(batch, int)),
        logits=lambda hidden, target: hidden,
        target_ids=lambda ids: ids,
        confidences=lambda hidden, before: before / 100,
    )

    def propose(lens: Any, bonus: Any) -> Any:
        batch = Batch(
            target=SimpleNamespace(shards=1),  # type: ignore[arg-type]
            draft=draft,
            pages=SimpleNamespace(attend=lambda lens, size, tree_mask=None: tree_mask),  # type: ignore[arg-type]
            sampling=None,  # type: ignore[arg-type]
            slots=lens,
            seq_lens=lens,
            bonus_tokens=bonus,
            tokens=lens,
            draw=SamplingConfig(greedy=True, implementation="xla", reads_confidence=True),
        )
        shape = DraftShape(DRAFTS, 1, DRAFTS + 1, size)
        tree, inputs = DSPARK.propose(batch, (), (), shape)
        return tree.draft_tokens, tree.confidences, inputs

    places, bonuses = np.array(LENS), np.array(BONUS)
    drafted, confidences, inputs = jax.jit(propose)(places, bonuses)
    tokens, positions, _, mask, causal_mask = inputs
    np.testing.assert_array_equal(positions, places[:, None] + np.arange(size))
    np.testing.assert_array_equal(tokens[:, 0], bonuses)
    assert (tokens[:, 1:] == GATED.mask_token_id).all()
    assert mask.shape == (2, size, size)
    assert mask.all()
    assert causal_mask is None
    for row, bonus in enumerate(BONUS):
        chain, state = [bonus], 0
        for logits in rows[row, 1:]:
            bias, state = markov(chain[-1], None, state)
            chain.append(int(np.argmax(logits + bias)))
        assert drafted[row].tolist() == chain
        np.testing.assert_allclose(confidences[row], np.array(chain[:-1]) / 100, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_a_reference_in_numpy(name: str) -> None:
    config, longest = CASES[name], max(LENS)
    rng, flat = np.random.default_rng(1), FlatModel.of(partial(BlockDraft, config))
    named = weights_of(config, flat)
    table = rng.normal(size=(VOCAB, SIZE)).astype(np.float32)
    features = rng.normal(size=(2, longest, config.feature_size)).astype(np.float32)
    pool = rng.normal(size=(config.num_layers, 7 * PAGE, 2, 1, DIM)).astype(np.float32)

    def propose(weights: Any, table: Any, features: Any, pool: Any) -> Any:
        draft = flat.rebuild(weights)
        pages = PageView((jnp.array([[3, 1, 0, 0], [2, 6, 4, 5]]),), PAGE, "xla")
        places = jnp.broadcast_to(jnp.arange(longest), (2, longest))
        pool = draft.store(features, places, pool, pages.store(jnp.array([0, 0]), longest))
        batch = Batch(
            target=SimpleNamespace(embedding=lambda ids: table[ids], shards=1),  # type: ignore[arg-type]
            draft=draft,
            pages=pages,
            sampling=None,  # type: ignore[arg-type]
            slots=jnp.arange(2),
            seq_lens=jnp.array(LENS),
            bonus_tokens=jnp.array(BONUS),
            tokens=jnp.zeros((2, 1), jnp.int32),
            draw=SamplingConfig(greedy=True, implementation="xla", reads_confidence=True),
        )
        shape = DraftShape(DRAFTS, 1, DRAFTS + 1, config.block)
        return DSPARK.propose(batch, pool, (), shape)[0]

    tree = jax.jit(propose)(flat.order(named), table, features, pool)
    reference = Reference(config, named, table)
    for row, length in enumerate(LENS):
        drafts, confidences = reference.drafts(features[row, :length], BONUS[row])
        assert tree.draft_tokens[row].tolist() == [BONUS[row], *drafts]
        np.testing.assert_allclose(tree.confidences[row], confidences, rtol=1e-3)
