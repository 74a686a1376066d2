"""Engine arguments, checked as far as possible without a model, a device or importing JAX."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from importlib.util import find_spec
from os import PathLike
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from msgspec import Meta

from specjax.checks import Natural, Positive, annotations, convert, is_integer, refused
from specjax.config import KV_DTYPES, MAX_STEPS, QUANTISED, Theta
from specjax.disaggregation.address import check_secret
from specjax.engine.names import answer
from specjax.speculative.catalog import check_name
from specjax.text.harmony import NAME as HARMONY
from specjax.text.parts import REASONING
from specjax.text.tool_formats import FORMATS

if TYPE_CHECKING:
    from specjax.adaptive.config import AdaptiveConfig
    from specjax.kv.events import KVEventsConfig
    from specjax.sampling.accept_draws import Acceptance
    from specjax.speculative.algorithm import CustomSpecAlgo, SpeculativeAlgorithm
    from specjax.types import DraftShape

# as in SGLang
DEFAULT_POLICY = "ema"
WATCHDOG_SECONDS = 300.0  # a step takes milliseconds on a GPU, but may take minutes on a CPU
T = TypeVar("T")
Share = Annotated[float, Meta(ge=0, le=1)]
CHOICES: dict[str, tuple[str | None, ...]] = {
    "disaggregation_mode": (None, "prefill", "decode"),
    "dtype": ("auto", "float32", "bfloat16"),
    "grammar_backend": (None, "llguidance"),
    "kv_cache_dtype": ("auto", *KV_DTYPES),
    "load_format": ("auto", "dummy"),
    "logprobs_mode": ("raw", "processed"),
    "quantization": (None, *QUANTISED),
    "reasoning_parser": (None, *REASONING),
    "tool_call_parser": (None, *FORMATS),
    "speculative_ngram_match_type": ("BFS", "PROB"),
}


def answers_other_names(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass raise TypeError for options that the table lists."""
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: T, **options: Any) -> None:
        if text := next(filter(None, map(answer, options)), None):
            raise TypeError(text)
        init(self, **options)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@answers_other_names
