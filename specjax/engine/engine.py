"""The engine: text or tokens in, text and metrics out."""

import asyncio
import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from os import PathLike
from typing import Any

from specjax.checkpoints import TargetCheckpoint
from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checks import check_number
from specjax.disaggregation.decode import LocalPeer, RemotePrompts
from specjax.disaggregation.prefill import PrefillJobs
from specjax.disaggregation.remote import PrefillServer, RemotePeer
from specjax.engine.args import EngineArgs
from specjax.engine.build import build_engine, make_controller
from specjax.engine.info import server_info
from specjax.engine.plan import EnginePlan
from specjax.engine.requests import Messages, Params, RequestFactory, has_grammar
from specjax.engine.weights import (
    NewWeights,
    check_finite,
    replace_weights,
    weights_from_disk,
    weights_from_tensors,
)
from specjax.kv.events import KVEventPublisher
from specjax.metrics import EngineMetrics, Totals
from specjax.models.experts import MixtureConfig
from specjax.runtime.runner import ModelRunner, Watch
from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.grammar_check import while_waiting
from specjax.scheduling.loop import Call, EngineLoop
from specjax.scheduling.scheduler import Scheduler
from specjax.text.parts import Reasoning
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Peer = PrefillServer | RemotePeer | LocalPeer
# by disaggregation mode: the prompt source, and the peer that connects it to another process
SIDES: dict[str, tuple[Any, Any]] = {
    "prefill": (PrefillJobs, PrefillServer),
    "decode": (RemotePrompts, RemotePeer),
}
# maximum wait of close() for the step in flight
CLOSE_SECONDS = 60.0


