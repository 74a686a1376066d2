"""Train a draft: initialisation, compiled step, statistics and checkpoints."""

import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, partial
from hashlib import file_digest
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp

from specjax.config import DraftConfig, ModelConfig, TransformerConfig
from specjax.json_file import read_json
from specjax.models.decoder import CausalLM
from specjax.models.eagle import Eagle3Head
from specjax.models.flat import FlatModel, Weights
from specjax.training.ttt import PackedBatch, StepStatistics, target_outputs, ttt_loss

FINAL_RATE_FRACTION = 0.02
# tables and output heads, whose rows belong to tokens, are for Adam
_NOT_FOR_MUON = ("lm_head.", "markov.", "confidence_head.")


def _muon_shapes(params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: optax.contrib.MuonDimensionNumbers()
        if getattr(x, "ndim", 0) == 2 and not name.startswith(_NOT_FOR_MUON)
        else None
        for name, x in params.items()
    }


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the optimisation. One step reads ``batch_rows * row_length`` tokens.

    Attributes:
        steps: number of optimiser steps in the whole run.
        batch_rows: packed rows per step.
        row_length: tokens per packed row.
        join: probability that a sequence continues the text of the previous one in its row.
        ttt_steps: unrolled steps of training-time test (EAGLE-3).
        anchors: blocks per packed row (block drafters).
        learning_rate: peak learning rate; by default 3e-3, less for drafts wider than 576.
        warmup_steps: steps in which the learning rate rises to its peak.
        hard_weight: weight of the target's most probable token in the loss, from 0 to 1; the rest
            is that of the target's softmax (EAGLE-3) or of sampled drafts (block drafters).
    """

    steps: int = 2000
    batch_rows: int = 8
    row_length: int = 512
    join: float = 0.0
    ttt_steps: int = 6
    anchors: int = 256
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    hard_weight: float = 0.7
    seed: int = 0

    @property
    def rate(self) -> Any:
        """The learning rate by step: linear warm-up, then cosine decay to 2 % of the peak."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=self.steps,
            end_value=self.learning_rate * FINAL_RATE_FRACTION,
        )
        return lambda step: schedule(step + 1)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Clipping, then Muon for matrices inside layers and Adam for all other weights.

        Muon's updates are as large as Adam's. Source: Liu et al. (arXiv 2502.16982).
        """
        muon = optax.contrib.muon(
            self.rate, adam_b2=0.95, consistent_rms=0.2, muon_weight_dimension_numbers=_muon_shapes
        )
        return optax.chain(optax.clip_by_global_norm(0.5), muon)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A checkpoint's float32 parameters by name, optimiser moments and next step."""

    params: dict[str, jax.Array]
    moments: Any
    step: jax.Array  # i32 scalar


def layer_shape(model: ModelConfig) -> dict[str, Any]:
    """The fields of a draft with the target's layer shape.

    Other engines read only SiLU, and heads that are rotated completely.
    """
    shape = {field.name: getattr(model, field.name) for field in fields(TransformerConfig)}
    shape["activation"] = "silu"
    return shape if model.rotary_dim is None else shape | {"rotary_dim": None, "rope_scaling": None}


def default_draft_config(model: ModelConfig, **changes: Any) -> DraftConfig:
    """Configure an EAGLE 3.1 draft with the target's layer shape, except for ``changes``."""
    if min(model.default_feature_layers) < 0:
        raise ValueError(f"--model has {model.num_layers} layers; EAGLE-3 needs 4 or more")
    shape = layer_shape(model)
    draft = {
        "checkpoint_format": "eagle-3",
        "num_layers": 1,
        "target_hidden_size": model.hidden_size,
        "feature_layers": model.default_feature_layers,
        "has_fc_norm": True,
        "norm_output": True,
    }
    return DraftConfig(**shape | draft | changes)


