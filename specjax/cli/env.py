"""``specjax env``: the environment, for bug reports."""

import os
import platform
from typing import Any

import jax

from specjax.compiling.cache import open_compile_cache
from specjax.models.driver import driver_version, newest_cuda, package_version, unused_gpu
from specjax.runtime.runner_config import device_memory

PACKAGES = "specjax jax jaxlib flax numpy jax-cuda12-plugin jax-cuda13-plugin".split()
PREFIXES = ("JAX_", "XLA_", "SPECJAX_", "CUDA_VISIBLE_DEVICES")


def add_env_parser(commands: Any) -> None:
    text = "print versions, devices and settings for a bug report"
    parser = commands.add_parser("env", help=text, description=f"{text.capitalize()}.")
    parser.set_defaults(quiet=True)


def run_env() -> int:
    """Print one property per line, without the values of secrets."""
    print(f"Python: {platform.python_version()}")
    print(f"OS: {platform.platform()}, {os.cpu_count()} CPUs")
    for name in PACKAGES:
        if found := package_version(name):
            print(f"{name}: {found}")
    if driver := driver_version():
        print(f"NVIDIA driver: {driver}, for CUDA up to {newest_cuda(driver) or 'version 11'}")
    has_gpu = False
    try:
        for device in jax.devices():
            has_gpu |= device.platform == "gpu"
            memory = device_memory(device) / 1e9
            print(f"device {device.id}: {device.device_kind}, {memory:.2f} GB")
        if cache := open_compile_cache("auto"):
            sizes = [path.stat().st_size for path in cache.path.iterdir()]
            print(f"compile cache: {cache.path}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")
    except (RuntimeError, AssertionError) as error:  # the plugin is absent or fails
        print("devices: none:", " ".join(repr(error).split()))
    if not has_gpu and (reason := unused_gpu()):
        print(f"GPU: {reason}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            print(f"{name}: {'(set)' if name.endswith(('KEY', 'SECRET')) else value}")
    return 0
