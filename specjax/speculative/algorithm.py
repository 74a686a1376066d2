"""Interface between the engine and a speculative algorithm.

An algorithm defines how tokens are drafted. All algorithms share verification, acceptance, pages,
scheduling and the compiled rounds. This shared code never asks which algorithm it runs.
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

# Pytrees of the algorithm. State (KV pools, tables) is read and written as a whole. Rows hold what
# a request carries from one round to the next. Both are donated in every call.
State = Any
Rows = Any
# prefixes of the engine arguments that only drafting reads
DRAFTING = ("speculative_", "draft", "simulate_")


@dataclass(frozen=True)
class Batch:
    """Inputs of every stage of a round. Padding rows have slot 0."""

    target: CausalLM
    draft: Any  # the algorithm's network, ``None`` if it has none
    pages: PageView  # of these rows
    sampling: SamplingTable  # of these rows
    slots: jax.Array  # i32 [B], request slots
    seq_lens: jax.Array  # i32 [B], tokens in the target's KV pool
    bonus_tokens: jax.Array  # i32 [B], the last token of each request, not in the pool yet
    tokens: jax.Array  # i32 [R, C], the history by request slot
    draw: SamplingConfig  # how the target draws its tokens

    @property
    def history(self) -> jax.Array:
        """Tokens i32 ``[B, C]`` by absolute position, up to the bonus token; garbage after it.

        After a prefix-cache hit, the start of the text is missing unless the request has penalties
        or the algorithm has ``needs_history``.
        """
        return self.tokens[self.slots]


@dataclass(frozen=True)
class PromptChunks:
    """Prompt tokens that the target has just processed: one chunk per batch row, packed.

    All chunks are concatenated into one row of P tokens, with padding at the end. A model processes
    that row as a batch of one.
    """

    tokens: jax.Array  # i32 [1, P]
    next_tokens: jax.Array  # i32 [1, P], the token after each; at a prompt's end the sampled one
    positions: jax.Array  # i32 [1, P], position in the chunk's own text
    last: jax.Array  # i32 [B], index in P of the last token of each chunk
    is_final: jax.Array  # bool [B], whether this chunk is the last of its prompt
    # stores KV at these positions and optionally attends, for any pool over the same pages
    attend: PagedAttend
    segments: Segments  # position of each chunk in P, and in its own text
    # i32 [B], leading tokens of each text whose KV, draft KV included, came from the prefix cache
    num_cached: jax.Array


class StateSizes(NamedTuple):
    """Sizes of an algorithm's state and rows."""

    num_slots: int  # R, including the padding slot
    num_kv: int  # KV indices: pages times page size, including the padding page
    context: int  # C, maximum tokens of a request
    shape: DraftShape  # the largest tier


class CommonAlgorithm:
    """Methods shared by built-in and registered algorithms, named as in SGLang."""

    # identity of the algorithm, for authors; the engine does not call these

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

    def is_dspark(self) -> bool:
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Whether drafting runs the draft network once over all T rows, like a verify pass.

        Only the memory planner reads it: such a pass holds the logits of all rows at once.
        """
        return self.is_dflash() or self.is_dspark()

    def create_future_map(
        self,
        max_running_requests: int,
        chunked_prefill_size: int,
        context_len: int,
        device: jax.Device,
        *,
        rows: Any = (),
    ) -> FutureMap:
        """Shapes and dtypes, by request slot, of all state carried to the next round.

        Stages read and write only ``rows``, so the engine rejects a subclass with more leaves.

        Padding slot 0 comes in addition to ``max_running_requests``. ``rows`` is the result of
        ``abstract_rows``.
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
            rows: the rows that the prefill engine sent, or ``None`` if it sent none.
            bonus_tokens: i32 ``[B]``.
            seq_lens: i32 ``[B]``, tokens in the KV pools.
            slots: i32 ``[B]``, request slots of this engine.
            future: this engine's map; lengths, bonus tokens and history are already set.

        Returns:
            Rows for the first round on this engine. ``None`` means zeros: the first round drafts
            nothing, and later rounds draft as usual.
        """
        return rows


class _BuiltIn:
    """A class attribute; the first read imports the built-in algorithm of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> "SpeculativeAlgorithm":
        return SpeculativeAlgorithm.from_string(self._name)  # type: ignore[return-value]