@dataclass(frozen=True)
class Trainer:
    """Trains an EAGLE-3 draft for a target with compiled functions.

    ``target_weights`` are frozen, in the order of ``target`` and in the dtype of computation.
    ``vocabulary`` i32[W] has the target ids of the draft vocabulary in ascending order.
    """

    config: TrainConfig
    draft: Any  # a DraftConfig; a subclass may use another type
    target: FlatModel[CausalLM]
    target_weights: Weights
    vocabulary: np.ndarray

    @cached_property
    def flat(self) -> FlatModel[Any]:
        return FlatModel.of(partial(Eagle3Head, self.draft, implementation="xla"))

    def init(self, initial: Mapping[str, Any] = MappingProxyType({})) -> TrainState:
        """Make the first state. ``initial`` has weights of a draft to start from, by weight name.

        All other weights are random, or copies of the target's.
        """
        named = dict(zip(self.flat.names, self.flat.random(self.config.seed), strict=True))
        self.begin(named, dict(zip(self.target.names, self.target_weights, strict=True)))
        named |= {name: initial[name] for name in named.keys() & initial.keys()}
        # copy them, because the training step donates its state, but not the target's weights
        params = {name: jnp.array(value, jnp.float32) for name, value in named.items()}
        return TrainState(params, self.config.optimizer.init(params), jnp.zeros((), jnp.int32))

    def begin(self, named: dict[str, Any], target: Mapping[str, Any]) -> None:
        """Remove random weights that are not trained, or replace them by those in ``target``."""
        named.pop("d2t", None)  # an integer table, which is not trained
        if "lm_head.kernel" in target:
            named["lm_head.kernel"] = target["lm_head.kernel"][:, self.vocabulary]
        else:
            named["lm_head.kernel"] = target["embedding.table"][self.vocabulary].T
        named["norm.scale"] = target["norm.scale"]

    def named_weights(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Convert named float32 parameters to the draft's weights, in its dtype."""
        named = {
            name: value.astype(self.draft.dtypes.activations) for name, value in params.items()
        }
        if "d2t" in self.flat.names:
            offsets = self.vocabulary - np.arange(len(self.vocabulary))
            named["d2t"] = jnp.asarray(offsets, jnp.int32)
        return named

    def head(self, params: Mapping[str, jax.Array]) -> Any:
        return self.flat.rebuild(self.flat.order(self.named_weights(params)))

    def loss(
        self, draft: Any, target: CausalLM, batch: PackedBatch, step: jax.Array
    ) -> tuple[jax.Array, StepStatistics]:
        """Compute the draft's loss and statistics on a batch; ``step`` i32 seeds random choices."""
        vocabulary = jnp.asarray(self.vocabulary, jnp.int32)
        outputs = target_outputs(target, batch, vocabulary, self.draft.feature_layers)
        unrolled = draft, target, batch, jax.lax.stop_gradient(outputs), vocabulary
        return ttt_loss(*unrolled, self.config.ttt_steps, self.config.hard_weight)

    def _loss(
        self,
        params: dict[str, jax.Array],
        target_weights: Weights,
        batch: PackedBatch,
        step: jax.Array,
    ) -> tuple[jax.Array, StepStatistics]:
        return self.loss(self.head(params), self.target.rebuild(target_weights), batch, step)

    @cached_property
    def step(self) -> Any:
        """The compiled step, from (state, target_weights, batch) to (state, statistics)."""

        def step(
            state: TrainState, target_weights: Weights, batch: PackedBatch
        ) -> tuple[TrainState, StepStatistics]:
            gradient = jax.grad(self._loss, has_aux=True)
            grads, statistics = gradient(state.params, target_weights, batch, state.step)
            updates, moments = self.config.optimizer.update(grads, state.moments, state.params)
            params = optax.apply_updates(state.params, updates)
            return TrainState(params, moments, state.step + 1), statistics

        return jax.jit(step, donate_argnums=0)

    @cached_property
    def _statistics(self) -> Any:
        return jax.jit(lambda *arguments: self._loss(*arguments)[1])

    def evaluate(self, params: Any, rows: PackedBatch) -> StepStatistics:
        """Return the statistics over all full batches of packed rows."""
        size = min(self.config.batch_rows, len(rows.tokens))
        if not size:
            raise ValueError("no rows are held out, but evaluation needs some; raise --held-out")
        ends = range(size, len(rows.tokens) + 1, size)
        chunks = (PackedBatch(*(x[end - size : end] for x in rows)) for end in ends)
        step = jnp.zeros((), jnp.int32)
        totals = [self._statistics(params, self.target_weights, batch, step) for batch in chunks]
        return jax.device_get(jax.tree.map(lambda *sums: sum(sums), *totals))


logger = logging.getLogger(__name__)
_DIGESTS = "sha256.json"


def save_state(manager: Any, state: TrainState, vocabulary: np.ndarray) -> None:
    """Write a checkpoint with an orbax ``CheckpointManager``, and digests of its files."""
    step = int(state.step)
    items = ocp.args.Composite(
        vocabulary=ocp.args.JsonSave({"target_ids": vocabulary.tolist()}),
        state=ocp.args.StandardSave(state),
    )
    manager.save(step, args=items)
    manager.wait_until_finished()
    folder = Path(manager.directory, str(step))
    (folder / _DIGESTS).write_text(json.dumps(_digests(folder)), encoding="utf-8")


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in ``folder`` by its name in ``folder``."""

    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return file_digest(stream, "sha256").hexdigest()

    files = [file for file in folder.rglob("*") if file.is_file()]
    names = [str(file.relative_to(folder)) for file in files]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(digest, files), strict=True))


def restore_state(manager: Any, like: TrainState, vocabulary: np.ndarray) -> TrainState | None:
    """Restore the latest intact checkpoint with the structure of ``like``; None without any.

    Damaged checkpoints after it are renamed to ``damaged-STEP-...`` with a warning. Raises
    ValueError if no checkpoint is intact and for this draft vocabulary.
    """
    failures: dict[int, str] = {}
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            _check_digests(Path(manager.directory, str(step)))
            state = _restored(manager, step, like, vocabulary)
        except Exception as error:  # orbax raises many unrelated types
            failures[step] = f"{error!s:.300}"
            continue
        for bad, reason in failures.items():
            moved = mkdtemp(prefix=f"damaged-{bad}-", dir=manager.directory)
            os.rename(Path(manager.directory, str(bad)), moved)
            logger.warning("cannot restore step %d (%s); moved it to %s", bad, reason, moved)
        manager.reload()  # otherwise, it skips saves up to the latest step that it has listed
        return state
    if failures:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in failures.items())
        raise ValueError(
            f"no checkpoint in {manager.directory} can be restored ({reasons}); continue with the "
            "options and data of the run that wrote them, or if their files are damaged, pass "
            "another --checkpoint-dir to start over"
        )
    return None


def _check_digests(folder: Path) -> None:
    """Raise ValueError if a file has changed since it was saved, before orbax reads it."""
    digests = _digests(folder)
    for name, digest in read_json(folder / _DIGESTS).items():
        if digests.get(name) != digest:
            raise ValueError(f"{folder / name} has changed since it was saved")


def _restored(manager: Any, step: int, like: TrainState, vocabulary: np.ndarray) -> TrainState:
    items = ocp.args.Composite(vocabulary=ocp.args.JsonRestore())
    saved = manager.restore(step, args=items)["vocabulary"]["target_ids"]
    if saved != vocabulary.tolist():
        raise ValueError("its draft vocabulary differs (data, --draft-vocab-size)")
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return manager.restore(step, args=items)["state"]


def checkpoint_manager(directory: Path) -> Any:
    """Create an orbax manager that keeps the latest two checkpoints in ``directory``."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(directory.resolve(), options=options)
