"""Engines for models with recurrent layers: plans, refusals and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints import export_fp8, open_target
from specjax.engine.args import EngineArgs
from specjax.engine.info import server_info
from specjax.engine.plan import plan_engine
from specjax.engine.weights import weights_from_tensors
from specjax.metrics import Totals
from specjax.testing import letter_tokenizer
from specjax.testing.files import write_folder

from ..support.model_files import read_folder, write_hybrid

NEXTN = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@pytest.fixture(scope="module")
def hybrid(files: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid") / "model", files.target)


def planned(path: Path, **options: Any) -> Any:
    return plan_engine(EngineArgs(model=path, max_running_requests=4, **options))


def test_a_plan_states_the_memory_of_states(hybrid: Path) -> None:
    plan = planned(hybrid, **NEXTN, dtype="float32")
    # four slots, that of padding and eight snapshots, each with the state and window of one layer
    assert plan.state_bytes == 13 * 4 * (4 * 16 * 16 + 3 * 128)
    least = planned(hybrid, dtype="float32", max_state_snapshots=0)
    assert 13 * least.state_bytes == 5 * plan.state_bytes
    numbers = [server_info(x, Totals(), None)["max_state_snapshots"] for x in (plan, least)]
    assert numbers == [8, 0]
    draft, drafting, _, sizes = plan.describe()
    assert draft.startswith("draft: 1 multi-token prediction modules")
    assert drafting.startswith("EAGLE: 3 drafted tokens per round")
    assert ", states 0.00 GB, KV" in sizes


def test_what_engines_refuse(hybrid: Path, files: Any) -> None:
    model = {"speculative_algorithm": "STANDALONE", "draft": hybrid}
    with pytest.raises(ValueError, match=r"draft=.* has recurrent layers, whose states cannot"):
        planned(files.target, **model)
    with pytest.raises(ValueError, match="speculative_num_draft_tokens=17 must be at most 16"):
        planned(hybrid, **NEXTN | {"speculative_num_steps": 16})
    with pytest.raises(ValueError, match="draft=None, but model="):
        planned(files.target, **NEXTN)
    with pytest.raises(ValueError, match=r"has 1; lower it .* or set .*'NEXTN'"):
        planned(hybrid, **NEXTN | {"speculative_algorithm": "MULTI_LAYER_EAGLE"})


# keys of published files that change nothing
PUBLISHED: dict[str, Any] = {
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "full_attention_interval": 4,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "unsloth_fixed_mtp": True,
    "use_cache": True,
}


def test_a_multimodal_file_gives_the_same_weights(hybrid: Path, tmp_path: Path) -> None:
    """Tensors of its language model have another prefix, but not those of the draft layer."""
    text, tensors = read_folder(hybrid)
    rope = {"rope_type": "default", "rope_theta": text.pop("rope_theta"), "mrope_interleaved": True}
    rope |= {"mrope_section": [1, 1, 0], "partial_rotary_factor": text["partial_rotary_factor"]}
    nested = text | PUBLISHED | {"rope_parameters": rope}
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}
    config |= {"text_config": nested, "vision_config": {"depth": 2}, "image_token_id": 9}
    renamed = {x.replace("model.", "model.language_model.", 1): y for x, y in tensors.items()}
    renamed["model.visual.merger.norm.weight"] = np.zeros(4, np.float32)
    write_folder(tmp_path / "model", config, renamed, letter_tokenizer())
    flat, wrapped = (planned(x, **NEXTN, dtype="float32") for x in (hybrid, tmp_path / "model"))
    for ours, theirs in ((flat.target, wrapped.target), (flat.drafts[0], wrapped.drafts[0])):
        assert ours.config == theirs.config
        theirs.check_weights()
        found = theirs.load_weights()
        for name, weight in ours.load_weights().items():
            np.testing.assert_array_equal(found[name], weight)


def test_fp8_files_leave_rates_whole(hybrid: Path, tmp_path: Path) -> None:
    """They give the weights that quantising on load gives; the draft layer stays whole."""
    export_fp8(tmp_path / "fp8", hybrid)
    opened = open_target(str(tmp_path / "fp8"), dtype="float32")
    opened.check_weights()
    assert opened.config.quantization is not None
    assert opened.config.quantization.plain == ("lm_head",)
    found = opened.load_weights()
    plan = planned(hybrid, dtype="float32", quantization="fp8")
    expected, _ = weights_from_tensors(plan, read_folder(hybrid)[1], draft=False)
    assert found["layers.0.attention.products.kernel"].dtype == np.float32
    for name, weight in found.items():
        if not name.startswith("lm_head"):
            np.testing.assert_array_equal(np.float32(weight), np.float32(expected[name]))
