"""Algorithms of other packages: how they are registered, and which ones are rejected."""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specjax.compiling.digest import source_facts
from specjax.engine.args import EngineArgs
from specjax.runtime.runner import ModelRunner
from specjax.speculative import catalog, registry
from specjax.speculative.algorithm import CustomSpecAlgo, SpeculativeAlgorithm, register_algorithm
from specjax.speculative.eagle import Eagle
from specjax.speculative.future_map import FutureMap
from specjax.speculative.tree import chain_input
from specjax.testing import TARGET, Files
from specjax.types import DraftShape

from ..support.runners import chains, runner_config

ECHO = '''
from dataclasses import dataclass

import jax.numpy as jnp

from specjax.speculative.algorithm import SpeculativeAlgorithm, register_algorithm
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape


@dataclass(frozen=True)
class Echo(SpeculativeAlgorithm):
    """Proposes the last token repeatedly."""

    def draft_shape(self, args, steps=None):
        return DraftShape.chain(args.speculative_num_steps or 3 if steps is None else steps)

    def propose(self, batch, state, rows, shape):
        tokens = jnp.repeat(batch.bonus_tokens[:, None], shape.nodes, axis=1)
        return chain_input(tokens, batch.seq_lens), state


@register_algorithm("echo", supports_overlap=True)
def make(args):
    return Echo("any")
'''


@dataclass(frozen=True)
class Silent(SpeculativeAlgorithm):
    """Never drafts."""

    size: int = 1

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(0)

    def propose(self, batch, state, rows, shape):
        raise AssertionError


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "custom", {})


