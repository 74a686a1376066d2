"""Figures of a profile: by hand, and of a real one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ..loading import load_bench

launches = load_bench("launches")


def line(name: str, *names_and_ns: tuple[str, float]) -> SimpleNamespace:
    events = [SimpleNamespace(name=name, duration_ns=ns) for name, ns in names_and_ns]
    return SimpleNamespace(name=name, events=events)


STREAM = [("gemm", 30e3)] * 6 + [("norm", 4e3)] * 2 + [("MemcpyD2H", 500.0)]
PLANES = [
    SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("Stream #17(Compute)", *STREAM),
            line("XLA Modules", ("jit_round", 500e3)),  # spans what is counted already
        ],
    ),
    SimpleNamespace(name="/host:CPU", lines=[line("Stream of nothing", ("gemm", 1.0))]),
]


def test_launches_are_those_of_one_round():
    kernels, microseconds = launches.read_launches(PLANES, 2)
    assert kernels == {"gemm": 3.0, "norm": 1.0, "MemcpyD2H": 0.5}
    assert microseconds == {"gemm": 90.0, "norm": 4.0, "MemcpyD2H": 0.25}
    assert microseconds.total() == pytest.approx(94.25)
    lines = launches.table(kernels, microseconds, num_rows=1).splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["kernel", "gemm"]
    assert lines[2].split() == ["94.2", "4.5", "all", "3"]
    assert len(launches.table(*launches.read_launches([], 1)).splitlines()) == 2


@pytest.mark.parametrize(
    "on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_a_real_profile(on_gpu):
    double = jax.jit(lambda x: x + x)
    x = jnp.ones(1 << 16)
    double(x).block_until_ready()
    kernels, microseconds = launches.profile_rounds(
        lambda: [double(x) for _ in range(4)][-1].block_until_ready(), 4
    )
    if on_gpu:
        assert sum(kernels.values()) == 1.0
        assert 0 < microseconds.total() < 1000
    else:
        assert kernels == {}
