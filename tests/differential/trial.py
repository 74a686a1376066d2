"""One engine against plain decoding, while its caller aborts, flushes and updates weights."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from specjax import DisaggregatedEngine, Engine
from specjax.engine.requests import sample_seed
from specjax.testing import Files, is_idle, num_held

from ..support.engine_process import ApartEngine
from .draws import (
    Options,
    Wish,
    chance,
    constrained,
    draw_phrases,
    draw_wish,
    one_of,
    quiet,
    to_the_end,
    without_count,
)

BATCH = 12  # requests that arrive together
LOGPROB_ERROR = 1e-4
STATE_ERROR = 1e-3
MOST_SECONDS = 300.0  # limit for concurrent requests, to detect a request that never ends
OTHER = "other weights"
Result = dict[str, Any]


def other_target(engine: Engine) -> dict[str, np.ndarray]:
    """Weights of a target by flat name that map many tokens differently, and give other KV."""
    rng = np.random.default_rng(6)
    names = engine.runner.networks.target.names
    tensors = dict(zip(names, map(np.asarray, engine.runner.weights[0]), strict=True))
    columns = np.arange(engine.target.config.vocab_size)
    moved = rng.choice(columns, len(columns) // 3, replace=False)
    columns[moved] = np.roll(moved, 1)
    changed = {}
    for name, tensor in tensors.items():  # outputs are the second axis, also of quantised matrices
        if name.startswith("lm_head.kernel"):
            changed[name] = tensor[:, columns]
        if ".qkv.kernel" in name:
            changed[name] = np.roll(tensor, 3, axis=1)
    return changed


@dataclass
class Reference:
    """Plain decoding with each of two sets of weights.

    Attributes:
        engines: with the old weights on disk, and with the new ones, which are also ``tensors``.
    """

    engines: tuple[Engine, Engine]
    tensors: dict[str, np.ndarray]

    @classmethod
    def of(cls, files: Files, **more: Any) -> "Reference":
        """``more`` are options of both engines."""
        sizes = {"max_running_requests": 8, "batch_buckets": (8,), "page_size": 16}
        options: Options = sizes | {"dtype": "float32", "disable_radix_cache": True}
        options |= {"grammar_backend": "llguidance"} | more
        old = files.engine(speculative=False, **options)
        new = files.engine(speculative=False, share_weights_with=old, **options)
        tensors = other_target(old)
        new.update_weights_from_tensor(tensors)
        return cls((old, new), tensors)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def results(self, wishes: Sequence[Wish], *, has_new: bool) -> list[list[Result]]:
        """The samples of plain decoding for each request."""
        still = [replace(wish, is_stream=False, abort_at=None, timeout=None) for wish in wishes]
        return asyncio.run(_served(self.engines[has_new], still, _Progress()))


@dataclass
class _Progress:
    """Due once streams have produced a number of tokens."""

    after: int = 0
    seen: int = 0
    is_due: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, num_tokens: int) -> None:
        self.seen += num_tokens
        if self.seen >= self.after:
            self.is_due.set()


async def _answer(engine: Engine, wish: Wish, rid: str, progress: _Progress) -> list[Result]:
    """The samples of one request."""
    call: Options = {"input_ids": wish.prompt, "sampling_params": wish.params, "rid": rid}
    call |= wish.options | {"timeout": wish.timeout}
    if not wish.is_stream:
        result = await engine.async_generate(**call)
        return result if wish.params.n > 1 else [result]
    last: dict[int, Result] = {}
    async for output in await engine.async_generate(**call, stream=True):
        index = output.get("index", 0)
        ids, before = output["output_ids"], last.get(index, {"output_ids": [], "text": ""})
        assert ids[: len(before["output_ids"])] == before["output_ids"]
        assert output["text"].startswith(before["text"])
        progress.add(len(ids) - len(before["output_ids"]))
        last[index] = output
        if wish.abort_at is not None and len(ids) >= wish.abort_at:
            engine.abort(rid)
    return [last[i] for i in range(wish.params.n)]


async def _served(
    engine: Engine,
    wishes: Sequence[Wish],
    progress: _Progress,
    happen: Callable[[], None] | None = None,
) -> list[list[Result]]:
    """Samples of concurrent requests, with an optional event in the middle."""

    async def disturb() -> None:
        await progress.is_due.wait()
        if happen is not None:
            await asyncio.to_thread(happen)

    disturbing = asyncio.create_task(disturb())
    answers = (_answer(engine, wish, f"r{i}", progress) for i, wish in enumerate(wishes))
    results = await asyncio.wait_for(asyncio.gather(*answers), MOST_SECONDS)
    progress.is_due.set()
    await disturbing
    return results


@contextmanager
def noted(text: str) -> Iterator[None]:
    """Add a note to a failing assertion."""
    try:
        yield
    except AssertionError as error:
        error.add_note(text)
        raise


class Trial:
    """Requests to one engine, compared with plain decoding.

    Attributes:
        options: of the engine.
        phrases: numbers of tokens of the common beginnings of prompts.
        counts: number of tokens, preemptions, aborts, updates and so on.
    """

    phrases = 3, 10, 40

    def __init__(self, files: Files, plain: Reference, rng: np.random.Generator, options: Options):
        self.files, self.plain, self.rng, self.options = files, plain, rng, options
        self.counts: Counter[str] = Counter()
        self.has_new = False
        self.results: list[Result] = []

    def run(self, num_batches: int) -> Counter[str]:
        """Serve ``num_batches`` batches; the engine must end as empty as it began."""
        lender = self.plain.engines[0]
        with self.files.engine(
            speculative=False, dtype="float32", share_weights_with=lender, **self.options
        ) as self.engine:
            config = self.engine.runner.config
            room = (config.num_pages - 1) * config.page_size - config.kv_writes.tail
            events = self.draw_events(num_batches)
            batches = [self.draw_batch(name, room) for name, _ in events]
            has_new = np.cumsum([False] + [name == OTHER for name, _ in events]) % 2 == 1
            plain: dict[int, list[list[Result]]] = {}
            for kind in (False, True):  # all at once, to fill the batches
                of_kind = [i for i in range(num_batches) if has_new[i] == kind]
                wishes = [wish for i in of_kind for wish in batches[i]]
                results = iter(self.plain.results(wishes, has_new=kind))
                plain |= {i: list(islice(results, BATCH)) for i in of_kind}
            for i, (name, after) in enumerate(events):
                self.serve(batches[i], plain[i], name, after)
            self.check_totals()
            self.counts["tokens prefilled elsewhere"] = prefilled_elsewhere(self.engine)
            self.engine.flush_cache()
            assert self.engine.debug_state()["pages_free"] == config.num_pages - 1
        return self.counts

    def draw_events(self, count: int) -> list[tuple[str, int]]:
        """The event in the middle of each batch, and the number of tokens that it follows."""
        names: list[str] = []
        while len(names) < count:
            flush = one_of(self.rng, ("flush", "same weights"))
            draft = "new draft" if "draft" in self.options else "nothing"
            names += ["nothing", *self.rng.permutation([OTHER, flush, draft]).tolist()]
        return [(name, int(self.rng.integers(1, 60))) for name in names[:count]]

    def draw_batch(self, event: str, room: int) -> list[Wish]:
        phrases = draw_phrases(self.rng, self.phrases)
        wishes = [draw_wish(self.rng, phrases, room) for _ in range(BATCH)]
        name = "batches with grammars"
        has_grammars = bool(self.options.get("grammar_backend"))
        if has_grammars := has_grammars and (not self.counts[name] or chance(self.rng, 0.7)):
            self.counts[name] += 1
            wishes = [constrained(self.rng, x) if chance(self.rng, 0.4) else x for x in wishes]
        is_quiet = chance(self.rng, 0.2) and not has_grammars
        # two requests that a small pool cannot hold at once, and one that its caller always aborts
        for i, temperature in enumerate((0.0, 0.8, 0.0)):
            wishes[i] = to_the_end(wishes[i], temperature, room)
        wishes[2] = replace(wishes[2], is_stream=True, abort_at=int(self.rng.integers(1, 9)))
        if is_quiet:
            self.counts["quiet batches"] += 1
            return [quiet(wish) for wish in wishes]
        return [without_count(wish) for wish in wishes] if event == OTHER else wishes

    def serve(self, wishes: list[Wish], plain: list[list[Result]], event: str, after: int) -> None:
        """Serve a batch and compare it."""
        was_new, happen = self.has_new, self.events().get(event)
        self.engine._loop.run(self.admit_boldly)
        results = asyncio.run(_served(self.engine, wishes, _Progress(after), happen))
        self.counts[event] += 1
        told = f"{event} after {after} tokens, new weights {was_new}"
        rests: list[tuple[Wish, list[int]]] = []
        for wish, outputs, others in zip(wishes, results, plain, strict=True):
            for sample, (output, other) in enumerate(zip(outputs, others, strict=True)):
                with noted(f"{told}, sample {sample} of {wish}: {output} instead of {other}"):
                    self.note(output, wish, is_undisturbed=happen is None)
                    if was_new == self.has_new:
                        self.compare(output, other, wish)
                    else:
                        rests += self.rest_across(output, other, wish, sample)
        self.counts["samples of two sets of weights"] += len(rests)
        continued = self.plain.results([wish for wish, _ in rests], has_new=self.has_new)
        for (wish, ids), (other,) in zip(rests, continued, strict=True):
            with noted(f"{told}, after the tokens of {wish}"):
                assert ids == other["output_ids"]
        assert is_idle(self.engine)
        assert num_held(self.engine) == 0

    def admit_boldly(self) -> None:
        """Reserve no pages for running requests, so that some are preempted."""
        self.engine._scheduler._budget._reserve = 0.0

    def events(self) -> dict[str, Callable[[], None]]:
        return {
            "flush": self.engine.flush_cache,
            "same weights": self.update_to_same,
            OTHER: self.update_to_other,
            "new draft": self.update_draft,
        }

    def update_to_same(self) -> None:
        networks = self.engine.runner.networks.target
        self.engine.update_weights_from_tensor(
            dict(zip(networks.names, self.engine.runner.weights[0], strict=True))
        )

    def update_to_other(self) -> None:
        """Load the new weights from arrays, or the old ones from disk."""
        if self.has_new:
            self.engine.update_weights_from_disk(self.files.target)
        else:
            self.engine.update_weights_from_tensor(self.plain.tensors)
        self.has_new = not self.has_new

    def update_draft(self) -> None:
        """Load kernels with noise, or those on disk again."""
        if chance(self.rng, 0.5):
            self.engine.update_weights_from_disk(draft_path=self.options["draft"])
            return
        names, weights = self.engine.runner.networks.draft.names, self.engine.runner.weights[1]
        kernels = {
            name: weight
            for name, weight in zip(names, map(np.asarray, weights), strict=True)
            if name.endswith(("kernel", "kernel.values", "kernel.scale"))
        }
        for name, weight in kernels.items():
            if not name.endswith("values"):
                noise = self.rng.normal(size=weight.shape).astype("f4")
                kernels[name] = weight + 0.3 * weight.std() * noise
        self.engine.update_weights_from_tensor(kernels, draft=True)

    def compare(self, output: Result, plain: Result, wish: Wish) -> None:
        ids, meta = output["output_ids"], output["meta_info"]
        if was_aborted(output, wish):
            assert ids == plain["output_ids"][: len(ids)]
        else:
            assert ids == plain["output_ids"]
            assert output["text"] == plain["text"]
            assert meta["finish_reason"] == plain["meta_info"]["finish_reason"]
        compare_reports(meta, plain["meta_info"])

    def rest_across(
        self, output: Result, plain: Result, wish: Wish, sample: int
    ) -> list[tuple[Wish, list[int]]]:
        """A request for the tokens after a weight update, and the expected tokens.

        Weights changed at some token: earlier tokens come from the old weights, later ones from the
        new. If both give the same token, the exact position does not matter.
        """
        ids, theirs = output["output_ids"], plain["output_ids"]
        pairs = enumerate(zip(ids, theirs, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(theirs)))
        is_aborted = was_aborted(output, wish)
        if ids == theirs or (is_aborted and same == len(ids)):
            return []
        count = (len(ids) if is_aborted else wish.params.max_new_tokens) - same
        seed = sample_seed(wish.params.sampling_seed or 0, sample)
        params = replace(wish.params, max_new_tokens=count, n=1, sampling_seed=seed)
        return [(Wish(wish.prompt + ids[:same], params), ids[same:])]

    def note(self, output: Result, wish: Wish, *, is_undisturbed: bool) -> None:
        """Count a sample, whose metrics must be consistent."""
        meta, num_tokens = output["meta_info"], len(output["output_ids"])
        is_late = "timed out" in meta["finish_reason"].get("message", "")
        self.results.append(output)
        self.counts += Counter(
            {
                "tokens": num_tokens,
                "greedy tokens": num_tokens * wish.params.is_greedy,
                "seeded tokens": num_tokens * (not wish.params.is_greedy),
                "samples": 1,
                "constrained samples": wish.params.grammar is not None,
                "timeouts": is_late,
                "aborts": was_aborted(output, wish) and not is_late,
                "switches": meta.get("spec_num_switches", 0),
                # the event preempts each request once
                "retractions": max(0, meta["num_retractions"] - (not is_undisturbed)),
                "cached tokens": meta["cached_tokens"],
                "verifies": meta.get("spec_verify_ct", 0),
                "accepted drafts": meta.get("spec_num_correct_drafts", 0),
            }
        )
        check_figures(meta, is_undisturbed=is_undisturbed)

    def check_totals(self) -> None:
        """The engine's metrics equal the sums of those of its requests."""
        (state,) = self.engine.get_server_info()["internal_states"]
        metas = [result["meta_info"] for result in self.results]
        sums = {
            "cached_tokens": "cached_tokens",
            "generation_tokens": "completion_tokens",
            "num_retracted_requests": "num_retractions",
            "spec_verify_ct": "spec_verify_ct",
            "spec_num_proposed_drafts": "spec_num_proposed_drafts",
            "spec_num_correct_drafts": "spec_num_correct_drafts",
        }
        for name, of_request in sums.items():
            assert state[name] == sum(meta.get(of_request, 0) for meta in metas), name
        assert state["num_requests"] == len(metas)
        reasons = Counter(meta["finish_reason"]["type"] for meta in metas)
        assert state["num_aborted_requests"] == reasons["abort"]


