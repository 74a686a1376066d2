"""What compiled functions depend on, as text that needs no tracing."""

import functools
import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "flax")
# of JAX's settings those that change compiled code
SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_optimization_level",
    "jax_pallas_use_mosaic_gpu",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
)


def environment(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Devices, libraries, sources and settings, by name, as they are now."""
    facts = {
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
        "runtime": " ".join(devices[0].client.platform_version.split()),
        "devices": f"{[(d.id, d.device_kind) for d in devices]} of {len(jax.devices())}",
        "sources": source_digest(),
        "XLA_FLAGS": _xla_flags(),
    }
    if devices[0].platform == "cpu":
        facts["cpu"] = _cpu_features()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {name: repr(getattr(jax.config, name, None)) for name in SETTINGS}


@functools.cache
def source_digest(*roots: str) -> str:
    """A hash of all Python sources below ``roots``; by default specjax with its kernels."""
    import specjax
    import specjax.kernels

    digest = hashlib.sha256()
    for root in roots or (*specjax.__path__, *specjax.kernels.__path__):
        for path in sorted(Path(root).rglob("*.py")):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(root)} {len(data)}\n".encode())
            digest.update(data)
    return digest.hexdigest()


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA reads a file of that name
        with suppress(OSError):
            flags = Path(flags).read_text(errors="replace")
    return " ".join(flags.split())


def _cpu_features() -> str:
    """Model and instruction sets of the processor, where Linux lists them."""
    with suppress(OSError):
        names = ("model name", "flags", "Features", "CPU")
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return digest_of(sorted({line for line in lines if line.startswith(names)}))
    return platform.processor()


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
