"""The limits of the kernels of deterministic inference (``invariant_*.py``)."""

from collections.abc import Iterator

import jax
from specjax.kernels.invariant_attention import HEAD_DIMS, MAX_ROWS

from specjax.config import TransformerConfig

OPTION = "enable_deterministic_inference=True"


def refusals(model: TransformerConfig, device: jax.Device, *, deterministic: bool) -> Iterator[str]:
    """Why the kernels cannot run a model on a device."""
    if not deterministic:
        return
    if device.platform == "cpu":
        yield f"{OPTION} needs a GPU"
    if model.dtype != "bfloat16":
        yield f"{OPTION} needs dtype='bfloat16'; the model has {model.dtype}"
    if model.quantization is not None:
        yield f"{OPTION} does not support quantised matrices; the model has {model.quantization}"
    for dim in {model.head_dim, getattr(model, "global_head_dim", model.head_dim)}:
        if dim not in HEAD_DIMS:
            dims = " or ".join(map(str, HEAD_DIMS))
            yield f"{OPTION} needs a head dim of {dims}, not {dim}"
    if model.num_heads > MAX_ROWS * model.num_kv_heads:
        heads = f"num_heads={model.num_heads} and num_key_value_heads={model.num_kv_heads}"
        yield f"{OPTION} needs at most {MAX_ROWS} query heads per KV head, not {heads}"
    if model.hidden_size % 16 or model.intermediate_size % 16:
        sizes = f"{model.hidden_size} and intermediate_size={model.intermediate_size}"
        yield f"{OPTION} needs multiples of 16 as hidden_size={sizes}"
