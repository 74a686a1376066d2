"""What is said if JAX does not use a GPU that is present."""

import logging
import os

import jax
import pytest

from specjax.models import placement as driver
from specjax.models.placement import Placement

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (me)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 2023\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make the machine have a GPU with a driver, and packages of JAX for CUDA releases."""

    def make(version: str, *packages: int, devices: int = 1) -> str | None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(driver, "glob", lambda _: ["/dev/nvidia0"] * devices)
        monkeypatch.setattr(driver, "driver_version", lambda: version)
        plugins = {f"jax-cuda{cuda}-plugin" for cuda in packages}
        monkeypatch.setattr(driver, "package_version", lambda name: name in plugins or None)
        return driver.unused_gpu()

    return make


@pytest.mark.parametrize(
    ("version", "packages", "remedy"),
    [
        ("580.159.04", (), "run: pip install -e '.[cuda13]'"),
        ("", (), "run: pip install -e '.[cuda13]'"),
        ("535.104.05", (), "run: pip install -e '.[cuda12]'"),
        (
            "535.104.05",
            (13,),
            "needs driver 580 or newer; update the driver, or run: pip",
        ),
        ("470.10", (), "CUDA 12 in JAX needs driver 525 or newer; update the driver"),
        ("470.10", (12,), "CUDA 12 in JAX needs driver 525 or newer; update the driver"),
        ("580.10", (13,), "JAX cannot use it (CUDA_VISIBLE_DEVICES=None); for the reason run: "),
    ],
)
def test_the_remedy_fits_the_driver(machine, version, packages, remedy) -> None:
    assert remedy in machine(version, *packages)


def test_hidden_devices_are_named(machine, monkeypatch) -> None:
    machine("580.10", 13)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES='')" in driver.unused_gpu()


def test_a_machine_without_a_gpu_has_no_remedy(machine) -> None:
    assert machine("580.10", devices=0) is None


def test_an_engine_warns_unless_the_cpu_is_chosen(machine, monkeypatch, caplog) -> None:
    machine("580.10")
    for platforms, count in (("cpu", 0), (None, 1)):
        monkeypatch.setattr(type(jax.config), "jax_platforms", platforms)
        with caplog.at_level(logging.WARNING):
            assert Placement.on().on_cpu
        assert caplog.text.count("running on the CPU: an NVIDIA GPU (driver 580.10)") == count


def test_threads_of_the_runtime_follow_the_quota(monkeypatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "5")
    monkeypatch.setattr(driver, "usable_cores", lambda: 3)
    for before, after in (("5", "5"), (None, "3")):
        if before is None:
            monkeypatch.delenv("PJRT_NPROC")
        Placement.on()
        assert os.environ["PJRT_NPROC"] == after


@pytest.mark.parametrize(
    ("text", "found"), [(OPEN, "580.159.04"), (CLOSED, "535.104.05"), ("", "")]
)
def test_the_version_is_that_of_the_kernel_module(monkeypatch, text, found) -> None:
    monkeypatch.setattr(driver.Path, "read_text", lambda *_, **__: text)
    assert driver.driver_version() == found
