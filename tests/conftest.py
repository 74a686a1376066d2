"""Settings of all tests: everything runs on the CPU unless a GPU is requested.

Nearly all time goes into compiling tiny models. XLA compiles them without optimisation. One folder
keeps every compiled function for the processes of a run and for later runs.
"""

import gc
import logging
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from specjax.compiling.cache import CompileCache
from specjax.models.placement import THREADS
from specjax.runtime.runner import ModelRunner
from specjax.testing import Files, write_files

# the same examples in every run, without deadlines: other processes affect the timing
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

# four runners compile in 33 CPU-seconds with only the first flag, and in 12 with all flags
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):  # later versions reject the flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
# for tests of properties that must hold on any device, and of several sides of two devices
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
CACHE = {
    "jax_compilation_cache_dir": str(COMPILED),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_traceback_in_locations_limit": 0,
}
TESTS = Path(__file__).parent
RUNNING: list[Any] = [None]  # the test that runs
# the functions from which fast tests get engines and runners; a test that compiles others is slow
BUILDERS = {
    "engine/conftest.py::base_engine",
    "engine/conftest.py::plain",
    "engine/test_adaptive.py::adaptive",
    "engine/test_engine.py::test_another_head_of_the_same_shape_is_not_shared",
    "engine/test_engine.py::test_closed_engines_refuse_work",
    "engine/test_engine.py::test_context_limit_ends_a_request",
    "engine/test_engine.py::test_start_up_reports_sizes_and_the_resolved_head",
    "engine/test_engine.py::test_weights_are_shared_without_reading_them_again",
    "engine/test_first_run.py::test_memory_that_others_use_is_named",
    "engine/test_grammar.py::engine",
    "engine/test_logprobs.py::test_prompt_logprobs_of_chunks_that_run_ahead",
    "engine/test_loop.py::test_a_fault_ends_every_kind_of_call",
    "engine/test_mesh.py::pair",
    "engine/test_quantization.py::engines",
    "engine/test_weights.py::engine",
    "engine/test_weights.py::new_engine",
    "engine/test_weights.py::test_a_flush_that_fails_is_a_fault_of_all",
    "engine/test_weights.py::test_a_plain_engine_has_no_draft",
    "metrics/test_metrics.py::run",
    "metrics/test_metrics.py::test_a_served_registry_does_not_keep_its_engine",
    "server/conftest.py::engine",
    "server/conftest.py::served",
    "speculative/test_algorithm.py::test_additional_leaves_of_a_map_are_refused",
    "support/runners.py::new_runner",
    "test_doc_blocks.py::make",
    "test_doc_blocks.py::test_curl_gets_answers",
    "training/test_collect.py::sampler",
}
SLOW = {"slow", "parity", "clients", "browser", "gpu"}
READ: dict[str, Any] = {}  # executables that engines share, by key
# groups of folders that share compiled runners and engines; one process runs each group
SHARING = (
    ("speculative", "runtime", "scheduling", "kv"),
    ("engine", "cli", "scripts", "metrics", "disaggregation"),
    ("server",),
)
# limit of memory mappings; Linux allows 65,530 per process
MANY_MAPPINGS = 30_000
# size of the compile cache in bytes above which it is deleted
FULL = 2 * 2**30


def selects(config: pytest.Config, mark: str) -> bool:
    """Whether the tests that run have this mark."""
    return bool(re.search(rf"(?<!not )\b{mark}\b", config.option.markexpr))


