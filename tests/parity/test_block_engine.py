"""Rounds of engines with block drafters against PyTorch, token for token, greedy and seeded."""

from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax.kernels.draw_tokens import token_noise  # noqa: E402

from specjax import Engine  # noqa: E402

from ..support.block_files import TARGET_LAYERS, BlockCase, publish, random_tensors  # noqa: E402
from .block_reference import Block, Target, read_block  # noqa: E402
from .torch_side import make_model, rope, run_model, save  # noqa: E402

pytestmark = pytest.mark.parity

# a small vocabulary and chosen seeds make a random drafter often right
VOCAB, SEED, TEMPERATURE, CONTEXT = 4, 11, 0.8, 80
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
SEEDS = {"dflash": 11, "dspark": 18, "dspark-fill-in": 17}
CASES = {
    "dflash": BlockCase(
        format=1,
        vocab=VOCAB,
        mask=3,
        drafts=4,
        windows=(6, None),
        causal=(True, False),
        add=SLIDING,
    ),
    "dspark": BlockCase(
        format=3, vocab=VOCAB, mask=3, drafts=5, markov="vanilla", confidence="markov"
    ),
    "dspark-fill-in": BlockCase(
        format=6,
        vocab=VOCAB,
        mask=0,
        is_fill_in=True,
        draft_vocab=3,
        markov="rnn",
        taps=(0, 2, 6),
    ),
}


@cache
def all_noise() -> np.ndarray:
    """The target's noise ``[context, V]`` of tokens at all positions, from one compilation."""
    seeds = jnp.tile(jnp.array([[0, SEED]], jnp.uint32), (CONTEXT, 1))
    at = jnp.arange(CONTEXT, dtype=jnp.int32)
    return np.array(token_noise(seeds, at, jnp.arange(VOCAB)))


class Simulation:
    """Simulated rounds of one request; every target pass reads the whole text again."""

    def __init__(self, model: "transformers.PreTrainedModel", block: Block, greedy: bool) -> None:
        self.model, self.block = model, block
        self.temperature = 0.0 if greedy else TEMPERATURE

    def noise(self, positions: range) -> "torch.Tensor":
        """The target's noise ``[T, V]`` of tokens at these positions."""
        assert positions.stop <= CONTEXT
        return torch.from_numpy(all_noise()[positions.start : positions.stop])

    def read(self, tokens: list[int]) -> tuple[list[int], "torch.Tensor"]:
        """The target's own next token at every position, and its features."""
        logits, layers = run_model(self.model, np.array([tokens]))
        scores = torch.from_numpy(logits[0])
        if self.temperature:
            scores = scores / self.temperature + self.noise(range(1, len(tokens) + 1))
        features = np.concatenate([layers[i][0] for i in self.block.taps], axis=-1)
        return scores.argmax(-1).tolist(), torch.from_numpy(features)

    def run(self, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
        """A completion of ``count`` tokens and the histogram of correct drafts."""
        block, n = self.block, len(prompt)
        histogram = [0] * (block.drafts + 1)
        best, features = self.read(prompt)
        output = [best[-1]]
        while len(output) < count:
            states = block.states(output[-1], n, block.context(features[:n], range(n)))
            noise = self.noise(range(n + 1, n + 1 + block.drafts))
            drafts, _, _ = block.draw(states, output[-1], noise, self.temperature)
            best, features = self.read(prompt + output + drafts)
            verified = best[n:]  # token after the root, after the first draft, ...
            accepted = 0
            while accepted < block.drafts and drafts[accepted] == verified[accepted]:
                accepted += 1
            n += accepted + 1
            kept = min(accepted + 1, count - len(output))
            output += verified[:kept]
            histogram[min(accepted, kept)] += 1
        return output, histogram


def sampling(greedy: bool, count: int) -> dict[str, Any]:
    params = {"temperature": 0.0 if greedy else TEMPERATURE, "max_new_tokens": count}
    return params | {"sampling_seed": SEED, "ignore_eos": True}


@pytest.mark.parametrize("name", CASES)
def test_rounds(name: str, tmp_path: Path) -> None:
    """Texts and acceptance histograms equal the simulation, from a cold and from a warm cache."""
    case = CASES[name]
    changes = {"num_hidden_layers": TARGET_LAYERS, "vocab_size": VOCAB, **rope(1e4)}
    model = make_model("LlamaConfig", changes, seed=14)
    target_dir = save(model, tmp_path / "target")
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    draft_dir = publish(case, random_tensors(case, {}, SEEDS[name]), tmp_path / "draft")
    block = read_block(draft_dir, Target(table, head, TARGET_LAYERS))
    rng = np.random.default_rng(3)
    prompts = [[int(x) for x in rng.integers(0, VOCAB, n)] for n in (1, 3, 8, 9, 21, 30)]
    counts = [40, 33, 40, 17, 40, 28]
    with Engine(
        str(target_dir),
        draft=str(draft_dir),
        speculative_algorithm="DSPARK" if case.markov else "DFLASH",
        dtype="float32",
        page_size=4,
        context_length=CONTEXT,
        max_running_requests=2,
        batch_buckets=(2,),
        max_total_tokens=800,
        chunked_prefill_size=8,
        skip_tokenizer_init=True,
        compile_cache_dir=None,
        compile_on_use=True,
    ) as engine:
        for greedy in (True, False):
            simulation = Simulation(model, block, greedy)
            expected = [simulation.run(p, n) for p, n in zip(prompts, counts, strict=True)]
            total = np.sum([histogram for _, histogram in expected], axis=0)
            assert min(total[0], total[1], total[2:].sum()) > 5, "the drafter is right too rarely"
            engine.flush_cache()
            for is_warm in (False, True):
                params = [sampling(greedy, count) for count in counts]
                results = engine.generate(input_ids=prompts, sampling_params=params)
                for result, (output, histogram) in zip(results, expected, strict=True):
                    assert result["output_ids"] == output
                    assert result["meta_info"]["spec_correct_drafts_histogram"] == histogram
                cached = sum(result["meta_info"]["cached_tokens"] for result in results)
                assert not is_warm or cached > 0
