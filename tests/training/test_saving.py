"""A checkpoint of a training run with a flipped bit loads the right values or raises an error."""

import shutil
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.trainer import TrainState, checkpoint_manager, restore_state, save_state

from .damage import Saved

LONG = (pytest.mark.slow, pytest.mark.long)
VOCABULARY = np.arange(3, 40, dtype=np.int32)


def state(step: int) -> TrainState:
    rng = np.random.default_rng(step)
    params = {f"layers.{i}": jnp.asarray(rng.normal(size=(16, 24)), jnp.float32) for i in range(3)}
    return TrainState(params, {"nu": jax.tree.map(jnp.square, params)}, jnp.asarray(step))


def restored(folder: Path) -> int:
    """Return the restored step after checking that its values are exactly those saved."""
    manager = checkpoint_manager(folder)
    try:
        found = restore_state(manager, state(0), VOCABULARY)
    finally:
        manager.close()
    step = int(found.step)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(state(step)), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    return step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("training") / "run"
    manager = checkpoint_manager(folder)
    for step in (3, 6):
        save_state(manager, state(step), VOCABULARY)
    manager.close()
    return Saved(folder)


@pytest.mark.slow
@pytest.mark.parametrize("count", [None, pytest.param(126, marks=LONG)])
@pytest.mark.parametrize("steps", [(3, 6), (6,)])
def test_a_flipped_bit_loads_no_other_values(saved, caplog, steps, count) -> None:
    """Flip one bit in each file, or ``count`` bits evenly over all bytes."""
    outcomes: Counter[int | None] = Counter()
    for _ in saved.flips(count):
        if 3 not in steps:
            shutil.rmtree(saved.folder / "3")
        caplog.clear()
        step, refusal = None, ""
        try:
            step = restored(saved.folder)
        except ValueError as error:
            refusal = str(error)
        outcomes[step] += 1
        warned = [r.getMessage() for r in caplog.records if r.name == "specjax.training.trainer"]
        if step == 3:
            assert len(warned) == 1
            assert warned[0].startswith("cannot restore step 6 (")
        elif step is None:
            assert f"no checkpoint in {saved.folder} can be restored (step 6: " in refusal
            assert "pass another --checkpoint-dir" in refusal
        assert step == 3 or not warned
    assert set(outcomes) == {6, 3 if 3 in steps else None}


def test_a_run_continues_after_a_damaged_checkpoint(saved) -> None:
    """The run saves the same steps again and keeps the damaged files, also on repeated damage."""
    saved.restore()
    for kept in (3, 5):
        (saved.folder / "6" / "vocabulary" / "metadata").write_text(f'"{kept}"')
        manager = checkpoint_manager(saved.folder)
        assert int(restore_state(manager, state(0), VOCABULARY).step) == kept
        for step in (5, 6):
            save_state(manager, state(step), VOCABULARY)
        manager.close()
        assert restored(saved.folder) == 6
    moved = saved.folder.glob("damaged-6-*/vocabulary/metadata")
    assert {path.read_text() for path in moved} == {'"3"', '"5"'}
    assert {path.name for path in saved.folder.glob("[0-9]*")} == {"5", "6"}


def test_checkpoints_of_another_run_are_rejected_and_kept(saved) -> None:
    saved.restore()
    manager = checkpoint_manager(saved.folder)
    other = {"layers.0": jnp.zeros((3, 3))}
    for like, vocabulary, message in (
        (state(0), VOCABULARY + 1, "step 3: its draft vocabulary differs"),
        (TrainState(other, {}, jnp.asarray(0)), VOCABULARY, "step 3: .*structures do not match"),
    ):
        with pytest.raises(ValueError, match=rf"(?s){message}.*options and data of the run"):
            restore_state(manager, like, vocabulary)
    manager.close()
    assert restored(saved.folder) == 6
