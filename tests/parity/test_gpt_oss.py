"""gpt-oss with experts in MXFP4 against transformers, from directories and GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import save_file  # noqa: E402

from specjax import Engine  # noqa: E402
from specjax.checkpoints import open_target  # noqa: E402

from ..support.mxfp4_files import packed, write_packed_gguf  # noqa: E402
from .jax_side import build_target, relative_error, run_target  # noqa: E402
from .torch_side import FAMILIES, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in the published layout; its router chooses other experts for each token."""
    name, changes = FAMILIES["gpt_oss"]
    model = make_model(name, {**changes, "swiglu_limit": 7.0})  # files of GGUF do not state it
    for layer in model.model.layers:
        layer.mlp.router.weight.data *= 3  # as 25 times transformers' initial weights
    path = save(model, tmp_path_factory.mktemp("gpt_oss"))
    tensors, _ = packed({name: x.numpy() for name, x in model.state_dict().items()})
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = PUBLISHED
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def reference(published: Path) -> Any:
    """The model as transformers reads it, which dequantises it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        published, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def check_logits(path: Path, reference: Any) -> None:
    checkpoint = open_target(str(path), dtype="float32")
    assert checkpoint.matrices == "float32, experts in MXFP4"
    checkpoint.check_weights()
    tokens = np.random.default_rng(7).integers(0, checkpoint.config.vocab_size, (2, 100))
    theirs, layers = run_model(reference, tokens)
    every = tuple(range(checkpoint.config.num_layers))
    ours, features = run_target(build_target(checkpoint), tokens, every)
    assert relative_error(ours, theirs) <= TOLERANCE
    assert relative_error(features, np.concatenate(layers, axis=-1)) <= TOLERANCE


def test_logits(published: Path, reference: Any) -> None:
    check_logits(published, reference)


def test_greedy_text(published: Path, reference: Any) -> None:
    """Drafts from the text are verified as trees; the long prompt is beyond the windows."""
    rng, params = np.random.default_rng(1), {"temperature": 0.0, "max_new_tokens": 10}
    prompts = [rng.integers(3, 131, 8).tolist(), rng.integers(3, 131, 15).tolist() * 6]
    with Engine(
        str(published),
        dtype="float32",
        context_length=128,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        skip_tokenizer_init=True,
        max_running_requests=2,
        batch_buckets=(2,),
        chunked_prefill_size=16,
        page_size=4,
        compile_on_use=True,
    ) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=params | {"ignore_eos": True})
    for prompt, output in zip(prompts, outputs, strict=True):
        text = list(prompt)
        for _ in range(10):
            text.append(int(run_model(reference, np.array([text]))[0][0, -1].argmax()))
        assert output["output_ids"] == text[len(prompt) :]


def test_gguf(published: Path, reference: Any, tmp_path: Path) -> None:
    """A GGUF file gives the same weights, to the bit."""
    state = {name: x.float().numpy() for name, x in reference.state_dict().items()}
    file = write_packed_gguf(tmp_path / "model.gguf", state, reference.config)
    check_logits(file, reference)
    one, other = (open_target(str(x), dtype="float32").load_weights() for x in (published, file))
    assert one.keys() == other.keys()
    for name, expected in one.items():
        np.testing.assert_array_equal(other[name], expected, err_msg=name)