def pytest_configure(config: pytest.Config) -> None:
    """Configure XLA and JAX's cache for this process and for processes that tests start."""
    if not selects(config, "gpu"):
        os.environ.setdefault("XLA_FLAGS", f"{QUICK} {FOUR_DEVICES}")
        os.environ.setdefault("PJRT_NPROC", str(4 * THREADS))
    for name, value in CACHE.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            jax.config.update(name, value)
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        return
    sizes = [path.stat().st_size for path in COMPILED.rglob("*") if path.is_file()]
    if sum(sizes) > FULL:
        shutil.rmtree(COMPILED)
    COMPILED.mkdir(parents=True, exist_ok=True)
    COMPILED.chmod(0o700)  # its files are executed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign whole modules to processes, and folders with shared compiled functions to one."""
    from xdist.scheduler import LoadScheduling, LoadScopeScheduling

    if selects(config, "gpu"):  # some take minutes, so each goes to the next idle process
        config.option.maxschedchunk = 1
        return LoadScheduling(config, log)

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.split("::")[0]
            parts = Path(module).parts
            if selects(config, "slow"):
                return module  # slow tests take minutes each and share little
            found = [group[0] for group in SHARING if len(parts) > 1 and parts[1] in group]
            return found[0] if found else module

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a test after its `long_after`; skip `gpu` tests on other backends."""
    counts = Counter[str]()
    for item in items:
        marker, test = item.get_closest_marker("long_after"), item.nodeid.partition("[")[0]
        if marker is not None and "gpu" not in item.keywords:
            counts[test] += 1
            if counts[test] > marker.args[0]:
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.long)
    if not any("gpu" in item.keywords for item in items) or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    RUNNING[0] = item


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, so that collections are fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _kept_logging() -> Iterator[None]:
    """Restore logging, as a script's main function may configure it for the whole process."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(autouse=True)
def _strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _read_once() -> Iterator[None]:
    """Read shared executables from disk once per process: each engine would need 0.4 s."""
    read = CompileCache.load

    def load(cache: CompileCache, key: str, arguments: Any) -> Any:
        if cache.path.parent != COMPILED:
            return read(cache, key, arguments)
        if key not in READ and (found := read(cache, key, arguments)):
            READ[key] = found
        return READ.get(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompileCache, "load", load)
        yield


@pytest.fixture(autouse=True, scope="session")
def _listed_builders() -> Iterator[None]:
    """Fail a fast test that compiles a runner with a builder that the list lacks.

    Also fail a test that patched the program before it made a runner that other tests share.
    """
    compile_runner = ModelRunner.compile

    def checked(runner: ModelRunner, *arguments: Any, **options: Any) -> None:
        frame: Any = sys._getframe(1)
        patch = RUNNING[0].funcargs.get("monkeypatch")
        if patch and patch._setattr and frame.f_back.f_code.co_name == "_made_runner":
            pytest.fail(
                "other tests share this runner; make it before the test patches the program"
            )
        while frame and not frame.f_code.co_filename.startswith(str(TESTS)):
            frame = frame.f_back
        place = frame and Path(frame.f_code.co_filename).relative_to(TESTS)
        builder = f"{place}::{frame.f_code.co_name}" if frame else "another thread"
        if builder not in BUILDERS and not SLOW & RUNNING[0].keywords.keys():
            pytest.fail(f"{builder} compiles a runner; mark the test as slow, or use a listed one")
        compile_runner(runner, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "compile", checked)
        yield


@pytest.fixture(autouse=True, scope="module")
def _few_executables() -> Iterator[None]:
    yield
    drop_executables()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Tiny checkpoints and the compile cache that engines share."""
    return write_files(tmp_path_factory.mktemp("engine"), COMPILED)


def drop_executables() -> None:
    """Drop executables if there are many: each takes several memory mappings on a CPU.

    A process without free mappings crashes inside the compiler.
    """
    if num_mappings() < MANY_MAPPINGS:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(("tests.", "specjax.testing.")):
            for value in list(vars(module).values()):
                clear = getattr(value, "cache_clear", None)
                if clear is not None and value.__module__ == module.__name__:
                    clear()
    READ.clear()
    jax.clear_caches()
    gc.collect()


def num_mappings() -> int:
    """Number of memory mappings of this process; 0 if the system does not report it."""
    try:
        return len(Path("/proc/self/maps").read_bytes().splitlines())
    except OSError:
        return 0
