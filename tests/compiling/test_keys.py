"""Everything that changes an executable changes its key; nothing else does."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.compiling import keys

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
    return keys.function_key(**given)


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
    key = keys.configuration_key((TARGET, None, "xla"))
    assert key == keys.configuration_key((dataclasses.replace(TARGET), None, "xla"))
    other = dataclasses.replace(TARGET, rope_theta=TARGET.rope_theta + 1)
    assert key != keys.configuration_key((other, None, "xla"))
    assert key != keys.configuration_key((TARGET, None, "pallas"))


def test_an_address_is_no_configuration() -> None:
    with pytest.raises(ValueError, match="has an address"):
        keys.configuration_key((object(),))


@pytest.mark.parametrize("name", [*dict(keys._fixed_facts()), "XLA_FLAGS"])
def test_every_fact_is_in_the_key(name) -> None:
    facts = keys.environment()
    assert name in facts
    changed = facts | {name: facts[name] + "x"}
    assert keys.configuration_key((), changed) != keys.configuration_key((), facts)
    assert keys.configuration_key(()) == keys.configuration_key((), facts)


def test_the_facts_name_what_compiled_code_depends_on() -> None:
    names = {"jax", "jaxlib", "runtime", "device", "devices", "sources", "XLA_FLAGS"}
    assert names <= set(keys.environment())
    assert "cpu" in keys.environment() or jax.default_backend() != "cpu"


def test_flags_are_read_anew(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before = keys.configuration_key(())
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1  --xla_two=2")
    with_flags = keys.configuration_key(())
    assert with_flags != before
    monkeypatch.setenv("XLA_FLAGS", " --xla_one=1 --xla_two=2")
    assert keys.configuration_key(()) == with_flags
    path = tmp_path / "flags"
    path.write_text("--xla_one=1")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    in_file = keys.configuration_key(())
    path.write_text("--xla_one=2")
    assert keys.configuration_key(()) != in_file


def test_settings_of_jax_that_change_code_are_in_the_key() -> None:
    before = keys.configuration_key(())
    with jax.default_matmul_precision("highest"):
        assert keys.configuration_key(()) != before
    with jax.debug_nans(True):
        assert keys.configuration_key(()) != before
    assert keys.configuration_key(()) == before


def test_settings_that_change_no_code_are_not(tmp_path) -> None:
    before = keys.configuration_key(())
    with jax.log_compiles(True), jax.transfer_guard("allow"):
        assert keys.configuration_key(()) == before
    assert not any("cache_dir" in name for name in keys.environment())


def test_a_changed_added_or_renamed_source_changes_the_digest(tmp_path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("not code")
    digests = [keys.source_digest([tmp_path])]
    (tmp_path / "notes.txt").write_text("still not code")
    assert keys.source_digest([tmp_path]) == digests[0]
    (tmp_path / "a.py").write_text("x = 2")
    digests.append(keys.source_digest([tmp_path]))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("")
    digests.append(keys.source_digest([tmp_path]))
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    digests.append(keys.source_digest([tmp_path]))
    assert len(set(digests)) == 4


def test_the_digest_covers_the_kernels(monkeypatch, tmp_path) -> None:
    import specjax.kernels

    before = keys.source_digest()
    (tmp_path / "kernel.py").write_text("x = 1")
    monkeypatch.setattr(specjax.kernels, "__path__", [str(tmp_path)])
    assert keys.source_digest() != before


def lowered(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments)


def test_a_lowered_key_tells_apart_what_a_module_does_not() -> None:
    one = lowered(lambda a, b: a + 1, abstract(3), abstract(3))
    other = lowered(lambda a, b: b + 1, abstract(3), abstract(3))
    listed = lowered(lambda a, b: [a + 1], abstract(3), abstract(3))
    donated = lowered(lambda a, b: a + 1, abstract(3), abstract(3), donate_argnums=1)
    keys = [keys.lowered_key("k", each, None) for each in (one, other, listed, donated)]
    assert one.as_text() == other.as_text()  # or the test shows nothing
    assert None not in keys
    assert len(set(keys)) == 4
    assert keys.lowered_key("k", one, {"flag": "1"}) != keys[0]
    assert keys.lowered_key("l", one, None) != keys[0]


def test_a_lowered_key_does_not_depend_on_sources(monkeypatch) -> None:
    before = keys.lowered_key("k", lowered(double, abstract(3)), None)
    facts = tuple((dict(keys._fixed_facts()) | {"sources": "others"}).items())
    monkeypatch.setattr(keys, "_fixed_facts", lambda: facts)
    assert keys.environment()["sources"] == "others"
    assert keys.lowered_key("k", lowered(double, abstract(3)), None) == before
