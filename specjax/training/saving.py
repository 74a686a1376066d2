"""Orbax checkpoints of a training run: its state, and the draft vocabulary that it is for."""

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from specjax.training.trainer import TrainState


def save_state(manager: Any, state: TrainState, vocabulary: np.ndarray) -> None:
    """Queue a checkpoint of ``state`` with an orbax ``CheckpointManager``."""
    items = ocp.args.Composite(
        vocabulary=ocp.args.JsonSave({"target_ids": vocabulary.tolist()}),
        state=ocp.args.StandardSave(state),
    )
    manager.save(int(state.step), args=items)


def restore_state(manager: Any, like: TrainState, vocabulary: np.ndarray) -> TrainState | None:
    """The newest checkpoint, in the structure of ``like``; None if there is none.

    ValueError if it is for another draft vocabulary.
    """
    latest = manager.latest_step()
    if latest is None:
        return None
    items = ocp.args.Composite(vocabulary=ocp.args.JsonRestore())
    saved = manager.restore(latest, args=items)["vocabulary"]["target_ids"]
    if saved != vocabulary.tolist():
        raise ValueError(
            f"step {latest} in {manager.directory} is for another draft vocabulary than this data "
            "and draft_vocab_size give; go on with those of that run, or name another checkpoint "
            "directory"
        )
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return manager.restore(latest, args=items)["state"]


def checkpoint_manager(directory: Path) -> Any:
    """Orbax manager that keeps the newest two checkpoints in ``directory``."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(directory.resolve(), options=options)
