"""The engine: text or tokens in, text and figures out."""

import atexit
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import jax

from specjax.checkpoints import DraftCheckpoint, TargetCheckpoint
from specjax.engine.adaptive import make_controller
from specjax.engine.args import EngineArgs
from specjax.engine.build import EngineParts, build_parts
from specjax.engine.diagnostics import two_best
from specjax.engine.info import server_info
from specjax.engine.inputs import Messages, check_ids
from specjax.engine.requests import Params, RequestFactory
from specjax.engine.streams import Batch, stream_batch, stream_batch_async, wait, wait_async
from specjax.engine.weights import (
    NewWeights,
    replace_weights,
    weights_from_disk,
    weights_from_tensors,
)
from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import PrefixCache
from specjax.metrics.engine_metrics import EngineMetrics
from specjax.runtime.runner import ModelRunner
from specjax.scheduling.loop import EngineLoop
from specjax.scheduling.scheduler import Scheduler
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# a step in flight is waited for; at the interpreter's end a device that hangs must not hold it up
CLOSE_SECONDS = 60.0
EXIT_SECONDS = 5.0


class Engine:
    """Generates text with a target model, speculatively or plainly, on one device.

    Everything that serving dispatches is compiled here, before the first request. The names follow
    SGLang's ``Engine``. All methods may be called from several threads at once; one thread of the
    engine's own runs the requests of all of them together.

    An engine ends with :meth:`close`, with its ``with`` block, when the last reference to it goes,
    or with the interpreter.

    Args:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        share_weights_with: an engine over the same model whose weights are used again, as they are
            now.
        **options: the other attributes of :class:`~specjax.engine.args.EngineArgs`.

    Raises:
        TypeError: for options that do not exist.
        ValueError: for arguments or checkpoints that do not work, with the knob to turn.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2-135m",
        *,
        share_weights_with: "Engine | None" = None,
        **options: Any,
    ) -> None:
        self.args = EngineArgs(model=model, **options)
        if share_weights_with is not None:
            share_weights_with._need_open()
        lender = None if share_weights_with is None else share_weights_with._parts
        self._parts: EngineParts = build_parts(self.args, lender)
        parts, args = self._parts, self.args
        self._factory = RequestFactory(
            parts.target.config,
            parts.tokenizer,
            context_length=parts.context_length,
            num_steps=parts.runner.config.num_steps,
            seed=args.seed,
            timeout=args.request_timeout,
        )
        overlap = jax.default_backend() != "cpu" if args.overlap is None else args.overlap
        runner = parts.runner
        allocator = PageAllocator(runner.config.num_pages, args.page_size)
        cache = None
        if not args.disable_radix_cache:
            lookahead = 0 if parts.draft is None else 1
            cache = PrefixCache(allocator, args.page_size, lookahead=lookahead)
        self._controller = make_controller(args, runner)
        num_kv_tokens = (runner.config.num_pages - 1) * args.page_size
        self._metrics = EngineMetrics(parts.target.name, num_kv_tokens, controller=self._controller)
        self._scheduler = Scheduler(
            runner,
            allocator,
            run_ahead=int(overlap),
            prefix_cache=cache,
            max_waiting_requests=args.max_waiting_requests,
            metrics=self._metrics,
            controller=self._controller,
        )
        self._loop = EngineLoop(self._scheduler)
        self._is_closed = False
        # behind JAX's own hook and so before it: the thread needs a device until it ends
        self._at_exit = partial(_close_at_exit, weakref.ref(self._loop))
        atexit.register(self._at_exit)
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._at_exit)
        self._finalizer.atexit = False

    @property
    def target(self) -> TargetCheckpoint:
        """Where the target's weights come from, with its configuration."""
        return self._parts.target

    @property
    def draft(self) -> DraftCheckpoint | None:
        """Where the draft head's weights come from; ``None`` in plain decoding."""
        return self._parts.draft

    @property
    def runner(self) -> ModelRunner:
        """The device side; it belongs to the engine's thread."""
        return self._parts.runner

    @property
    def tokenizer(self) -> Tokenizer | None:
        """``None`` with ``skip_tokenizer_init``."""
        return self._parts.tokenizer

    @property
    def context_length(self) -> int:
        """Prompt and completion together."""
        return self._parts.context_length

    @property
    def metrics(self) -> EngineMetrics:
        """Figures since the start; ``metrics.registry`` is for ``prometheus_client``."""
        return self._metrics

    def get_server_info(self) -> dict[str, Any]:
        """Arguments, sizes and state, in the shape of SGLang's ``get_server_info``.

        ``internal_states`` is a list with one dict: requests, KV use, throughput, acceptance and
        memory now and since the start. Everything in it is plain data for ``json.dumps``.
        """
        return server_info(self.args, self._parts, self._metrics.snapshot(), self._controller)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        messages: Messages | Sequence[Messages] | None = None,
        rid: str | Sequence[str] | None = None,
        return_logprob: bool | Sequence[bool] = False,
        top_logprobs_num: int | Sequence[int] = 0,
        timeout: float | None = None,
        stream: bool = False,
    ) -> Any:
        """Complete one input or a list of them.

        Leaving early in any way (Ctrl-C, closing or forgetting a stream) aborts what still runs.

        Args:
            prompt: raw text; no chat template is applied.
            sampling_params: one for all inputs, or a list with one for each.
            input_ids: tokens instead of text.
            messages: a conversation (or a list of them) that goes through the chat template.
            rid: id of the request, for :meth:`abort`; a list for a list of inputs. An id may be
                used again when its request has ended. Sample ``i`` of an input with ``n`` above 1
                is ``"{rid}_{i}"``.
            return_logprob: report ``(log probability, token id, None)`` of every completion token
                in ``meta_info["output_token_logprobs"]``, from the raw logits: neither temperature
                nor filters, penalties and bias are applied. A list for a list of inputs.
            top_logprobs_num: with ``return_logprob``, report this many best tokens at each position
                in ``meta_info["output_top_logprobs"]`` too; a list for a list of inputs.
            timeout: seconds after which the requests end with finish reason ``abort``;
                ``request_timeout`` of the engine by default.
            stream: yield cumulative results as they grow instead of returning the last. A slow
                reader gets fewer and longer steps.

        Returns:
            For one input a dict with ``text``, ``output_ids`` (the completion only) and
            ``meta_info``; for a list, a list of them. With ``n`` samples a list of ``n`` for each
            input, one input after the other. A ``sampling_seed`` is that of sample 0; sample ``i``
            is what the seed ``(sampling_seed + i * 0x9E3779B97F4A7C15) % 2**64`` gives. With
            ``stream`` an iterator of such dicts, with the ``index`` in the list that there would
            be.

        Raises:
            ValueError: for inputs or parameters that cannot be served.
            QueueFullError: if ``max_waiting_requests`` wait already.
            EngineFault: if the engine failed while it ran the requests, or before.
        """
        self._need_open()
        batch = self._factory.make(
            prompt=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            messages=messages,
            rid=rid,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            timeout=timeout,
        )
        self._check(batch)
        if stream:
            return stream_batch(self._loop, batch, owner=self)
        return wait(self._loop, batch)

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Params | Sequence[Params] = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        messages: Messages | Sequence[Messages] | None = None,
        rid: str | Sequence[str] | None = None,
        return_logprob: bool | Sequence[bool] = False,
        top_logprobs_num: int | Sequence[int] = 0,
        timeout: float | None = None,
        stream: bool = False,
    ) -> Any:
        """:meth:`generate` as a coroutine; with ``stream`` it returns an asynchronous iterator.

        Cancelling it aborts what still runs.
        """
        self._need_open()
        batch = self._factory.make(
            prompt=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            messages=messages,
            rid=rid,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            timeout=timeout,
        )
        self._check(batch)
        if stream:
            return stream_batch_async(self._loop, batch, owner=self)
        return await wait_async(self._loop, batch)

    def abort(self, rid: str) -> None:
        """End the request of an id, and all its samples, with finish reason ``abort``.

        Whoever waits for it gets the text so far. An id that does not run is ignored.
        """
        self.abort_request(rid)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """:meth:`abort` under SGLang's name; with ``abort_all`` every request ends."""
        if not isinstance(rid, str) or not isinstance(abort_all, bool) or bool(rid) == abort_all:
            raise ValueError(f"rid={rid!r}, abort_all={abort_all}: give one of them")
        self._loop.abort_rid(None if abort_all else rid)

    def flush_cache(self) -> None:
        """Forget all KV, cached prefixes included.

        Running requests keep their text, and compute its KV again.
        """
        self._need_open()
        # half a flush has lost results that requests wait for
        self._loop.run(self._scheduler.flush_cache, is_vital=True)

    def update_weights_from_disk(
        self,
        model_path: str | PathLike[str] | None = None,
        draft_path: str | PathLike[str] | None = None,
    ) -> None:
        """Replace the weights of the target, the draft head or both between two rounds.

        Nothing compiles. No KV of the old weights is used again: the prefix cache is flushed, and
        running requests keep their text, compute its KV anew and go on with the new weights.

        Args:
            model_path: a checkpoint with the configuration of the running target.
            draft_path: one with that of the running draft head.

        Raises:
            ValueError: if a checkpoint cannot be read or has another configuration; the weights
                are as before then.
        """
        self._need_open()
        target, draft, weights = weights_from_disk(
            self.target,
            self.draft,
            model_path,
            draft_path,
            draft_rope_theta=self.args.draft_rope_theta,
        )
        self._replace_weights(weights)
        self._parts.target, self._parts.draft = target, draft

    def update_weights_from_tensor(
        self,
        named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        draft: bool = False,
    ) -> None:
        """Replace some or all weights between two rounds, as :meth:`update_weights_from_disk` does.

        Args:
            named_tensors: arrays by name: Hugging Face names (with all the parts of a weight that
                is stored in several tensors, such as ``q_proj``, ``k_proj`` and ``v_proj``), or the
                engine's own (``engine.runner.networks.target.names``). Shapes and dtypes are those
                of the running weights.
            draft: they are of the draft head.

        Raises:
            ValueError: naming the tensor that does not fit; the weights are as before then.
        """
        self._need_open()
        nets = self.runner.networks
        self._replace_weights(weights_from_tensors(nets, named_tensors, draft=draft))

    def logit_gap(self, input_ids: Sequence[int]) -> tuple[int, int, float]:
        """The two best next tokens after ``input_ids`` and the gap of their logits.

        It tells how near a tie was where bfloat16 texts with and without speculation part.
        """
        self._need_open()
        nets = self.runner.networks
        check_ids(input_ids, self.target.config.vocab_size, self.context_length)
        return two_best(nets.target, self.runner.weights[0], list(input_ids))

    def close(self) -> None:
        """End what is running with finish reason ``abort`` and let the device memory go."""
        self._is_closed = True
        if not self._loop.close(CLOSE_SECONDS):
            logger.warning(
                "the engine's thread did not end within %.0f s; its memory goes when it does",
                CLOSE_SECONDS,
            )
            return
        if self._finalizer.detach() is not None:  # the first to get here
            atexit.unregister(self._at_exit)
            self.runner.unload()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _need_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed")

    def _check(self, batch: Batch) -> None:
        for request in batch.requests:
            self._scheduler.check(request)

    def _replace_weights(self, new: NewWeights) -> None:
        self._loop.run(partial(_replace_weights, self._scheduler, self.runner, new), is_vital=True)


def _replace_weights(scheduler: Scheduler, runner: ModelRunner, new: NewWeights) -> None:
    scheduler.flush_cache()
    replace_weights(runner, new)


def _stop(loop: EngineLoop, at_exit: Any) -> None:
    atexit.unregister(at_exit)
    loop.stop()


def _close_at_exit(loop: "weakref.ref[EngineLoop]") -> None:
    alive = loop()
    if alive is not None:
        alive.close(EXIT_SECONDS)
