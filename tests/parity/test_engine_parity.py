"""The engine end to end against PyTorch: greedy text, and the accepted tokens of every round."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax import Engine  # noqa: E402

from .eagle_files import (  # noqa: E402
    HeadCase,
    publish,
    random_tensors,
    reference_head,
)
from .eagle_reference import Draft  # noqa: E402
from .torch_side import find_smollm2, make_model, rope, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

GREEDY = {"temperature": 0.0, "ignore_eos": True}
# (head, steps per round, seed): small vocabulary and chosen seeds make a random head often right
VOCAB, LAYERS = 4, 5
CASES = {
    "eagle3": (
        HeadCase(
            vocab=VOCAB,
            draft_vocab=3,
            config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
        ),
        4,
        5,
    ),
    "eagle31_layer_ids": (
        HeadCase(
            vocab=VOCAB,
            draft_vocab=VOCAB,
            is_3_1=True,
            config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
        ),
        3,
        19,
    ),
    "peagle": (
        HeadCase(
            vocab=VOCAB,
            draft_vocab=VOCAB,
            mask_key="mask_token_id",
            qk_norm=True,
            layers=2,
            embedding="own",
            config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}},
        ),
        4,
        5,
    ),
    "eagle1": (
        HeadCase(algorithm="EAGLE", vocab=VOCAB, draft_vocab=VOCAB, lm_head="target", fc_bias=True),
        5,
        2,
    ),
}


class Simulation:
    """Simulated rounds of one request; every target pass reads the whole text again."""

    def __init__(
        self, model: "transformers.PreTrainedModel", draft: Draft, taps: tuple[int, ...]
    ) -> None:
        self.model, self.draft, self.taps = model, draft, taps

    def read(self, tokens: list[int]) -> tuple[list[int], "torch.Tensor"]:
        """Return the target's greedy next token and feature at every position."""
        ids = np.array([tokens])
        logits, layers = run_model(self.model, ids)
        if self.taps:
            features = np.concatenate([layers[i][0] for i in self.taps], axis=-1)
        else:
            with torch.no_grad():
                features = self.model.model(torch.from_numpy(ids)).last_hidden_state[0].numpy()
        return logits[0].argmax(-1).tolist(), torch.from_numpy(features)

    def run(self, prompt: list[int], num_steps: int, count: int) -> tuple[list[int], list[int]]:
        """Return a completion of ``count`` tokens and the histogram of correct drafts."""
        histogram = [0] * (num_steps + 1)
        n = len(prompt)
        best, features = self.read(prompt)
        output = [best[-1]]
        ids, fresh, start = [*prompt[1:], best[-1]], features, 0
        while len(output) < count:
            for i, state in enumerate(self.draft.fuse(fresh)):
                logits, y = self.draft.forward(ids[i], state, start + i)
            drafts = [self.draft.target_token(logits)]
            for k in range(num_steps - 1):
                logits, y = self.draft.forward(*self.draft.next_row(drafts[-1], y), n + k)
                drafts.append(self.draft.target_token(logits))
            text = prompt + output
            best, features = self.read(text + drafts)
            verified = best[n:]  # token after the root, after the first draft, ...
            accepted = 0
            while accepted < num_steps and drafts[accepted] == verified[accepted]:
                accepted += 1
            self.draft.forget_from(n)
            ids, start = verified[: accepted + 1], n
            fresh = features[n : n + accepted + 1]
            n += accepted + 1
            kept = min(accepted + 1, count - len(output))
            output += ids[:kept]
            histogram[min(accepted, kept)] += 1
        return output, histogram


@pytest.mark.parametrize("name", CASES)
def test_rounds(name: str, tmp_path: Path) -> None:
    """Completions and acceptance histograms of a batch equal the PyTorch simulation."""
    case, num_steps, seed = CASES[name]
    changes = {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, **rope(1e4)}
    model = make_model("LlamaConfig", changes, seed=14)
    target_dir = save(model, tmp_path / "target")
    tensors = random_tensors(case, torch.zeros(1), seed=seed)
    draft_dir = publish(case, tensors, tmp_path / "draft")
    rng = np.random.default_rng(3)
    prompts = [[int(x) for x in rng.integers(0, VOCAB, n)] for n in (1, 3, 8, 9, 21, 30)]
    counts = [40, 33, 40, 17, 40, 28]

    taps = tuple(case.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", ()))
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    table = tensors.get("embed_tokens.weight", table)
    expected = []
    for prompt, count in zip(prompts, counts, strict=True):
        lm_head = tensors.get("lm_head.weight", head)
        draft = Draft(reference_head(case, tensors), table, lm_head)
        expected.append(Simulation(model, draft, taps).run(prompt, num_steps, count))
    total = np.sum([histogram for _, histogram in expected], axis=0)
    assert min(total[0], total[1], total[2:].sum()) > 5, "the head is right too rarely"

    with Engine(
        str(target_dir),
        draft=str(draft_dir),
        speculative_algorithm=case.algorithm,
        speculative_num_steps=num_steps,
        dtype="float32",
        page_size=4,
        context_length=80,
        max_running_requests=2,
        batch_buckets=(2,),
        max_total_tokens=200,
        chunked_prefill_size=8,
        skip_tokenizer_init=True,
        compile_cache_dir=None,
        compile_on_use=True,
    ) as engine:
        results = engine.generate(
            input_ids=prompts,
            sampling_params=[{**GREEDY, "max_new_tokens": count} for count in counts],
        )
    for result, (output, histogram) in zip(results, expected, strict=True):
        assert result["output_ids"] == output
        assert result["meta_info"]["spec_correct_drafts_histogram"] == histogram


@pytest.mark.slow
def test_smollm2_greedy_text() -> None:
    """Plain decoding gives the text of transformers' ``generate``."""
    path, count = find_smollm2(), 24
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    prompts = ["The sky is blue because", "def is_prime(n):\n"]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
        expected.append(out[0, ids.shape[1] :].tolist())
    with Engine(
        "smollm2-135m",
        dtype="float32",
        context_length=128,
        max_running_requests=2,
        batch_buckets=(2,),
        compile_cache_dir=None,
        compile_on_use=True,
    ) as engine:
        results = engine.generate(prompts, {"temperature": 0.0, "max_new_tokens": count})
    for result, ids in zip(results, expected, strict=True):
        assert result["output_ids"] == ids
        assert result["text"] == tokenizer.decode(ids, skip_special_tokens=True)
