"""Orbax checkpoints of a training run: its state, and the draft vocabulary that it is for."""

import logging
import os
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from specjax.checkpoints.orbax import check_digests, write_digests
from specjax.training.trainer import TrainState

logger = logging.getLogger(__name__)


def save_state(manager: Any, state: TrainState, vocabulary: np.ndarray) -> None:
    """Write a checkpoint of ``state``, and its digests, with an orbax ``CheckpointManager``."""
    step = int(state.step)
    items = ocp.args.Composite(
        vocabulary=ocp.args.JsonSave({"target_ids": vocabulary.tolist()}),
        state=ocp.args.StandardSave(state),
    )
    manager.save(step, args=items)
    manager.wait_until_finished()
    write_digests(Path(manager.directory, str(step)))


def restore_state(manager: Any, like: TrainState, vocabulary: np.ndarray) -> TrainState | None:
    """The newest checkpoint that is whole, in the structure of ``like``; None if there is none.

    Newer ones are renamed to ``damaged-STEP-...``, with a warning. ValueError if there are
    checkpoints and none of them is whole and for this draft vocabulary.
    """
    failures: dict[int, str] = {}
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            check_digests(Path(manager.directory, str(step)))
            state = _restored(manager, step, like, vocabulary)
        except Exception as error:  # orbax raises many unrelated types
            failures[step] = f"{error!s:.300}"
            continue
        for bad, reason in failures.items():
            moved = mkdtemp(prefix=f"damaged-{bad}-", dir=manager.directory)
            os.rename(Path(manager.directory, str(bad)), moved)
            logger.warning("step %d cannot be restored (%s) and is now %s", bad, reason, moved)
        manager.reload()  # it would skip all saves up to a step that it knows
        return state
    if failures:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in failures.items())
        raise ValueError(
            f"no checkpoint in {manager.directory} can be restored ({reasons}); go on with the "
            "options and data of the run that wrote them, or if their files are damaged, name "
            "another --checkpoint-dir to begin again"
        )
    return None


def _restored(manager: Any, step: int, like: TrainState, vocabulary: np.ndarray) -> TrainState:
    items = ocp.args.Composite(vocabulary=ocp.args.JsonRestore())
    saved = manager.restore(step, args=items)["vocabulary"]["target_ids"]
    if saved != vocabulary.tolist():
        raise ValueError("it is for another draft vocabulary (data, --draft-vocab-size)")
    items = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    return manager.restore(step, args=items)["state"]


def checkpoint_manager(directory: Path) -> Any:
    """Orbax manager that keeps the newest two checkpoints in ``directory``."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    return ocp.CheckpointManager(directory.resolve(), options=options)
