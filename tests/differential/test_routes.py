"""The experts that engines report are those of one pass over the final text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax import Engine
from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.runtime.runner import ModelRunner
from specjax.scheduling.in_flight import InFlight
from specjax.testing import Files, letter_tokenizer
from specjax.testing.files import CONFIG, write_folder

from ..support.compilation import counted_compilations
from ..support.dense_routes import dense_routes
from ..support.mixture_files import write_glm, write_hybrid_mixture, write_mixture
from ..support.model_files import read_folder, write_hybrid
from .draws import Drafts, Options
from .rows import OF_MIXTURES, Row, drafting, serving

pytestmark = pytest.mark.slow
ROUTES: Options = {"enable_return_routed_experts": True, "dtype": "float32"}
# the target's own modules
OWN: Options = {"draft": None, "speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
TREE: Options = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}
ROWS: list[Row] = [*OF_MIXTURES, ("P-EAGLE", "chain", "in turn", 4, "here", "fixed", 1)]


def check_routes(engine: Engine, prompts: list[list[int]], count: int = 40, n: int = 1) -> Any:
    """Check the experts of all tokens but the last; return the sums of counts in meta_info."""
    totals: dict[str, int] = {}
    weights, config = engine.runner.weights[0], engine.target.config
    for params in ({"temperature": 0.0}, {"temperature": 0.8, "sampling_seed": 3, "n": n}):
        starts = [(7 * i) % (len(prompt) + 1) for i, prompt in enumerate(prompts)]
        results = engine.generate(
            input_ids=prompts,
            sampling_params=params | {"max_new_tokens": count, "ignore_eos": True},
            return_routed_experts=True,
            routed_experts_start_len=starts,
        )
        samples = len(results) // len(prompts)
        for i, result in enumerate(results):
            meta, start = result["meta_info"], starts[i // samples]
            ids = prompts[i // samples] + result["output_ids"]
            expected = dense_routes(weights, ids, config)[start:-1]
            assert meta["routed_experts"].dtype == np.int32
            np.testing.assert_array_equal(meta["routed_experts"], expected)
            for name in ("cached_tokens", "num_retractions", "spec_num_correct_drafts"):
                totals[name] = totals.get(name, 0) + meta.get(name, 0)
    return totals


def draw_prompts(count: int, length: int = 30) -> list[list[int]]:
    """Prompts of different lengths with a common start."""
    common, *others = np.random.default_rng(0).integers(60, size=(count + 1, length)).tolist()
    return [common[: length // 2] + other[: length // 2 - i] for i, other in enumerate(others)]


@pytest.fixture(scope="module")
def mixture(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("mixtures")
    return replace(files, target=write_mixture(folder / "mixture", files.target))


def with_dense_layer(path: Path, mixture: Path) -> Path:
    """Write a mixture whose first layer has one plain feed-forward."""
    config, tensors = read_folder(mixture)
    expert = "model.layers.0.mlp.experts.0."
    plain = {x.replace("experts.0.", ""): y for x, y in tensors.items() if x.startswith(expert)}
    tensors = {x: y for x, y in tensors.items() if not x.startswith("model.layers.0.mlp.")}
    config |= {"mlp_only_layers": [0], "intermediate_size": config["moe_intermediate_size"]}
    return write_folder(path, config, tensors | plain, letter_tokenizer())


@pytest.mark.parametrize(
    "index", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, len(ROWS)))]
)
def test_experts_of_every_algorithm(mixture: Files, drafts, index: int) -> None:
    """With chunks, several rounds per dispatch, prefix hits and, in a small pool, preemption."""
    row = ROWS[index]
    options = {"draft": None} | drafting(row, drafts) | serving(row) | ROUTES
    with mixture.engine(**options) as engine:
        totals = check_routes(engine, draw_prompts(8))
        engine.flush_cache()
    assert totals["spec_num_correct_drafts"] > 20
    assert totals["num_retractions"] > 0
    assert totals["cached_tokens"] > 0


def test_experts_of_packed_rows(mixture: Files, drafts: Drafts, monkeypatch: Any) -> None:
    """Requests of a round verify different numbers of rows of their trees."""
    options: Options = TREE | {"speculative_adaptive": True, "max_running_requests": 4}
    options |= {"speculative_adaptive_config": {"policy": "budget", "candidate_steps": [3]}}
    with mixture.engine(**options, **ROUTES, batch_buckets=(4,)) as engine:
        packed = [shape for shape in engine.config.shapes if shape.packed]
        monkeypatch.setattr(InFlight, "_choose_tier", lambda *_: packed[0])
        totals = check_routes(engine, draw_prompts(4))
    assert totals["spec_num_correct_drafts"] > 20


def test_experts_of_plain_decoding_and_samples(mixture: Files, tmp_path: Path) -> None:
    """Samples share the pages of their prompt; a plain feed-forward has zeros."""
    files = replace(mixture, target=with_dense_layer(tmp_path / "dense", mixture.target))
    with files.engine(speculative=False, **ROUTES) as engine:
        totals = check_routes(engine, draw_prompts(3), n=3)
        assert totals["cached_tokens"] > 3 * 12
        again = engine.generate(
            input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4}, return_routed_experts=True
        )
        assert not again["meta_info"]["routed_experts"][:, 0].any()
        plain = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        assert "routed_experts" not in plain["meta_info"]


@pytest.mark.parametrize("options", [OWN, OWN | TREE], ids=["chain", "tree"])
def test_experts_of_a_hybrid_with_its_own_draft(
    files: Files, tmp_path: Path, options: Options
) -> None:
    """The draft's own routers write nothing; requests continue from snapshots."""
    hybrid = write_hybrid(tmp_path / "hybrid", files.target)
    files = replace(files, target=write_hybrid_mixture(tmp_path / "mixture", hybrid))
    with files.engine(**options, **ROUTES) as engine:
        totals = check_routes(engine, draw_prompts(4, 60))
    assert totals["spec_num_correct_drafts"] > 20
    assert totals["cached_tokens"] > 0


