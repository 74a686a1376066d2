"""A recurrent layer of Qwen3.5 against transformers, in float32."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax.kernels.delta_inputs import RequestRows  # noqa: E402
from specjax.kernels.delta_rule import DeltaPool, delta_replay  # noqa: E402

from specjax.checkpoints.tensors import in_memory, make_weight  # noqa: E402
from specjax.kv.recurrent import (  # noqa: E402
    DraftedStates,
    recur_in_order,
    recur_over_drafts,
)
from specjax.models.declare import request_shapes  # noqa: E402
from specjax.models.flat import recipes_of  # noqa: E402
from specjax.models.gated_delta import DeltaConfig, GatedDelta  # noqa: E402
from specjax.models.layers import LayerKind  # noqa: E402
from specjax.models.rope import RopeTables  # noqa: E402

from .jax_side import build, relative_error  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-5
HIDDEN, TAPS = 48, 4
CASES = {
    "odd": {"key_heads": 2, "value_heads": 6, "key_dim": 16, "value_dim": 8, "bias": 0.0},
    # a state halves in hundreds of rows, not in one
    "long": {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16, "bias": -5.0},
    "strong": {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 16, "bias": 4.0},
}


def make(key_heads, value_heads, key_dim, value_dim, bias, implementation="xla"):
    """The layer of transformers, and ours with the same weights."""
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": TAPS,
        "hidden_size": HIDDEN,
        "rms_norm_eps": 1e-6,
    }
    module = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet
    other = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    theirs = module(transformers.Qwen3_5TextConfig(**sizes, **other), 0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if name == "norm.weight":
                tensor.copy_(1 + 0.3 * noise)
            elif name == "dt_bias":
                tensor.copy_(bias + 0.5 * noise)
            else:
                tensor.copy_(noise * (0.5 if noise.ndim == 1 else 1.5 * noise.shape[-1] ** -0.5))
    config = DeltaConfig(
        model_type="test",
        vocab_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        **sizes,
    )
    kind = LayerKind.of(config, implementation=implementation)

    def network(config):
        return GatedDelta(config, kind, "")

    tensors = {f"linear_attn.{name}": x.numpy() for name, x in theirs.state_dict().items()}
    source, recipes = in_memory(tensors, Path("layer")), recipes_of(network, config)
    assert {part.name for x in recipes.values() for part in x.parts} == {*tensors}
    named = {name: make_weight(x, source, np.dtype(np.float32)) for name, x in recipes.items()}
    return theirs, build(partial(network, config), named)


class Session:
    """Passes of a layer over texts in slots, and transformers' outputs of whole texts."""

    def __init__(self, case: str, lengths: tuple[int, ...], **how: str) -> None:
        theirs, self.layer = make(**CASES[case], **how)
        self.how = {"implementation": how.get("implementation", "xla")}
        rng = np.random.default_rng(1)
        self.texts = [rng.normal(size=(n, HIDDEN)).astype(np.float32) for n in lengths]
        with torch.no_grad():
            self.expected = [theirs(torch.from_numpy(x)[None])[0].numpy() for x in self.texts]
        shapes = request_shapes([self.layer.cache], len(lengths) + 1)
        # slots are not cleared before a text starts
        self.pool = DeltaPool(*(jnp.full(x.shape, 7.0, x.dtype) for x in shapes))
        self.lengths = np.zeros(len(lengths), np.int32)

    def rows(self, counts) -> RequestRows:
        slots = np.arange(1, len(self.texts) + 1)
        sources = np.where(self.lengths > 0, slots, -1)
        starts = np.cumsum([0, *counts[:-1]])
        return RequestRows(*(jnp.asarray(x, jnp.int32) for x in (slots, sources, starts, counts)))

    def inputs(self, ends) -> jax.Array:
        pairs = zip(self.texts, self.lengths, ends, strict=True)
        return jnp.asarray(np.concatenate([x[start:end] for x, start, end in pairs]))[None]

    def run(self, cache, recur, x):
        out, cache = jax.jit(lambda layer, cache, x: layer(x, _ROPE, cache, 0, recur))(
            self.layer, cache, x
        )
        return np.asarray(out if out.ndim == 3 else out.sum(0))[0], cache

    def in_order(self, counts, **options) -> None:
        """Compute the next rows of each text, and compare outputs."""
        rows, total = self.rows(counts), int(sum(counts))
        recur = recur_in_order(rows, total, TAPS, **self.how, **options)
        ends = self.lengths + counts
        out, self.pool = self.run(self.pool, recur, self.inputs(ends))
        self.compare(out, counts, ends)

    def drafted(self, width: int, accepted) -> None:
        """Verify ``width`` rows of each text, compare them, and keep some."""
        counts = [width] * len(self.texts)
        rows, ends = self.rows(counts), self.lengths + width
        recur = recur_over_drafts(rows, sum(counts), TAPS, width, **self.how)
        states = DraftedStates.of(self.pool, sum(counts))
        out, states = self.run(states, recur, self.inputs(ends))
        self.compare(out, counts, ends)
        number = np.arange(width, dtype=np.int32)
        path = np.where(number < np.array(accepted)[:, None], number, -1)
        self.pool = delta_replay(*states, rows, jnp.asarray(path), **self.how)
        self.lengths += np.array(accepted, np.int32) - width

    def compare(self, out, counts, ends) -> None:
        expected = [x[end - n : end] for x, n, end in zip(self.expected, counts, ends, strict=True)]
        assert relative_error(out, np.concatenate(expected)) <= TOLERANCE
        self.lengths = np.asarray(ends, np.int32)


_ROPE = RopeTables(jnp.zeros(()), jnp.zeros(()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [64, 1])
def test_whole_texts(case, group):
    Session(case, (150, 1, 37)).in_order([150, 1, 37], group=group)


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_rounds(case):
    """Prompts in chunks, plain rounds, and rounds with drafts of which some are accepted."""
    session = Session(case, (170, 140))
    for counts in ([64, 37], [37, 64], [1, 2]):
        session.in_order(counts)
    for _ in range(3):
        session.in_order([1, 1], group=1)
    for width, accepted in ((4, (1, 4)), (8, (8, 3)), (1, (1, 1)), (5, (2, 0)), (6, (6, 6))):
        session.drafted(width, accepted)
    session.in_order([16, 10])


@pytest.mark.parametrize("case", ["long", "strong"])
def test_kernels(case):
    session = Session(case, (50, 40), implementation="interpret")
    session.in_order([37, 20])
    session.drafted(4, (2, 4))
    session.in_order([1, 1], group=1)
