"""Deterministic inference: refusals, lowering, and on a GPU texts that depend on nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import numpy as np
import pytest

from specjax import Engine
from specjax.checkpoints.presets import LLAMA31_8B
from specjax.config import ModelConfig
from specjax.disaggregation.rows import check_facts
from specjax.engine.args import EngineArgs
from specjax.engine.plan import OWNERS
from specjax.engine.requests import DEFAULT_SEED
from specjax.models import experts
from specjax.models.experts import MixtureConfig
from specjax.models.qwen35 import Qwen35Config
from specjax.runtime.runner import ModelRunner
from specjax.testing import Files
from specjax.types import NO_DRAFTS, DraftShape

from ..support.lowering import lower_for_cuda
from ..support.model_files import write_model
from ..support.runners import EAGLE3, TARGET, algorithm_of, runner_config

ON = {"enable_deterministic_inference": True}
CHAIN, TREE = DraftShape.chain(2), DraftShape(steps=2, topk=2, nodes=6)


def test_a_cpu_is_refused(files: Files) -> None:
    with pytest.raises(ValueError, match="enable_deterministic_inference=True needs a GPU"):
        files.engine(**ON)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "needs dtype='bfloat16'; the model has float32"),
        ({"head_dim": 96}, "needs a head dim of 16 or 32 or 64 or 128 or 256, not 96"),
        (
            {"head_dim": 16, "kv_cache_dtype": "fp8_e4m3"},
            "at least 32 with kv_cache_dtype='fp8_e4m3', not 16",
        ),
        (
            {"num_heads": 130, "num_kv_heads": 2},
            "needs at most 64 query heads per KV head, not num",
        ),
        ({"intermediate_size": 1000}, "needs multiples of 16 as hidden_size=4096 and inter"),
    ],
)
def test_models_that_it_does_not_cover_are_refused(changes: dict[str, Any], reason: str) -> None:
    gpu: Any = SimpleNamespace(platform="gpu")

    def reasons(model: ModelConfig, is_asked: bool) -> list[str]:
        return [x for owner in OWNERS for x in owner(model, gpu, deterministic=is_asked)]

    model = replace(LLAMA31_8B, **changes)
    assert reasons(LLAMA31_8B, True) == reasons(model, False) == []
    (refusal,) = reasons(model, True)
    assert refusal.startswith("enable_deterministic_inference=True")
    assert reason in refusal


def test_experts_of_odd_widths_are_refused() -> None:
    model, gpu = replace(MIXTURE, moe_intermediate_size=100), jax.devices()[0]
    (refusal,) = experts.refusals(model, gpu, deterministic=True)
    assert "needs multiples of 16 as the widths of experts, not 100 and 0" in refusal
    assert not [*experts.refusals(model, gpu, deterministic=False)]
    assert not [*experts.refusals(MIXTURE, gpu, deterministic=True)]


@pytest.mark.parametrize(
    "lossy",
    [{"speculative_use_rejection_sampling": True}, {"speculative_accept_threshold_single": 0.5}],
)
def test_acceptance_that_depends_on_drafts_is_refused(lossy: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="else texts depend on drafts"):
        EngineArgs(speculative_algorithm="EAGLE3", **ON, **lossy)


def test_sides_with_different_modes_are_refused() -> None:
    name = "enable_deterministic_inference"
    with pytest.raises(ValueError, match=f"{name}: True here, False there"):
        check_facts({name: True}, {name: False})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_no_product_of_the_target_is_left_to_xla(shape: DraftShape) -> None:
    """All products that are left are the draft's; plain decoding has none."""
    models = [replace(one, head_dim=16) for one in (TARGET, EAGLE3)]
    counts = {}
    for mode in (False, True):
        config = runner_config(
            algorithm=algorithm_of(EAGLE3),
            shapes=(shape,),
            implementation="pallas",
            deterministic=mode,
        )
        networks = config.algorithm.networks(*models, implementation="pallas", deterministic=mode)
        jobs = list(ModelRunner(networks, config)._functions().jobs())
        found = {str(key[0]): (function, arguments, how) for key, function, arguments, how in jobs}
        function, arguments, options = found["greedy_round"]
        assert options.get("xla_allow_excess_precision") is (False if mode else None)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        text = lower_for_cuda(function, *shapes)
        assert ("specjax_invariant_dot" in text) is mode
        assert ("specjax_invariant_own" in text) is mode
        counts[mode] = text.count("stablehlo.dot_general")
    assert counts[True] < counts[False]
    config = runner_config(
        algorithm=algorithm_of(None),
        shapes=(NO_DRAFTS,),
        implementation="pallas",
        deterministic=True,
    )
    networks = config.algorithm.networks(models[0], implementation="pallas", deterministic=True)
    for key, function, arguments, _ in ModelRunner(networks, config)._functions().jobs():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        assert "stablehlo.dot_general" not in lower_for_cuda(function, *shapes), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixture", "hybrid"])