def install(folder: Path, package: str, source: str, *points: str) -> None:
    """Write a package like an installer, with entry points ``name = module``."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(source)
    info = folder / f"{package}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{catalog.GROUP}]", *points, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages; their modules are unloaded afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("echo_plugin", "other_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_registered_algorithm_is_found_by_its_name_in_any_case() -> None:
    seen: list[Any] = []

    @register_algorithm("My_Own", supports_overlap=True, validate_server_args=seen.append)
    def make(args: Any) -> Silent:
        return Silent("another name", size=args.page_size)

    assert callable(make)
    assert make(EngineArgs(page_size=2)) == Silent("another name", size=2)
    assert "MY_OWN" in catalog.names()
    for name in ("my_own", "MY_OWN"):
        found = SpeculativeAlgorithm.from_string(name)
        assert isinstance(found, CustomSpecAlgo)
        kinds = ("none", "eagle", "eagle3", "standalone", "ngram", "dflash")
        assert not any(getattr(found, f"is_{kind}")() for kind in kinds)
        assert found.is_speculative()
        assert not found.supports_target_verify_for_draft()
    args = EngineArgs(speculative_algorithm="my_own", page_size=8, overlap=True)
    assert args.algorithm == Silent("another name", size=8)
    assert seen == [args]
    assert args.supports_overlap
    assert registry.find("eagle").name == "EAGLE"


def test_running_ahead_is_off_unless_it_is_registered() -> None:
    register_algorithm("silent")(lambda args: Silent("silent"))
    assert not EngineArgs(speculative_algorithm="silent").supports_overlap
    with pytest.raises(ValueError, match="overlap=True is not supported by SILENT"):
        EngineArgs(speculative_algorithm="silent", overlap=True)

    class Late(Silent):
        supports_overlap = False

    register_algorithm("late", supports_overlap=True)(lambda args: Late("late"))
    with pytest.raises(ValueError, match="overlap=True is not supported by LATE"):
        EngineArgs(speculative_algorithm="late", overlap=True)


def test_a_validator_refuses_arguments() -> None:
    def refuse(args: EngineArgs) -> None:
        raise ValueError(f"page_size={args.page_size} must be 1")

    register_algorithm("silent", validate_server_args=refuse)(lambda args: Silent("silent"))
    with pytest.raises(ValueError, match="page_size=4 must be 1"):
        EngineArgs(speculative_algorithm="silent", page_size=4)


@pytest.mark.parametrize("name", ["eagle3", "NextN", "none", "ngram", "standalone", "dflash"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"name='{name}' is reserved"):
        register_algorithm(name)


@pytest.mark.parametrize("name", ["", "two words", "a/b", None, 3])
def test_invalid_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="may contain only letters"):
        register_algorithm(name)


def test_a_name_is_taken_once() -> None:
    def make(args: Any) -> Silent:
        return Silent("silent")

    register_algorithm("silent")(make)
    register_algorithm("silent")(make)  # as if its module was reloaded
    with pytest.raises(ValueError, match=r"name='Silent' is taken by .*\.make"):
        register_algorithm("Silent")(lambda args: Silent("silent"))


def test_factories_without_a_name_are_told_apart() -> None:
    """Lambdas or local functions of one function share a qualified name."""

    def local(number: int) -> Any:
        return lambda args: Silent("silent", size=number)

    first, other = local(1), local(2)
    assert first.__qualname__ == other.__qualname__
    register_algorithm("silent")(first)
    register_algorithm("silent")(first)
    for factory in (other, partial(first), partial(other)):
        with pytest.raises(ValueError, match=r"name='silent' is taken by <function .*<lambda> at"):
            register_algorithm("silent")(factory)
    args = EngineArgs(speculative_algorithm="silent")
    assert args.algorithm == Silent("silent", size=1)


def test_the_cell_of_a_notebook_replaces_its_factory() -> None:
    for number in (1, 2):
        cell: dict[str, Any] = {"__name__": "__main__", "Silent": Silent, "number": number}
        exec("def make(args):\n    return Silent('silent', size=number)", cell)
        register_algorithm("silent")(cell["make"])
        found = EngineArgs(speculative_algorithm="silent").algorithm
        assert found == Silent("silent", size=number)


def test_a_class_that_lacks_a_method_is_refused() -> None:
    class Poor(CustomSpecAlgo):
        is_ngram = None  # type: ignore[assignment]
        supports_target_verify_for_draft = None  # type: ignore[assignment]

    lacks = r"Poor.* lacks \['is_ngram', 'supports_target_verify_for_draft'\]"
    with pytest.raises(ValueError, match=lacks):
        register_algorithm("silent", spec_class=Poor)
    with pytest.raises(ValueError, match=r"lacks .*'create_worker'"):
        register_algorithm("silent", spec_class=object)


def test_a_spec_class_is_used() -> None:
    class Drafting(CustomSpecAlgo):
        def is_ngram(self) -> bool:
            return True

    register_algorithm("silent", spec_class=Drafting)(lambda args: Silent("silent"))
    assert SpeculativeAlgorithm.from_string("silent").is_ngram()


class Answering(CustomSpecAlgo):
    """Overrides methods of the algorithm that it makes."""

    def is_ngram(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def create_future_map(
        self, max_running_requests: int, *sizes: Any, rows: Any = ()
    ) -> FutureMap:
        own = jax.ShapeDtypeStruct((max_running_requests + 1, 2), jnp.dtype("int32"))
        return super().create_future_map(max_running_requests, *sizes, rows={"own": own})

    def build_disagg_draft_input(self, rows: Any, bonus_tokens: Any, *others: Any) -> Any:
        assert super().build_disagg_draft_input(rows, bonus_tokens, *others) is rows
        return {"own": jnp.stack([bonus_tokens] * 2, axis=1)}


def test_methods_that_a_spec_class_overrides_are_called() -> None:
    """Only for the algorithm that its factory made."""
    shared = Silent("silent")
    register_algorithm("answering", spec_class=Answering)(lambda args: shared)
    register_algorithm("silent")(lambda args: shared)
    made = EngineArgs(speculative_algorithm="answering").algorithm
    other = EngineArgs(speculative_algorithm="silent").algorithm
    assert [each.is_ngram() for each in (made, other, shared)] == [True, False, False]
    assert [each.is_some() for each in (made, other)] == [True, True]
    in_one_pass = [each.supports_target_verify_for_draft() for each in (made, other, shared)]
    assert in_one_pass == [True, False, False]
    networks = made.networks(TARGET)
    options: dict[str, Any] = {"shapes": chains(9), "implementation": "pallas"}
    configs = [runner_config(algorithm=each, **options) for each in (made, other)]
    maps = [ModelRunner(networks, each).abstract_state.future for each in configs]
    assert maps[0].rows["own"].shape == (5, 2)
    assert maps[1].rows == ()
    ints = jnp.asarray([3, 4], jnp.int32)
    given = made.build_disagg_draft_input(None, ints, ints, ints, maps[0])
    assert given["own"].tolist() == [[3, 3], [4, 4]]
    assert other.build_disagg_draft_input(None, ints, ints, ints, maps[1]) is None
    assert f"{__name__}.Answering" in made.cache_facts()
    assert other.cache_facts() == shared.cache_facts() == source_facts(Silent)


@pytest.mark.slow
def test_methods_of_a_spec_class_without_effect_are_refused() -> None:
    class Misplaced(CustomSpecAlgo):
        lookahead = 3

        def propose(self, *inputs: Any) -> Any:
            raise AssertionError

    with pytest.raises(ValueError, match=r"\['lookahead', 'propose'\] have no effect .*Misplaced"):
        register_algorithm("misplaced", spec_class=Misplaced)

    class Own(CustomSpecAlgo):
        """Makes its worker without a factory, and overrides a common method."""

        def create_worker(self, args: Any) -> Silent:
            return Silent("own")

        def is_ngram(self) -> bool:
            return True

    register_algorithm("own", spec_class=Own)(lambda args: None)
    assert EngineArgs(speculative_algorithm="own").algorithm.is_ngram()

    class Overlapping(CustomSpecAlgo):
        supports_overlap = True

    with pytest.raises(ValueError, match=r"set supports_overlap in register_algorithm\("):
        register_algorithm("overlapping", spec_class=Overlapping)


@dataclass(frozen=True)
class Counting(Silent):
    """Counts the rounds of each request in its own leaves, and drafts that number."""

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(1)

    def prefill(self, batch, state, rows, chunks, features):
        return state, {"own": jnp.zeros_like(rows["own"])}

    def propose(self, batch, state, rows, shape):
        chain = jnp.stack([batch.bonus_tokens, rows["own"][:, 0]], axis=1)
        return chain_input(chain, batch.seq_lens), state

    def extend(self, batch, state, rows, verified, shape):
        return state, {"own": rows["own"] + 1}


@pytest.mark.slow
def test_stages_read_and_write_additional_leaves(files: Files) -> None:
    register_algorithm("counting", spec_class=Answering)(lambda args: Counting("COUNTING"))
    drafts = []
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    with files.small(draft=None, speculative_algorithm="counting", overlap=False) as engine:
        engine.watch_rounds(lambda _, tree, __: drafts.append(int(tree.draft_tokens[0, 1])))
        engine.generate(input_ids=[7, 9, 12], sampling_params=params)
    assert len(drafts) > 3
    assert drafts == list(range(len(drafts)))


@pytest.mark.parametrize("factory", [lambda args: None, lambda args: Silent])
def test_a_factory_that_makes_something_else_is_refused(factory: Any) -> None:
    register_algorithm("silent")(factory)
    with pytest.raises(ValueError, match=r"='SILENT' returned .*, not a Spec"):
        EngineArgs(speculative_algorithm="silent")
    with pytest.raises(ValueError, match="factory 3 of 'other' must be callable"):
        register_algorithm("other")(3)  # type: ignore[type-var]


def test_a_factory_that_fails_is_named() -> None:
    class Half(SpeculativeAlgorithm):
        pass

    register_algorithm("half")(lambda args: Half("half"))  # type: ignore[abstract]
    with pytest.raises(ValueError, match=r"factory of .*'HALF' failed: .*abstract"):
        EngineArgs(speculative_algorithm="half")
    register_algorithm("own")(lambda args: args.shapes)
    with pytest.raises(ValueError, match=r"factory of .*'OWN' failed: RecursionError"):
        EngineArgs(speculative_algorithm="own")


def test_an_installed_package_is_imported_where_it_is_named(site: Path) -> None:
    install(site, "echo_plugin", ECHO, "Echo = echo_plugin")
    broken = ECHO.replace('"echo"', '"broken"') + "raise RuntimeError('broken')"
    install(site, "other_plugin", broken, "broken = other_plugin")
    assert {"ECHO", "BROKEN"} < set(catalog.names())
    registry.find("eagle3")
    assert "echo_plugin" not in sys.modules
    args = EngineArgs(speculative_algorithm="echo", speculative_num_steps=2, overlap=True)
    assert args.shape == DraftShape.chain(2)
    assert "other_plugin" not in sys.modules
    for _ in range(2):
        with pytest.raises(ValueError, match=r"other_plugin cannot be loaded: .*broken"):
            EngineArgs(speculative_algorithm="BROKEN")
    EngineArgs(speculative_algorithm="Echo")


def test_entry_points_that_register_nothing_or_clash_are_refused(site: Path) -> None:
    install(site, "echo_plugin", ECHO, "other = echo_plugin", "twice = echo_plugin")
    install(site, "other_plugin", "", "twice = other_plugin")
    with pytest.raises(ValueError, match=r"does not register this name; .*register_algorithm"):
        registry.find("other")
    with pytest.raises(ValueError, match=r"'twice': .*echo_plugin.*uninstall all but one"):
        registry.find("twice")


def facts_in_a_process(site: Path, *, edit: str = "") -> tuple[str, ...]:
    """Facts of the installed algorithm in a new process, which may edit it after loading."""
    table = site / "echo_plugin" / "sub" / "table.txt"
    code = (
        "from pathlib import Path\n"
        "from specjax.engine.args import EngineArgs\n"
        "algorithm = EngineArgs(speculative_algorithm='echo').algorithm\n"
        f"if {edit!r}: Path({str(table)!r}).write_text({edit!r})\n"
        "print(repr(algorithm.cache_facts()))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts: tuple[str, ...] = ast.literal_eval(done.stdout)
    return facts


@pytest.mark.slow
def test_compiled_functions_depend_on_a_package_as_a_whole(site: Path) -> None:
    """Also on files other than Python, but not on edits after the import."""
    install(site, "echo_plugin", ECHO, "echo = echo_plugin")
    (site / "echo_plugin" / "sub").mkdir()
    (site / "echo_plugin" / "sub" / "table.txt").write_text("1")
    first = facts_in_a_process(site)
    assert first[0] == "echo_plugin.Echo"
    assert first[1].startswith("echo_plugin echo_plugin==1.5 ")
    assert facts_in_a_process(site) == first
    edited = facts_in_a_process(site, edit="2")
    after = facts_in_a_process(site)
    assert len({first, edited, after}) == 3
    for name in ("NONE", "EAGLE3"):
        assert registry.find(name).cache_facts() == ()


def test_unreadable_sources_give_facts_of_this_process_only() -> None:
    made = type("Made", (Silent,), {"__module__": "made_here"})
    sys.modules["made_here"] = type(sys)("made_here")
    try:
        assert source_facts(made) != source_facts(made)
    finally:
        del sys.modules["made_here"]


@pytest.mark.slow
def test_a_subclass_of_a_built_in_one_runs_under_another_name(files: Files) -> None:
    """It opens the same drafts, because their format does not depend on its name."""

    class Own(Eagle):
        pass

    register_algorithm("own", supports_overlap=True)(lambda args: Own("OWN", "eagle-3"))
    register_algorithm("other")(lambda args: Own("OTHER", "eagle-1"))
    params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    outs = []
    for changes in ({"speculative_algorithm": "own"}, {}):
        with files.small(**changes) as engine:
            outs.append(engine.generate(input_ids=[7, 9, 12], sampling_params=params))
    own, eagle = outs
    assert own["output_ids"] == eagle["output_ids"]
    name = "spec_num_correct_drafts"
    assert own["meta_info"][name] == eagle["meta_info"][name] > 0
    with pytest.raises(ValueError, match="eagle-3 head, but speculative_algorithm drafts with"):
        files.small(speculative_algorithm="other")
