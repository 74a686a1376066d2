"""Values of MXFP4 against those that transformers dequantises."""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specjax.kernels import mxfp4  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

pytestmark = pytest.mark.parity


def test_values_are_equal_to_the_bit() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(256, size=(3, 5, 90, 16), dtype=np.uint8)
    scales = rng.integers(3, 129, (3, 5, 90), np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    packed = jnp.asarray(mxfp4.pack(blocks)), jnp.asarray(mxfp4.pack_scales(scales))
    ours = mxfp4.unpacked(*packed, 90 * 32).astype("bfloat16")
    expected = theirs.transpose(1, 2).contiguous().view(torch.int16).numpy()  # it is [E, in, out]
    np.testing.assert_array_equal(np.asarray(ours).view(np.int16), expected)
