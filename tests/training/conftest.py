"""A tiny random target and head for the training tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from specjax.config import DraftConfig, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Weights
from specjax.testing import random_weights
from specjax.training.data import Corpus
from specjax.training.generate import Sampler
from specjax.training.trainer import TrainConfig, Trainer, default_draft_config

from ..support.model_files import write_model


@dataclass(frozen=True)
class Tiny:
    """A target with 4 layers and a vocabulary of 61 tokens, in the parts that training needs."""

    model: ModelConfig
    flat: FlatModel[CausalLM]
    weights: Weights
    draft: DraftConfig

    def trainer(self, config: TrainConfig, vocabulary: np.ndarray | None = None) -> Trainer:
        if vocabulary is None:
            vocabulary = np.sort(np.random.default_rng(3).permutation(61)[:40])
        return Trainer(config, self.draft, self.flat, self.weights, vocabulary)


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    model = ModelConfig(
        model_type="llama",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    flat = FlatModel.of(partial(CausalLM, model))
    weights = random_weights(flat, 0)
    draft = default_draft_config(model, intermediate_size=40, draft_vocab_size=40)
    return Tiny(model, flat, weights, draft)


@pytest.fixture(scope="session")
def sampler(tiny, tmp_path_factory) -> Iterator[Sampler]:
    """A sampler of the tiny target that generates three texts in parallel."""
    path = write_model(tmp_path_factory.mktemp("target"), tiny.model)
    sizes = {"num_rows": 3, "prefill_rows": 2, "max_prompt_len": 8, "max_new_tokens": 24}
    sampler = Sampler.open(str(path), "float32", stop_ids=(), **sizes)
    with sampler.engine:
        yield sampler


@pytest.fixture
def corpus() -> Corpus:
    rng = np.random.default_rng(1)
    pairs = []
    for i in range(40):
        prompt = rng.integers(0, 61, rng.integers(3, 9)).tolist()
        answer = rng.integers(0, 61, rng.integers(2, 14)).tolist()
        pairs.append((prompt, answer, "even" if i % 2 == 0 else "odd"))
    return Corpus.of(pairs)
