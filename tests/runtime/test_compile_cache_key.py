"""Everything that changes an executable changes its key; nothing else does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.runtime import cache_key

from ..tiny import TARGET


def abstract(*shape: int, dtype=jnp.float32, **options) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, **options)


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def triple(x: jax.Array) -> jax.Array:
    return 3 * x


def key_of(**changes) -> str:
    given = {
        "configuration": "c",
        "key": ("round", 3, 1),
        "function": jax.jit(double),
        "arguments": ((abstract(3), abstract(2)),),
        "options": {"flag": "1"},
    } | changes
    return cache_key.function_key(**given)


def test_a_function_key_is_stable() -> None:
    assert key_of() == key_of()
    assert key_of(arguments=[(abstract(3), abstract(2))]) == key_of()


@pytest.mark.parametrize(
    "change",
    [
        {"configuration": "d"},
        {"key": ("round", 3, 2)},
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
    ids=str,
)
def test_every_part_changes_a_function_key(change) -> None:
    assert key_of(**change) != key_of()


def test_the_configuration_is_in_the_key() -> None:
    key = cache_key.configuration_key((TARGET, None, "xla"))
    assert key == cache_key.configuration_key((dataclasses.replace(TARGET), None, "xla"))
    other = dataclasses.replace(TARGET, rope_theta=TARGET.rope_theta + 1)
    assert key != cache_key.configuration_key((other, None, "xla"))
    assert key != cache_key.configuration_key((TARGET, None, "pallas"))


def test_an_address_is_no_configuration() -> None:
    with pytest.raises(ValueError, match="has an address"):
        cache_key.configuration_key((object(),))


@pytest.mark.parametrize("name", [*dict(cache_key._fixed_facts()), "XLA_FLAGS"])
def test_every_fact_is_in_the_key(name) -> None:
    facts = cache_key.environment()
    assert name in facts
    changed = facts | {name: facts[name] + "x"}
    assert cache_key.configuration_key((), changed) != cache_key.configuration_key((), facts)
    assert cache_key.configuration_key(()) == cache_key.configuration_key((), facts)


def test_the_facts_name_what_compiled_code_depends_on() -> None:
    names = {"jax", "jaxlib", "runtime", "device", "devices", "sources", "XLA_FLAGS"}
    assert names <= set(cache_key.environment())
    assert "cpu" in cache_key.environment() or jax.default_backend() != "cpu"


def test_flags_are_read_anew(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before = cache_key.configuration_key(())
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1  --xla_two=2")
    with_flags = cache_key.configuration_key(())
    assert with_flags != before
    monkeypatch.setenv("XLA_FLAGS", " --xla_one=1 --xla_two=2")
    assert cache_key.configuration_key(()) == with_flags
    path = tmp_path / "flags"
    path.write_text("--xla_one=1")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    in_file = cache_key.configuration_key(())
    path.write_text("--xla_one=2")
    assert cache_key.configuration_key(()) != in_file


def test_settings_of_jax_that_change_code_are_in_the_key() -> None:
    before = cache_key.configuration_key(())
    with jax.default_matmul_precision("highest"):
        assert cache_key.configuration_key(()) != before
    with jax.debug_nans(True):
        assert cache_key.configuration_key(()) != before
    assert cache_key.configuration_key(()) == before


def test_settings_that_change_no_code_are_not(tmp_path) -> None:
    before = cache_key.configuration_key(())
    with jax.log_compiles(True), jax.transfer_guard("allow"):
        assert cache_key.configuration_key(()) == before
    assert not any("cache_dir" in name for name in cache_key.environment())


def test_a_changed_added_or_renamed_source_changes_the_digest(tmp_path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("not code")
    digests = [cache_key.source_digest([tmp_path])]
    (tmp_path / "notes.txt").write_text("still not code")
    assert cache_key.source_digest([tmp_path]) == digests[0]
    (tmp_path / "a.py").write_text("x = 2")
    digests.append(cache_key.source_digest([tmp_path]))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("")
    digests.append(cache_key.source_digest([tmp_path]))
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    digests.append(cache_key.source_digest([tmp_path]))
    assert len(set(digests)) == 4


def test_the_digest_covers_the_kernels(monkeypatch, tmp_path) -> None:
    import specjax.kernels

    before = cache_key.source_digest()
    (tmp_path / "kernel.py").write_text("x = 1")
    monkeypatch.setattr(specjax.kernels, "__path__", [str(tmp_path)])
    assert cache_key.source_digest() != before


def lowered(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments)


def test_a_lowered_key_tells_apart_what_a_module_does_not() -> None:
    one = lowered(lambda a, b: a + 1, abstract(3), abstract(3))
    other = lowered(lambda a, b: b + 1, abstract(3), abstract(3))
    listed = lowered(lambda a, b: [a + 1], abstract(3), abstract(3))
    donated = lowered(lambda a, b: a + 1, abstract(3), abstract(3), donate_argnums=1)
    keys = [cache_key.lowered_key("k", each, None) for each in (one, other, listed, donated)]
    assert one.as_text() == other.as_text()  # or the test shows nothing
    assert None not in keys
    assert len(set(keys)) == 4
    assert cache_key.lowered_key("k", one, {"flag": "1"}) != keys[0]
    assert cache_key.lowered_key("l", one, None) != keys[0]


def test_a_lowered_key_does_not_depend_on_sources(monkeypatch) -> None:
    before = cache_key.lowered_key("k", lowered(double, abstract(3)), None)
    facts = tuple((dict(cache_key._fixed_facts()) | {"sources": "others"}).items())
    monkeypatch.setattr(cache_key, "_fixed_facts", lambda: facts)
    assert cache_key.environment()["sources"] == "others"
    assert cache_key.lowered_key("k", lowered(double, abstract(3)), None) == before