class Engine:
    """Generates text with a target model on one device, with or without speculation.

    The constructor compiles all functions that serving dispatches. Names follow SGLang's
    ``Engine``. Any thread may call the methods; the engine's own thread runs the requests of all
    callers together. In a forked process the methods raise ``RuntimeError``.

    It ends when :meth:`close` is called, its ``with`` block or process ends, or it is unreferenced.

    Args:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        share_weights_with: another engine for the same model; both use its current weights.
        compile_on_use: compile each function at its first use, for an engine with few requests.
        **options: the other attributes of :class:`~specjax.engine.args.EngineArgs`.

    Attributes:
        runner: the device side; only the engine's thread may use it.
        tokenizer: ``None`` with ``skip_tokenizer_init``.
        config: sizes and features of the compiled functions.
        context_length: maximum number of tokens in prompt and completion together.
        metrics: metrics since the start; ``metrics.registry`` is for ``prometheus_client``.

    Raises:
        TypeError: for options that do not exist.
        ValueError: for invalid arguments or checkpoints; the message names the option to change.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2-135m",
        *,
        share_weights_with: "Engine | None" = None,
        compile_on_use: bool = False,
        **options: Any,
    ) -> None:
        args = EngineArgs(model=model, **options)
        if args.disaggregation_mode and args.disaggregation_address is None:
            raise ValueError(
                f"disaggregation_mode={args.disaggregation_mode!r} needs disaggregation_address; "
                "for two devices of one process make a DisaggregatedEngine"
            )
        self._start(args, share_weights_with, compile_on_use)

    @classmethod
    def _of(cls, args: EngineArgs, share_weights_with: "Engine", compile_on_use: bool) -> "Engine":
        engine = cls.__new__(cls)
        engine._start(args, share_weights_with, compile_on_use)
        return engine

    def _start(
        self, args: EngineArgs, share_weights_with: "Engine | None", compile_on_use: bool = False
    ) -> None:
        events = args.kv_events
        # first, because its addresses may be in use
        self._events = None if events is None else KVEventPublisher(events, args.page_size)
        try:
            self._build(args, share_weights_with, compile_on_use)
        except BaseException:
            if self._events is not None:
                self._events.close()
            raise

    def _build(
        self, args: EngineArgs, share_weights_with: "Engine | None", compile_on_use: bool
    ) -> None:
        self.args = args
        shared = None
        if share_weights_with is not None:
            share_weights_with._need_open()
            shared = share_weights_with._plan, share_weights_with.runner
        plan, runner, tokenizer = build_engine(args, shared, compile_on_use=compile_on_use)
        self._plan: EnginePlan = plan
        self.runner: ModelRunner = runner
        self.tokenizer: Tokenizer | None = tokenizer
        self.config: RunnerConfig = runner.config
        self.context_length = plan.context_length
        overlap = args.overlap
        if overlap is None:
            overlap = args.supports_overlap and not runner.networks.placement.on_cpu
        self._controller = make_controller(args, runner)
        controller, largest = self._controller, runner.config.largest
        totals = Totals(
            max_total_tokens=plan.config.max_total_tokens,
            max_window_tokens=plan.config.max_window_tokens,
            drafts=largest.steps > 0,
            depth=largest.depth,
            chains=largest.steps > 0 and largest.topk == 1,
            is_mixture=isinstance(plan.target.config, MixtureConfig),
            rows_by_proposed=[0] * max(shape.nodes for shape in runner.config.shapes),
            adapts=controller is not None,
            adaptive=dict if controller is None else controller.totals,
            simulate_accept_length=args.simulate_accept_length,
            simulate_acceptance=args.simulate_acceptance,
            checks_acceptance=plan.has_trained_draft,
            tier=largest,
        )
        self.metrics = EngineMetrics(plan.target.name, totals)
        source, peer = SIDES.get(args.disaggregation_mode or "", (None, None))
        self._scheduler = Scheduler(
            runner,
            run_ahead=int(overlap),
            caches_prefixes=not args.disable_radix_cache,
            max_waiting_requests=args.max_waiting_requests,
            max_prefill_stall=1e-3 * args.max_prefill_stall_ms,
            metrics=totals,
            controller=controller,
            prompt_source=None if source is None else source(runner),
            cache_watcher=self._events,
        )
        self._factory = RequestFactory(plan, tokenizer, self._scheduler)
        self._loop = EngineLoop(self._scheduler, args.watchdog_timeout)
        self._is_closed = False
        self._peer: Peer | None = None
        try:
            if args.disaggregation_address is not None:
                address, secret = args.disaggregation_address, args.disaggregation_secret
                self._peer = peer(address, secret, self._side)
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _stop, self._loop, self._peer, self._events)
        self._finalizer.atexit = False

    @property
    def _side(self) -> tuple[EngineLoop, Any]:
        """The loop and the prompt source, to which another engine connects."""
        return self._loop, self._scheduler.prompt_source

    @property
    def disaggregation_address(self) -> str | None:
        """Address that a prefill side listens on; port 0 is replaced by the actual port."""
        return getattr(self._peer, "address", None)

    @property
    def kv_event_sources(self) -> list[dict[str, Any]]:
        """Where KV events are published, in the form of vLLM; empty without them."""
        return [] if self._events is None else [self._events.source]

    @property
    def peer_connected(self) -> bool | None:
        """Whether the other side is connected; ``None`` without disaggregation."""
        return self._scheduler.prompt_source.peer_connected

    def wait_for_peer(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the other side; returns whether it is connected.

        Any thread may call this. Raises ValueError without ``disaggregation_mode``.
        """
        check_number("timeout", timeout, at_least=0)
        if self.peer_connected is None:
            raise ValueError("wait_for_peer needs disaggregation_mode, which is None")
        end = time.monotonic() + timeout
        while not self.peer_connected and (remaining := end - time.monotonic()) > 0:
            self.check_health()
            time.sleep(min(0.05, remaining))
        return bool(self.peer_connected)

    @property
    def target(self) -> TargetCheckpoint:
        """Checkpoint of the target's weights, with its configuration."""
        return self._plan.target

    @property
    def draft(self) -> Checkpoint[Any] | None:
        """Checkpoint of the draft's weights; ``None`` if the draft has no weights."""
        return next(iter(self._plan.drafts), None)

    def get_server_info(self) -> dict[str, Any]:
        """Return arguments, sizes and state as JSON values, with the keys that SGLang uses.

        ``internal_states`` is a list with one dict, which describes requests, KV use, throughput,
        acceptance and memory, both now and since the start.
        """
        self._loop.check_process()
        return server_info(self._plan, self.metrics.snapshot(), self._controller)

    def debug_state(self) -> dict[str, int]:
        """Numbers of requests, calls and KV pages, counted between two steps, for tests."""
        return self._loop.debug_state()

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
        logprob_start_len: int | Sequence[int] = -1,
        return_hidden_states: bool | Sequence[bool] = False,
        return_routed_experts: bool | Sequence[bool] = False,
        routed_experts_start_len: int | Sequence[int] = 0,
        timeout: float | Sequence[float | None] | None = None,
        stream: bool = False,
    ) -> Any:
        """Complete one input or a list of inputs.

        With a list of inputs, each option except ``stream`` is one value or one value per input.
        If the caller leaves early (Ctrl-C, a closed or dropped stream), its requests are aborted.

        Args:
            prompt: raw text; no chat template is applied.
            sampling_params: how tokens are chosen and when the request ends.
            input_ids: tokens instead of text.
            messages: a conversation (or a list of them) that goes through the chat template.
            rid: id of the request, for :meth:`abort_request`. An id may be reused after its request
                has ended. Sample ``i`` of an input with ``n`` above 1 is ``"{rid}_{i}"``.
            return_logprob: report ``(log-probability, token id, None)`` of every completion token
                in ``meta_info["output_token_logprobs"]``. The values come from the raw logits, or,
                with ``logprobs_mode="processed"``, after penalties, bias, temperature and filters.
            top_logprobs_num: with ``return_logprob``, also report this many most likely tokens per
                position in ``meta_info["output_top_logprobs"]``.
            logprob_start_len: with ``return_logprob``, report prompt tokens from this index on in
                ``meta_info["input_token_logprobs"]`` and ``["input_top_logprobs"]``, from the raw
                logits. The first reported token has no value: its entries are
                ``(None, token id, None)`` and ``None``. Cached tokens are recomputed. -1 is off.
            return_hidden_states: report an array f32 ``[completion tokens, D]`` in
                ``meta_info["hidden_states"]``. Row ``i`` is the target's state after the final
                norm, from which completion token ``i`` was chosen.
            return_routed_experts: report the experts that each token of prompt and completion but
                the last used, i32 ``[tokens, layers, K]``, in ``meta_info["routed_experts"]`` at
                the end. Layers without experts have zeros. A request that is aborted may have
                fewer tokens. Needs the engine option ``enable_return_routed_experts``.
            routed_experts_start_len: report them from this token on; at most the prompt's length.
            timeout: seconds until requests end with reason ``abort``. Default: ``request_timeout``.
            stream: yield cumulative results as they grow. A slow reader gets fewer of them.

        Returns:
            For one input, a dict with ``text``, ``output_ids`` (the completion only) and
            ``meta_info``. For a list of inputs, a list of such dicts. With ``n`` samples, the list
            has ``n`` dicts per input, and the seed of sample ``i`` is
            ``(sampling_seed + i * 0x9E3779B97F4A7C15) % 2**64``. With ``stream``, an iterator of
            such dicts; ``index`` is the position in the list that a call without it returns.

        Raises:
            ValueError: if an input or parameter is invalid.
            QueueFullError: if ``max_waiting_requests`` requests are already waiting.
            EngineFault: if the engine has failed.
        """
        call = self.make_call(
            prompt,
            sampling_params,
            stream=stream,
            input_ids=input_ids,
            messages=messages,
            rid=rid,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            logprob_start_len=logprob_start_len,
            return_hidden_states=return_hidden_states,
            return_routed_experts=return_routed_experts,
            routed_experts_start_len=routed_experts_start_len,
            timeout=timeout,
        )
        return self._loop.stream(call, owner=self) if stream else self._loop.wait(call)

    @wraps(generate, assigned=())
    async def async_generate(self, *inputs: Any, stream: bool = False, **options: Any) -> Any:
        """Coroutine of :meth:`generate`; ``stream`` gives an async iterator. Cancelling aborts."""
        make = partial(self.make_call, *inputs, stream=stream, **options)
        # other processes render chat templates and compile grammars: do not block the event loop
        params = options.get("sampling_params", inputs[1] if len(inputs) > 1 else None)
        if options.get("messages") is None and not has_grammar(params):
            return await self.async_run(make())
        with while_waiting():
            call = await asyncio.to_thread(make)
        return await self.async_run(call)

    def make_call(self, *inputs: Any, stream: bool = False, **options: Any) -> Call:
        """Check and tokenise :meth:`generate`'s arguments in any thread, for :meth:`async_run`."""
        self._need_open()
        if not self.config.batch_buckets:
            raise ValueError(
                "disaggregation_mode='prefill' serves decode engines only; send the request to an "
                "engine with disaggregation_mode='decode'"
            )
        return self._factory.make(*inputs, stream=stream, **options)

    @property
    def has_grammars(self) -> bool:
        """Whether requests may limit their text by a grammar."""
        return self.config.has_grammars

    @property
    def reasoning(self) -> Reasoning | None:
        """The format of the model's reasoning, if there is a ``reasoning_parser``."""
        return self._factory.reasoning

    @property
    def tool_call_parser(self) -> str | None:
        """The format of the model's tool calls."""
        return self._plan.args.tool_call_parser

    def make_probe(self, timeout: float) -> Call:
        """Make a call with one prompt token and one new token; a prefill side can run it too."""
        self._need_open()
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        return self._factory.make(
            input_ids=[0], sampling_params=sampling, timeout=timeout, stream=False
        )

    async def async_run(self, call: Call) -> Any:
        """Run a call from :meth:`make_call`, once; the result is as in :meth:`async_generate`."""
        if call.is_stream:
            return self._loop.stream_async(call, owner=self)
        return await self._loop.wait_async(call)

    def check_health(self) -> None:
        """Raise ``EngineFault`` if the engine has failed, ``ValueError`` if it is closed.

        An engine whose device does not answer for ``watchdog_timeout`` seconds has failed.
        """
        self._need_open()
        self._loop.check_health()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the request ``rid`` with all its samples, or all requests.

        The callers get the text so far, with finish reason ``abort``. Unknown ids are ignored.
        """
        if not isinstance(rid, str) or not isinstance(abort_all, bool) or bool(rid) == abort_all:
            raise ValueError(f"give either rid or abort_all; got {rid=}, {abort_all=}")
        self._loop.abort_rid(None if abort_all else rid)

    abort = abort_request

    def flush_cache(self) -> None:
        """Drop all KV and cached prefixes; running requests compute their KV again."""
        self._need_open()
        # vital: a partial flush would lose results that requests wait for
        self._loop.run(self._scheduler.flush_cache, is_vital=True)

    def update_weights_from_disk(
        self,
        model_path: str | PathLike[str] | None = None,
        draft_path: str | PathLike[str] | None = None,
        *,
        allow_nonfinite: bool = False,
    ) -> None:
        """Replace the weights of the target, the draft or both by those in checkpoints.

        Nothing is compiled. The KV pools and the prefix cache are emptied between two rounds.
        Running requests keep their text, recompute its KV and continue with the new weights.

        Raises:
            ValueError: if a checkpoint cannot be read or has another configuration, or if a weight
                is not finite and ``allow_nonfinite`` is not set. Then no weight is replaced.
        """
        self._need_open()
        plan, weights = weights_from_disk(self._plan, model_path, draft_path)
        self._replace_weights(weights, allow_nonfinite, plan)

    def update_weights_from_tensor(
        self,
        named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        draft: bool = False,
        allow_nonfinite: bool = False,
    ) -> None:
        """Replace some or all weights of the target or, with ``draft``, of the draft.

        Requests continue as with :meth:`update_weights_from_disk`. The tensors are copied (JAX
        arrays on their own devices). If the devices cannot hold the copies, use several calls.

        Args:
            named_tensors: arrays by name, either Hugging Face names (with all parts of a fused
                weight, such as ``q_proj``, ``k_proj`` and ``v_proj``) or the engine's names
                (``engine.runner.networks.target.names``). Shapes must match; floats are cast.
            allow_nonfinite: accept weights that are NaN or infinite.

        Raises:
            ValueError: if a tensor does not fit, was donated or is not finite; the error names it.
        """
        self._need_open()
        replacement = weights_from_tensors(self._plan, named_tensors, draft=draft)
        self._replace_weights(replacement, allow_nonfinite)

    def watch_rounds(self, watch: Watch | None) -> None:
        """Call ``watch`` with the drafts and accepted tokens of each later round. ``None`` ends it.

        For tools: tokens stay the same, but rounds are slower, since each is dispatched in three
        parts, which are compiled when they are first used. ``watch`` runs in the engine's thread
        with request slots i32 ``[B]``, a :class:`~specjax.types.VerifyInput` and a
        :class:`~specjax.types.VerifyOutput`. An exception in ``watch`` ends the engine.
        """
        self._need_open()
        self._loop.run(partial(self.runner.watch_rounds, watch))

    def close(self) -> None:
        """Abort running requests and free the device memory."""
        self._loop.check_process()
        self._is_closed = True
        if self._peer is not None:
            self._peer.close()
        if not self._loop.close(CLOSE_SECONDS):
            logger.warning("the engine thread did not end within %.0f s", CLOSE_SECONDS)
        elif self._finalizer.detach() is not None:  # only the first caller unloads
            self.runner.unload()
            self._factory.close()
            if self._events is not None:
                self._events.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _need_open(self) -> None:
        self._loop.check_process()
        if self._is_closed:
            raise ValueError("the engine is closed")

    @property
    def _engines(self) -> "tuple[Engine, ...]":
        """Engines whose weights are replaced together."""
        return (self,)

    def _replace_weights(
        self, replacement: NewWeights, allow_nonfinite: bool, plan: EnginePlan | None = None
    ) -> None:
        if not allow_nonfinite:
            for weights in replacement:
                check_finite(weights)
        for engine in self._engines:  # check all before any is changed
            engine.check_health()
        for engine in self._engines:
            engine._loop.run(partial(engine._replace_between_steps, replacement), is_vital=True)
            if plan is not None:
                engine._plan = replace(engine._plan, target=plan.target, drafts=plan.drafts)

    def _replace_between_steps(self, replacement: NewWeights) -> None:
        self._scheduler.flush_cache()
        for _ in replace_weights(self.runner, replacement):
            self._loop.advance()
        self.runner.reset()
        self._scheduler.prompt_source.weights_replaced()


def _stop(loop: EngineLoop, peer: Peer | None, events: KVEventPublisher | None) -> None:
    if peer is not None:
        peer.close()
    loop.stop()
    if events is not None:
        events.close()