@dataclass(frozen=True)
class SpeculativeAlgorithm(CommonAlgorithm, ABC):
    """How tokens are drafted. Stateless: all state is in the ``State`` and ``Rows`` pytrees.

    Attributes:
        name: the registered name.
    """

    NONE = _BuiltIn()
    EAGLE = _BuiltIn()
    EAGLE3 = _BuiltIn()
    NGRAM = _BuiltIn()
    STANDALONE = _BuiltIn()
    MULTI_LAYER_EAGLE = _BuiltIn()
    DFLASH = _BuiltIn()
    DSPARK = _BuiltIn()

    name: str

    # traced, pure

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: jax.Array
    ) -> tuple[State, Rows]:
        """Process prompt chunks. The returned rows ``[B, ...]`` matter only if the prompt ends.

        ``batch.seq_lens`` excludes the chunks, and ``rows`` come from earlier chunks. ``features``
        ``[1, P, F]`` are the outputs of the target's ``feature_layers`` for these tokens.
        """
        return state, rows

    @abstractmethod
    def propose(
        self, batch: Batch, state: State, rows: Rows, shape: DraftShape
    ) -> tuple[VerifyInput, State]:
        """Draft a tree of ``shape.nodes`` rows whose root is the bonus token.

        If the tree has more rows, only the first ``shape.nodes`` are verified.
        If ``batch.draw.acceptance.uses_rejection`` is set, the tree must be a chain with
        ``draft_probs``. Its drafts must be drawn with noise that the target does not use.
        """

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        """Process the accepted tokens and return the rows for the next round.

        ``batch`` and ``rows`` are those at the start of the round, with lengths and bonus tokens
        before acceptance. With 0 steps the next round is not expected to draft.
        """
        return state, rows

    # host side

    def create_worker(self, args: Any) -> "SpeculativeAlgorithm":
        """Return the algorithm for these engine arguments; a built-in one returns itself.

        Raises ValueError if ``overlap=True`` is not supported.
        """
        if args.overlap and not self.supports_overlap:
            raise ValueError(f"overlap=True is not supported by {self.name}; leave it None")
        return self

    def validate(self, args: Any) -> None:
        """Reject engine arguments that do not fit together or that nothing would read.

        Raises ValueError with the value, the limit and the option.
        """
        options = [option for option in fields(args) if option.name.startswith(DRAFTING)]
        given = [option.name for option in options if getattr(args, option.name) != option.default]
        if unread := [name for name in given if not self.reads(name)]:
            raise ValueError(
                f"{unread} have no effect with speculative_algorithm="
                f"{args.speculative_algorithm!r}; leave them out, or choose another algorithm"
            )
        self.draft_shape(args)

    def reads(self, option: str) -> bool:
        """Whether this algorithm uses a drafting argument; otherwise it must keep its default."""
        return not option.startswith("speculative_ngram_")

    @abstractmethod
    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """The tier with ``steps`` steps; ``None`` means those of the arguments, or the default.

        0 steps give ``NO_DRAFTS``. Raises ValueError for sizes that the algorithm cannot draft.
        """

    def fit_shapes(self, args: Any, config: Any) -> tuple[DraftShape, ...]:
        """The tiers of these arguments, once the draft's ``config`` is known.

        Raises ValueError for sizes that this draft cannot draft.
        """
        shapes: tuple[DraftShape, ...] = args.shapes
        return shapes

    def open_draft(self, args: Any, target: Any, draft: Any) -> tuple[Any, ...]:
        """Open the checkpoint of the draft network: a tuple of none or one.

        ``draft`` is the engine argument, or its replacement in a weight update. Raises ValueError
        if the target has no such draft, or the draft does not fit the target.
        """
        return ()

    def draft_model(self, config: Any, implementation: str | None) -> FlatModel[Any]:
        """Structure of the draft network with this configuration."""
        return FlatModel.empty()

    def networks(
        self,
        target: ModelConfig,
        draft_config: Any = None,
        *,
        implementation: str | None = None,
        placement: Placement | None = None,
    ) -> Networks:
        """Structures of the target and of this algorithm's draft."""
        model = FlatModel.of(partial(CausalLM, target, implementation=implementation))
        draft = self.draft_model(draft_config, implementation)
        return Networks(model, draft, target, draft_config, placement or Placement.on())

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> State:
        return ()

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> Rows:
        """Shapes and dtypes of the rows by request slot, ``[R, ...]``.

        Rows are initialised to zero, so an all-zero row must mean "nothing to draft from".
        """
        return ()

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        """Target layers whose outputs are the features; empty for the last hidden state."""
        return ()

    @property
    def lookahead(self) -> int:
        """Tokens after a position that the state there depends on; part of the prefix-cache key."""
        return 0

    @property
    def needs_history(self) -> bool:
        """Whether :attr:`Batch.history` must be complete even after a prefix-cache hit."""
        return False

    def draft_bytes(self, batch: int, context: int, shape: DraftShape) -> int:
        """Upper bound of the device memory of ``propose`` in bytes, without logits."""
        return 0

    @property
    def supports_overlap(self) -> bool:
        """Whether a round may be dispatched before the host has read the previous one."""
        return True

    @property
    def supports_rejection_sampling(self) -> bool:
        """Whether drafted chains come with the probabilities they were drawn from."""
        return False

    def adaptive_unsupported_reason(self, args: Any) -> str | None:
        """Why the number of drafted steps cannot adapt; ``None`` if it can."""
        return None

    def cache_facts(self) -> tuple[str, ...]:
        """Inputs of the compile-cache key, in addition to specjax's sources and this object's repr.

        By default: the sources of the packages that define the class. Add everything else that is
        traced: code of other packages, and arrays, which a repr shortens.
        """
        from specjax.speculative.registry import source_facts

        return source_facts(type(self))

    @staticmethod
    def from_string(name: str | None) -> "SpeculativeAlgorithm | CustomSpecAlgo":
        """The algorithm with this name, in any case; plain decoding for ``None``.

        An algorithm of another package is a :class:`CustomSpecAlgo` until ``create_worker``.
        Raises ValueError for a name that is not registered.
        """
        from specjax.speculative.registry import find

        return find(name)


if not TYPE_CHECKING:  # registry imports this module, and authors import only from here

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
    """Plain decoding: drafts no tokens, and has no state or rows."""

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
