"""Compiled functions on disk: hits without tracing, and no harm from bad entries."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.compiling import cache as compile_cache
from specjax.compiling.cache import CompileCache, bypassed, open_compile_cache
from specjax.compiling.pool import CompiledFunction, CompilePool
from specjax.types import KVPools

from ..support.compilation import counted_compilations, kept_cache_settings

SIZE = 1024


@pytest.fixture
def folder(tmp_path) -> Path:
    with kept_cache_settings():
        yield tmp_path / "cache"


class Step:
    """A function over registered dataclasses that counts how often it is traced."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.num_traces = 0

    def __call__(self, pools: KVPools, slots: jax.Array) -> tuple[KVPools, dict[str, jax.Array]]:
        self.num_traces += 1
        noise = jax.random.uniform(jax.random.key(3), pools.target.shape)
        target = self.factor * pools.target + noise
        best = jax.lax.top_k(target, 3)[1]
        return KVPools(target, pools.draft), {"best": best[slots], "sum": jnp.sum(target)}


def pool_of(cache: CompileCache | None, step: Step | None = None, size: int = SIZE) -> CompilePool:
    """A pool with one function, added but not compiled."""
    function = step or Step()

    def counted(pools, slots):
        return function(pools, slots)

    pool = CompilePool(cache)
    abstract = (
        KVPools(jax.ShapeDtypeStruct((size,), jnp.float32), None),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    pool.add(("step", size), jax.jit(counted, donate_argnums=0), abstract)
    return pool


def run(pool: CompilePool, size: int = SIZE) -> tuple[np.ndarray, np.ndarray, float]:
    pools, out = pool["step", size](
        KVPools(jnp.arange(size, dtype=jnp.float32), None), jnp.arange(2)
    )
    return np.asarray(pools.target), np.asarray(out["best"]), float(out["sum"])


def opened(folder: Path, *configuration) -> CompileCache:
    cache = open_compile_cache(folder)
    assert cache is not None
    return CompileCache(cache.path, configuration)


def compiled(pool: CompilePool) -> CompiledFunction:
    pool.compile(show_progress=False)
    return pool.report[-1]


def compiled_in(folder: Path) -> CompiledFunction:
    return compiled(pool_of(opened(folder)))


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A folder with the one entry that most tests read; each test gets a copy."""
    with kept_cache_settings():
        folder = tmp_path_factory.mktemp("filled") / "cache"
        assert not compiled_in(folder).is_hit
        return folder


@pytest.fixture
def warm(filled, folder) -> Path:
    shutil.copytree(filled, folder)
    return folder


def entries(folder: Path, suffix: str = ".xla") -> list[Path]:
    return sorted((folder / compile_cache.FOLDER).glob(f"*{suffix}"))


def test_a_hit_is_neither_traced_nor_lowered_nor_compiled(folder) -> None:
    first = pool_of(opened(folder), one := Step())
    made = compiled(first)
    second = pool_of(opened(folder), other := Step())
    with counted_compilations() as events:
        found = compiled(second)
    assert events == []
    assert (one.num_traces, other.num_traces) == (1, 0)
    assert (made.is_hit, found.is_hit) == (False, True)
    assert made.num_bytes == found.num_bytes == entries(folder)[0].stat().st_size
    assert made.key == found.key == f"step {SIZE}"
    assert second.report == [found]
    assert entries(folder)[0].stat().st_mode & 0o777 == 0o600
    for mine, theirs in zip(run(first), run(second), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_loaded_function_still_writes_in_place_and_refuses_other_shapes(warm) -> None:
    pool = pool_of(opened(warm))
    found = compiled(pool)
    assert found.is_hit
    assert pool["step", SIZE].memory_analysis().alias_size_in_bytes == 4 * SIZE
    target = jnp.zeros(SIZE)
    before = target.unsafe_buffer_pointer()
    pools, _ = pool["step", SIZE](KVPools(target, None), jnp.arange(2))
    assert target.is_deleted()
    assert pools.target.unsafe_buffer_pointer() == before
    with pytest.raises(TypeError):
        pool["step", SIZE](KVPools(jnp.zeros(SIZE + 1), None), jnp.arange(2))
    with pytest.raises(TypeError):
        pool["step", SIZE](KVPools(jnp.zeros(SIZE), jnp.zeros(1)), jnp.arange(2))


def test_another_configuration_is_compiled(warm) -> None:
    pool = pool_of(opened(warm, "other"), Step(factor=3.0))
    assert not compiled(pool).is_hit
    assert len(entries(warm)) == 2
    pools = pool["step", SIZE](KVPools(jnp.zeros(SIZE), None), jnp.arange(2))[0]
    twice = pool["step", SIZE](pools, jnp.arange(2))[0].target  # 3 x + x of the same noise
    noise = jax.random.uniform(jax.random.key(3), (SIZE,))
    np.testing.assert_allclose(twice, 4 * noise, rtol=1e-6)


def signed(name: str, payload: bytes) -> bytes:
    return compile_cache._checksum(name, payload) + payload


DIGEST = compile_cache._DIGEST_LETTERS
DAMAGE: dict[str, Callable[[str, bytes], bytes]] = {
    "empty": lambda name, data: b"",
    "truncated": lambda name, data: data[:-100],
    "header only": lambda name, data: data[:DIGEST],
    "flipped": lambda name, data: data[:-50] + bytes([data[-50] ^ 1]) + data[-49:],
    "other key": lambda name, data: signed(name[::-1], data[DIGEST:]),
    "other checksum": lambda name, data: data[DIGEST::-1] + data[DIGEST:],
    "no pickle": lambda name, data: signed(name, b"not a pickle"),
    "no executable": lambda name, data: signed(name, b"N."),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_counts_as_missing_with_a_warning(warm, caplog, how) -> None:
    (path,) = entries(warm)
    path.write_bytes(DAMAGE[how](path.name, path.read_bytes()))
    assert opened(warm).load(path.name, ()) is None
    assert f"{path} is rebuilt" in caplog.text


def test_an_entry_for_other_arguments_is_not_taken(warm, caplog) -> None:
    """Keys cover the arguments; an entry with a false key is detected too."""
    (path,) = entries(warm)
    cache = opened(warm)
    slots = jax.ShapeDtypeStruct((2,), jnp.int32)

    def load(*shape: int, dtype=jnp.float32, draft=None):
        return cache.load(path.name, (KVPools(jax.ShapeDtypeStruct(shape, dtype), draft), slots))

    assert load(SIZE) is not None
    assert load(2 * SIZE) is None
    assert load(SIZE, dtype=jnp.bfloat16) is None
    assert load(SIZE, draft=slots) is None
    assert caplog.text.count("it was compiled for other argument shapes or dtypes") == 3


def test_an_entry_that_others_can_write_is_not_read_but_replaced(warm, caplog, monkeypatch) -> None:
    (path,) = entries(warm)
    path.chmod(0o666)
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.pickle, "loads", lambda data: pytest.fail("unpickled"))
        assert not compiled_in(warm).is_hit
    assert f"{path} is rebuilt: ValueError: others can write to {path}" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600
    assert compiled_in(warm).is_hit


def test_a_full_disk_costs_the_entry_only(folder, caplog, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(compile_cache, "write_private", fail)
    pool = pool_of(opened(folder))
    assert compiled(pool).num_bytes is None
    assert "is not stored: OSError: no space left" in caplog.text
    run(pool)


@pytest.mark.slow
def test_functions_in_jaxs_cache_are_compiled_past_it(folder) -> None:
    """JAX's cache gives executables that cannot be serialized."""
    cache = opened(folder)
    plain = pool_of(None)
    compiled(plain)
    assert any(path.is_file() for path in folder.iterdir())
    hits: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event.endswith("/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        assert not compiled(pool_of(cache)).is_hit
        assert hits == []
        compiled(pool_of(None))
        assert len(hits) == 1  # JAX's cache is on again
    finally:
        jax.monitoring.unregister_event_listener(listen)
    found = pool_of(cache)
    assert compiled(found).is_hit
    np.testing.assert_array_equal(run(found)[0], run(plain)[0])


@pytest.mark.parametrize("enabled", [True, False])
def test_bypasses_nest_and_put_the_setting_back(enabled) -> None:
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", enabled)
    try:
        with bypassed(), bypassed():
            assert not jax.config.jax_enable_compilation_cache
        assert jax.config.jax_enable_compilation_cache == enabled
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def test_one_thread_bypasses_at_a_time() -> None:
    """Else the first thread to end would turn JAX's cache on again for the other."""
    order: list[str] = []

    def other() -> None:
        with bypassed():
            order.append("second")

    thread = threading.Thread(target=other)
    with bypassed():
        thread.start()
        thread.join(0.1)
        assert not jax.config.jax_enable_compilation_cache
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def shared(x: jax.Array) -> jax.Array:
    return jnp.sort(jnp.concatenate([x, jnp.roll(x, 3) * 2]))


@pytest.mark.slow
def test_executables_from_jaxs_cache_are_not_stored(folder) -> None:
    """Such an executable can be serialized and loaded, but then does not run."""
    abstract = jax.ShapeDtypeStruct((64,), jnp.float32)
    wanted = shared(jnp.arange(64.0)).tolist()
    cache = opened(folder)
    jax.jit(shared).lower(abstract).compile()
    jax.clear_caches()
    held = jax.jit(shared).lower(abstract).compile()
    for is_hit in (False, True):
        pool = CompilePool(cache)
        pool.add("shared", jax.jit(partial(shared)), (abstract,))
        pool.compile(show_progress=False)
        assert pool.report[0].is_hit is is_hit
        assert pool["shared"](jnp.arange(64.0)).tolist() == wanted
    assert held(jnp.arange(64.0)).tolist() == wanted
    with pytest.raises(ValueError, match=r"function=.* may be shared"):
        pool.add("shared", jax.jit(shared), (abstract,))


def test_an_error_while_tracing_keeps_finished_functions(folder) -> None:
    pool = pool_of(opened(folder))

    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("broken on purpose")

    pool.add("broken", jax.jit(broken), (jax.ShapeDtypeStruct((1,), jnp.float32),))
    with pytest.raises(ValueError, match="broken on purpose"):
        pool.compile(show_progress=False)
    assert jax.config.jax_enable_compilation_cache


def test_json_values_are_kept_by_configuration(folder, caplog) -> None:
    cache = opened(folder, "one")
    assert cache.load_json("round times") is None
    cache.store_json("round times", {"3 1": 0.5})
    assert opened(folder, "one").load_json("round times") == {"3 1": 0.5}
    assert opened(folder, "two").load_json("round times") is None
    assert cache.load_json("other") is None
    (path,) = entries(folder, ".json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"key": "other"}))
    assert cache.load_json("round times") is None
    path.write_text(json.dumps(content | {"value": [1]}))
    assert cache.load_json("round times") is None
    assert caplog.text.count("is rebuilt") == 2
    cache.store_json("round times", {"3 1": 0.25})
    assert cache.load_json("round times") == {"3 1": 0.25}


def test_pruning_deletes_unread_entries(folder) -> None:
    cache = opened(folder)
    for name in ("old", "new"):
        cache.store_json(name, {})
    abandoned = cache.path / ".tmp-1-0"  # of a writer that was killed
    abandoned.touch()
    past = time.time() - 100
    for path in cache.path.iterdir():
        os.utime(path, (past, past))
    (cache.path / "folder").mkdir()
    os.utime(cache.path / "folder", (0, 0))
    assert cache.prune(200) == 0
    assert cache.load_json("new") == {}  # reading renews it
    assert cache.prune(50) == 2
    assert [path.name[:4] for path in cache.path.iterdir() if path.is_file()] == ["new-"]


ROOT = Path(__file__).parents[2]


def outcome(folder: Path) -> list[str]:
    """Whether entries were found, and exact results of the functions."""
    pools = [pool_of(opened(folder), size=size) for size in (64, 128)]
    hits = [compiled(pool).is_hit for pool in pools]
    results = [run(pool, size) for pool, size in zip(pools, (64, 128), strict=True)]
    return [str(hits), *(f"{x.tobytes().hex()} {best} {total.hex()}" for x, best, total in results)]


def started(folder: Path) -> subprocess.Popen:
    script = f"""
from pathlib import Path
from tests.compiling.test_cache import outcome
print(*outcome(Path({str(folder)!r})), sep="\\n")
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
    )


def finished(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "specjax" not in err, err  # no warning of the cache
    return out.splitlines()


@pytest.mark.slow
def test_processes_share_entries_and_may_warm_up_at_once(folder) -> None:
    cold = [finished(process) for process in [started(folder), started(folder)]]
    warm = outcome(folder)  # in this process, which has compiled none of them
    assert warm[0] == "[True, True]"
    assert warm[1:] == cold[0][1:] == cold[1][1:]
    assert len(entries(folder)) == 2
    assert not list((folder / compile_cache.FOLDER).glob(".tmp-*"))


@pytest.mark.parametrize("found", [True, False])
def test_the_log_counts_cache_hits(warm, caplog, found) -> None:
    caplog.set_level(logging.INFO, logger="specjax")
    compiled(pool_of(opened(warm) if found else None))
    assert "1 function in" in caplog.text
    assert f"{1 - found} compiled, {int(found)} read from the cache" in caplog.text
