"""What a compiled function depends on, as a key that needs no tracing."""

import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
from jax.stages import Lowered

FORMAT = 1
# libraries that choose or contain the code of a GPU executable
GPU_PACKAGES = tuple(
    f"{name}{suffix}"
    for name, suffixes in (
        ("jax-cuda12", ("-plugin", "-pjrt")),
        ("jax-cuda13", ("-plugin", "-pjrt")),
        ("nvidia-cublas", ("", "-cu12")),
        ("nvidia-cudnn", ("-cu12", "-cu13")),
        ("nvidia-cuda-nvcc", ("", "-cu12")),
        ("nvidia-cuda-runtime", ("", "-cu12")),
    )
    for suffix in suffixes
)
ENVIRONMENT_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TF_FORCE_UNIFIED_MEMORY")
# settings that change no executable: where caches lie, what is logged, which devices are seen
IRRELEVANT_SETTINGS = (
    "jax_array_garbage_collection_guard",
    "jax_compilation_cache",
    "jax_coordination",
    "jax_cuda_visible_devices",
    "jax_debug_log",
    "jax_distributed",
    "jax_dump",
    "jax_enable_compilation_cache",
    "jax_explain",
    "jax_log",
    "jax_no_",
    "jax_oneapi_visible_devices",
    "jax_persistent_cache",
    "jax_platform",
    "jax_pprint",
    "jax_raise_persistent",
    "jax_rocm_visible_devices",
    "jax_thread_guard",
    "jax_traceback",
    "jax_tracer_error",
    "jax_transfer_guard",
)


def environment() -> dict[str, str]:
    """Machine, libraries and settings, by name, as they are now."""
    facts = dict(_fixed_facts())
    for name in sorted(jax.config.values):  # type: ignore[attr-defined]
        if not name.startswith(IRRELEVANT_SETTINGS):
            facts[name] = repr(getattr(jax.config, name, None))
    flags = os.environ.get("XLA_FLAGS", "")
    facts["XLA_FLAGS"] = " ".join(flags.split())
    if flags and not flags.lstrip().startswith("-"):  # XLA reads a file of that name
        with suppress(OSError):
            facts["XLA_FLAGS file"] = Path(flags).read_text(errors="replace")
    for name in ENVIRONMENT_VARIABLES:
        facts[name] = os.environ.get(name, "")
    return facts


@functools.cache
def _fixed_facts() -> tuple[tuple[str, str], ...]:
    """What cannot change while the process runs."""
    device = jax.devices()[0]
    facts = {
        "format": str(FORMAT),
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "system": f"{platform.system()} {platform.machine()}",
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "flax": flax.__version__,
        "platform": device.platform,
        "runtime": " ".join(device.client.platform_version.split()),
        "device": device.device_kind,
        "devices": f"{len(jax.devices())}, {len(jax.local_devices())} of this process",
        "sources": source_digest(),
    }
    if device.platform == "cpu":
        facts["cpu"] = cpu_features()
    else:
        facts["driver"] = driver_version()
        for name in GPU_PACKAGES:
            with suppress(PackageNotFoundError):
                facts[name] = version(name)
    return tuple(facts.items())


def source_digest(roots: Sequence[str | Path] | None = None) -> str:
    """A hash of all Python sources below ``roots``; by default specjax with its kernels."""
    if roots is None:
        import specjax
        import specjax.kernels

        roots = [*specjax.__path__, *specjax.kernels.__path__]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(Path(root).rglob("*.py")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def cpu_features() -> str:
    """Model and instruction sets of the processor, as a hash where Linux lists them."""
    with suppress(OSError):
        kept = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts = sorted({line for line in lines if line.split("\t")[0].rstrip(" :") in kept})
        if facts:
            return hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return platform.processor()


def driver_version() -> str:
    """Version of the NVIDIA kernel driver, or ``unknown``."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    with suppress(OSError, AttributeError):
        import ctypes

        library = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if library.nvmlInit_v2() == 0:
            failed = library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
            library.nvmlShutdown()
            if not failed:
                return text.value.decode()
    return "unknown"


def describe_arguments(arguments: Any) -> list[str]:
    """Structure, shapes and dtypes of (abstract) arguments."""
    leaves, structure = jax.tree.flatten(arguments)
    lines = [str(structure)]
    for leaf in leaves:
        is_weak = getattr(leaf, "weak_type", False)
        placed = getattr(leaf, "sharding", None)
        lines.append(f"{leaf.dtype}{list(leaf.shape)} {is_weak} {placed}")
    return lines


def configuration_key(configuration: Sequence[Any], facts: Mapping[str, str] | None = None) -> str:
    """The key of what belongs to a configuration in this environment.

    Args:
        configuration: values whose ``repr`` says all about them, such as frozen dataclasses.
        facts: the environment; by default that of this process.

    Raises:
        ValueError: for a value whose ``repr`` is an address, which differs in each process.
    """
    text = repr(tuple(configuration))
    if " at 0x" in text:
        raise ValueError(f"configuration={text} has an address; give values with a repr")
    return digest_of({"environment": dict(facts or environment()), "configuration": text})


def function_key(
    configuration: str,
    key: Hashable,
    function: Any,
    arguments: Sequence[Any],
    options: Mapping[str, Any] | None,
) -> str:
    """The key of one compiled function.

    What the function closes over and which arguments it donates have no representation of their
    own: they follow from the sources, the configuration and ``key``.

    Args:
        configuration: a :func:`configuration_key`.
        key: the function's key in its pool.
        function: the jitted function; its name is part of the key.
        arguments: abstract arguments.
        options: options of the compiler.
    """
    names = [getattr(function, name, "") for name in ("__module__", "__qualname__", "__name__")]
    return digest_of(
        {
            "configuration": configuration,
            "key": repr(key),
            "function": names,
            "arguments": describe_arguments(tuple(arguments)),
            "options": sorted((name, repr(value)) for name, value in (options or {}).items()),
        }
    )


def lowered_key(key: Hashable, lowered: Lowered, options: Mapping[str, Any] | None) -> str | None:
    """The key of what is about to be compiled, whatever sources and configuration it came from.

    Equal keys mean equal executables: beside the module they cover what an entry holds and a module
    does not say, trees and unused arguments (of two functions that use one each of two equal
    arguments, the modules are the same).

    Args:
        key: the function's key in its pool.
        lowered: the function, lowered.
        options: options of the compiler.

    Returns:
        The key, or ``None`` where this JAX does not tell which arguments are unused.
    """
    lowering = getattr(lowered, "_lowering", None)
    used = getattr(lowering, "compile_args", {}).get("kept_var_idx")
    if used is None:
        return None
    facts = {name: fact for name, fact in environment().items() if name != "sources"}
    return digest_of(
        {
            "environment": facts,
            "key": repr(key),
            "module": lowered.as_text(),
            "arguments": [str(lowered.in_tree), *map(repr, jax.tree.leaves(lowered.args_info))],
            "results": [str(lowered.out_tree), *map(repr, jax.tree.leaves(lowered.out_info))],
            "used": sorted(used),
            "options": sorted((name, repr(value)) for name, value in (options or {}).items()),
        }
    )


def digest_of(value: Any) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
