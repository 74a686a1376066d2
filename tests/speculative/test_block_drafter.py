"""A block drafter: one pass over a block of mask tokens whose rows see each other.

Its network has several layers. Their keys and values of the text are projections of features from
any number of target layers. Weights are random, and it is registered like a plugin's algorithm.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.config import ModelConfig
from specjax.engine.args import EngineArgs
from specjax.kv.pages import PageView
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Networks
from specjax.models.layers import DecoderLayer, Linear, RMSNorm, rope_tables
from specjax.models.registry import layer_kinds
from specjax.runtime.runner import ModelRunner
from specjax.runtime.runner_config import temporary_bytes
from specjax.sampling.draw import draft_tokens
from specjax.sampling.params import SamplingParams
from specjax.speculative import registry
from specjax.speculative.algorithm import (
    SpeculativeAlgorithm,
    StateSizes,
    kv_pool,
    register_algorithm,
)
from specjax.speculative.tree import chain_input
from specjax.testing import TARGET, Job, dense_decode, random_weights
from specjax.types import DraftShape, VerifyInput, VerifyOutput

from ..runners import make_request, make_runner, run_requests, target_model
from .driver import serve, start

pytestmark = pytest.mark.slow

STEPS, COUNT = 3, 16
LAYERS = (0, 1, 1, 0, 1)  # target layers; more than the draft has
DRAFT = replace(TARGET, num_layers=3)


class BlockDraft(nnx.Module):
    """Decoder layers over a block after a text."""

    def __init__(self, config: ModelConfig, num_features: int) -> None:
        size, dtypes = config.hidden_size, config.dtypes
        norm = partial(RMSNorm, config, size)
        self.config = config
        self.mask = Linear(1, size, bias=False, dtypes=dtypes)  # the mask token's embedding
        self.fc = Linear(num_features * size, size, bias=False, dtypes=dtypes)
        self.layers = nnx.List(DecoderLayer(config, kind) for kind in layer_kinds(config))
        self.context_norm, self.norm = norm(), norm()

    def write(self, features: jax.Array, positions: jax.Array, kv: Any, store: Any) -> Any:
        """Store keys and values of the text."""
        context = self.context_norm(self.fc(features))
        rope = rope_tables(self.config.rope, positions)
        for i, layer in enumerate(self.layers):
            kv = layer.attention.store(context, rope, kv, i, store)
        return kv

    def __call__(
        self, tokens: jax.Array, rows: int, positions: jax.Array, kv: Any, attend: Any, target: Any
    ) -> tuple[jax.Array, Any]:
        """Hidden states ``[B, T, D]`` of a block: last tokens i32 ``[B, 1]``, then masks."""
        first = target.embedding(tokens)
        masks = jnp.broadcast_to(self.mask.kernel[...], (len(first), rows - 1, first.shape[-1]))
        x, delta = jnp.concatenate([first, masks], axis=1), None
        rope = rope_tables(self.config.rope, positions)
        for i, layer in enumerate(self.layers):
            _, x, delta, kv = layer(x, delta, rope, kv, i, attend)
        return self.norm.add(x, delta)[1], kv


@dataclass(frozen=True)
class Blocks(SpeculativeAlgorithm):
    """The state is the draft's KV pool, with the target's indices; it has no rows."""

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(args.speculative_num_steps if steps is None else steps)

    def draft_model(self, config: ModelConfig, implementation: str | None) -> FlatModel[BlockDraft]:
        return FlatModel.of(partial(BlockDraft, config, len(LAYERS)))

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> Any:
        return kv_pool(networks.draft_config, sizes.num_kv)

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        return LAYERS

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def prefill(self, batch, state, rows, chunks, features):
        return batch.draft.write(features, chunks.positions, state, chunks.attend.store), rows

    def propose(self, batch, state, rows, shape):
        size = shape.nodes
        positions = batch.seq_lens[:, None] + jnp.arange(size, dtype=jnp.int32)
        block = jnp.ones((len(batch.slots), size, size), bool)
        attend = batch.pages.attend(batch.seq_lens, size, tree_mask=block)
        newest = batch.bonus_tokens[:, None]
        hidden, state = batch.draft(newest, size, positions, state, attend, batch.target)
        logits = batch.target.logits(hidden[:, 1:])
        places = positions[:, 1:]
        _, drafts = draft_tokens(logits, None, places, batch.sampling, batch.draw, 1)
        return chain_input(jnp.concatenate([newest, drafts[..., 0]], 1), batch.seq_lens), state

    def extend(self, batch, state, rows, verified, shape):
        width = verified.accept_tokens.shape[1]
        positions = batch.seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        store = batch.pages.store(batch.seq_lens, width)
        return batch.draft.write(verified.features, positions, state, store), rows


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """A runner of the registered algorithm, with separately compiled stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_custom", {})
        register_algorithm("blocks", supports_overlap=True)(lambda args: Blocks("BLOCKS"))
        args = EngineArgs(speculative_algorithm="blocks", speculative_num_steps=STEPS)
    config = replace(make_runner().config, algorithm=args.algorithm, shapes=args.shapes)
    made = ModelRunner(args.algorithm.networks(TARGET, DRAFT), config)
    made.compile(show_progress=False, stages=True)
    made.load(target_model()[1], random_weights(made.networks.draft, 6))
    return made


RNG = np.random.default_rng(8)
PARAMS = [
    SamplingParams(max_new_tokens=COUNT, temperature=0.0),
    # with the target's noise, even random networks agree occasionally
    SamplingParams(max_new_tokens=COUNT, temperature=2.5),
    SamplingParams(max_new_tokens=COUNT, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=COUNT, temperature=0.9, top_p=0.9),
    # up to the last token that fits the pages
    SamplingParams(max_new_tokens=8, temperature=1.0),
]
JOBS = [
    Job(prompt=tuple(RNG.integers(6, 61, size=size).tolist()), params=params, seed=i)
    for i, (params, size) in enumerate(zip(PARAMS, (5, 21, 1, 16, 120), strict=True))
]


