"""Gemma 4's assistant against transformers, and its texts against plain decoding."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax import DisaggregatedEngine, Engine  # noqa: E402
from specjax.checkpoints import open_target  # noqa: E402
from specjax.checkpoints.assistant import open_assistant  # noqa: E402
from specjax.cli.main import main  # noqa: E402
from specjax.models.gemma4_assistant import Gemma4Assistant, read_layers  # noqa: E402
from specjax.testing.dense import dense_attention  # noqa: E402

from .jax_side import build, build_target, relative_error  # noqa: E402
from .torch_side import GEMMA4, SMALL, make_model, save  # noqa: E402

pytestmark = pytest.mark.parity
WINDOW, LENGTH = GEMMA4["sliding_window"], 40


def modes(config: Any) -> list[str | None]:
    """As transformers means them; 5.23 raises if no layer has KV, and returns none if all do."""
    kinds = config.layer_types
    if config.num_kv_shared_layers:
        return ["reuse"] * len(kinds)
    last = {kind: i for i, kind in enumerate(kinds)}
    return ["store" if last[kind] == i else None for i, kind in enumerate(kinds)]


def make_assistant(seed: int = 5) -> Any:
    body = {**SMALL, **GEMMA4, "hidden_size": 24, "num_hidden_layers": 2}
    body |= {"layer_types": GEMMA4["layer_types"][:2], "vocab_size_per_layer_input": 0}
    del body["attn_implementation"], body["final_logit_softcapping"]
    text = transformers.Gemma4TextConfig(**body)
    config = transformers.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=SMALL["hidden_size"]
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = "norm" in name
            weight.copy_(1 + 0.3 * noise if is_norm else noise * 1.5 * weight.shape[-1] ** -0.5)
        for name, x in model.named_buffers():
            if name.endswith("layer_scalar"):
                x.copy_(0.7 + 0.3 * torch.rand(x.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gemma4")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(modes))
    target, assistant = make_model("Gemma4TextConfig", GEMMA4), make_assistant()
    yield target, assistant, save(target, folder / "target"), save(assistant, folder / "draft")
    monkeypatch.undo()


def test_passes_equal_transformers(pair: Any) -> None:
    target, assistant, path, draft = pair
    opened = open_target(str(path), dtype="float32")
    ours, checkpoint = build_target(opened), open_assistant(draft, opened)
    network = build(lambda: Gemma4Assistant(checkpoint.config), checkpoint.load_weights())
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (1, LENGTH + 1))
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        out = target(
            ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
    shared = dict(out.shared_kv_states)
    # keys that a row at the position of the next token sees
    shared["sliding_attention"] = tuple(
        x[:, :, -(WINDOW - 1) :] for x in shared["sliding_attention"]
    )
    windowed, full = read_layers(opened.config)
    kv = {windowed: shared["sliding_attention"], full: shared["full_attention"]}

    def read(layer: int, q: Any) -> Any:
        k, v = (jnp.asarray(x.numpy()).swapaxes(1, 2) for x in kv[layer])
        return dense_attention(q, k, v)

    state, place = out.hidden_states[-1][:, -1:], torch.tensor([[LENGTH]])
    hidden, token = jnp.asarray(state.numpy()), ids[:, -1:]
    for _ in range(3):
        inputs = torch.cat([target.get_input_embeddings()(token), state], dim=-1)
        with torch.no_grad():
            theirs = assistant(
                inputs_embeds=inputs, position_ids=place, shared_kv_states=shared, use_cache=False
            )
        positions = jnp.full((1, 1), LENGTH)
        states = network(jnp.asarray(token.numpy(), jnp.int32), hidden, positions, ours, read)
        assert relative_error(network.logits(states), theirs.logits.numpy()) <= 1e-4
        hidden, state = network.following(states), theirs.last_hidden_state
        assert relative_error(hidden, state.numpy()) <= 1e-4
        token = theirs.logits.argmax(dim=-1)


ADAPTIVE: dict[str, Any] = {
    "speculative_adaptive": True,
    "speculative_adaptive_config": {
        **{"policy": "ema", "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1},
        "candidate_steps": [0, 3],
    },
}


@pytest.mark.parametrize(
    ("topk", "page_size", "context", "more"),
    [
        (1, 4, 128, {}),
        (3, 1, 128, {}),
        (1, 4, 12, {}),
        (1, 4, 128, ADAPTIVE),
        (1, 4, 128, {"prefill": {"page_size": 8}}),
    ],
    ids=["chain", "tree", "short context", "adaptive", "split"],
)
def test_texts_equal_plain_decoding(
    pair: Any, topk: int, page_size: int, context: int, more: dict[str, Any]
) -> None:
    _, _, path, draft = pair
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 131, n).tolist() for n in ((1, 5) if context == 12 else (1, 30, 70))]
    params = [
        {"temperature": t, "sampling_seed": 3, "ignore_eos": True, "max_new_tokens": 6 * n}
        for t, n in zip((0.0, 0.8, 0.0), (1, 1, 4), strict=True)
    ][: len(prompts)]
    shared: dict[str, Any] = {
        "dtype": "float32",
        "context_length": context,
        "skip_tokenizer_init": True,
        "max_running_requests": 4,
        "batch_buckets": (4,),
        "chunked_prefill_size": 16,
        "page_size": page_size,
        "compile_on_use": True,
    }
    how = {"speculative_algorithm": "FROZEN_KV_MTP", "draft": str(draft)}
    how |= {"speculative_num_steps": 3, "speculative_eagle_topk": topk, **more}
    results = []
    for options in ({"speculative_algorithm": None}, how):
        kind = DisaggregatedEngine if "prefill" in options else Engine
        with kind(str(path), **shared, **options) as engine:
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
            again = engine.generate(input_ids=prompts, sampling_params=params)
        results += [[x["output_ids"] for x in each] for each in (outputs, again)]
    assert results[0] == results[1] == results[2] == results[3]
    assert sum(x["meta_info"]["spec_verify_ct"] for x in outputs) > 0


def test_inspect_names_the_algorithm(pair: Any, capsys: Any) -> None:
    _, _, path, draft = pair
    assert main(["inspect", str(draft), f"--model={path}"]) == 0
    found = capsys.readouterr().out
    assert "algorithm: FROZEN_KV_MTP" in found
    assert "KV memory: none; it reads that of the target" in found
    assert main(["inspect", str(draft)]) == 1
    assert "needs its target; pass --model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_ordered_embeddings": True}, "only assistants of 12B and 31B"),
        ({"backbone_hidden_size": 64}, "target_hidden_size=64"),
        ({"backbone_hidden_size": 0}, "backbone_hidden_size=0 must be"),
        ({"model_type": "llama"}, "must be gemma4_assistant or"),
        ({"text_config": {"sliding_window": 5}}, "sliding_window=5, but the target's"),
    ],
)
def test_assistants_of_other_targets_are_refused(
    pair: Any, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, _, path, draft = pair
    config = json.loads((draft / "config.json").read_text())
    inner = config["text_config"] | change.get("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps(config | change | {"text_config": inner}))
    with pytest.raises(ValueError, match=reason):
        open_assistant(tmp_path, open_target(str(path), dtype="float32"))


def test_a_target_without_windows_is_refused(pair: Any, tmp_path: Path) -> None:
    config = json.loads((pair[2] / "config.json").read_text())
    kinds = {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    (tmp_path / "config.json").write_text(json.dumps(config | kinds))
    with pytest.raises(ValueError, match="needs a layer with a window"):
        open_assistant(pair[3], open_target(str(tmp_path), dtype="float32"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"enable_moe_block": True}, "mixtures of experts"),
        ({"hidden_size_per_layer_input": 8}, "per-layer embeddings"),
        ({"num_kv_shared_layers": 2}, "share the KV"),
        ({"use_bidirectional_attention": "all"}, "only 'vision' is"),
    ],
)
def test_other_models_are_refused(
    pair: Any, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = json.loads((pair[2] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=reason):
        open_target(str(tmp_path), dtype="float32")
