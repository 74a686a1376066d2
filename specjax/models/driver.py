"""Find the NVIDIA driver, and the reason if JAX does not use the GPU, without starting CUDA."""

import os
import re
from contextlib import suppress
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# maps each CUDA release that JAX is built for, newest first, to the lowest driver version
DRIVERS = {13: 580, 12: 525}


def driver_version() -> str:
    """Version of the NVIDIA driver, or an empty text if Linux reports none."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if found := re.search(r"Module.*?\s(\d+\.\d+[\d.]*)\s", text):
            return found[1]
    return ""


def newest_cuda(driver: str) -> int:
    """Newest CUDA release that this driver version supports; 0 if it is too old for all."""
    major = int(driver.partition(".")[0] or DRIVERS[13])  # unknown: assume a recent one
    return next((cuda for cuda, least in DRIVERS.items() if major >= least), 0)


def package_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    return None


def unused_gpu() -> str | None:
    """Explain why JAX does not use this machine's GPU, with a remedy; ``None`` without a GPU."""
    if not glob("/dev/nvidia[0-9]*"):
        return None
    newest = newest_cuda(driver := driver_version())
    plugins = (cuda for cuda in DRIVERS if package_version(f"jax-cuda{cuda}-plugin"))
    installed, command = next(plugins, 0), f"pip install -e '.[cuda{newest}]'"
    if not newest or installed > newest:
        wanted = installed or 12
        remedy = f"CUDA {wanted} in JAX needs driver {DRIVERS[wanted]} or newer; update the driver"
        if newest:
            remedy += f", or run: pip uninstall -y jax-cuda{installed}-plugin && {command}"
    elif not installed:
        remedy = f"JAX has no CUDA plugin; run: {command}"
    else:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        remedy = f"JAX cannot use it (CUDA_VISIBLE_DEVICES={shown!r}); for the reason run: "
        remedy += "JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'"
    return f"an NVIDIA GPU (driver {driver or 'unknown'}) is present, but {remedy}"