def prefilled_elsewhere(engine: Engine) -> int:
    """Prompt tokens that the prefill side computed, if any."""
    if isinstance(engine, ApartEngine):
        found: int = engine.process.ask("state")["prefilled_tokens"]
        return found
    if isinstance(engine, DisaggregatedEngine):
        return engine.prefill.metrics.snapshot().prefilled_tokens
    return 0


def was_aborted(output: Result, wish: Wish) -> bool:
    """Whether its caller or its timeout aborted it."""
    return wish.may_abort and output["meta_info"]["finish_reason"]["type"] == "abort"


def check_figures(meta: Result, *, is_undisturbed: bool) -> None:
    """Check the identities of docs/metrics.md within one request."""
    if "spec_verify_ct" not in meta:
        return
    verifies, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    proposed, histogram = meta["spec_num_proposed_drafts"], meta["spec_correct_drafts_histogram"]
    rounds = {int(steps): n for steps, n in meta["spec_rounds_by_steps"].items()}
    assert sum(histogram) == verifies == sum(n for steps, n in rounds.items() if steps)
    assert sum(i * n for i, n in enumerate(histogram)) == correct <= proposed
    assert meta["spec_num_wasted_drafts"] == proposed - correct
    assert meta["spec_accept_rate"] == pytest.approx(correct / proposed if proposed else 0)
    speculated = meta["completion_tokens"] - rounds.get(0, 0)
    assert meta["spec_accept_length"] == pytest.approx(speculated / verifies if verifies else 0)
    # a verify also gives its bonus token, unless the request ends before it; every prefill of a
    # request gives one token
    prefilled = speculated - verifies - correct
    assert prefilled >= -1
    if is_undisturbed:
        assert prefilled <= 1 + meta["num_retractions"]


def compare_reports(meta: Result, plain: Result) -> None:
    """Compare log-probabilities and hidden states of all produced tokens."""
    count = meta["completion_tokens"]
    if not count:
        return  # aborted, possibly before its prompt was read
    for kind, last in (("input", None), ("output", count)):
        ours, theirs = (m.get(f"{kind}_token_logprobs", [])[:last] for m in (meta, plain))
        assert [token for _, token, _ in ours] == [token for _, token, _ in theirs]
        compare_values(ours, theirs)
        ours, theirs = (m.get(f"{kind}_top_logprobs", [])[:last] for m in (meta, plain))
        for best, other in zip(ours, theirs, strict=True):
            compare_values(best or [], other or [])
    if "hidden_states" in plain:
        np.testing.assert_allclose(
            meta["hidden_states"], plain["hidden_states"][:count], atol=STATE_ERROR
        )


def compare_values(ours: list[Any], theirs: list[Any]) -> None:
    values = [[np.nan if v is None else v for v, *_ in each] for each in (ours, theirs)]
    np.testing.assert_allclose(*values, atol=LOGPROB_ERROR)
