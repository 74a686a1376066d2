"""Greedy text of an engine against transformers, for every family that loads.

Logits of all families are in ``test_logits``.
"""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax import Engine  # noqa: E402

from .torch_side import FAMILIES, REFUSED, make_model, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

# these differ from others in a rule of the choice of experts, which their logits show
SWITCHED = (
    "qwen3_moe_sparse qwen3_moe_window qwen2_moe_normalised mixtral_window olmoe_normalised "
    "glm4_moe_norms"
)
# engines compute these as others; their logits show how files, heads and ropes of theirs are read
LIKE_OTHERS = (
    "llama_linear llama_yarn llama_longrope llama_bias llama_mlp_bias llama_tied llama_gelu "
    "llama_head32 llama_head96 llama_head256 mistral ministral qwen2_tied qwen2_window qwen2_yarn "
    "qwen3_tied qwen3_bias qwen3_window gemma phi3 phi3_window phi3_longrope olmo3 glm4 qwen3_moe "
    "mixtral olmoe granitemoe seed_oss seed_oss_biases "
    "exaone4_small granite_swa_bare ernie4_5 ernie4_5_biases hunyuan_plain minicpm5"
)
LOADED = [
    pytest.param(family, marks=pytest.mark.long if family in LIKE_OTHERS.split() else ())
    for family in FAMILIES
    if family not in (*REFUSED, *SWITCHED.split())
]
ROPES = ("gemma3", "olmo3", "exaone4", "granite_swa", "muse_glimmer")
COUNT = 10
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": COUNT}


def continued(model: "transformers.PreTrainedModel", prompt: list[int]) -> list[int]:
    """Greedy tokens, each from a pass over the whole text, which chooses the rope scaling."""
    text = list(prompt)
    for _ in range(COUNT):
        text.append(int(run_model(model, np.array([text]))[0][0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", LOADED)
def test_greedy_text(family: str, tmp_path: Path) -> None:
    """Drafts from the text are verified as trees; prompts of 90 tokens are beyond all windows."""
    model = make_model(*FAMILIES[family])
    path = save(model, tmp_path / "model")
    rng = np.random.default_rng(1)
    # the second prompt repeats itself, so that drafts are found
    short, long = rng.integers(3, 131, 8).tolist(), rng.integers(3, 131, 15).tolist() * 6
    contexts = {128: [short, long]}
    # LongRoPE depends on the context of the engine, where transformers takes that of the text
    if "longrope" in family or family == "phi4_mini":
        contexts = {32: [short], 128: [long]}
    if family in ROPES:  # layers with windows have other rotary embeddings in any context
        contexts[12] = [short[:1]]
    for context, prompts in contexts.items():
        with Engine(
            str(path),
            dtype="float32",
            context_length=context,
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=6,
            skip_tokenizer_init=True,
            max_running_requests=1,
            batch_buckets=(1,),
            chunked_prefill_size=16,
            page_size=4,
            compile_on_use=True,
        ) as engine:
            for prompt in prompts:
                output = engine.generate(input_ids=prompt, sampling_params=GREEDY)
                assert output["output_ids"] == continued(model, prompt), (context, len(prompt))
