"""The seam between the engine and a speculative algorithm.

An algorithm says how tokens are drafted. Verification, acceptance, pages, scheduling and the
compiled rounds are shared; they ask the algorithm and never which one it is.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.config import ModelConfig
from specjax.kv.pages import PagedAttend, PageView, Segments
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Networks, Placement
from specjax.sampling.draw import SamplingConfig
from specjax.speculative.future_map import FutureMap
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, SamplingTable, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from specjax.speculative.registry import CustomSpecAlgo as CustomSpecAlgo
    from specjax.speculative.registry import register_algorithm as register_algorithm

# An algorithm's own pytrees. State is read and written as a whole (KV pools, tables); rows are what
# a request brings from one round to the next. Both are donated through every call.
State = Any
Rows = Any
# how the names of engine arguments begin that only drafting reads
DRAFTING = ("speculative_", "draft", "simulate_")


@dataclass(frozen=True)
class Batch:
    """What every stage of a round may read; rows of no request have slot 0."""

    target: CausalLM
    draft: Any  # the algorithm's network, ``None`` where it has none
    pages: PageView  # of the rows
    sampling: SamplingTable  # of the rows
    slots: jax.Array  # i32 [B], request slots
    seq_lens: jax.Array  # i32 [B], tokens in the target's KV pool
    bonus_tokens: jax.Array  # i32 [B], the newest token, not in the pool yet
    tokens: jax.Array  # i32 [R, C], the history by request slot
    draw: SamplingConfig  # how the target draws its tokens

    @property
    def history(self) -> jax.Array:
        """Tokens i32 ``[B, C]`` by absolute position, bonus token included; garbage behind it.

        The start of a text whose KV came out of the prefix cache is there only for requests with
        penalties and where the algorithm has ``needs_history``.
        """
        return self.tokens[self.slots]


@dataclass(frozen=True)
class PromptChunks:
    """Prompt tokens that the target has just read: a chunk a row of the batch, packed.

    All chunks stand in one row of P tokens, one behind the other, padding at the end; a model takes
    that row as a batch of one.
    """

    tokens: jax.Array  # i32 [1, P]
    next_tokens: jax.Array  # i32 [1, P], the token behind each: the sampled one at a prompt's end
    positions: jax.Array  # i32 [1, P], in the chunk's own text
    last: jax.Array  # i32 [B], where in P the last token of each chunk stands
    is_final: jax.Array  # bool [B], whether the prompt ends with this chunk
    # stores at these positions, and attends or not, for a pool over the same pages
    attend: PagedAttend
    segments: Segments  # where each chunk stands in P, and in its own text
    # i32 [B], first tokens of each text whose KV, the algorithm's too, came out of the prefix cache
    num_cached: jax.Array


class StateSizes(NamedTuple):
    """Sizes that an algorithm's state and rows are made for."""

    num_slots: int  # R, the padding slot included
    num_kv: int  # KV indices: pages times page size, the padding page included
    context: int  # C, tokens of a request
    shape: DraftShape  # the largest tier


