"""Complete rounds produce the tokens of dense decoding, whatever is drafted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling.draw import SamplingConfig
from specjax.sampling.params import SamplingParams
from specjax.speculative.future_map import DeviceState, resolve
from specjax.speculative.prefill import Chunk
from specjax.speculative.round import Resident, RoundConfig, draw_and_accept, make_batch, run_target
from specjax.speculative.tree import chain_input
from specjax.testing import EAGLE3

from ..support.runners import (
    EAGLE,
    dense_greedy,
    head_weights,
    make_request,
    make_runner,
    run_requests,
    target_model,
)

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(6, 61, size=n).tolist() for n in (1, 3, 16, 17, 40, 9, 5)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, max_new_tokens=20, ignore_eos=True)


def outputs(runner, params, **kwargs):
    steps = runner.config.largest.steps
    requests = [
        make_request(p, params, seed=7 * i + 2**40, width=steps) for i, p in enumerate(PROMPTS)
    ]
    run_requests(runner, requests, **kwargs)
    return [request.output_ids for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("head", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_changes_no_token(head, params):
    plain = outputs(make_runner(), params)
    runner = make_runner(head, 4)
    assert outputs(runner, params) == plain
    assert outputs(runner, params, run_ahead=1) == plain


@pytest.mark.slow
@pytest.mark.parametrize(("head", "steps"), [(None, 0), (EAGLE3, 4)])
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_rounds_per_dispatch_change_nothing(head, steps, run_ahead):
    """Tokens, metrics and ends equal those with one round per dispatch, including end tokens."""
    params = SamplingParams(temperature=0.9, max_new_tokens=23, logit_bias={5: 5.0})
    results = []
    for rounds in (1, 4):
        requests = [
            make_request(p, params, seed=3 * i + 1, width=steps) for i, p in enumerate(PROMPTS)
        ]
        run_requests(make_runner(head, steps, rounds=rounds), requests, run_ahead=run_ahead)
        figures = [request.result() for request in requests]
        for out in figures:
            for name in ("e2e_latency", "queue_time", "time_to_first_token"):
                assert out["meta_info"].pop(name) > 0
        results.append(figures)
    assert results[0] == results[1]
    reasons = {out["meta_info"]["finish_reason"]["type"] for out in results[0]}
    assert reasons == {"stop", "length"}


def test_a_row_stops_on_the_device():
    """A row stops advancing inside a dispatch at its last token and at an end token."""
    runner = make_runner(rounds=4)
    truth = dense_greedy(PROMPTS[3], 12)
    for budget, ends, produced in ((7, (), 7), (12, (truth[4],), truth.index(truth[4]) + 1)):
        runner.set_slot(1, SamplingParams(temperature=0.0), seed=0, end_token_ids=ends)
        runner.set_pages(1, range(1, 21))
        runner.prefill([Chunk(1, PROMPTS[3][:16], 0, PROMPTS[3][16])])
        runner.prefill([Chunk(1, PROMPTS[3][16:], 16, None, budget)])
        packed = np.concatenate([runner.round([1]).read() for _ in range(3)])
        counts = packed[:, 0, -1]
        assert counts.tolist() == [1] * (produced - 1) + [0] * (12 - produced + 1)
        assert packed[: produced - 1, 0, 0].tolist() == truth[1:produced]
        assert int(runner.on_device.future.seq_lens[1]) == len(PROMPTS[3]) + produced - 1
    runner.clear_slot(1)


def start(runner, prompt):
    """Prefill one prompt into slot 1; return the first token."""
    runner.set_slot(1, SamplingParams(temperature=0.0), seed=0)
    runner.set_pages(1, range(1, 21))
    width = runner.config.prefill_buckets[-1]
    for at in range(0, len(prompt), width):
        token = runner.prefill([Chunk.of(1, prompt, at, at + width)])
    return int(token.read()[0])


@pytest.mark.slow
@pytest.mark.parametrize("head", [EAGLE3, EAGLE], ids=["eagle3", "eagle"])
def test_any_number_of_drafts_can_be_accepted(head):
    """Chains from the known continuation, with an error at every depth."""
    steps, prompt = 4, PROMPTS[3]
    runner = make_runner(head, steps)
    truth = dense_greedy(prompt, 40)
    assert start(runner, prompt) == truth[0]
    flat, weights = target_model()
    target = flat.rebuild(weights)
    model = runner.networks.draft.rebuild(head_weights(head))
    slots = jnp.array([1, 0], jnp.int32)
    resident = Resident(target, model, runner._by_slot)
    algorithm, shape = runner.config.algorithm, runner.config.largest
    config = RoundConfig(
        algorithm=algorithm,
        shape=shape,
        sampling=SamplingConfig(),
        feature_layers=algorithm.feature_layers(runner.networks),
    )
    lens = jnp.array([len(prompt), 0], jnp.int32)
    state = jax.tree.map(jnp.copy, runner.on_device)
    done = 1

    @jax.jit
    def one_round(state, chain, lens):
        future = state.future
        batch = replace(make_batch(resident, future, slots, config), seq_lens=lens)
        tree = chain_input(chain, lens)
        state, passed = run_target(batch, state, tree, config)
        state, out = draw_and_accept(batch, state, tree, passed, config)
        rows, pools = resolve(future, slots), state.pools
        draft, following = algorithm.extend(batch, pools.draft, rows, out, shape)
        return out, following, DeviceState(replace(pools, draft=draft), future)

    for good in (0, 4, 2, 1, 3, 4, 4, 0):
        chain = truth[done - 1 : done + steps]
        chain = [t if i <= good else (t + 1) % 61 for i, t in enumerate(chain)]
        both = jnp.array([chain, [0] * 5], jnp.int32)
        out, following, state = one_round(state, both, lens)
        assert out.num_accepted_drafts.tolist() == [good, 0]
        assert out.num_accepted_tokens.tolist() == [good + 1, 0]
        assert out.accept_tokens[0, : good + 1].tolist() == truth[done : done + good + 1]
        lens = lens + out.num_accepted_tokens
        done += good + 1
        assert lens.tolist() == [len(prompt) + done - 1, 0]
        # the head's state must equal that after prefilling the same text
        fresh_first = start(runner, prompt + truth[: done - 1])
        assert fresh_first == truth[done - 1]
        rows = runner.on_device.future.rows
        np.testing.assert_allclose(rows.hidden[1], following.hidden[0], rtol=2e-4, atol=2e-5)
        assert rows.topk_ids[1].tolist() == following.topk_ids[0].tolist()
    runner.clear_slot(1)


def test_padding_slot_stays_empty():
    runner = make_runner(EAGLE3, 4)
    start(runner, PROMPTS[1])
    packed = None
    for _ in range(3):
        packed = runner.round([1, 0, 0]).read()[0]
    assert not packed[1:].any()
    assert int(runner.on_device.future.seq_lens[0]) == 0
    runner.clear_slot(1)
