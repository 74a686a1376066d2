"""Algorithms by name, and their draft shapes."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import pytest

from specjax.engine.args import EngineArgs
from specjax.runtime.runner import ModelRunner
from specjax.speculative import catalog
from specjax.speculative.algorithm import SpeculativeAlgorithm
from specjax.speculative.eagle import DraftInput, Eagle
from specjax.speculative.future_map import FutureMap
from specjax.testing import EAGLE3, TARGET
from specjax.types import DraftShape

from ..support.runners import chains, runner_config


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (None, "NONE"),
        ("none", "NONE"),
        ("eagle", "EAGLE"),
        ("Eagle3", "EAGLE3"),
        ("NextN", "EAGLE"),
    ],
)
def test_names_in_any_case(given, name) -> None:
    assert SpeculativeAlgorithm.from_string(given).name == name


@pytest.mark.parametrize("given", ["EAGLE2", "", 3])
def test_unknown_names_are_refused(given) -> None:
    with pytest.raises(
        ValueError, match=r"speculative_algorithm=.* is not one of \['NONE', 'EAGLE'"
    ):
        SpeculativeAlgorithm.from_string(given)


@pytest.mark.parametrize("name", catalog.names())
def test_identity_of_algorithms(name) -> None:
    found = SpeculativeAlgorithm.from_string(name)
    assert found.is_speculative() == found.is_some() != found.is_none()
    assert getattr(SpeculativeAlgorithm, name) is found
    assert found.is_none() == (name == "NONE")
    assert found.is_eagle() == ("EAGLE" in name)
    assert found.is_eagle3() == (name == "EAGLE3")
    assert found.is_ngram() == (name == "NGRAM")
    assert found.is_standalone() == (name == "STANDALONE")
    assert found.is_dflash() == (name == "DFLASH")
    assert found.is_dspark() == (name == "DSPARK")
    assert found.supports_target_verify_for_draft() == (name in ("DFLASH", "DSPARK"))
    assert found.lookahead == found.is_eagle() + 2 * found.is_standalone()
    assert eval(repr(found), {type(found).__name__: type(found)}) == found  # used as a cache key


@pytest.mark.slow
def test_built_in_ones_are_imported_when_they_are_read() -> None:
    code = (
        "import sys\n"
        "from specjax.speculative.algorithm import SpeculativeAlgorithm\n"
        "name = 'specjax.speculative.multi_layer_eagle'\n"
        "assert name not in sys.modules\n"
        "assert SpeculativeAlgorithm.MULTI_LAYER_EAGLE.is_some()\n"
        "assert name in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Recorded(Eagle):
    """Records the arguments of its future map."""

    def create_future_map(self, *sizes: Any, rows: Any = ()) -> Any:
        made = super().create_future_map(*sizes, rows=rows)
        return dataclasses.replace(made, rows={"sizes": sizes, "own": rows})


def runner_of(algorithm: SpeculativeAlgorithm) -> ModelRunner:
    config = runner_config(algorithm=algorithm, shapes=chains(2), mixed_prefill_tokens=16)
    return ModelRunner(algorithm.networks(TARGET, EAGLE3), config)


def test_a_runner_has_the_map_that_its_algorithm_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(Recorded("RECORDED", "eagle-3"))
    networks = runner.networks
    monkeypatch.setattr(type(networks.placement), "abstract", lambda self, values, *_: values)
    future = runner.abstract_state.future
    assert future.rows["sizes"] == (4, 16, 128, networks.placement.device)
    assert future.tokens.shape == (5, 128)
    assert isinstance(future.rows["own"], DraftInput)
    assert future.rows["own"].hidden.shape == (5, TARGET.hidden_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LargerMap(FutureMap):
    """A future map with a leaf that stages do not receive."""

    own: Any = None


class Larger(Eagle):
    def create_future_map(self, *sizes: Any, rows: Any = ()) -> Any:
        made = super().create_future_map(*sizes, rows=rows)
        return LargerMap(**vars(made), own=made.seq_lens)


def test_additional_leaves_of_a_map_are_refused() -> None:
    runner = runner_of(Larger("LARGER", "eagle-3"))
    message = "LARGER must return a FutureMap, not a LargerMap; put additional arrays into its rows"
    with pytest.raises(ValueError, match=message):
        runner.compile(show_progress=False)


def test_shapes() -> None:
    chain = DraftShape.chain(3)
    assert chain == DraftShape(3, 1, 4)
    assert (chain.accept_width, chain.tail) == (4, 0)
    assert (chain.num_candidates, chain.draft_rows, chain.rows) == (3, 2, 4)
    tree = DraftShape(3, 4, 20)
    assert (tree.num_candidates, tree.draft_rows, tree.rows, tree.tail) == (36, 8, 20, 19)
    deep = DraftShape(6, 16, 8)
    assert (deep.draft_rows, deep.rows, deep.tail) == (80, 81, 80)
    assert (DraftShape.chain(0).num_candidates, DraftShape.chain(0).rows) == (0, 1)
    cut = DraftShape.chain(7, 4)
    assert (cut, DraftShape.chain(2, 4)) == (DraftShape(7, 1, 4), DraftShape(2, 1, 3))
    assert (cut.depth, cut.accept_width, cut.rows, cut.tail) == (3, 4, 7, 0)
    assert DraftShape(5, 3, 4).accept_width == 4
    block = DraftShape(3, 1, 4, block=8)
    assert (block.depth, block.accept_width, block.rows, block.tail) == (3, 4, 8, 7)
    assert str(block) == "3"
    assert [str(shape) for shape in (chain, cut, tree)] == ["3", "7-1-4", "3-4-20"]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"speculative_eagle_topk": 4}, (3, 4, 13)),
        ({"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 37}, (3, 4, 37)),
        ({"speculative_eagle_topk": 4, "speculative_num_steps": 1}, (1, 4, 5)),
        ({"speculative_eagle_topk": 16, "speculative_num_steps": 6}, (6, 16, 64)),
        ({"speculative_num_draft_tokens": 4}, (3, 1, 4)),
        ({"speculative_num_draft_tokens": 2}, (3, 1, 2)),
    ],
)
def test_trees_of_arguments(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    good = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    assert EngineArgs(**(good | options)).shape == DraftShape(*shape)


@pytest.mark.parametrize("name", ["EAGLE3", "EAGLE", "STANDALONE"])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_rows_of_a_verify_need_a_depth(name: str, topk: int, *, is_adaptive: bool) -> None:
    """A number of rows needs explicit steps, even if the default steps would fit."""
    for nodes in (6, 16):
        with pytest.raises(
            ValueError, match=f"draft_tokens={nodes} needs speculative_num_steps, which is None"
        ):
            EngineArgs(
                draft="any",
                speculative_algorithm=name,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=nodes,
                speculative_adaptive=is_adaptive,
            )


def test_tiers_of_a_tree_have_as_many_nodes_as_they_can_fill() -> None:
    args = EngineArgs(
        speculative_algorithm="EAGLE",
        speculative_num_steps=3,
        speculative_eagle_topk=4,
        speculative_num_draft_tokens=16,
        speculative_adaptive=True,
        speculative_adaptive_config={"candidate_steps": [0, 1, 3, 5]},
    )
    assert args.shape == DraftShape(3, 4, 16)
    tiers = [DraftShape(*shape) for shape in ((0, 1, 1), (1, 4, 5), (3, 4, 16), (5, 4, 16))]
    assert args.shapes == tuple(tiers)
    for first, shape in zip((0, 1, 5), (*tiers[:2], tiers[3]), strict=True):
        assert dataclasses.replace(args, speculative_num_steps=first).shape == shape
        with pytest.raises(
            ValueError, match="speculative_num_draft_tokens=65 must be from 2 to 64"
        ):
            dataclasses.replace(args, speculative_num_steps=first, speculative_num_draft_tokens=65)


@pytest.mark.parametrize(("nodes", "most"), [(None, 8), (4, 8), (3, 3)])
def test_tiers_of_a_cut_chain_verify_no_more_rows(nodes: int | None, most: int) -> None:
    args = EngineArgs(
        speculative_algorithm="EAGLE",
        speculative_num_steps=3,
        speculative_num_draft_tokens=nodes,
        speculative_adaptive=True,
        speculative_adaptive_config={"candidate_steps": [0, 1, 3, 7]},
    )
    assert args.shapes == tuple(DraftShape.chain(steps, most) for steps in (0, 1, 3, 7))


def test_default_tiers_that_are_too_large_for_a_tree_are_dropped() -> None:
    sizes: dict[str, Any] = {"speculative_eagle_topk": 32, "speculative_num_steps": 3}
    args = sizes | {"speculative_algorithm": "EAGLE", "speculative_adaptive": True}
    assert [shape.steps for shape in EngineArgs(**args).shapes] == [1, 3]
    named: dict[str, Any] = {"speculative_adaptive_config": {"candidate_steps": [1, 3, 7]}}
    with pytest.raises(ValueError, match="lower speculative_eagle_topk=32"):
        EngineArgs(**args, **named)


def test_no_more_is_simulated_than_a_verify_can_accept() -> None:
    tree = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    tree |= {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 3}
    made = EngineArgs(**tree, simulate_accept_length=3)  # type: ignore[arg-type]
    assert made.shape == DraftShape(3, 2, 3)
    with pytest.raises(ValueError, match=r"simulate_accept_length=3.5 must be from 1 to 3"):
        EngineArgs(**tree, simulate_accept_length=3.5)  # type: ignore[arg-type]


NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": None}
MODULES = {"speculative_algorithm": "multi_layer_eagle", "speculative_num_steps": 2}
STANDALONE = {"speculative_algorithm": "standalone", "draft": "some"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_algorithm": "EAGLE2"}, "speculative_algorithm='EAGLE2' is not one of"),
        ({"speculative_num_steps": 0}, "speculative_num_steps=0 .* speculative_algorithm=None"),
        ({"speculative_num_steps": 64}, "speculative_num_steps=64"),
        ({"speculative_num_steps": 3.0}, "speculative_num_steps=3.0"),
        ({"speculative_eagle_topk": 0}, "speculative_eagle_topk=0 must be an integer of"),
        ({"speculative_eagle_topk": 65}, r"topk=65 or .* must be at most 128"),
        ({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 12}, "from 2 to 11: a tree"),
        ({"speculative_eagle_topk": 9, "speculative_num_draft_tokens": 65}, "from 2 to 64: a tree"),
        ({"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 1}, "tokens=1 must be from"),
        ({"speculative_num_draft_tokens": 5}, r"speculative_num_draft_tokens=5 .* \+ 1 = 4"),
        ({"speculative_num_draft_tokens": 1}, "draft_tokens=1 must be from 2 to"),
        (
            NGRAM | {"speculative_ngram_max_match_window_size": 17},
            "max_match_window_size=17 must be from",
        ),
        (NGRAM | {"speculative_ngram_min_match_window_size": 13}, "min_match_window_size=13 to 16"),
        (
            NGRAM | {"speculative_ngram_max_bfs_breadth": 17},
            "max_bfs_breadth=17 must be at most 16",
        ),
        (
            NGRAM | {"speculative_ngram_match_type": "LRU"},
            "match_type='LRU' must be 'BFS' or 'PROB'",
        ),
        (NGRAM | {"speculative_num_draft_tokens": 65}, "num_steps=64 must be from 1 to 63"),
        (
            NGRAM | {"speculative_num_draft_tokens": 3, "speculative_num_steps": 3},
            "tokens=3 must be .* = 4 to",
        ),
        (
            NGRAM | {"speculative_num_draft_tokens": 32, "speculative_num_steps": 3},
            "= 4 to 31, the capacity of",
        ),
        (NGRAM | {"speculative_num_steps": 0}, "num_steps=0 must be from 1 to 63"),
        (NGRAM | {"draft": "x"}, r"\['draft'\] have no effect .*='ngram'"),
        (
            NGRAM | {"speculative_draft_window_size": 8},
            r"\['speculative_draft_window_size'\] have no effect .*='ngram'",
        ),
        (
            {"speculative_algorithm": "FROZEN_KV_MTP", "speculative_draft_window_size": 8},
            r"\['speculative_draft_window_size'\] have no effect .*='FROZEN_KV_MTP'",
        ),
        (NGRAM | {"speculative_eagle_topk": 2}, r"\['speculative_eagle_topk'\] have no"),
        (NGRAM | {"speculative_use_rejection_sampling": True}, "speculative_algorithm=NGRAM has"),
        (
            NGRAM | {"speculative_adaptive": True, "speculative_num_draft_tokens": 4},
            "num_draft_tokens=4 cannot be set if speculative_adaptive=True",
        ),
        (
            MODULES | {"speculative_eagle_topk": 2},
            "speculative_eagle_topk=2 must be 1: .* change the KV of the text",
        ),
        (MODULES | {"speculative_num_steps": 0}, "speculative_num_steps=0 must be"),
        (MODULES | {"speculative_num_draft_tokens": 4}, "speculative_num_draft_tokens=4"),
        ({"speculative_ngram_match_type": "PROB"}, r"\['speculative_ngram_match_type'\] have no"),
        (STANDALONE | {"draft": None}, "draft=None, but speculative_algorithm=STANDALONE"),
        (STANDALONE | {"draft_rope_theta": 10.0}, r"\['draft_rope_theta'\] have no effect"),
    ],
)
def test_impossible_drafting_options_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    assert EngineArgs(**good).shape == DraftShape.chain(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        EngineArgs(**(good | changes))