@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Start options of an :class:`~specjax.Engine`, under SGLang's names.

    Attributes:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        draft: draft head: a directory or repo id. Default: the head included with the model. For
            ``"STANDALONE"``: a model with the same vocabulary, in any form that ``model`` accepts.
            For ``"NEXTN"`` and ``"MULTI_LAYER_EAGLE"``: a checkpoint with the prediction modules;
            default: the model. For ``"DFLASH"`` and ``"DSPARK"``: a block drafter, by default the
            folder ``dspark`` of ``model`` or the drafter embedded for it. For
            ``"FROZEN_KV_MTP"``: an assistant of the model.
        speculative_algorithm: ``"EAGLE3"``, ``"EAGLE"``, ``"NEXTN"``, ``"NGRAM"``,
            ``"STANDALONE"``, ``"MULTI_LAYER_EAGLE"``, ``"DFLASH"``, ``"DSPARK"``,
            ``"FROZEN_KV_MTP"``, the name of an algorithm from an installed package, or ``None`` or
            ``"NONE"`` for plain decoding.
        speculative_num_steps: levels drafted per round, one token each in a chain. Default: 5; 11
            for ``"NGRAM"``; 4 for ``"FROZEN_KV_MTP"``; 1 for ``"MULTI_LAYER_EAGLE"``, which has one
            module per step. For ``"DFLASH"`` and ``"DSPARK"``: number of the block's drafts to
            verify; default: all.
        speculative_eagle_topk: branches per level of the drafted tree; 1 drafts a chain.
        speculative_num_draft_tokens: tokens verified per round, including the root (at most 64, or
            16 with recurrent layers). Default: for a chain, ``speculative_num_steps + 1``, which is
            also the maximum; for a tree, topk x steps + 1. Needs ``speculative_num_steps`` except
            with ``"NGRAM"``, ``"DFLASH"`` and ``"DSPARK"``.
        speculative_adaptive: adapt the number of drafted tokens to the measured acceptance,
            starting at ``speculative_num_steps``, which may be 0.
        speculative_adaptive_config: JSON object, or the path of a file with one. The policy for
            servers, ``{"policy": "budget"}``, drafts only as much as pays at the current load.
            Default: the EMA policy. See docs/adaptive_decoding.md.
        speculative_use_rejection_sampling: at temperatures above 0, accept drafts by speculative
            sampling (chains only). A draft with target probability p and draft probability q is
            accepted with probability ``min(1, p / q)``, else a token is drawn from the residual
            ``max(0, p - q)``. The target's distribution is kept (in bfloat16 up to rounding), but a
            seed no longer gives the text of plain decoding.
        speculative_accept_threshold_single: accept a draft above temperature 0 if its target
            probability is at least this, from 0 (accept every draft) to 1 (off). Values below 1 are
            lossy: neither the target's distribution nor, for a given seed, the text of plain
            decoding is kept.
        speculative_accept_threshold_acc: divide the acceptance probability of drafts above
            temperature 0 by this; the result is capped at 1. From 0 (accept every draft that the
            target may draw) to 1 (off). Values below 1 are lossy too.
        speculative_token_map: draft only tokens of a hot vocabulary, so that a head that shares the
            target's output head reads a part of it. A ``.json`` file with a list of token ids, or
            ``TEXT:COUNT`` for the most frequent tokens of a text file.
        speculative_draft_window_size: number of last tokens that each row of a draft network reads
            in its attention, for prompts beyond those of its training. A layer with a smaller
            window in its own file keeps that. Texts stay the same. Default: all tokens.
        speculative_draft_sink_size: number of first tokens that such rows read too. Needs
            ``speculative_draft_window_size``.
        speculative_ngram_min_match_window_size: minimum n-gram length to match.
        speculative_ngram_max_match_window_size: maximum n-gram length to match (at most 16).
        speculative_ngram_max_bfs_breadth: maximum matches per tree (at most 16); 1 drafts a chain.
        speculative_ngram_match_type: prefer recent (``"BFS"``) or frequent (``"PROB"``) matches.
        speculative_ngram_external_corpus_path: JSON lines file to search in addition to the
            request's text; each line is a text or a list of token ids.
        speculative_ngram_external_corpus_max_tokens: maximum tokens of the external corpus.
        draft_rope_theta: rotary base of the draft head, instead of the checkpoint's.
        draft_tp_size: number of devices that share each layer of the draft and its KV: 1 or
            ``tp_size``. Default: what is faster, by the bytes of the draft.
        tokenizer: directory or repo id of a tokenizer to use instead of the model's.
        chat_template: file with a Jinja template to use instead of the tokenizer's.
        revision: branch, tag or commit, if ``model`` is a repo id; does not apply to other options.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"auto"``: float32 on a CPU, else the checkpoint's.
        quantization: ``"fp8"`` (e4m3), ``"int8"`` or ``"int4"``: store whole matrices in 8 bits
            with a scale per output channel, or in 4 bits with a scale per 128 inputs, also those of
            the output head and the draft, but not embeddings (nor a head tied to them), norms and
            block drafters. Drafts are verified by the quantised target, whose text differs from
            that of the whole weights. Checkpoints that are quantised themselves need no option.
        quantize_activations: also round the inputs of products to 8 bits, a scale per row, for fp8
            and int8 with scales per output channel. From 64 rows on, products are then faster.
            Default: activations keep ``dtype``, whatever the checkpoint states.
        kv_cache_dtype: ``"fp8_e4m3"`` stores keys and values of the target and the draft in 8 bits,
            in half the memory of bfloat16; a checkpoint's scales are rounded up to powers of two.
            On a GPU, it needs compute capability 8.9 or later, and head dims that are multiples of
            32. ``"auto"``: as ``dtype``.
        context_length: maximum tokens of prompt plus completion. Default: the model's limit.
        page_size: tokens per KV page.
        max_running_requests: requests decoded at once. Default: 4 on a CPU, 32 on a GPU.
        max_waiting_requests: maximum waiting requests; further ones are refused. Default: no limit.
        request_timeout: seconds, waiting included, after which a request ends with finish reason
            ``abort``. The ``timeout`` of a request overrides it. Default: no limit.
        watchdog_timeout: seconds after which the engine fails if its device has not answered. Time
            that other processes or debuggers stop this one does not count.
        batch_buckets: batch sizes that rounds are compiled for. Default: powers of two from 1 up to
            ``max_running_requests``; on a GPU, 1 is left out if padding it to 2 is faster.
        max_total_tokens: tokens in the KV pool. Default: set by ``mem_fraction_static``.
        mem_fraction_static: share of device memory for weights and KV, unless
            ``max_total_tokens`` is set. Default: 0.5 on a CPU, 0.85 on a GPU.
        disable_radix_cache: compute every prompt in full instead of caching KV pages by prefix.
        max_state_snapshots: states of recurrent layers that the prefix cache keeps, where requests
            with an equal start may continue; 0 disables it for models with such layers. Each takes
            as much memory as the states of a request. Default: twice ``max_running_requests``.
        kv_events_config: JSON object, or the path of a file with one: publish which pages are
            cached, for routers, with the keys and messages of vLLM and SGLang. See
            docs/deploying.md.
        chunked_prefill_size: maximum prompt tokens prefilled per step while other requests decode.
            Default: 8,192 on a GPU, as far as ``max_prefill_stall_ms`` permits, and 512 on a CPU.
        max_prefill_stall_ms: maximum milliseconds of prefill between two rounds, as estimated from
            earlier prefills; at least one call of the smallest width runs. Lower values delay first
            tokens. Requests that start together in an idle engine wait for each other, for 1.5 s.
        overlap: dispatch a round before the previous one is read; results are the same. Default: on
            for a GPU, off for a CPU, where it does not help.
        logprobs_mode: ``"raw"`` reports log-probabilities of completion tokens from the raw logits,
            ``"processed"`` from the distribution that is sampled: after penalties, bias,
            temperature (0 counts as 1) and filters.
        load_format: ``"auto"`` reads the checkpoint's weights; ``"dummy"`` reads its configuration
            only and makes random weights on the device, to measure speed.
        rounds_per_dispatch: rounds per call on the device. More than 1 pays off if a round takes
            less time than its dispatch, but streaming becomes coarser.
        enable_deterministic_inference: the tokens and log-probabilities of a request depend only on
            its own prompt, parameters and seed, in bfloat16 too: not on drafts, other requests, the
            prefix cache or chunks of the prompt. Needs a GPU. See docs/deterministic.md.
        enable_return_routed_experts: requests to a mixture of experts may ask which experts each of
            their tokens used (``return_routed_experts``); this takes memory of K bytes per token
            and layer, with K experts per token. Default: such requests are refused.
        grammar_backend: ``"llguidance"`` lets requests limit their text by a JSON schema, a regular
            expression or a grammar; needs the extra ``specjax[grammar]``. More functions are then
            compiled. Default: such requests are refused.
        constrained_json_disable_any_whitespace: JSON that follows a schema has no white space.
        reasoning_parser: ``"qwen3"`` or ``"deepseek-r1"``: the model reasons between ``<think>``
            and ``</think>``; ``"gpt-oss"``: in messages of the channel ``analysis``. Grammars begin
            after it, and chat answers have it apart.
        tool_call_parser: the format in which the model writes tool calls: ``"hermes"``,
            ``"qwen25"``, ``"llama3"``, ``"mistral"``, ``"pythonic"``, ``"qwen3_coder"`` or
            ``"gpt-oss"``, which needs the same ``reasoning_parser``. Default: chat requests with
            tools that may be called are refused.
        skip_tokenizer_init: load no tokenizer; requests must then give ``input_ids``.
        seed: random seed for requests without ``sampling_seed``; with
            ``enable_deterministic_inference`` these have the seed 42.
        compile_cache_dir: folder for compiled functions; ``"auto"`` is the user's cache folder,
            ``None`` keeps JAX's own setting.
        show_progress: print sizes and a progress bar to standard error. Default: on a terminal.
        base_gpu_id: index of the engine's first device in ``jax.devices()``.
        tp_size: number of devices that share the target's weights and KV, from ``base_gpu_id`` on.
            It must divide the heads and the inner width of the model, and divide the KV heads or be
            a multiple of their number. See docs/many_gpus.md.
        disaggregation_mode: ``"prefill"`` only computes prompts for other engines; ``"decode"``
            sends its prompts to such an engine if one is connected; see docs/disaggregation.md.
        disaggregation_address: ``host:port`` that the prefill side listens on and the decode side
            connects to; ``None`` if both are in one process.
        disaggregation_secret: shared secret of both sides, required if they are on different hosts.
            It is neither sent nor shown; all traffic is encrypted.
        simulate_accept_length: for benchmarks: accept this many tokens per round on average,
            whether they are correct or not; the text is meaningless. From 1 to
            ``speculative_num_steps + 1``. Trees follow the deepest path, which may be shorter.
        simulate_acceptance: instead accept each draft with this probability if its parent was
            accepted, from 0 to 1. Requests may override it.
    """

    model: str | PathLike[str] = "smollm2-135m"
    draft: str | PathLike[str] | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)] | None = None
    speculative_eagle_topk: Positive = 1
    speculative_num_draft_tokens: Positive | None = None
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | PathLike[str] | Mapping[str, Any] | None = None
    speculative_use_rejection_sampling: bool = False
    speculative_accept_threshold_single: Share = 1.0
    speculative_accept_threshold_acc: Share = 1.0
    speculative_token_map: str | PathLike[str] | None = None
    speculative_draft_window_size: Positive | None = None
    speculative_draft_sink_size: Natural = 0
    speculative_ngram_min_match_window_size: Positive = 1
    speculative_ngram_max_match_window_size: Positive = 12
    speculative_ngram_max_bfs_breadth: Positive = 10
    speculative_ngram_match_type: str = "BFS"
    speculative_ngram_external_corpus_path: str | PathLike[str] | None = None
    speculative_ngram_external_corpus_max_tokens: Positive = 10_000_000
    draft_rope_theta: Theta | None = None
    draft_tp_size: Positive | None = None
    tokenizer: str | PathLike[str] | None = None
    chat_template: str | PathLike[str] | None = None
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    quantize_activations: bool = False
    kv_cache_dtype: str = "auto"
    context_length: Positive | None = None
    page_size: Positive = 16
    max_running_requests: Positive | None = None
    max_waiting_requests: Natural | None = None
    request_timeout: Annotated[float, Meta(gt=0)] | None = None
    watchdog_timeout: Annotated[float, Meta(gt=0, le=1e9)] = WATCHDOG_SECONDS
    batch_buckets: Sequence[int] | None = None
    max_total_tokens: Positive | None = None
    mem_fraction_static: Annotated[float, Meta(gt=0, le=1)] | None = None
    disable_radix_cache: bool = False
    max_state_snapshots: Natural | None = None
    kv_events_config: str | PathLike[str] | Mapping[str, Any] | None = None
    chunked_prefill_size: Positive | None = None
    max_prefill_stall_ms: Annotated[float, Meta(gt=0)] = 30.0
    overlap: bool | None = None
    logprobs_mode: str = "raw"
    load_format: str = "auto"
    rounds_per_dispatch: Positive = 1
    enable_deterministic_inference: bool = False
    enable_return_routed_experts: bool = False
    grammar_backend: str | None = None
    constrained_json_disable_any_whitespace: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    skip_tokenizer_init: bool = False
    seed: Natural = 0
    compile_cache_dir: str | PathLike[str] | None = "auto"
    show_progress: bool | None = None
    base_gpu_id: Natural = 0
    tp_size: Positive = 1
    disaggregation_mode: str | None = None
    disaggregation_address: str | None = None
    disaggregation_secret: str = field(default="", repr=False)
    simulate_accept_length: float | None = None
    simulate_acceptance: Share | None = None

    def __post_init__(self) -> None:
        check_options({option.name: getattr(self, option.name) for option in fields(self)})
        if self.overlap and not self.supports_overlap:
            name = self._registered.name
            raise ValueError(f"overlap=True is not supported by {name}; leave it unset")
        self._check_text()
        if self.kv_events is not None and self.disable_radix_cache:
            raise ValueError("kv_events_config needs a prefix cache; leave out disable_radix_cache")
        self.algorithm.validate(self)
        if self.speculative_draft_sink_size and self.speculative_draft_window_size is None:
            raise ValueError(
                f"speculative_draft_sink_size={self.speculative_draft_sink_size} needs "
                "speculative_draft_window_size, which is None; set both"
            )
        if self.speculative_adaptive_config is not None and not self.speculative_adaptive:
            raise ValueError(
                f"speculative_adaptive_config={self.speculative_adaptive_config!r} needs "
                "speculative_adaptive=True"
            )
        if self.disaggregation_mode is None:
            for name in ("disaggregation_address", "disaggregation_secret"):
                if getattr(self, name):
                    raise ValueError(f"{name} needs disaggregation_mode='prefill' or 'decode'")
        elif self.disaggregation_address is not None:
            check_secret(self.disaggregation_address, self.disaggregation_secret)
        self._check_devices()
        self._check_acceptance()
        if (most := self.shapes[-1].steps) > MAX_STEPS:
            raise ValueError(
                "candidate_steps of speculative_adaptive_config must be at most "
                f"{MAX_STEPS}; got {most}"
            )
        self.check_simulation(self.shapes)

    def _check_devices(self) -> None:
        """Refuse options that several devices do not support yet."""
        if self.draft_tp_size not in (None, 1, self.tp_size):
            raise ValueError(
                f"draft_tp_size={self.draft_tp_size} must be 1 or tp_size={self.tp_size}"
            )
        if self.tp_size > 1 and self.enable_deterministic_inference:
            raise ValueError(
                f"enable_deterministic_inference=True needs tp_size=1, not {self.tp_size}"
            )

    def _check_text(self) -> None:
        """Refuse options about text that need a tokenizer or a library."""
        for name in ("grammar_backend", "reasoning_parser", "tool_call_parser"):
            value = getattr(self, name)
            if value is not None and self.skip_tokenizer_init:
                raise ValueError(f"{name}={value!r} needs a tokenizer; unset skip_tokenizer_init")
        reasoning, tools = self.reasoning_parser, self.tool_call_parser
        if tools is not None and (reasoning == HARMONY) != (tools == HARMONY):
            raise ValueError(
                f"tool_call_parser={tools!r} and reasoning_parser={reasoning!r} read different "
                f"formats; set both to {HARMONY!r}, or none"
            )
        if self.grammar_backend is not None and find_spec("llguidance") is None:
            raise ValueError(
                "grammar_backend='llguidance' needs the library llguidance; install "
                "specjax[grammar]"
            )

    def check_simulation(self, shapes: Sequence["DraftShape"]) -> None:
        """Raise ValueError if no tier can accept ``simulate_accept_length`` tokens."""
        accepted = self.simulate_accept_length
        if None not in (accepted, self.simulate_acceptance):
            pair = f"simulate_accept_length={accepted!r} and simulate_acceptance="
            raise ValueError(f"{pair}{self.simulate_acceptance!r} exclude each other; set only one")
        longest = max(shape.accept_width for shape in shapes)
        if accepted is not None and not 1 <= accepted <= longest:
            raise ValueError(
                f"simulate_accept_length={accepted!r} must be from 1 to {longest}, the lower of "
                "speculative_num_steps + 1 and the tokens verified per round"
            )

    def _check_acceptance(self) -> None:
        how, topk = self.acceptance, self.shapes[-1].topk
        if self.enable_deterministic_inference and not how.is_coupled:
            raise ValueError(
                "enable_deterministic_inference=True needs both speculative_accept_threshold "
                "options at 1 and speculative_use_rejection_sampling=False, else texts depend on "
                "drafts"
            )
        if not how.uses_rejection:
            return
        knob = "speculative_use_rejection_sampling=True"
        if how.has_thresholds:
            raise ValueError(
                f"{knob} needs both thresholds at 1, but speculative_accept_threshold_single="
                f"{how.threshold_single} and speculative_accept_threshold_acc={how.threshold_acc}"
            )
        if not self.algorithm.supports_rejection_sampling:
            raise ValueError(
                f"{knob} needs draft probabilities, but speculative_algorithm="
                f"{self.algorithm.name} has none"
            )
        if topk > 1:
            raise ValueError(
                f"{knob} works for chains only: speculative_eagle_topk={topk} must be 1"
            )

    @property
    def shows_progress(self) -> bool:
        """Whether to write sizes and progress to standard error, if the process has one."""
        if sys.stderr is None:
            return False
        return sys.stderr.isatty() if self.show_progress is None else self.show_progress

    @cached_property
    def acceptance(self) -> "Acceptance":
        from specjax.sampling.accept_draws import Acceptance

        return Acceptance(
            self.speculative_use_rejection_sampling,
            self.speculative_accept_threshold_single,
            self.speculative_accept_threshold_acc,
        )

    @cached_property
    def kv_events(self) -> "KVEventsConfig | None":
        """Where KV events are published, if they are."""
        if self.kv_events_config is None:
            return None
        from specjax.kv.events import read_config

        config = read_config(self.kv_events_config)
        return config if config.is_on else None

    @cached_property
    def adaptive(self) -> "AdaptiveConfig | None":
        """Adaptive configuration before it is resolved; ``None`` if the tier is fixed."""
        if not self.speculative_adaptive:
            return None
        from specjax.adaptive.config import load_adaptive_config

        config = load_adaptive_config(self.speculative_adaptive_config)
        return replace(config, policy=config.policy or DEFAULT_POLICY)

    @cached_property
    def algorithm(self) -> "SpeculativeAlgorithm":
        worker = self._registered.create_worker(self)
        return getattr(self._registered, "overridden", lambda worker: worker)(worker)

    @cached_property
    def _registered(self) -> "SpeculativeAlgorithm | CustomSpecAlgo":
        from specjax.speculative.registry import find

        return find(self.speculative_algorithm)  # type: ignore[no-any-return]

    @property
    def supports_overlap(self) -> bool:
        return self._registered.supports_overlap and self.algorithm.supports_overlap

    @cached_property
    def shape(self) -> "DraftShape":
        """The draft shape of a round; with adaptive decoding, the one at the start."""
        return self.algorithm.draft_shape(self)

    @cached_property
    def shapes(self) -> "tuple[DraftShape, ...]":
        """All draft shapes (tiers) that a round may use, in ascending order."""
        if self.adaptive is None:
            return (self.shape,)
        if (reason := self.algorithm.adaptive_unsupported_reason(self)) is not None:
            raise ValueError(f"speculative_adaptive=True: {reason}")
        shapes: list[DraftShape] = []
        for count in self.adaptive.resolve(str(self.adaptive.policy)).candidate_steps:
            try:
                shapes.append(self.algorithm.draft_shape(self, count))
            except ValueError:  # default candidates that are too large are dropped
                if count in self.adaptive.candidate_steps or not any(s.steps for s in shapes):
                    raise
        return tuple(shapes)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option whose type, range, choice or name is wrong by itself."""
    hints = annotations(EngineArgs)
    for name, value in options.items():
        if name in hints:
            _check_type(name, value, hints[name])
        if value not in (choices := CHOICES.get(name, (value,))):
            raise refused(name, value, f"must be {' or '.join(map(repr, choices))}")
    check_name(options.get("speculative_algorithm"))


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = [get_origin(kind) or kind for kind in get_args(hint)]
    if Sequence in kinds and value is not None:
        if not isinstance(value, Sequence) or not all(map(is_integer, value)):
            raise refused(name, value, "must be a list of integers")
    elif PathLike not in kinds:
        convert(name, value, hint)
    elif not isinstance(value, tuple(kinds)):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise refused(name, value, f"must be of type {names}")
