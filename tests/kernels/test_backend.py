"""The wrapper around the Triton lowering."""

import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.kernels import backend

from ..support.lowering import TRITON_CALL, lower_for_cuda
from .runs import RUNS, run_jitted

KERNELS = Path(__file__).parents[2] / "kernels"


def specjax_double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def double(x, **options):
    return backend.triton_call(
        specjax_double,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        num_warps=1,
        num_stages=1,
        **options,
    )(x)


def test_only_the_backend_names_the_triton_module() -> None:
    users = {path.name for path in KERNELS.glob("*.py") if "triton." in path.read_text("utf-8")}
    assert users == {"backend.py"}


def test_call_runs_in_the_interpreter() -> None:
    x = jnp.arange(8, dtype=jnp.int32)
    np.testing.assert_array_equal(double(x, implementation="interpret"), 2 * np.arange(8))


def test_call_lowers_through_triton_under_the_name_of_the_body() -> None:
    text = lower_for_cuda(lambda x: double(x, implementation="pallas"), jnp.zeros(8, jnp.int32))
    assert TRITON_CALL in text
    assert "specjax_double" in text


def specjax_widen(x_ref, out_ref, *, implementation):
    out_ref[...] = backend.widen(x_ref[...], out_ref.dtype, implementation)


def widened(x, implementation):
    return backend.triton_call(
        partial(specjax_widen, implementation=implementation),
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        num_warps=1,
        implementation=implementation,
    )(x)


@pytest.mark.parametrize("run", RUNS[1:])
def test_values_of_e4m3_stay_as_they_are(run) -> None:
    """Subnormal ones and both zeros too; e4m3 lacks infinities."""
    bits = np.arange(256, dtype=np.uint8)
    values = bits[(bits & 0x7F) != 0x7F]
    values = np.resize(values, 256).view(jnp.float8_e4m3fn)
    got = run_jitted(widened, run, values)
    np.testing.assert_array_equal(got.astype(np.float32), values.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(values))


def test_values_of_e4m3_are_converted_by_own_instructions() -> None:
    values = jnp.zeros(256, jnp.float8_e4m3fn)
    text = lower_for_cuda(partial(widened, implementation="pallas"), values)
    assert TRITON_CALL in text
    assert "fma.rn.bf16x2" in text


def test_only_the_one_deprecation_is_silenced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        double(jnp.zeros(8, jnp.int32), implementation="interpret")
        message = "The Pallas Triton backend is deprecated and so on"
        warnings.warn(message, DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="another"):
            warnings.warn("another", DeprecationWarning, stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn(message, UserWarning, stacklevel=1)


@pytest.mark.parametrize(
    ("platform", "options", "expected"),
    [
        ("cpu", {}, "xla"),
        ("cpu", {"is_attention": True, "head_dim": 64}, "chunked"),
        ("gpu", {}, "pallas"),
        ("gpu", {"is_attention": True, "head_dim": 128}, "pallas"),
        ("gpu", {"is_attention": True, "head_dim": 80}, "pallas"),
        ("gpu", {"is_attention": True, "head_dim": 72}, "xla"),
        ("gpu", {"implementation": "xla", "is_attention": True}, "xla"),
        ("gpu", {"implementation": "chunked"}, "xla"),
        ("cpu", {"implementation": "pallas", "head_dim": 80}, "pallas"),
    ],
)
def test_choice_of_implementation(monkeypatch, platform, options, expected) -> None:
    """An explicit name is used as given; otherwise the platform and head dim decide."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert backend.resolve(**options) == expected


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mosaic' must be one of .*'pallas', 'interpret'"):
        backend.resolve("mosaic")


def test_equal_options_of_different_types_make_different_kernels() -> None:
    def scaled(x_ref, out_ref, *, scale):
        out_ref[...] = x_ref[...] * 2 if isinstance(scale, int) else x_ref[...] * 3

    def call(scale, *args):
        return backend.triton_call(
            partial(scaled, *args, scale=scale),
            grid=(1,),
            out_shape=jax.ShapeDtypeStruct((4,), jnp.float32),
            num_warps=1,
            num_stages=1,
            implementation="interpret",
        )

    assert call(2) is call(2)
    x = jnp.ones(4)
    assert (call(2)(x).tolist(), call(2.0)(x).tolist()) == ([2.0] * 4, [3.0] * 4)
    with pytest.raises(ValueError, match=r"options \(5,\) of scaled by keyword"):
        call(2, 5)


def test_equal_calls_of_a_module_share_their_lowering() -> None:
    def calls(x, y):
        for _ in range(8):
            x, y = double(x, implementation="pallas"), double(y, implementation="pallas")
        return x, y

    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (8, 16)]
    # jax lowers the first call separately from the others
    assert lower_for_cuda(calls, *shapes).count(TRITON_CALL) <= 2 * len(shapes)
