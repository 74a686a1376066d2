"""Compiled functions on disk: hits without tracing, and nothing bad from bad entries."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.compiling import cache as compile_cache
from specjax.compiling import pool as compile_pool
from specjax.compiling.cache import CompileCache, open_compile_cache
from specjax.compiling.folder import PrivateFolder
from specjax.compiling.jax_cache import bypassed, enable_compile_cache
from specjax.compiling.pool import CompilePool
from specjax.types import KVPools

from ..settings import counted_compilations, kept_cache_settings

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
    return cache.bound(*configuration)


def compiled_once(folder: Path) -> None:
    (function,) = pool_of_compiled(folder)
    assert not function.is_hit
    assert function.is_traced


def pool_of_compiled(folder: Path, step: Step | None = None):
    return pool_of(opened(folder), step).compile(show_progress=False)


def entries(folder: Path, suffix: str = ".xla") -> list[Path]:
    return sorted((folder / compile_cache.FOLDER).glob(f"*{suffix}"))


def test_a_hit_is_neither_traced_nor_lowered_nor_compiled(folder) -> None:
    first = pool_of(opened(folder), one := Step())
    (made,) = first.compile(show_progress=False)
    second = pool_of(opened(folder), other := Step())
    with counted_compilations() as events:
        (found,) = second.compile(show_progress=False)
    assert events == []
    assert (one.num_traces, other.num_traces) == (1, 0)
    assert (made.is_hit, found.is_hit, found.is_traced) == (False, True, False)
    assert made.num_bytes == found.num_bytes == entries(folder)[0].stat().st_size
    assert made.label == found.label == f"step {SIZE}"
    assert second.report == (found,)
    for mine, theirs in zip(run(first), run(second), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_loaded_function_still_writes_in_place(folder) -> None:
    compiled_once(folder)
    pool = pool_of(opened(folder))
    (found,) = pool.compile(show_progress=False)
    assert found.is_hit
    assert found.alias_bytes == 4 * SIZE
    target = jnp.zeros(SIZE)
    before = target.unsafe_buffer_pointer()
    pools, _ = pool["step", SIZE](KVPools(target, None), jnp.arange(2))
    assert target.is_deleted()
    assert pools.target.unsafe_buffer_pointer() == before


def test_a_loaded_function_refuses_other_shapes(folder) -> None:
    compiled_once(folder)
    pool = pool_of(opened(folder))
    assert pool.compile(show_progress=False)[0].is_hit
    with pytest.raises(TypeError):
        pool["step", SIZE](KVPools(jnp.zeros(SIZE + 1), None), jnp.arange(2))
    with pytest.raises(TypeError):
        pool["step", SIZE](KVPools(jnp.zeros(SIZE), jnp.zeros(1)), jnp.arange(2))


def test_another_configuration_traces_and_finds_the_same_executable(folder) -> None:
    compiled_once(folder)
    step = Step()
    (found,) = pool_of(opened(folder, "other"), step).compile(show_progress=False)
    assert (found.is_hit, found.is_traced, step.num_traces) == (True, True, 1)
    assert len(entries(folder)) == 1
    assert len(entries(folder, ".json")) == 2
    step = Step()
    (found,) = pool_of(opened(folder, "other"), step).compile(show_progress=False)
    assert (found.is_traced, step.num_traces) == (False, 0)


def test_another_function_under_another_configuration_is_compiled(folder) -> None:
    compiled_once(folder)
    pool = pool_of(opened(folder, "other"), Step(factor=3.0))
    assert not pool.compile(show_progress=False)[0].is_hit
    assert len(entries(folder)) == 2
    plain = pool_of(None, Step(factor=3.0))
    plain.compile(show_progress=False)
    np.testing.assert_array_equal(run(pool)[0], run(plain)[0])


def damaged(how: str, data: bytes) -> bytes:
    if how == "empty":
        return b""
    if how == "truncated":
        return data[:-100]
    if how == "header only":
        return b"\n".join(data.split(b"\n", 3)[:3])
    if how == "flipped":
        return data[:-50] + bytes([data[-50] ^ 1]) + data[-49:]
    if how == "other version":
        return data.replace(b"specjax executable", b"specjax executablf", 1)
    if how == "other key":
        magic, key, rest = data.split(b"\n", 2)
        return b"\n".join((magic, key[::-1], rest))
    magic, key, checksum, payload = data.split(b"\n", 3)
    if how == "other checksum":
        return b"\n".join((magic, key, checksum[::-1], payload))
    assert how == "no pickle"
    payload = b"not a pickle"
    checksum = compile_cache.hashlib.sha256(payload).hexdigest().encode()
    return b"\n".join((magic, key, checksum, payload))


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "truncated",
        "header only",
        "flipped",
        "other version",
        "other key",
        "other checksum",
        "no pickle",
    ],
)
def test_a_damaged_entry_is_built_anew_with_a_warning(folder, caplog, how) -> None:
    compiled_once(folder)
    (path,) = entries(folder)
    whole = path.read_bytes()
    path.write_bytes(damaged(how, whole))
    assert path.read_bytes() != whole
    pool = pool_of(opened(folder), step := Step())
    (made,) = pool.compile(show_progress=False)
    assert not made.is_hit
    assert step.num_traces == 1
    assert f"{path} is built anew" in caplog.text
    caplog.clear()
    assert pool_of_compiled(folder)[0].is_hit  # it was replaced
    assert caplog.text == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"key": "x", "value": {}}', "\x00", "[" * 100_000]
)
def test_a_damaged_link_is_written_anew(folder, caplog, text) -> None:
    compiled_once(folder)
    (path,) = entries(folder, ".json")
    path.write_text(text)
    (found,) = pool_of_compiled(folder)
    assert found.is_traced
    assert f"{path} is ignored" in caplog.text
    assert not pool_of_compiled(folder)[0].is_traced


def test_a_link_to_nothing_is_no_hit(folder, caplog) -> None:
    compiled_once(folder)
    (path,) = entries(folder)
    path.unlink()
    (made,) = pool_of_compiled(folder)
    assert not made.is_hit
    assert f"{path} is missing" in caplog.text
    assert pool_of_compiled(folder)[0].is_hit


def test_an_entry_for_other_arguments_is_built_anew(folder, caplog, monkeypatch) -> None:
    """Keys cover the arguments; an entry that lies about them is found out all the same."""
    monkeypatch.setattr(compile_cache.keys, "function_key", lambda *_: "0" * 64)
    monkeypatch.setattr(compile_pool.keys, "lowered_key", lambda *_: "1" * 64)
    monkeypatch.setattr(compile_pool, "label_of", lambda key: "step")
    compiled_once(folder)
    pool = pool_of(opened(folder), size=2 * SIZE)
    assert not pool.compile(show_progress=False)[0].is_hit
    assert "is built anew" in caplog.text
    run(pool, 2 * SIZE)


def test_an_entry_that_others_can_write_is_not_read(folder, caplog, monkeypatch) -> None:
    compiled_once(folder)
    (path,) = entries(folder)
    path.chmod(0o666)
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.pickle, "loads", lambda data: pytest.fail("unpickled"))
        assert not pool_of_compiled(folder)[0].is_hit
    assert f"{path} is not used" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600  # replaced
    assert pool_of_compiled(folder)[0].is_hit


def test_an_entry_of_another_owner_is_not_read(folder, caplog, monkeypatch) -> None:
    compiled_once(folder)
    cache = opened(folder)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(compile_cache.pickle, "loads", lambda data: pytest.fail("unpickled"))
    (made,) = pool_of(cache).compile(show_progress=False)
    assert not made.is_hit
    assert made.num_bytes is None  # nor written
    assert "belongs to user" in caplog.text


@pytest.mark.parametrize("part", ["", compile_cache.FOLDER])
def test_a_named_folder_that_others_can_write_is_refused(folder, part) -> None:
    (folder / part).mkdir(parents=True)
    (folder / part).chmod(0o777)
    with pytest.raises(ValueError, match=r"compile_cache_dir=.* is refused: .*; chmod go-w"):
        open_compile_cache(folder)


def test_a_named_folder_that_is_a_link_is_refused(folder, tmp_path) -> None:
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ValueError, match="symbolic link"):
        open_compile_cache(folder)


@pytest.mark.parametrize("part", ["specjax", f"specjax/{compile_cache.FOLDER}"])
def test_auto_does_without_a_folder_that_others_can_write(
    tmp_path, monkeypatch, caplog, part
) -> None:
    (tmp_path / part).mkdir(parents=True)
    (tmp_path / part).chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept_cache_settings():
        jax.config.update("jax_compilation_cache_dir", None)
        assert open_compile_cache("auto") is None
        if part == "specjax":  # JAX would execute what lies there
            assert jax.config.jax_compilation_cache_dir is None
    assert "compile_cache_dir" in caplog.text


def test_no_folder_is_no_cache(tmp_path) -> None:
    with kept_cache_settings():
        assert open_compile_cache(None) is None
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
        assert open_compile_cache("auto") is None


@pytest.mark.parametrize("directory", ["", "gs://bucket/cache", Path("gs://b")])
def test_what_is_no_local_folder_is_refused(directory) -> None:
    with kept_cache_settings(), pytest.raises(ValueError, match="is no local folder"):
        open_compile_cache(directory)


def test_a_home_that_is_not_known_costs_the_cache_only(caplog, monkeypatch) -> None:
    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)
    with kept_cache_settings():
        jax.config.update("jax_compilation_cache_dir", None)
        assert open_compile_cache("auto") is None
        assert "compile_cache_dir" in caplog.text
        with pytest.raises(ValueError, match="compile_cache_dir='~nobody' cannot be made"):
            open_compile_cache("~nobody")


def test_a_full_disk_costs_the_entry_only(folder, caplog, monkeypatch) -> None:
    cache = opened(folder)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(PrivateFolder, "write", fail)
    pool = pool_of(cache)
    (made,) = pool.compile(show_progress=False)
    assert made.num_bytes is None
    assert "is not kept: OSError: no space left" in caplog.text
    run(pool)


def test_what_jax_has_cached_is_compiled_past_its_cache(folder) -> None:
    """JAX's cache gives executables that cannot be serialized."""
    enable_compile_cache(folder)
    plain = pool_of(None)
    plain.compile(show_progress=False)
    count = len(list(folder.iterdir()))
    assert count > 0
    hits: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event.endswith("/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        compiled_once(folder)
        assert hits == []
        pool_of(None).compile(show_progress=False)
        assert len(hits) == 1  # JAX's cache is on again
    finally:
        jax.monitoring.unregister_event_listener(listen)
    found = pool_of(opened(folder))
    assert found.compile(show_progress=False)[0].is_hit
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


def test_an_error_while_tracing_leaves_what_is_done(folder) -> None:
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
    assert caplog.text.count("is ignored") == 2
    cache.store_json("round times", {"3 1": 0.25})
    assert cache.load_json("round times") == {"3 1": 0.25}


def test_pruning_deletes_what_nothing_has_read(folder) -> None:
    compiled_once(folder)
    past = time.time() - 100
    for path in [*entries(folder), *entries(folder, ".json")]:
        os.utime(path, (past, past))
    cache = opened(folder)
    cache.store_json("new", {})
    assert cache.prune(200, time.time()) == 0
    assert pool_of_compiled(folder)[0].is_hit  # reading makes them young
    assert cache.prune(50, time.time()) == 0
    for path in entries(folder):
        os.utime(path, (past, past))
    assert cache.prune(50, time.time()) == 1
    assert entries(folder) == []


SCRIPT = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING)
    import jax, jax.numpy as jnp, numpy as np
    from specjax.compiling.cache import open_compile_cache
    from specjax.compiling.pool import CompilePool
    from specjax.types import KVPools

    def step(pools, x):
        noise = jax.random.uniform(jax.random.key(3), pools.target.shape)
        target = pools.target + noise
        return KVPools(target, None), jax.lax.top_k(target @ x, 2)

    pool = CompilePool(open_compile_cache(sys.argv[1]).bound("here"))
    for n in (64, 128, 256):
        pools = KVPools(jax.ShapeDtypeStruct((8, n), jnp.float32), None)
        arguments = (pools, jax.ShapeDtypeStruct((n, 4), jnp.float32))
        pool.add(("step", n), jax.jit(step, donate_argnums=0), arguments)
    functions = pool.compile(show_progress=False)
    print([function.is_hit for function in functions])
    for n in (64, 128, 256):
        target = jnp.ones((8, n))
        before = target.unsafe_buffer_pointer()
        pools, best = pool["step", n](KVPools(target, None), jnp.ones((n, 4)))
        assert pools.target.unsafe_buffer_pointer() == before
        print(float(np.asarray(pools.target).sum()).hex(), np.asarray(best[1]).sum())
"""


def started(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def finished(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "specjax" not in err, err  # no warning of the cache
    return out.splitlines()


def test_processes_share_entries_and_may_warm_up_at_once(tmp_path) -> None:
    folder = tmp_path / "cache"
    cold = [finished(process) for process in [started(folder), started(folder)]]
    warm = finished(started(folder))
    assert warm[0] == "[True, True, True]"
    assert warm[1:] == cold[0][1:] == cold[1][1:]
    assert len(entries(folder)) == 3
    assert not list((folder / compile_cache.FOLDER).glob(".tmp-*"))


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_log_tells_what_was_read(folder, caplog, has_cache) -> None:
    caplog.set_level(logging.INFO, logger="specjax")
    for _ in range(2):
        pool_of(opened(folder) if has_cache else None).compile(show_progress=False)
    found = int(has_cache)
    assert "1 functions in" in caplog.text
    assert f"{1 - found} compiled, {found} read from the cache" in caplog.records[-1].message