def test_tokens_equal_dense_decoding(runner: ModelRunner) -> None:
    outputs = serve(runner, JOBS)
    for job, output in zip(JOBS, outputs, strict=True):
        assert output.tokens == dense_decode(runner.weights[0], job).tokens
    assert outputs[1].num_rounds < COUNT - 4


def test_a_scheduler_that_runs_ahead_changes_nothing(runner: ModelRunner) -> None:
    requests = [
        make_request(list(job.prompt), replace(job.params, ignore_eos=True), seed=job.seed)
        for job in JOBS
    ]
    run_requests(runner, requests, run_ahead=1)
    for job, request in zip(JOBS, requests, strict=True):
        assert request.output_ids == dense_decode(runner.weights[0], job).tokens


def rotated(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Apply rotary positions to ``[N, heads, H]``; halves form the pairs."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * DRAFT.rope_theta ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + DRAFT.rms_norm_eps) * scale


def dense_drafts(runner: ModelRunner, text: list[int]) -> list[int]:
    """The most likely drafts after a text, in float64 from its features, without pages."""
    nets = runner.networks
    model = nets.target.rebuild(runner.weights[0])
    named = dict(zip(nets.draft.names, map(np.float64, runner.weights[1]), strict=True))
    features = target_features(model, text[:-1])
    context = normed(features @ named["fc.kernel"], named["context_norm.scale"])
    table = np.float64(model.embedding.table[...])
    x = np.concatenate([table[text[-1:]], np.repeat(named["mask.kernel"], STEPS, axis=0)])
    places = np.arange(len(text) + STEPS)
    heads, kv_heads, dim = DRAFT.num_heads, DRAFT.num_kv_heads, DRAFT.head_dim
    for i in range(DRAFT.num_layers):
        weights = {name.removeprefix(f"layers.{i}."): w for name, w in named.items()}
        inputs = np.concatenate([context, normed(x, weights["input_norm.scale"])])
        qkv = (inputs @ weights["attention.qkv.kernel"]).reshape(len(inputs), -1, dim)
        q, k, v = np.split(qkv, (heads, heads + kv_heads), axis=1)
        q, k = rotated(q, places)[-len(x) :], rotated(k, places)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.exp(np.einsum("qnh,knh->nqk", q, k) / np.sqrt(dim))
        mixed = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v)
        x = x + mixed.reshape(len(x), -1) @ weights["attention.output.kernel"]
        inner = normed(x, weights["post_attention_norm.scale"]) @ weights["mlp.gate_up.kernel"]
        gate, up = np.split(inner, 2, axis=-1)
        x = x + gate / (1 + np.exp(-gate)) * up @ weights["mlp.down.kernel"]
    logits = normed(x, named["norm.scale"]) @ np.float64(model.lm_head.kernel[...])
    return np.argmax(logits[1:], axis=-1).tolist()


def target_features(model: CausalLM, tokens: list[int]) -> np.ndarray:
    """Features f64 ``[N, F]`` of a text, computed in separate pages."""
    size = 64
    pages = PageView(jnp.ones((1, 1), jnp.int32), size, "xla")
    kv = jnp.zeros(kv_pool(TARGET, 2 * size).shape)
    padded = jnp.zeros((1, size), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
    attend = pages.attend(jnp.zeros(1, jnp.int32), size)
    positions = jnp.arange(size, dtype=jnp.int32)[None]
    _, features, _ = model(padded, positions, kv, attend, LAYERS)
    return np.float64(features[0, : len(tokens)])


def test_drafts_are_those_of_a_dense_block_after_projected_features(runner: ModelRunner) -> None:
    """Also after a prompt of two chunks, and after rounds that accepted drafts."""
    jobs = JOBS[:2]
    texts = [[*job.prompt, int(start(runner, i, job).read()[0])] for i, job in enumerate(jobs, 1)]
    checked = []

    def watch(slots: jax.Array, tree: VerifyInput, verified: VerifyOutput) -> None:
        greedy = 0  # the other row draws with noise
        drafts = tree.draft_tokens[greedy, 1:].tolist()
        checked.append(drafts == dense_drafts(runner, texts[greedy]))
        for text, tokens, count in zip(
            texts, verified.accept_tokens, verified.num_accepted_tokens, strict=False
        ):
            text += tokens[:count].tolist()

    runner.watch_rounds(watch)
    for _ in range(4):
        runner.round([1, 2])
    runner.watch_rounds(None)
    for slot in (1, 2):
        runner.clear_slot(slot)
    assert checked == [True] * 4


def test_it_writes_context_alone_and_drafts_in_one_pass(runner: ModelRunner) -> None:
    """Without feed-forward, softmax is the only exponential."""
    texts = {
        name: runner.compiled[name, runner.config.largest, 4].as_text()
        for name in ("draft", "verify", "extend")
    }
    assert "exponential(" not in texts["extend"]
    assert "exponential(" in texts["draft"]
    assert runner.config.algorithm.supports_target_verify_for_draft()
    assert runner.on_device.future.rows == ()


def test_the_memory_plan_has_the_logits_of_the_whole_block(runner: ModelRunner) -> None:
    config = replace(runner.config, implementation="pallas")
    chain = replace(config, algorithm=SpeculativeAlgorithm.from_string("EAGLE"))
    plans = [temporary_bytes(TARGET, each, len(LAYERS)) for each in (config, chain)]
    assert plans[0] - plans[1] == 4 * (STEPS + 1) * TARGET.vocab_size * 4
