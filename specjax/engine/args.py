"""Arguments of an engine, checked as far as they can be without model and device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from os import PathLike
from typing import Any

from specjax.adaptive.config import AdaptiveConfig, load_adaptive_config
from specjax.checks import check_integer, is_number
from specjax.config import MAX_STEPS, SpeculativeConfig

DEFAULT_NUM_STEPS = 5
# measured: docs/adaptive_decoding.md
DEFAULT_POLICY = "ema"
PATHS = ("model", "draft", "compile_cache_dir")
BOOLS = (
    "speculative_adaptive",
    "disable_radix_cache",
    "overlap",
    "skip_tokenizer_init",
    "show_progress",
)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Everything that an :class:`~specjax.Engine` can be told at its start, under SGLang's names.

    Attributes:
        model: ``"smollm2-135m"`` (embedded), a Hugging Face directory, a GGUF file or a repo id.
        draft: draft head: a directory or repo id; ``None`` takes the head embedded for ``model``.
        speculative_algorithm: ``"EAGLE3"``, ``"EAGLE"``, or ``None`` to decode plainly.
        speculative_num_steps: drafted tokens a round; 5 by default.
        speculative_eagle_topk: candidates a level; only 1 (a chain) is supported.
        speculative_num_draft_tokens: rows of a verify; ``speculative_num_steps + 1`` for a chain.
        speculative_adaptive: choose the drafted tokens of each round by what is being accepted.
            ``speculative_num_steps`` is where it begins.
        speculative_adaptive_config: path of a JSON file, or its values, for
            ``speculative_adaptive``; see ``docs/adaptive_decoding.md``.
        draft_rope_theta: overrides the rotary base of the draft head.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"auto"``: float32 on a CPU, the checkpoint's on a
            GPU.
        context_length: prompt and completion together; the model's own limit by default.
        page_size: tokens a KV page.
        max_running_requests: requests decoded at once; 4 on a CPU and 32 on a GPU by default.
        max_waiting_requests: requests that may wait for a place beside those; a request beyond is
            refused. ``None`` is no limit.
        request_timeout: seconds after which a request ends with finish reason ``abort``, waiting
            included; ``generate`` can set another for its own. ``None`` is no limit.
        batch_buckets: batch sizes that rounds are compiled for. By default powers of two, on a GPU
            from 2 on where a padded batch of one is faster.
        max_total_tokens: tokens in the KV pool.
        mem_fraction_static: share of the device's memory for weights and KV where
            ``max_total_tokens`` is not given.
        disable_radix_cache: compute every prompt anew instead of keeping KV pages by prefix.
        chunked_prefill_size: prompt tokens a prefill dispatch; 512 on a CPU, 1,024 on a GPU.
        overlap: dispatch a round before the one before it is read. The results are the same; by
            default on a GPU only, since a CPU has no time to win by it.
        load_format: ``"auto"`` reads the checkpoint's weights; ``"dummy"`` reads its configuration
            only and makes random weights on the device, for measurements of speed.
        rounds_per_dispatch: rounds that one call on the device makes; more than 1 pays where a
            round is shorter than its dispatch, at the price of coarser streaming.
        skip_tokenizer_init: do without a tokenizer; only ``input_ids`` are accepted then.
        seed: of the noise of requests that bring no ``sampling_seed``.
        compile_cache_dir: folder of compiled functions, ``"auto"`` for the user's cache folder,
            ``None`` to leave JAX's own setting alone.
        show_progress: sizes, the resolved draft head and a progress bar on standard error at
            start-up; by default where that is a terminal.
        simulate_accept_length: accept this many tokens a round on average, right or wrong: for
            measurements of speed, its text is of no meaning. From 1 to
            ``speculative_num_steps + 1``.

    Raises:
        ValueError: for a value outside its range, with its name.
    """

    model: str | PathLike[str] = "smollm2-135m"
    draft: str | PathLike[str] | None = None
    speculative_algorithm: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int | None = None
    speculative_adaptive: bool = False
    speculative_adaptive_config: str | PathLike[str] | Mapping[str, Any] | None = None
    draft_rope_theta: float | None = None
    dtype: str = "auto"
    context_length: int | None = None
    page_size: int = 16
    max_running_requests: int | None = None
    max_waiting_requests: int | None = None
    request_timeout: float | None = None
    batch_buckets: Sequence[int] | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    disable_radix_cache: bool = False
    chunked_prefill_size: int | None = None
    overlap: bool | None = None
    load_format: str = "auto"
    rounds_per_dispatch: int = 1
    skip_tokenizer_init: bool = False
    seed: int = 0
    compile_cache_dir: str | PathLike[str] | None = "auto"
    show_progress: bool | None = None
    simulate_accept_length: float | None = None

    def __post_init__(self) -> None:
        optional = {f.name for f in fields(self) if f.default is None}
        for name, least in (
            ("max_running_requests", 1),
            ("max_waiting_requests", 0),
            ("chunked_prefill_size", 1),
            ("rounds_per_dispatch", 1),
            ("context_length", 1),
            ("page_size", 1),
            ("max_total_tokens", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is not None or name not in optional:
                check_integer(name, value, at_least=least)
        for name in BOOLS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in optional):
                raise ValueError(f"{name}={value!r} must be a bool")
        for name in PATHS:
            value = getattr(self, name)
            if not isinstance(value, str | PathLike) and (value is not None or name == "model"):
                raise ValueError(f"{name}={value!r} must be a text or a path")
        for name in ("draft_rope_theta", "mem_fraction_static"):
            value = getattr(self, name)
            if value is not None and not is_number(value):
                raise ValueError(f"{name}={value!r} must be a number")
        buckets = self.batch_buckets
        if buckets is not None and not (
            isinstance(buckets, Sequence) and all(type(size) is int for size in buckets)
        ):
            raise ValueError(f"batch_buckets={buckets!r} must be a list of integers")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format={self.load_format!r} is not 'auto' or 'dummy'")
        check_timeout("request_timeout", self.request_timeout)
        speculative, accepted = self.speculative, self.simulate_accept_length
        if self.speculative_adaptive_config is not None and not self.speculative_adaptive:
            raise ValueError(
                f"speculative_adaptive_config={self.speculative_adaptive_config!r} is given, but "
                "speculative_adaptive is False; set it"
            )
        most = self.tiers[-1]
        if most > MAX_STEPS:
            raise ValueError(
                f"speculative_adaptive_config has candidate_steps={list(self.tiers)}, but at most "
                f"{MAX_STEPS} are supported"
            )
        if speculative is not None and accepted is not None:
            if not is_number(accepted) or not 1 <= accepted <= most + 1:
                raise ValueError(
                    f"simulate_accept_length={accepted!r} must be a number from 1 to "
                    f"speculative_num_steps + 1 = {most + 1}"
                )

    @cached_property
    def adaptive(self) -> AdaptiveConfig | None:
        """How the drafted tokens are chosen; ``None`` where they stay as they are.

        A file is read once, so that tiers and policy come from the same values.

        Raises:
            ValueError: for a configuration that is not valid.
        """
        if not self.speculative_adaptive:
            return None
        config = load_adaptive_config(self.speculative_adaptive_config)
        return config.resolve(config.policy or DEFAULT_POLICY)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Every number of drafted tokens that a round can have, ascending."""
        adaptive, speculative = self.adaptive, self.speculative
        if adaptive is not None:
            return adaptive.candidate_steps
        return (0 if speculative is None else speculative.num_steps,)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """What a round drafts; ``None`` for plain decoding."""
        if self.speculative_algorithm is None:
            given: dict[str, Any] = {
                "speculative_num_steps": self.speculative_num_steps,
                "speculative_num_draft_tokens": self.speculative_num_draft_tokens,
                "speculative_eagle_topk": (
                    self.speculative_eagle_topk if self.speculative_eagle_topk != 1 else None
                ),
                "speculative_adaptive": self.speculative_adaptive or None,
                "speculative_adaptive_config": self.speculative_adaptive_config,
                "draft": self.draft,
                "draft_rope_theta": self.draft_rope_theta,
                "simulate_accept_length": self.simulate_accept_length,
            }
            unused = [name for name, value in given.items() if value is not None]
            if unused:
                raise ValueError(f"{unused} are given, but speculative_algorithm is None; set it")
            return None
        steps = self.speculative_num_steps
        if steps is None:
            steps = DEFAULT_NUM_STEPS
        rows = self.speculative_num_draft_tokens
        return SpeculativeConfig(
            algorithm=self.speculative_algorithm,
            num_steps=steps,
            topk=self.speculative_eagle_topk,
            num_draft_tokens=steps + 1 if rows is None else rows,
        )


def check_timeout(name: str, seconds: float | None) -> None:
    """Refuse what is no time to wait.

    Raises:
        ValueError: naming the argument.
    """
    if seconds is not None and not (is_number(seconds) and seconds > 0):
        raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0, or None")
