"""Stacked tensors of experts are read slice by slice."""

from pathlib import Path

import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.stacks import unstacked
from specjax.checkpoints.tensors import TensorSource, in_memory
from specjax.models.declare import Part, Recipe
from specjax.testing.files import write_folder

from ..support.checkpoint_files import CONFIG, HIDDEN

FILE = Path("file")
STACKS = (
    ("experts.gate_up_proj",),
    ("input_linear.weight",),
    ("experts.gate_proj.weight", "experts.up_proj.weight"),
)
PARTS = tuple(Part(f"experts.{i}.{x}.weight", (4, 6)) for i in range(3) for x in ("gate", "up"))
RECIPES = {
    "gate_up": Recipe(PARTS, stacks=STACKS),
    "router": Recipe((Part("gate.weight", (3, 6)),), stacks=(("router.weight",),)),
}


def opened(**tensors: np.ndarray) -> TensorSource:
    named = {name.replace("__", "."): x for name, x in tensors.items()}
    return unstacked(in_memory(named, FILE), RECIPES)


@pytest.mark.parametrize("name", ["experts__gate_up_proj", "input_linear__weight"])
def test_slices(name: str) -> None:
    stack = np.random.default_rng(0).normal(size=(3, 8, 6)).astype(np.float32)
    other = np.ones(2, np.float32)
    source = opened(**{name: stack, "other": other})
    assert {*source.infos} == {"other", *(part.name for part in PARTS)}
    assert source.infos["experts.2.up.weight"].shape == (4, 6)
    for _ in range(2):  # a source may be read again
        for i in (2, 0, 1):
            np.testing.assert_array_equal(source.read(f"experts.{i}.up.weight"), stack[i, 4:])
            np.testing.assert_array_equal(source.read(f"experts.{i}.gate.weight"), stack[i, :4])
    assert source.read("other") is other


def test_a_stack_of_each_projection() -> None:
    gate, up = np.random.default_rng(0).normal(size=(2, 3, 4, 6))
    source = opened(experts__gate_proj__weight=gate, experts__up_proj__weight=up)
    assert {*source.infos} == {part.name for part in PARTS}
    for i in range(3):
        np.testing.assert_array_equal(source.read(f"experts.{i}.gate.weight"), gate[i])
        np.testing.assert_array_equal(source.read(f"experts.{i}.up.weight"), up[i])


def test_a_tensor_may_have_another_name() -> None:
    router = np.ones((3, 6))
    source = opened(router__weight=router)
    assert {*source.infos} == {"gate.weight"}
    np.testing.assert_array_equal(source.read("gate.weight"), router)


def test_a_stack_is_read_once_and_kept_only_until_its_last_slice() -> None:
    stack, reads = np.zeros((3, 8, 6), np.float32), []
    inner = in_memory({STACKS[0][0]: stack}, FILE)

    def read(name: str) -> np.ndarray:
        reads.append(name)
        return inner.read(name)

    source = unstacked(TensorSource(FILE, inner.infos, read), RECIPES)
    for name in source.infos:
        source.read(name)
    assert reads == [*STACKS[0]]
    source.read("experts.0.up.weight")
    assert len(reads) == 2


@pytest.mark.parametrize(("rows", "of_up"), [(8, slice(4, 8)), (2, slice(1, 2)), (4, slice(2, 4))])
def test_scales_are_cut_like_values(rows: int, of_up: slice) -> None:
    values, scale = np.zeros((3, 8, 6), np.int8), np.arange(3.0 * rows).reshape(3, rows, 1)
    source = opened(experts__gate_up_proj=values, experts__gate_up_proj_scale_inv=scale)
    found = source.read("experts.1.up.weight_scale_inv")
    np.testing.assert_array_equal(found, scale[1, of_up])
    assert source.infos["experts.1.up.weight_scale_inv"].shape == found.shape


def test_files_without_stacks_stay() -> None:
    source = in_memory({"experts.0.gate.weight": np.zeros((4, 6), np.float32)}, FILE)
    assert unstacked(source, RECIPES) is source


def test_a_stack_of_one_matrix() -> None:
    gate_up, down = (np.random.default_rng(0).normal(size=(1, n, 6)) for n in (8, 4))
    recipes = {
        "gate_up": Recipe(PARTS[:2], stacks=STACKS),
        "down": Recipe((Part("experts.0.down.weight", (4, 6)),), stacks=(("experts.down_proj",),)),
    }
    stored = {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    source = unstacked(in_memory(stored, FILE), recipes)
    np.testing.assert_array_equal(source.read("experts.0.up.weight"), gate_up[0, 4:])
    np.testing.assert_array_equal(source.read("experts.0.down.weight"), down[0])


@pytest.mark.parametrize("shape", [(4, 8, 6), (2, 8, 6), (3, 9, 6), (3, 8, 5), (3, 8)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj' in file .* requires \(3, 8, 6\)"):
        opened(experts__gate_up_proj=np.zeros(shape, np.float32))


def test_scales_that_cannot_be_cut_are_refused() -> None:
    values, scale = np.zeros((3, 8, 6), np.int8), np.zeros((3, 3, 1), np.float32)
    with pytest.raises(ValueError, match=r"gate_up_proj_scale' in file has shape \(3, 3, 1\)"):
        opened(experts__gate_up_proj=values, experts__gate_up_proj_scale=scale)


def test_stacks_may_be_whole_in_a_quantised_checkpoint(tmp_path: Path) -> None:
    """Then they stay whole, as matrices of single experts do."""
    family = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4}
    config = CONFIG | family | sizes | {"quantization_config": {"quant_method": "fp8"}}
    stack = np.zeros((2, 8, HIDDEN), np.float32)
    write_folder(tmp_path, config, {"model.layers.1.mlp.experts.gate_up_proj": stack})
    names = [f"experts.{i}.{x}_proj" for i in range(2) for x in ("gate", "up")]
    quantization = open_target(tmp_path).config.quantization
    assert quantization is not None
    assert quantization.plain == tuple(f"model.layers.1.mlp.{name}" for name in names)
