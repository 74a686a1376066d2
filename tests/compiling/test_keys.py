"""Everything that changes an executable changes its key; nothing else does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.compiling import cache
from specjax.compiling.cache import CompileCache
from specjax.testing import TARGET


def abstract(*shape: int, dtype=jnp.float32, **options) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def triple(x: jax.Array) -> jax.Array:
    return 3 * x


def key_of(*facts, devices=(), **changes) -> str:
    given = {
        "label": "round 3 1",
        "function": jax.jit(double),
        "arguments": ((abstract(3), abstract(2)),),
        "options": {"flag": "1"},
    } | changes
    # nothing is read or written, so any path works
    return CompileCache("unused", facts, devices).key(**given)


def test_a_key_is_stable_and_tells_the_label() -> None:
    assert key_of() == key_of()
    assert key_of(arguments=[(abstract(3), abstract(2))]) == key_of()
    assert key_of().startswith("round-3-1-")


@pytest.mark.parametrize(
    "change",
    [
        {"label": "round 3 2"},
        {"function": jax.jit(triple)},
        {"arguments": ((abstract(4), abstract(2)),)},
        {"arguments": ((abstract(3, dtype=jnp.bfloat16), abstract(2)),)},
        {"arguments": ((abstract(3, weak_type=True), abstract(2)),)},
        {"arguments": (abstract(3), abstract(2))},
        {"arguments": ([abstract(3), abstract(2)],)},
        {"options": None},
        {"options": {"flag": "2"}},
        {"options": {"flag": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_changes_a_key(change) -> None:
    assert key_of(**change) != key_of()


def test_the_configuration_is_in_the_key() -> None:
    key = key_of(TARGET, None, "xla")
    assert key == key_of(dataclasses.replace(TARGET), None, "xla")
    assert key != key_of(dataclasses.replace(TARGET, rope_theta=TARGET.rope_theta + 1), None, "xla")
    assert key != key_of(TARGET, None, "pallas")
    assert key != key_of(TARGET, None, "xla", "plugin 1.0 0f3a")


def test_an_address_is_no_configuration() -> None:
    with pytest.raises(ValueError, match="contains a memory address"):
        key_of(object())


def test_the_environment_is_in_the_key(monkeypatch) -> None:
    before, facts = key_of(), cache.environment(jax.devices()[:1])
    names = {"jax", "jaxlib", "flax", "runtime", "devices", "sources", "python", "XLA_FLAGS"}
    assert names <= set(facts)
    assert "cpu" in facts or jax.default_backend() != "cpu"
    assert "cpu" in facts["devices"].lower() or jax.default_backend() != "cpu"
    monkeypatch.setattr(cache, "environment", lambda _: facts | {"sources": "changed"})
    assert key_of() != before


def test_flags_are_read_again(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before = key_of()
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1  --xla_two=2")
    with_flags = key_of()
    assert with_flags != before
    monkeypatch.setenv("XLA_FLAGS", " --xla_one=1 --xla_two=2")
    assert key_of() == with_flags
    path = tmp_path / "flags"
    path.write_text("--xla_one=1")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    in_file = key_of()
    path.write_text("--xla_one=2")
    assert key_of() != in_file


def test_settings_of_jax_that_change_code_are_in_the_key() -> None:
    before = key_of()
    with jax.default_matmul_precision("highest"):
        assert key_of() != before
    with jax.debug_nans(True):
        assert key_of() != before
    assert key_of() == before


def test_settings_that_change_no_code_are_not() -> None:
    before = key_of()
    with jax.log_compiles(True), jax.transfer_guard("allow"):
        assert key_of() == before


def test_a_changed_added_or_renamed_source_changes_the_digest(tmp_path) -> None:
    def digest() -> str:
        cache.source_digest.cache_clear()
        return cache.source_digest(str(tmp_path))

    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("not code")
    digests = [digest()]
    (tmp_path / "notes.txt").write_text("still not code")
    assert digest() == digests[0]
    (tmp_path / "a.py").write_text("x = 2")
    digests.append(digest())
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("")
    digests.append(digest())
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    digests.append(digest())
    assert len(set(digests)) == 4


def test_the_digest_covers_the_kernels(monkeypatch, tmp_path) -> None:
    import specjax.kernels

    before = cache.source_digest()
    (tmp_path / "kernel.py").write_text("x = 1")
    monkeypatch.setattr(specjax.kernels, "__path__", [str(tmp_path)])
    cache.source_digest.cache_clear()
    assert cache.source_digest() != before
    cache.source_digest.cache_clear()