class CommonAlgorithm:
    """What built-in and registered algorithms share, under SGLang's names."""

    # which one it is: for authors; the engine does not ask

    def is_none(self) -> bool:
        return False

    def is_some(self) -> bool:
        return not self.is_none()

    def is_speculative(self) -> bool:
        return not self.is_none()

    def is_eagle(self) -> bool:
        return False

    def is_eagle3(self) -> bool:
        return False

    def is_standalone(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def is_dflash(self) -> bool:
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Whether drafting is one pass of its network over all T rows, as a verify is one.

        Only the memory planner reads it: such a pass has the logits of all rows at once.
        """
        return self.is_dflash()

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: jax.Device,
        *,
        rows: Any = (),
    ) -> FutureMap:
        """Shapes and dtypes of all that waits for the next round, by request slot.

        Stages read and write its rows alone, so an engine refuses a subclass with further leaves.

        Slot 0, the padding, is one more than ``max_running_requests``; ``rows`` are what
        ``abstract_rows`` gave.
        """
        return FutureMap.abstract(max_running_requests + 1, context_len, rows)

    def build_disagg_draft_input(
        self,
        rows: Any,
        bonus_tokens: jax.Array,
        seq_lens: jax.Array,
        slots: jax.Array,
        future: FutureMap,
    ) -> Any:
        """Rows ``[B, ...]`` of requests whose prompts were computed elsewhere; B may be 0.

        Args:
            rows: what prefill left there, ``None`` where they did not come along.
            bonus_tokens: i32 ``[B]``.
            seq_lens: i32 ``[B]``, tokens in the KV pools.
            slots: i32 ``[B]``, request slots here.
            future: of this side, which has lengths, bonus tokens and history of the slots already.

        Returns:
            What the first round here starts from. ``None`` stands for zeros: that round drafts
            nothing, the later ones as usual.
        """
        return rows


class _BuiltIn:
    """A built-in algorithm as a class attribute of its name, imported when it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> "SpeculativeAlgorithm":
        return SpeculativeAlgorithm.from_string(self._name)  # type: ignore[return-value]


@dataclass(frozen=True)
class SpeculativeAlgorithm(CommonAlgorithm, ABC):
    """How tokens are drafted. Stateless: what it keeps are its ``State`` and ``Rows`` pytrees.

    Attributes:
        name: under which the registry has it.
    """

    NONE = _BuiltIn()
    EAGLE = _BuiltIn()
    EAGLE3 = _BuiltIn()
    NGRAM = _BuiltIn()
    STANDALONE = _BuiltIn()
    MULTI_LAYER_EAGLE = _BuiltIn()

    name: str

    # traced, pure

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: jax.Array
    ) -> tuple[State, Rows]:
        """Take in chunks of prompts; rows ``[B, ...]`` matter where a prompt ends.

        ``batch.seq_lens`` are before the chunks, ``rows`` left by earlier ones; ``features``
        ``[1, P, F]`` are what the target's ``feature_layers`` gave for the tokens.
        """
        return state, rows

    @abstractmethod
    def propose(
        self, batch: Batch, state: State, rows: Rows, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        """Draft a tree of ``shape.nodes`` rows behind each bonus token, which is its root.

        Of more rows the first ones are verified.
        With ``batch.draw.acceptance.uses_rejection`` it is a chain with ``draft_probs``, drawn with
        noise that the target does not use.
        """

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        """Take in what was accepted, and return what the next round starts from.

        ``batch`` and ``rows`` are as when the round began: lengths and bonus tokens before
        acceptance. With 0 steps the next round is not expected to draft.
        """
        return state, rows

    # host side

    def create_worker(self, args: Any) -> "SpeculativeAlgorithm":
        """This algorithm, which needs no engine arguments to be made.

        ValueError for ``overlap=True`` where it is not supported.
        """
        if args.overlap and not self.supports_overlap:
            raise ValueError(f"overlap=True, which {self.name} does not support; leave it None")
        return self

    def validate(self, args: Any) -> None:
        """Refuse engine arguments that do not fit together; also those that nothing would read.

        ValueError with value, limit and knob.
        """
        options = [option for option in fields(args) if option.name.startswith(DRAFTING)]
        given = [option.name for option in options if getattr(args, option.name) != option.default]
        if unread := [name for name in given if not self.reads(name)]:
            raise ValueError(
                f"{unread} are given, but nothing reads them with speculative_algorithm="
                f"{args.speculative_algorithm!r}; leave them out, or set another"
            )
        self.draft_shape(args)

    def reads(self, option: str) -> bool:
        """Whether an engine argument of drafting means anything here; else it keeps its default."""
        return not option.startswith("speculative_ngram_")

    @abstractmethod
    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """The tier of so many steps; of the engine arguments' own or default ones for ``None``.

        That of 0 steps is ``NO_DRAFTS``. ValueError for sizes that the algorithm cannot draft.
        """

    def open_draft(self, args: Any, target: Any, draft: Any) -> tuple[Any, ...]:
        """Checkpoints of the draft network: none, or one.

        ``draft`` is that of the engine arguments, or what comes in its place when weights are
        replaced. ValueError if there is none for the opened target, or it does not fit.
        """
        return ()

    def draft_model(self, config: Any, implementation: str | None) -> FlatModel[Any]:
        """Structure of the draft network of a configuration."""
        return FlatModel.empty()

    def networks(
        self,
        target: ModelConfig,
        draft_config: Any = None,
        *,
        implementation: str | None = None,
        placement: Placement | None = None,
    ) -> Networks:
        """Structures of a target and this algorithm's draft."""
        model = FlatModel.of(partial(CausalLM, target, implementation=implementation))
        draft = self.draft_model(draft_config, implementation)
        return Networks(model, draft, target, draft_config, placement or Placement.on())

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> State:
        return ()

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> Rows:
        """Shapes and dtypes of the rows by request slot, ``[R, ...]``.

        They begin as zeros, from which nothing is to be drafted.
        """
        return ()

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        """Target layers whose outputs are the features; empty for the last hidden state."""
        return ()

    @property
    def lookahead(self) -> int:
        """Tokens behind a position that its state there depends on: a key of the prefix cache."""
        return 0

    @property
    def needs_history(self) -> bool:
        """Whether :attr:`Batch.history` has to be whole also behind a prefix-cache hit."""
        return False

    def draft_bytes(self, batch: int, context: int, shape: DraftShape) -> int:
        """Upper bound of the device memory that ``propose`` takes besides logits, for the plan."""
        return 0

    @property
    def supports_overlap(self) -> bool:
        """Whether a round may be dispatched before the one before it is read."""
        return True

    @property
    def supports_rejection_sampling(self) -> bool:
        """Whether drafted chains come with the probabilities that they were drawn from."""
        return False

    def adaptive_unsupported_reason(self, args: Any) -> str | None:
        """Why the number of drafted steps cannot adapt; ``None`` where it can."""
        return None

    def cache_facts(self) -> tuple[str, ...]:
        """What a compiled function depends on beside the sources of specjax and this object's repr.

        These are the sources of the packages that the class comes from. Extend them by what else is
        traced: code of other packages, and arrays, which a repr shortens.
        """
        from specjax.speculative.registry import source_facts

        return source_facts(type(self))

    @staticmethod
    def from_string(name: str | None) -> "SpeculativeAlgorithm | CustomSpecAlgo":
        """The algorithm of a name in any case; plain decoding for ``None``.

        One of another package is a :class:`CustomSpecAlgo` until ``create_worker`` makes it.
        ValueError for a name that is not registered.
        """
        from specjax.speculative.registry import find

        return find(name)


if not TYPE_CHECKING:  # registry imports this module, and authors import from here alone

    def __getattr__(name: str) -> Any:
        if name not in ("CustomSpecAlgo", "register_algorithm"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from specjax.speculative import registry

        return getattr(registry, name)


def kv_pool(config: Any, num_kv: int) -> jax.ShapeDtypeStruct:
    """Keys and values ``[L, num_kv, 2, KV, H]`` of all layers of a network."""
    shape = (config.num_layers, num_kv, 2, config.num_kv_heads, config.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtypes.kv))


@dataclass(frozen=True)
class Plain(SpeculativeAlgorithm):
    """A draft of no tokens, without state and rows."""

    def reads(self, option: str) -> bool:
        return option == "speculative_algorithm"

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(0)

    def is_none(self) -> bool:
        return True

    def propose(
        self, batch: Batch, state: State, rows: Rows, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state


PLAIN = Plain("NONE")
