"""Models that keep only some layers of another model."""

import runpy

import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.export import save_layers
from specjax.testing.files import CONFIG, write_target

from ..loading import SCRIPTS


def test_layers_move_together(tmp_path) -> None:
    target = open_target(write_target(tmp_path / "target"), dtype="float32")
    main = runpy.run_path(str(SCRIPTS / "prune_layers.py"))["main"]
    arguments = ["--model", str(target.path), "--keep", "1", "--dtype", "float32", "--output"]
    assert main([*arguments, str(tmp_path / "pruned")]) == 0
    pruned = open_target(tmp_path / "pruned", dtype="float32")
    assert (pruned.config.num_layers, CONFIG.num_layers) == (1, 2)
    whole, found = target.load_weights(), pruned.load_weights()
    moved = {name: name.replace("layers.0.", "layers.1.") for name in found}
    assert sorted(moved.values()) == sorted(n for n in whole if not n.startswith("layers.0."))
    for name, source in moved.items():
        np.testing.assert_array_equal(found[name], whole[source])
    assert not np.array_equal(*(whole[f"layers.{i}.mlp.down.kernel"] for i in (0, 1)))
    assert pruned.load_tokenizer().encode("abc") == target.load_tokenizer().encode("abc")


@pytest.mark.parametrize("layers", [[], [2], [-1, 0], [1, 0], [0, 0], [0.0]])
def test_missing_layers(layers, tmp_path, capsys) -> None:
    target = open_target(write_target(tmp_path / "target"))
    with pytest.raises(
        ValueError, match=r"layers=\[.*\] must be in ascending order and from 0 to 1"
    ):
        save_layers(tmp_path / "pruned", target, layers)
    main = runpy.run_path(str(SCRIPTS / "prune_layers.py"))["main"]
    assert main(["--model", str(target.path), "--keep", "0-2", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("prune_layers: error: layers=[0, 1, 2] must be in")