def test_no_product_of_these_models_is_left_to_xla(kind: str) -> None:
    config = runner_config(
        algorithm=algorithm_of(None),
        shapes=(NO_DRAFTS,),
        implementation="pallas",
        deterministic=True,
    )
    mixture = replace(MIXTURE, shared_expert_intermediate_size=64, has_shared_expert_gate=True)
    model, kernel = {
        "mixture": (mixture, "specjax_experts_in"),
        "hybrid": (HYBRID, "specjax_delta_steps"),
    }[kind]
    networks = config.algorithm.networks(model, implementation="pallas", deterministic=True)
    for key, function, arguments, _ in ModelRunner(networks, config)._functions().jobs():
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        text = lower_for_cuda(function, *shapes)
        assert "stablehlo.dot_general" not in text, key
        assert (kernel in text) is (key != ("record_cached",)), key


SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "qk_norm": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
MIXTURE = MixtureConfig(
    model_type="qwen3_moe",
    num_experts=24,
    num_experts_per_tok=4,
    moe_intermediate_size=96,
    **SIZES,
)
# values of its file that are not those of every family
STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
HYBRID = Qwen35Config(
    model_type="qwen3_5_text",
    rotary_dim=64,
    linear_layers=(0, 1, 2),
    **STATES,
    **(SIZES | {"head_dim": 256, "num_heads": 4}),
)


