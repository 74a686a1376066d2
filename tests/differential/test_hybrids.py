"""Engines for models with recurrent layers produce the tokens of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.testing import Files, check_tokens, letter_tokenizer
from specjax.testing.files import CONFIG, write_folder
from specjax.testing.models import PERTURBATION

from ..support.model_files import read_folder
from .rows import BATCHES, SEEN, Row, drafting, serving
from .trial import Reference, Trial

HEADS = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 16, "value_head_dim": 16}
ROWS: list[Row] = [
    ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
    ("NGRAM", "tree", "in turn", 16, "here", "adaptive", 3),
    ("NEXTN", "chain", "ahead", 4, "here", "fixed", 3),
    ("NEXTN", "tree", "in turn", 1, "here", "adaptive", 1),
    ("DSPARK", "chain", "ahead", 1, "here", "adaptive", 1),
    ("STANDALONE", "tree", "ahead", 4, "here", "fixed", 3),
    ("DFLASH", "chain", "in turn", 4, "here", "fixed", 1),
    ("EAGLE", "cut chain", "ahead", 1, "here", "adaptive", 3),
    ("P-EAGLE", "chain", "in turn", 4, "here", "fixed", 1),
]


def write_hybrid(path: Path, target: Path) -> Path:
    """Write the copying target with a recurrent layer, gates, and a layer that drafts.

    Half of the heads keep a state for hundreds of tokens. The draft layer normalises the last
    token's embedding, and adds the target's attention to it.
    """
    config, tensors = read_folder(target)
    config |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    config |= {f"linear_{name}": value for name, value in HEADS.items()}
    config |= {"layer_types": ["linear_attention", "full_attention"]}
    config |= {"partial_rotary_factor": 0.5}
    rng, size, dim = np.random.default_rng(3), CONFIG.hidden_size, CONFIG.head_dim

    def random(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    # norms add 1 to the stored scale
    named = {x: y - 1 if "norm" in x else y for x, y in tensors.items()}
    named = {x: y for x, y in named.items() if not x.startswith("model.layers.0.self_attn.")}
    at, channels, values = "model.layers.0.linear_attn.", 2 * 2 * 16 + 4 * 16, 4 * 16
    named |= {
        f"{at}in_proj_qkv.weight": random(channels, size),
        f"{at}in_proj_z.weight": random(values, size),
        f"{at}in_proj_a.weight": random(4, size),
        f"{at}in_proj_b.weight": random(4, size),
        f"{at}conv1d.weight": random(channels, 1, 4),
        f"{at}A_log": random(4),
        f"{at}dt_bias": np.array([-6, -5, -1, 1], np.float32),
        f"{at}norm.weight": np.ones(16, np.float32),
        f"{at}out_proj.weight": random(size, values, scale=8 * PERTURBATION),
    }
    at = "model.layers.1.self_attn."
    queries = tensors[f"{at}q_proj.weight"].reshape(-1, dim, size)
    both = np.concatenate([queries, random(*queries.shape, scale=3.0)], axis=1)
    named[f"{at}q_proj.weight"] = both.reshape(-1, size)
    named |= {f"{at}{x}_norm.weight": np.zeros(dim, np.float32) for x in "qk"}
    module = {x: y for x, y in named.items() if x.startswith("model.layers.1.")}
    named |= {x.replace("model.layers.1.", "mtp.layers.0."): y for x, y in module.items()}
    named["mtp.fc.weight"] = np.eye(size, 2 * size, dtype=np.float32)
    norms = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    named |= {f"mtp.{name}.weight": np.zeros(size, np.float32) for name in norms}
    return write_folder(path, config, named, letter_tokenizer())


@pytest.fixture(scope="module")
def hybrid(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("hybrids")
    return replace(files, target=write_hybrid(folder / "hybrid", files.target))


@pytest.fixture(scope="module")
def plain(hybrid: Files) -> Iterator[Reference]:
    reference = Reference.of(hybrid)
    yield reference
    reference.close()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN"])
def test_tokens_of_a_tree_are_those_of_dense_decoding(hybrid: Files, algorithm: str) -> None:
    """Plain decoding by full passes without a cache or kept states is independent of the engine."""
    shape: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
    if algorithm == "NEXTN":
        shape |= {"speculative_algorithm": algorithm, "draft": None}
    prompts = np.random.default_rng(0).integers(60, size=(2, 30)).tolist()
    with hybrid.engine(dtype="float32", **shape) as engine:
        assert check_tokens(engine, prompts, count=40) > 20


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "index", [0, 2, *(pytest.param(i, marks=pytest.mark.long) for i in (1, *range(3, len(ROWS))))]
)
def test_engines_equal_plain_decoding(hybrid, drafts, plain, index, device) -> None:
    row = ROWS[index]
    options = drafting(row, drafts) | serving(row)
    trial = Trial(hybrid, plain, np.random.default_rng(index), options)
    counts = trial.run(BATCHES)
    print(row, dict(counts))
    for seen in SEEN:
        # no state is kept where a cached text would start
        assert (counts[seen] > 0) == (seen != "cached tokens"), seen
