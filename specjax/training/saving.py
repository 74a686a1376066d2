"""Orbax checkpoints of a training run."""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from specjax.training.trainer import TrainState


def save_state(manager: Any, state: TrainState) -> None:
    """Queue a checkpoint of ``state`` with an orbax ``CheckpointManager``."""
    manager.save(int(state.step), args=ocp.args.StandardSave(state))


def restore_state(manager: Any, like: TrainState) -> TrainState | None:
    """The newest checkpoint, in the structure of ``like``; None if there is none."""
    latest = manager.latest_step()
    if latest is None:
        return None
    return manager.restore(latest, args=ocp.args.StandardRestore(like))


def checkpoint_manager(directory: Path, keep: int = 2) -> Any:
    """Orbax manager that keeps the newest ``keep`` checkpoints in ``directory``."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    return ocp.CheckpointManager(directory.resolve(), options=options)