@pytest.mark.gpu
class TestOnGpu:
    """A random model in bfloat16; every engine shares the weights of the first."""

    MODEL = ModelConfig(model_type="qwen3", **SIZES)
    SETTINGS: ClassVar[dict[str, Any]] = {}  # further values of its file
    DRAFT: ModelConfig | None = None  # None: the model itself

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        folder = write_model(tmp_path_factory.mktemp("target"), cls.MODEL, **cls.SETTINGS)
        with Engine(folder, speculative_algorithm="NONE", **cls.options()) as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def draft(cls, plain: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
        if cls.DRAFT is None:
            return Path(plain.target.path)
        return write_model(tmp_path_factory.mktemp("draft"), cls.DRAFT)

    @staticmethod
    def options(**changes: Any) -> dict[str, Any]:
        sizes = {"context_length": 1024, "max_running_requests": 16, "batch_buckets": (1, 16)}
        sizes |= {"max_total_tokens": 16 * 1024, "skip_tokenizer_init": True}
        return {"dtype": "bfloat16", "compile_on_use": True, **sizes, **ON, **changes}

    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls) -> tuple[list[list[int]], list[dict[str, Any]]]:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 512, n).tolist() for n in rng.integers(3, 600, 16)]
        common = {"max_new_tokens": 100, "ignore_eos": True}
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8},
            {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
            {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2},
        ]
        return prompts, [common | kind for kind in kinds * 4]

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, plain: Engine, jobs: Any) -> list[Any]:
        return [
            cls.texts(plain, [prompt], [params])[0] for prompt, params in zip(*jobs, strict=True)
        ]

    @staticmethod
    def texts(engine: Engine, prompts: Any, params: Any) -> list[Any]:
        outputs = engine.generate(
            input_ids=prompts, sampling_params=list(params), return_logprob=True
        )
        assert all(output["meta_info"]["deterministic"] for output in outputs)
        return [
            (output["output_ids"], [x for x, *_ in output["meta_info"]["output_token_logprobs"]])
            for output in outputs
        ]

    @pytest.mark.parametrize(
        "options",
        [
            {"speculative_algorithm": "NONE"},
            {"speculative_algorithm": "NONE", "chunked_prefill_size": 48, "max_total_tokens": 3000},
            {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
            {"speculative_algorithm": "NGRAM"},
            {"speculative_algorithm": "STANDALONE", "speculative_num_steps": 3},
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_num_steps": 3,
                "speculative_eagle_topk": 4,
                "speculative_num_draft_tokens": 16,
            },
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_adaptive": True,
                "speculative_adaptive_config": {"policy": "budget", "candidate_steps": [0, 1, 3]},
                "rounds_per_dispatch": 2,
            },
        ],
        ids=["plain", "preempted", "ngram chain", "ngram", "chain", "tree", "budget"],
    )
    def test_texts_equal_plain_decoding_alone(
        self, plain: Engine, draft: Path, jobs: Any, expected: list[Any], options: dict[str, Any]
    ) -> None:
        model, is_drafted = plain.target.path, options["speculative_algorithm"] == "STANDALONE"
        drafter = {"draft": str(draft)} if is_drafted else {}
        made = self.options(**options, **drafter, share_weights_with=plain)
        with Engine(model, **made) as engine:
            assert self.texts(engine, *jobs) == expected
            assert self.texts(engine, *jobs) == expected  # prompts are cached now
            snapshot = engine.metrics.snapshot()
        if "max_total_tokens" in options:
            assert snapshot.num_retracted > 0
        else:
            assert snapshot.cached_tokens > 0
        if is_drafted and self.DRAFT is None and "speculative_adaptive" not in options:
            assert snapshot.num_accepted_drafts > snapshot.num_verifies

    def test_prefill_scores_a_text_as_generation_does(
        self, plain: Engine, jobs: Any, expected: list[Any]
    ) -> None:
        prompts, _ = jobs
        for prompt, (ids, logprobs) in list(zip(prompts, expected, strict=True))[::2]:
            output = plain.generate(
                input_ids=prompt + ids,
                sampling_params={"temperature": 0.0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=len(prompt) - 1,
            )
            assert [x for x, *_ in output["meta_info"]["input_token_logprobs"][1:]] == logprobs

    def test_requests_without_a_seed_have_a_fixed_one(self, plain: Engine, jobs: Any) -> None:
        prompts, params = jobs[0][:2], [jobs[1][1]] * 2
        seeded = [one | {"sampling_seed": DEFAULT_SEED} for one in params]
        assert self.texts(plain, prompts, params) == self.texts(plain, prompts, seeded)

    def test_kv_of_8_bits(self, plain: Engine, jobs: Any) -> None:
        prompts, params = (list(one[:8]) for one in jobs)
        found = []
        for algorithm in ("NONE", "NGRAM"):
            kind = {"speculative_algorithm": algorithm, "kv_cache_dtype": "fp8_e4m3"}
            with Engine(plain.target.path, **self.options(**kind)) as engine:
                if algorithm == "NONE":
                    alone = zip(prompts, params, strict=True)
                    found.append([self.texts(engine, [x], [y])[0] for x, y in alone])
                found.append(self.texts(engine, prompts, params))
        assert found[0] == found[1] == found[2]
        assert found[0] != self.texts(plain, prompts, params)


@pytest.mark.gpu
class TestMixtureOnGpu(TestOnGpu):
    """A random mixture, whose router weights differ enough between experts."""

    MODEL = MIXTURE


@pytest.mark.gpu
class TestHybridOnGpu(TestOnGpu):
    """Recurrent layers, and attention at a head dim of 256; drafts are from another model."""

    MODEL = HYBRID
    SETTINGS: ClassVar[dict[str, Any]] = STATES | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "partial_rotary_factor": 0.25,
    }
    DRAFT = TestOnGpu.MODEL
