"""Bytes of large models on each device of a mesh, without weights."""

import jax
import pytest

from specjax.config import ModelConfig
from specjax.models.declare import pool_shapes
from specjax.models.experts import MixtureConfig
from specjax.models.mesh import refusals
from specjax.models.placement import Placement
from specjax.speculative.algorithm import PLAIN

SHAPES = {
    "Llama-3.1-8B": ("llama", 4096, 32, 32, 14336, 128256),
    "Qwen3-32B": ("qwen3", 5120, 64, 64, 25600, 151936),
    "Llama-3.1-70B": ("llama", 8192, 64, 80, 28672, 128256),
}
COUNTS = (1, 2, 4, 8)
# GB (1e9 bytes) in bfloat16, with whole embeddings, by number of devices; and bytes of a token's KV
EXPECTED = {
    "Llama-3.1-8B": ((16.1, 8.56, 4.80, 2.93), 131_072),
    "Qwen3-32B": ((65.5, 33.5, 17.6, 9.55), 262_144),
    "Llama-3.1-70B": ((141, 71.6, 36.9, 19.5), 327_680),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_device(name: str) -> None:
    family, hidden, heads, layers, inner, vocab = SHAPES[name]
    config = ModelConfig(
        model_type=family,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        num_layers=layers,
        intermediate_size=inner,
        vocab_size=vocab,
        qk_norm=family == "qwen3",
        dtype="bfloat16",
    )
    embedding = 2 * vocab * hidden
    for count, expected in zip(COUNTS, EXPECTED[name][0], strict=True):
        assert not list(refusals(config, (), count))
        # devices may stand for several, because nothing is put there
        place = Placement((jax.devices() * 2)[:count])
        networks = PLAIN.networks(config, placement=place)
        assert networks.weight_bytes / 1e9 == pytest.approx(expected, rel=0.01)
        if count > 1:  # norms of layers take little
            assert networks.replicated_bytes == pytest.approx(embedding, rel=0.002)
        (pool,) = place.abstract(pool_shapes(networks.target.caches, (1,)), 3)
        token = jax.ShapeDtypeStruct(pool.sharding.shard_shape(pool.shape), pool.dtype)
        assert token.size * token.dtype.itemsize == EXPECTED[name][1] // count


@pytest.mark.slow
def test_bytes_of_a_mixture_with_fewer_kv_heads_than_devices() -> None:
    """Qwen3-235B-A22B: 470 GB, of which the experts are 454."""
    config = MixtureConfig(
        model_type="qwen3_moe",
        hidden_size=4096,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        num_layers=94,
        intermediate_size=12288,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        vocab_size=151936,
        qk_norm=True,
        dtype="bfloat16",
    )
    embedding, routers = 2 * 151936 * 4096, 2 * 94 * 128 * 4096
    experts, outputs = 2 * 94 * 128 * 3 * 4096 * 1536, 2 * 94 * 64 * 128 * 4096
    for count in COUNTS:
        qkv = 2 * 94 * 4096 * 128 * (64 + 2 * max(4, count))
        expected = (experts + outputs + qkv + embedding) / count + embedding + routers
        place = Placement((jax.devices() * 2)[:count])
        networks = PLAIN.networks(config, placement=place)
        assert not list(refusals(config, (), count))
        assert networks.weight_bytes == pytest.approx(expected, rel=0.001)
        if count > 1:
            assert networks.replicated_bytes == pytest.approx(embedding + routers, rel=0.002)
