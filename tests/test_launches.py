"""Figures of a profile: by hand, and of a real one."""

import jax
import jax.numpy as jnp
import pytest

from specjax.launches import LAUNCH_CALLS, profile_rounds, read_launches


def named(kind: str, name: str, **keys: int) -> dict:
    return {"ph": "M", "name": kind, "args": {"name": name}, **keys}


def event(name: str, pid: int, tid: int, dur: float = 1.0) -> dict:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": 0.0, "dur": dur}


EVENTS = [
    named("process_name", "/device:GPU:0", pid=1),
    named("process_name", "/host:CPU", pid=2),
    named("thread_name", "Stream #17", pid=1, tid=5),
    named("thread_name", "XLA Modules", pid=1, tid=6),
    *[event("gemm", 1, 5, 30.0)] * 6,
    *[event("norm", 1, 5, 4.0)] * 2,
    event("jit_round", 1, 6, 500.0),  # spans what is counted already
    *[event("cuGraphLaunch", 2, 9)] * 2,
    event("cuLaunchKernel", 2, 9),
    event("cuMemcpyDtoHAsync", 2, 9),
    event("cuGraphLaunch", 1, 5, 0.5),
]


def test_launches_are_those_of_one_round():
    found = read_launches(EVENTS, 2)
    assert found.kernels == {"gemm": 3.0, "norm": 1.0, "cuGraphLaunch": 0.5}
    assert found.microseconds == {"gemm": 90.0, "norm": 4.0, "cuGraphLaunch": 0.25}
    assert found.calls == {"cuGraphLaunch": 1.0, "cuLaunchKernel": 0.5}
    assert found.busy == pytest.approx(0.09425)
    lines = found.table(num_rows=1).splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["kernel", "gemm"]
    assert lines[2].split() == ["94.2", "4.5", "all", "3"]
    assert lines[3] == "driver calls a round: 1.0 cuGraphLaunch, 0.5 cuLaunchKernel"
    assert "none seen" in read_launches([], 1).table()


@pytest.mark.parametrize(
    "on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_a_real_profile(on_gpu):
    double = jax.jit(lambda x: x + x)
    x = jnp.ones(1 << 16)
    double(x).block_until_ready()
    found = profile_rounds(lambda: [double(x) for _ in range(4)][-1].block_until_ready(), 4)
    if on_gpu:
        assert sum(found.kernels.values()) == 1.0
        assert 0 < found.busy < 1
        assert found.calls
        assert set(found.calls) <= set(LAUNCH_CALLS)
    else:
        assert found.kernels == found.calls == {}
