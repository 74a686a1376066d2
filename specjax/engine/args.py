"""Arguments of an engine, checked as far as they can be without model and device."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from os import PathLike
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from msgspec import Meta

from specjax.adaptive.config import AdaptiveConfig, load_adaptive_config
from specjax.checks import Natural, Positive, convert, is_integer, refused
from specjax.config import MAX_STEPS
from specjax.disaggregation.address import check_secret
from specjax.sampling.accept_draws import Acceptance
from specjax.speculative.algorithm import CustomSpecAlgo, SpeculativeAlgorithm
from specjax.types import DraftShape

# measured: docs/adaptive_decoding.md
DEFAULT_POLICY = "ema"
Share = Annotated[float, Meta(ge=0, le=1)]
CHOICES: dict[str, tuple[str | None, ...]] = {
    "disaggregation_mode": (None, "prefill", "decode"),
    "dtype": ("auto", "float32", "bfloat16"),
    "load_format": ("auto", "dummy"),
    "logprobs_mode": ("raw", "processed"),
    "speculative_ngram_match_type": ("BFS", "PROB"),
}


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Everything that an :class:`~specjax.Engine` can be told at its start, under SGLang's names.

    Attributes:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        draft: draft head: a directory or repo id; ``None`` takes the head embedded for ``model``.
            Of ``"STANDALONE"`` another model with the same vocabulary, named as ``model`` is;
            of ``"MULTI_LAYER_EAGLE"`` a checkpoint with the modules, by default the model's own.
        speculative_algorithm: ``"EAGLE3"``, ``"EAGLE"``, ``"NGRAM"``, ``"STANDALONE"``,
            ``"MULTI_LAYER_EAGLE"``, one of an installed package, or ``None`` to decode plainly.
        speculative_num_steps: tokens drafted one behind the other in a round; 5 by default, 1 of
            ``"MULTI_LAYER_EAGLE"``, which has a module for each, and 11 of ``"NGRAM"``.
        speculative_eagle_topk: branches a level of the drafted tree; 1 is a chain.
        speculative_num_draft_tokens: tokens verified in a round, the root included (at most 64).
            Default: ``speculative_num_steps + 1`` for a chain, which may have fewer, and one per
            branch and level for a tree. Needs ``speculative_num_steps``, except for ``"NGRAM"``.
        speculative_adaptive: choose the drafted tokens of each round by what is being accepted.
            ``speculative_num_steps`` is where it begins, which may be 0.
        speculative_adaptive_config: path of a JSON file, or its values: docs/adaptive_decoding.md.
        speculative_use_rejection_sampling: accept drafts above temperature 0 by speculative
            sampling: a draft is drawn with noise of its own, accepted with probability
            ``min(1, p / q)`` of the target's and the draft's probability, else the token is drawn
            from what p has more than q. The distribution stays the target's (in bfloat16 up to
            rounding), but a seed does not give the text of plain decoding any more. For chains.
        speculative_accept_threshold_single: accept a draft above temperature 0 wherever the target
            gives it at least this probability, from 0, which accepts every draft, to 1, which turns
            it off. Below 1 it is lossy: neither the text of plain decoding for a seed nor the
            target's distribution stays.
        speculative_accept_threshold_acc: divides the probability with which drafts above
            temperature 0 are accepted, up to 1 at most. From 0, which accepts every draft that the
            target may draw, to 1, which turns it off; below 1 it is lossy as well.
        speculative_ngram_min_match_window_size: last tokens that have to be found again, at least.
        speculative_ngram_max_match_window_size: those that are looked for, up to 16.
        speculative_ngram_max_bfs_breadth: places that a tree is made of, up to 16; with 1 it is a
            chain.
        speculative_ngram_match_type: ``"BFS"`` prefers what followed last, ``"PROB"`` what followed
            often.
        speculative_ngram_external_corpus_path: JSON lines, each a text or a list of token ids, that
            are looked through beside the request's own text.
        speculative_ngram_external_corpus_max_tokens: a corpus of more is refused.
        draft_rope_theta: overrides the rotary base of the draft head.
        tokenizer: directory or repo id of another tokenizer than the model's own.
        chat_template: file of a Jinja template to use instead of the tokenizer's own.
        revision: branch, tag or commit of ``model`` if that is a repo id; of nothing else.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"auto"``: float32 on a CPU, else the checkpoint's.
        context_length: prompt and completion together; the model's own limit by default.
        page_size: tokens a KV page.
        max_running_requests: requests decoded at once; 4 on a CPU and 32 on a GPU by default.
        max_waiting_requests: requests that may wait beside those, more are refused; ``None``: any.
        request_timeout: seconds after which a request ends with finish reason ``abort``, waiting
            included; ``generate`` can set another for its own. ``None`` is no limit.
        batch_buckets: batch sizes that rounds are compiled for. By default powers of two, on a GPU
            from 2 on where a padded batch of one is faster.
        max_total_tokens: tokens in the KV pool.
        mem_fraction_static: share of device memory for weights and KV, not with max_total_tokens.
        disable_radix_cache: compute every prompt anew instead of keeping KV pages by prefix.
        chunked_prefill_size: prompt tokens that are computed beside one round of the requests that
            decode, which wait for them; 512 by default. Where few decode beside those that start,
            up to 8,192 on a GPU.
        overlap: dispatch a round before the one before it is read. The results are the same; by
            default on a GPU only, since a CPU has no time to win by it.
        logprobs_mode: ``"raw"`` reports log-probabilities of completion tokens from the raw logits,
            ``"processed"`` those of the distribution that the token was drawn from: after
            penalties, bias, temperature (0 counts as 1) and filters.
        load_format: ``"auto"`` reads the checkpoint's weights; ``"dummy"`` reads its configuration
            only and makes random weights on the device, for measurements of speed.
        rounds_per_dispatch: rounds that one call on the device makes; more than 1 pays where a
            round is shorter than its dispatch, at the price of coarser streaming.
        skip_tokenizer_init: do without a tokenizer; only ``input_ids`` are accepted then.
        seed: of the noise of requests that bring no ``sampling_seed``.
        compile_cache_dir: folder of compiled functions, ``"auto"`` for the user's cache folder,
            ``None`` to leave JAX's own setting alone.
        show_progress: sizes and a progress bar on standard error; by default on a terminal.
        base_gpu_id: which of the process's devices (``jax.devices()``) the engine is put on.
        disaggregation_mode: ``"prefill"`` computes prompts for other engines and nothing else,
            ``"decode"`` has prompts computed by such a one where it can: docs/disaggregation.md.
        disaggregation_address: ``host:port`` that a prefill side listens at and a decode side
            connects to; ``None`` where both are in one process.
        disaggregation_secret: what both sides know, and needed where they are on different hosts.
            It is neither sent nor shown; all that is sent is encrypted.
        simulate_accept_length: accept this many tokens a round on average, right or wrong, to
            measure speed alone: from 1 to ``speculative_num_steps + 1``. In a tree along its
            deepest path, which may be shorter.
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
    speculative_ngram_min_match_window_size: Positive = 1
    speculative_ngram_max_match_window_size: Positive = 12
    speculative_ngram_max_bfs_breadth: Positive = 10
    speculative_ngram_match_type: str = "BFS"
    speculative_ngram_external_corpus_path: str | PathLike[str] | None = None
    speculative_ngram_external_corpus_max_tokens: Positive = 10_000_000
    draft_rope_theta: float | None = None
    tokenizer: str | PathLike[str] | None = None
    chat_template: str | PathLike[str] | None = None
    revision: str | None = None
    dtype: str = "auto"
    context_length: Positive | None = None
    page_size: Positive = 16
    max_running_requests: Positive | None = None
    max_waiting_requests: Natural | None = None
    request_timeout: Annotated[float, Meta(gt=0)] | None = None
    batch_buckets: Sequence[int] | None = None
    max_total_tokens: Positive | None = None
    mem_fraction_static: Annotated[float, Meta(gt=0, le=1)] | None = None
    disable_radix_cache: bool = False
    chunked_prefill_size: Positive | None = None
    overlap: bool | None = None
    logprobs_mode: str = "raw"
    load_format: str = "auto"
    rounds_per_dispatch: Positive = 1
    skip_tokenizer_init: bool = False
    seed: Natural = 0
    compile_cache_dir: str | PathLike[str] | None = "auto"
    show_progress: bool | None = None
    base_gpu_id: Natural = 0
    disaggregation_mode: str | None = None
    disaggregation_address: str | None = None
    disaggregation_secret: str = field(default="", repr=False)
    simulate_accept_length: float | None = None

    def __post_init__(self) -> None:
        for name, hint in _annotations().items():
            _check_type(name, getattr(self, name), hint)
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise refused(name, value, f"is not {' or '.join(map(repr, known))}")
        self.algorithm.validate(self)
        if self.speculative_adaptive_config is not None and not self.speculative_adaptive:
            raise ValueError(
                f"speculative_adaptive_config={self.speculative_adaptive_config!r} is given, but "
                "speculative_adaptive is False; set it"
            )
        if self.disaggregation_mode is None:
            for name in ("disaggregation_address", "disaggregation_secret"):
                if getattr(self, name):
                    raise ValueError(f"{name} is given, but disaggregation_mode is None; set it")
        elif self.disaggregation_address is not None:
            check_secret(self.disaggregation_address, self.disaggregation_secret)
        self._check_acceptance()
        most = self.shapes[-1].steps
        if most > MAX_STEPS:
            raise ValueError(
                f"speculative_adaptive_config has {most} among its candidate_steps, but at most "
                f"{MAX_STEPS} are supported"
            )
        accepted = self.simulate_accept_length
        longest = max(shape.accept_width for shape in self.shapes)
        if accepted is not None and not 1 <= accepted <= longest:
            raise ValueError(
                f"simulate_accept_length={accepted!r} must be a number from 1 to {longest}, the "
                "lower one of speculative_num_steps + 1 and the rows of a verify"
            )

    def _check_acceptance(self) -> None:
        how, topk = self.acceptance, self.shapes[-1].topk
        if not how.uses_rejection:
            return
        knob = "speculative_use_rejection_sampling=True"
        if how.has_thresholds:
            raise ValueError(
                f"{knob} excludes speculative_accept_threshold_single={how.threshold_single} and "
                f"speculative_accept_threshold_acc={how.threshold_acc} below 1; leave both at 1"
            )
        if not self.algorithm.supports_rejection_sampling:
            raise ValueError(
                f"{knob}, but speculative_algorithm={self.algorithm.name} has no draft "
                "probabilities; leave it False"
            )
        if topk > 1:
            raise ValueError(
                f"{knob} is for chains: speculative_eagle_topk={topk} must be at most 1 with it"
            )

    @property
    def shows_progress(self) -> bool:
        """Whether sizes and progress go to standard error, which a process may not have."""
        if sys.stderr is None:
            return False
        return sys.stderr.isatty() if self.show_progress is None else self.show_progress

    @cached_property
    def acceptance(self) -> Acceptance:
        """How drafts above temperature 0 are accepted."""
        return Acceptance(
            self.speculative_use_rejection_sampling,
            self.speculative_accept_threshold_single,
            self.speculative_accept_threshold_acc,
        )

    @cached_property
    def adaptive(self) -> AdaptiveConfig | None:
        """How the drafted tokens are chosen; ``None`` where they stay. A file is read once."""
        if not self.speculative_adaptive:
            return None
        config = load_adaptive_config(self.speculative_adaptive_config)
        return config.resolve(config.policy or DEFAULT_POLICY)

    @cached_property
    def algorithm(self) -> SpeculativeAlgorithm:
        """How tokens are drafted."""
        made = self._registered.create_worker(self)
        return getattr(self._registered, "overridden", lambda worker: worker)(made)

    @cached_property
    def _registered(self) -> SpeculativeAlgorithm | CustomSpecAlgo:
        return SpeculativeAlgorithm.from_string(self.speculative_algorithm)

    @property
    def supports_overlap(self) -> bool:
        """Whether a round may be dispatched before the one before it is read."""
        return self._registered.supports_overlap and self.algorithm.supports_overlap

    @cached_property
    def shape(self) -> DraftShape:
        """What a round drafts, the first where that adapts."""
        return self.algorithm.draft_shape(self)

    @cached_property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Everything that a round may draft, the tiers, ascending."""
        if self.adaptive is None:
            return (self.shape,)
        reason = self.algorithm.adaptive_unsupported_reason(self)
        if reason is not None:
            raise ValueError(f"speculative_adaptive=True: {reason}")
        steps = self.adaptive.candidate_steps
        return tuple(self.algorithm.draft_shape(self, count) for count in steps)


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = [get_origin(kind) or kind for kind in get_args(hint)]
    if Sequence in kinds and value is not None:
        if not isinstance(value, Sequence) or not all(map(is_integer, value)):
            raise refused(name, value, "must be a list of integers")
    elif PathLike not in kinds:
        convert(name, value, hint)
    elif not isinstance(value, tuple(kinds)):
        names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise refused(name, value, f"must be a {names}")


@cache
def _annotations() -> dict[str, Any]:
    return get_type_hints(EngineArgs, include_extras=True)
