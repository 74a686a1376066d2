"""The engine: text or tokens in, text and figures out."""

import logging
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint, open_target
from specjax.config import SpeculativeConfig
from specjax.diagnostics import two_best
from specjax.inputs import (
    Messages,
    check_ids,
    check_vocabulary,
    need_tokenizer,
    tokenize_inputs,
)
from specjax.kernels.tree_attention import attention_implementation
from specjax.runtime.buckets import MIN_ROWS_GPU, checked_buckets, prefill_buckets
from specjax.runtime.compile_pool import enable_compile_cache
from specjax.runtime.memory import device_memory, kv_bytes_per_token, plan_pools
from specjax.runtime.paging import PageAllocator
from specjax.runtime.runner import ModelRunner, Networks, RunnerConfig
from specjax.sampling_params import SamplingParams
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler
from specjax.tokenizer import IncrementalDecoder

logger = logging.getLogger(__name__)

DEFAULT_NUM_STEPS = 5
Params = SamplingParams | Mapping[str, Any] | None


class Engine:
    """Generates text with a target model, speculatively or plainly, on one device.

    Everything that serving dispatches is compiled here, before the first request. The names follow
    SGLang's ``Engine``.

    Args:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        draft: draft head: a directory or repo id; ``None`` takes the head embedded for ``model``.
        speculative_algorithm: ``"EAGLE3"``, ``"EAGLE"``, or ``None`` to decode plainly.
        speculative_num_steps: drafted tokens a round; 5 by default.
        speculative_eagle_topk: candidates a level; only 1 (a chain) is supported.
        speculative_num_draft_tokens: rows of a verify; ``speculative_num_steps + 1`` for a chain.
        draft_rope_theta: overrides the rotary base of the draft head.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"auto"``: float32 on a CPU, the checkpoint's on a
            GPU.
        context_length: prompt and completion together; the model's own limit by default.
        page_size: tokens a KV page.
        max_running_requests: requests decoded at once; 4 on a CPU and 32 on a GPU by default.
        batch_buckets: batch sizes that rounds are compiled for; powers of two by default.
        max_total_tokens: tokens in the KV pool.
        mem_fraction_static: share of the device's memory for weights and KV where
            ``max_total_tokens`` is not given.
        chunked_prefill_size: prompt tokens a prefill dispatch; 512 on a CPU, 1,024 on a GPU.
        load_format: ``"auto"`` reads the checkpoint's weights; ``"dummy"`` reads its configuration
            only and makes random weights on the device, for measurements of speed.
        rounds_per_dispatch: rounds that one call on the device makes; more than 1 pays where a
            round is shorter than its dispatch, at the price of coarser streaming.
        skip_tokenizer_init: do without a tokenizer; only ``input_ids`` are accepted then.
        seed: of the noise of requests that bring no ``sampling_seed``.
        compile_cache_dir: folder of compiled functions, ``"auto"`` for the user's cache folder,
            ``None`` to leave JAX's own setting alone.
        show_progress: progress bar at start-up; by default where standard error is a terminal.
        simulate_accept_length: accept this many tokens a round on average, right or wrong: for
            measurements of speed, its text is of no meaning.
        share_weights_with: an engine over the same model whose weights are used again.

    Raises:
        ValueError: for arguments or checkpoints that do not work, with the knob to turn.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2-135m",
        *,
        draft: str | PathLike[str] | None = None,
        speculative_algorithm: str | None = None,
        speculative_num_steps: int | None = None,
        speculative_eagle_topk: int = 1,
        speculative_num_draft_tokens: int | None = None,
        draft_rope_theta: float | None = None,
        dtype: str = "auto",
        context_length: int | None = None,
        page_size: int = 16,
        max_running_requests: int | None = None,
        batch_buckets: Sequence[int] | None = None,
        max_total_tokens: int | None = None,
        mem_fraction_static: float | None = None,
        chunked_prefill_size: int | None = None,
        load_format: str = "auto",
        rounds_per_dispatch: int = 1,
        skip_tokenizer_init: bool = False,
        seed: int = 0,
        compile_cache_dir: str | PathLike[str] | None = "auto",
        show_progress: bool | None = None,
        simulate_accept_length: float | None = None,
        share_weights_with: "Engine | None" = None,
    ) -> None:
        device = jax.devices()[0]
        on_cpu = device.platform == "cpu"
        if show_progress is None:
            show_progress = sys.stderr.isatty()
        speculative = _speculative_config(
            speculative_algorithm,
            speculative_num_steps,
            speculative_eagle_topk,
            speculative_num_draft_tokens,
            {
                "draft": draft,
                "draft_rope_theta": draft_rope_theta,
                "simulate_accept_length": simulate_accept_length,
            },
        )
        if load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={load_format!r} is not 'auto' or 'dummy'")
        for name, value in (
            ("max_running_requests", max_running_requests),
            ("chunked_prefill_size", chunked_prefill_size),
            ("rounds_per_dispatch", rounds_per_dispatch),
            ("context_length", context_length),
            ("page_size", page_size),
            ("max_total_tokens", max_total_tokens),
        ):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value} must be an integer of at least 1")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed={seed} must be an integer of at least 0")
        enable_compile_cache(None if compile_cache_dir is None else str(compile_cache_dir))

        target = open_target(model, dtype="float32" if dtype == "auto" and on_cpu else dtype)
        if share_weights_with is not None:
            share_weights_with._need_open()
            if not _is_same(share_weights_with.target, target):
                raise ValueError(
                    f"share_weights_with is an engine over {share_weights_with.target.path} in "
                    f"{share_weights_with.target.config.dtype}, not over {target.path} in "
                    f"{target.config.dtype}"
                )
        head = None
        if speculative is not None:
            from specjax.checkpoints import open_draft

            head = open_draft(
                draft, target, algorithm=speculative.algorithm, rope_theta=draft_rope_theta
            )
            logger.info("draft head: %s", head.describe())
        networks = Networks.of(
            target.config, None if head is None else head.config, "xla" if on_cpu else "pallas"
        )
        self.context_length = _context_length(context_length, target.config)
        slots = max_running_requests or (4 if on_cpu else 32)
        chunk = chunked_prefill_size or (512 if on_cpu else 1024)
        flats = (networks.target, networks.head)
        arrays = [leaf for flat in flats if flat is not None for leaf in flat.abstract]
        plan = plan_pools(
            memory=device_memory(device),
            on_cpu=on_cpu,
            weight_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in arrays),
            token_bytes=sum(
                kv_bytes_per_token(c)
                for c in (networks.target_config, networks.head_config)
                if c is not None
            ),
            page_size=page_size,
            context_length=self.context_length,
            max_running_requests=slots,
            max_total_tokens=max_total_tokens,
            mem_fraction_static=mem_fraction_static,
        )
        logger.info("%s (%s): %s", target.name, target.config.dtype, plan.describe())
        self._num_steps = 0 if speculative is None else speculative.num_steps
        self.runner = ModelRunner(
            networks,
            RunnerConfig(
                num_steps=self._num_steps,
                page_size=page_size,
                num_pages=plan.num_pages,
                pages_per_request=-(-self.context_length // page_size),
                num_slots=slots + 1,
                batch_buckets=checked_buckets(
                    batch_buckets, slots, 1 if on_cpu or speculative else MIN_ROWS_GPU
                ),
                prefill_buckets=prefill_buckets(chunk, self.context_length),
                attention=attention_implementation(
                    "cpu" if on_cpu else "gpu",
                    [c.head_dim for c in (target.config, networks.head_config) if c is not None],
                ),
                rounds_per_dispatch=rounds_per_dispatch,
                simulate_accept_length=simulate_accept_length,
            ),
        )
        self.target: TargetCheckpoint = target
        self.draft: DraftCheckpoint | None = head
        with ThreadPoolExecutor(1) as executor:
            loading = executor.submit(self._load_weights, share_weights_with, load_format)
            self.tokenizer = None if skip_tokenizer_init else target.load_tokenizer()
            self.runner.compile(show_progress=show_progress)
            self.runner.load(*loading.result())
        allocator = PageAllocator(plan.num_pages, page_size)
        self._scheduler = Scheduler(self.runner, allocator, run_ahead=0 if on_cpu else 1)
        self._lock = threading.RLock()
        self._rng = np.random.default_rng(seed)
        self._open: set[Request] = set()
        self._closed = False

    def _load_weights(self, other: "Engine | None", load_format: str) -> tuple[Any, Any]:
        nets = self.runner.networks
        if load_format == "dummy":
            return nets.target.random(0), () if nets.head is None else nets.head.random(1)
        target = head = None
        if other is not None:
            target = other.runner.weights[0]
            if _is_same(other.draft, self.draft):
                head = other.runner.weights[1]
        if target is None:
            target = jax.device_put(nets.target.order(self.target.load_weights()))
        if head is None:
            if self.draft is None or nets.head is None:
                head = ()
            else:
                head = jax.device_put(nets.head.order(self.draft.load_weights()))
        return target, head

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        messages: Messages | Sequence[Messages] | None = None,
        stream: bool = False,
    ) -> Any:
        """Complete one input or a list of them.

        Args:
            prompt: raw text; no chat template is applied.
            sampling_params: one for all inputs, or a list with one for each.
            input_ids: tokens instead of text.
            messages: a conversation (or a list of them) that goes through the chat template.
            stream: yield cumulative results as they grow instead of returning the last.

        Returns:
            For one input a dict with ``text``, ``output_ids`` (the completion only) and
            ``meta_info``; for a list, a list of them. With ``stream`` an iterator of such dicts,
            with ``index`` for a list of inputs.

        Raises:
            ValueError: for inputs or parameters that cannot be served.
        """
        self._need_open()
        inputs, is_batch = tokenize_inputs(self.tokenizer, prompt, input_ids, messages)
        for ids in inputs:
            check_ids(ids, self.target.config.vocab_size, self.context_length)
        if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            params = [SamplingParams.of(p) for p in sampling_params]
            if len(params) != len(inputs):
                raise ValueError(f"{len(params)} sampling_params for {len(inputs)} inputs")
        else:
            params = [SamplingParams.of(sampling_params)] * len(inputs)  # type: ignore[arg-type]
        requests = [self._request(i, p) for i, p in zip(inputs, params, strict=True)]
        for request in requests:
            self._scheduler.check(request)
        if stream:
            return self._stream(requests, is_batch)
        try:
            self._submit(requests)
            while not all(request.is_finished for request in requests):
                self._step()
        finally:
            self._drop(requests)
        results = [request.result() for request in requests]
        return results if is_batch else results[0]

    def logit_gap(self, input_ids: Sequence[int]) -> tuple[int, int, float]:
        """The two best next tokens after ``input_ids`` and the gap of their logits.

        It tells how near a tie was where bfloat16 texts with and without speculation part.
        """
        self._need_open()
        nets = self.runner.networks
        return two_best(nets.target, self.runner.weights[0], list(input_ids))

    def close(self) -> None:
        """End what is running with finish reason ``abort`` and let the device memory go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop(list(self._open))
            self.runner.unload()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _need_open(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")

    def _submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._need_open()
            self._open.update(requests)
            for request in requests:
                self._scheduler.add(request)

    def _step(self) -> None:
        with self._lock:
            self._scheduler.step()

    def _drop(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._scheduler.abort(request)
                self._open.discard(request)

    def _stream(self, requests: list[Request], is_batch: bool) -> Iterator[dict[str, Any]]:
        sent = [-1] * len(requests)
        try:
            # queued when first asked for, so that a stream that nobody reads holds nothing
            self._submit(requests)
            while True:
                outs = []
                with self._lock:
                    is_over = all(request.is_finished for request in requests)
                    for i, request in enumerate(requests):
                        state = 2 * len(request.output_ids) + request.is_finished
                        if state in (sent[i], 0):
                            continue
                        sent[i] = state
                        out = request.result() | {"text": request.streamed_text()}
                        out["meta_info"]["output_is_draft"] = list(request.output_is_draft)
                        outs.append(out | ({"index": i} if is_batch else {}))
                yield from outs
                if is_over:
                    return
                self._step()
        finally:
            self._drop(requests)

    def _request(self, input_ids: list[int], params: SamplingParams) -> Request:
        if params.stop_strings:
            need_tokenizer(self.tokenizer, "stop")
        ends = set(params.stop_token_ids or ())
        check_vocabulary("stop_token_ids", sorted(ends), self.target.config.vocab_size)
        if not params.ignore_eos:
            ends |= set(self.target.config.eos_token_ids)
        seed = params.sampling_seed
        with self._lock:
            drawn = int(self._rng.integers(2**63))
        return Request(
            uuid.uuid4().hex,
            input_ids,
            params,
            seed=drawn if seed is None else seed,
            max_new_tokens=min(params.max_new_tokens, self.context_length - len(input_ids)),
            end_token_ids=frozenset(ends),
            decoder=None if self.tokenizer is None else IncrementalDecoder(self.tokenizer),
            spec_width=self._num_steps,
        )


def _is_same(
    one: TargetCheckpoint | DraftCheckpoint | None, other: TargetCheckpoint | DraftCheckpoint | None
) -> bool:
    """Whether two checkpoints give the same weights."""
    if one is None or other is None:
        return False
    return one.config == other.config and one.path.resolve() == other.path.resolve()


def _speculative_config(
    algorithm: str | None,
    num_steps: int | None,
    topk: int,
    num_draft_tokens: int | None,
    others: Mapping[str, Any],
) -> SpeculativeConfig | None:
    if algorithm is None:
        given = {
            "speculative_num_steps": num_steps,
            "speculative_num_draft_tokens": num_draft_tokens,
            "speculative_eagle_topk": topk if topk != 1 else None,
            **others,
        }
        unused = [name for name, value in given.items() if value is not None]
        if unused:
            raise ValueError(f"{unused} are given, but speculative_algorithm is None; set it")
        return None
    steps = DEFAULT_NUM_STEPS if num_steps is None else num_steps
    return SpeculativeConfig(
        algorithm=algorithm,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=steps + 1 if num_draft_tokens is None else num_draft_tokens,
    )


def _context_length(context_length: int | None, config: Any) -> int:
    window = config.sliding_window
    limit = config.max_position_embeddings
    if window is not None and window < limit:
        if context_length is not None and context_length > window:
            raise ValueError(
                f"context_length={context_length} exceeds the model's sliding window of {window}; "
                "sliding-window attention is not supported beyond it; lower context_length"
            )
        if context_length is None:
            logger.warning(
                "context_length=%d of %d: the sliding window, beyond which attention is not "
                "supported",
                window,
                limit,
            )
        limit = window
    if context_length is not None and context_length > limit:
        raise ValueError(
            f"context_length={context_length} exceeds the model's limit of {limit} "
            "(max_position_embeddings); lower context_length"
        )
    return context_length or limit