def test_experts_of_a_target_with_its_own_modules(mixture: Files, tmp_path: Path) -> None:
    files = replace(mixture, target=write_glm(tmp_path / "glm", mixture.target))
    with files.engine(**OWN, **ROUTES) as engine:
        assert check_routes(engine, draw_prompts(4))["spec_num_correct_drafts"] > 20


def test_layers_with_windows_lose_no_experts(mixture: Files, tmp_path: Path) -> None:
    """Routes have the pages of the first pool, which keeps tokens before the windows."""
    config, tensors = read_folder(mixture.target)
    config |= {"use_sliding_window": True, "sliding_window": 4}
    target = write_folder(tmp_path / "windows", config, tensors, letter_tokenizer())
    options: Options = {"speculative_num_steps": 1, "speculative_eagle_topk": 2, "page_size": 1}
    options |= {"speculative_num_draft_tokens": 3, "chunked_prefill_size": 4}
    with replace(mixture, target=target).engine(**ROUTES, **options) as engine:
        assert engine.config.window_pages
        assert engine.runner.abstract_state.pools.target[0] is None
        assert check_routes(engine, draw_prompts(4, 60))["spec_num_correct_drafts"] > 20


def test_ends_of_all_kinds(mixture: Files) -> None:
    """Aborted requests report the tokens that were computed, and a prompt alone all but one."""
    with mixture.engine(**ROUTES, max_total_tokens=400) as engine:
        weights, config = engine.runner.weights[0], engine.target.config
        prompt = draw_prompts(1)[0]
        params: Any = {"max_new_tokens": 90, "temperature": 0.0, "ignore_eos": True}
        asked: Any = {"input_ids": prompt, "return_routed_experts": True}

        def check(result: dict[str, Any]) -> int:
            ids, experts = prompt + result["output_ids"], result["meta_info"]["routed_experts"]
            expected = dense_routes(weights, ids, config)[: len(experts)]
            np.testing.assert_array_equal(experts, expected)
            return len(ids) - len(experts)

        assert check(engine.generate(**asked, sampling_params=params | {"max_new_tokens": 0})) == 1
        stops = {"stop": ["a", "e"], "temperature": 1.0, "sampling_seed": 0, "max_new_tokens": 90}
        assert check(engine.generate(**asked, sampling_params=stops)) == 1
        parts = engine.generate(**asked, sampling_params=params, stream=True, rid="a")
        for part in parts:
            if part["meta_info"]["finish_reason"] is None:
                assert "routed_experts" not in part["meta_info"]
                engine.abort_request("a")
        assert part["meta_info"]["finish_reason"]["type"] == "abort"
        assert check(part) == 1
        late = engine.generate(**asked, sampling_params=params, timeout=1e-9)
        assert late["meta_info"]["routed_experts"].shape == (0, CONFIG.num_layers, 2)


def test_nothing_is_compiled_after_the_start(mixture: Files) -> None:
    with mixture.engine(**ROUTES, compile_on_use=False) as engine:
        prompts = draw_prompts(2)
        params: Any = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        options = {"input_ids": prompts, "sampling_params": params}
        with counted_compilations() as events:
            results = engine.generate(**options, return_routed_experts=True)
            [result["meta_info"]["routed_experts"] for result in results]
        assert not events


def test_the_plan_counts_the_pool(mixture: Files, files: Files) -> None:
    """A byte per expert of a token and layer; without the option, nothing is kept."""
    options: Options = {"page_size": 4, "max_running_requests": 2, "speculative_algorithm": "NGRAM"}
    args = EngineArgs(model=mixture.target, **options, **ROUTES)
    kept, plain = plan_engine(args), plan_engine(replace(args, enable_return_routed_experts=False))
    assert kept.needs.token_bytes - plain.needs.token_bytes == 2 * CONFIG.num_layers
    runners = [ModelRunner(plan.networks, plan.config) for plan in (kept, plain)]
    pools = [runner.abstract_state.pools.target for runner in runners]
    assert [len(x) for x in pools] == [2, 1]
    assert pools[0][:1] == pools[1]
    assert pools[0][1].shape == (1, kept.config.num_kv[0], CONFIG.num_layers, 2)
    jobs = [{job[0] for job in runner._functions().jobs()} for runner in runners]
    assert jobs[0] - jobs[1] == {("take_routes",)}
    with pytest.raises(ValueError, match="enable_return_routed_experts=True needs a mixture"):
        plan_engine(replace(args, model=files.target))
