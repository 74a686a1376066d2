"""Interface between the engine and a speculative algorithm.

An algorithm defines how tokens are drafted. All algorithms share verification, acceptance, pages,
scheduling and the compiled rounds. The shared code does not depend on the algorithm.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specjax.compiling.digest import source_facts
from specjax.config import MAX_STEPS, ModelConfig
from specjax.kv.pages import PagedAttend, PageView, Segments
from specjax.models.declare import token_kv
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel, Networks
from specjax.models.mesh import draft_shards
from specjax.models.placement import Placement
from specjax.sampling.draw import SamplingConfig
from specjax.speculative.future_map import FutureMap
from specjax.speculative.tree import chain_input
from specjax.types import DraftShape, SamplingTable, TokenInputs, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from specjax.speculative.registry import CustomSpecAlgo as CustomSpecAlgo
    from specjax.speculative.registry import register_algorithm as register_algorithm

# Pytrees that the algorithm defines. A state (KV pools, tables) is read and written as a whole.
# Rows hold what a request carries from one round to the next. Every call donates both.
State = Any
Rows = Any
Proposal = tuple[VerifyInput, State]  # the drafted tree, and the new state
# engine arguments with these prefixes are read only for drafting
DRAFTING = ("speculative_", "draft", "simulate_")


@dataclass(frozen=True)
class Batch:
    """Inputs of every stage of a round. Padding rows have slot 0."""

    target: CausalLM
    draft: Any  # the algorithm's network, or ``None`` if it has none
    pages: PageView  # pages of these requests
    sampling: SamplingTable  # parameters of these requests
    slots: Array  # i32 [B], request slots
    seq_lens: Array  # i32 [B], tokens in the target's KV pool
    bonus_tokens: Array  # i32 [B], the last token of each request, not in the pool yet
    tokens: Array  # i32 [R, C], the history by request slot
    draw: SamplingConfig  # how the target draws its tokens
    target_kv: tuple[Any, ...] = ()  # the target's KV pools, only to read: see ``read_target``

    @property
    def history(self) -> Array:
        """Tokens i32 ``[B, C]`` by absolute position up to the bonus token, then invalid entries.

        After a prefix-cache hit, the start of the text is missing unless the request has penalties
        or the algorithm sets ``needs_history``.
        """
        return self.tokens[self.slots]

    def read_target(self, layer: int, q: Array, positions: Array) -> Array:
        """Attend with rotated queries ``[B, T, N, H]`` to the KV of one of the target's layers.

        Rows see the tokens before ``seq_lens``; in a layer with a window, those of them that a row
        at ``positions`` i32 ``[B, T]``, from ``seq_lens`` on, would see.
        """
        kind, places = self.target.layers[layer].kind, self.target.pool_layers(len(self.target_kv))
        pool = next(i for i, layers in enumerate(places) if layer in layers)
        where = self.target_kv[pool], places[pool].index(layer), q, self.seq_lens, positions
        options: Any = {"window": kind.window, "softcap": kind.softcap}
        return self.pages.pools[pool].read(*where, **options)

    def inputs_of_rows(self, is_real: Array) -> TokenInputs:
        """The inputs of T tokens of each request; where ``is_real [B, T]`` is false: padding."""
        is_real = is_real & (self.slots > 0)[:, None]
        request = jnp.arange(len(self.slots), dtype=jnp.int32)[:, None]
        return TokenInputs(is_real, jnp.broadcast_to(request, is_real.shape), self.sampling)

    def inputs_of_segments(self, segments: Segments) -> TokenInputs:
        """The inputs of one row ``[1, W]`` that holds a segment of each request."""
        return TokenInputs(segments.is_real[None], segments.index[None], self.sampling)


@dataclass(frozen=True)
class PromptChunks:
    """Prompt tokens that the target has just processed: one chunk for each of B requests.

    All chunks are concatenated and padded to one row of P tokens, which is run as a batch of one.
    """

    tokens: Array  # i32 [1, P]
    next_tokens: Array  # i32 [1, P], the token after each; after a prompt the sampled one
    positions: Array  # i32 [1, P], the position of each token in its prompt
    last: Array  # i32 [B], index in P of the last token of each chunk
    is_final: Array  # bool [B], whether this chunk is the last of its prompt
    # stores KV at these positions in any pool with the same pages, and can attend to it
    attend: PagedAttend
    segments: Segments  # where each chunk is in P and in its prompt
    # i32 [B], number of leading tokens whose KV, including draft KV, came from the prefix cache
    num_cached: Array


class StateSizes(NamedTuple):
    """Sizes of an algorithm's state and rows."""

    num_slots: int  # R, including the padding slot
    num_kv: int  # KV indices: pages times page size, including the padding page
    context: int  # C, maximum tokens of a request
    shape: DraftShape  # the largest tier


class CommonAlgorithm:
    """Methods of all algorithms, built-in or registered, with the names they have in SGLang."""

    name: str

    # these tell authors which algorithm runs; the engine does not call them

    def is_none(self) -> bool:
        return self.name == "NONE"

    def is_some(self) -> bool:
        return not self.is_none()

    is_speculative = is_some

    def is_eagle(self) -> bool:
        return self.name in ("EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE")

    def is_eagle3(self) -> bool:
        return self.name == "EAGLE3"

    def is_standalone(self) -> bool:
        return self.name == "STANDALONE"

    def is_ngram(self) -> bool:
        return self.name == "NGRAM"

    def is_dflash(self) -> bool:
        return self.name == "DFLASH"

    def is_dspark(self) -> bool:
        return self.name == "DSPARK"

    def is_frozen_kv_mtp(self) -> bool:
        return self.name == "FROZEN_KV_MTP"

    def supports_target_verify_for_draft(self) -> bool:
        """Whether drafting runs the draft network once over all T rows, like a verify pass."""
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
        """Shapes and dtypes, by request slot, of all state that is carried to the next round.

        There are ``max_running_requests`` slots and padding slot 0. ``rows`` is the result of
        ``abstract_rows``. Stages use only ``rows``, so the engine rejects a map with more leaves.
        """
        return FutureMap.abstract(max_running_requests + 1, context_len, rows)

    def build_disagg_draft_input(
        self, rows: Any, bonus_tokens: Array, seq_lens: Array, slots: Array, future: FutureMap
    ) -> Any:
        """Rows ``[B, ...]`` of requests whose prompts were computed elsewhere; B may be 0.

        Args:
            rows: the rows that the prefill engine sent, or ``None`` if it sent none.
            bonus_tokens: i32 ``[B]``.
            seq_lens: i32 ``[B]``, tokens in the KV pools.
            slots: i32 ``[B]``, request slots of this engine.
            future: this engine's map; lengths, bonus tokens and history are already set.

        Returns:
            Rows for the first round here; ``None`` means zeros, with which this round cannot draft.
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
    """Defines how tokens are drafted; all state is in the ``State`` and ``Rows`` pytrees."""

    NONE = _BuiltIn()
    EAGLE = _BuiltIn()
    EAGLE3 = _BuiltIn()
    NGRAM = _BuiltIn()
    STANDALONE = _BuiltIn()
    MULTI_LAYER_EAGLE = _BuiltIn()
    DFLASH = _BuiltIn()
    DSPARK = _BuiltIn()
    FROZEN_KV_MTP = _BuiltIn()

    # whether Batch.history must be complete even after a prefix-cache hit
    needs_history: ClassVar[bool] = False
    # whether a round may be dispatched before the host has read the previous one
    supports_overlap: ClassVar[bool] = True
    # whether chains have ``draft_probs``, the probabilities from which drafts were drawn
    supports_rejection_sampling: ClassVar[bool] = False
    # network(config, implementation=...) makes the draft network; ``None`` if there is none. With a
    # parameter ``shards``, devices may share it, and its state, which must be KV pools.
    network: ClassVar[Any] = None

    name: str

    # traced, pure

    def prefill(
        self, batch: Batch, state: State, rows: Rows, chunks: PromptChunks, features: Array
    ) -> tuple[State, Rows]:
        """Process prompt chunks. A round reads the returned rows only after a prompt's last chunk.

        ``batch.seq_lens`` are the lengths before the chunks. ``rows`` ``[B, ...]`` come from
        earlier chunks. ``features`` ``[1, P, F]`` are the outputs of the target's
        ``feature_layers`` for these tokens.
        """
        return state, rows

    @abstractmethod
    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        """Draft a tree of ``shape.nodes`` rows whose root is the bonus token.

        If ``batch.draw.reads_confidence`` is set, the tree may have ``confidences``.
        If the tree has more rows, only the first ``shape.nodes`` are verified. If
        ``batch.draw.acceptance.uses_rejection`` is set, the tree must be a chain with
        ``draft_probs``, and the noise that draws its drafts must differ from the target's.
        """

    def extend(
        self, batch: Batch, state: State, rows: Rows, verified: VerifyOutput, shape: DraftShape
    ) -> tuple[State, Rows]:
        """Process the accepted tokens and return the rows for the next round.

        ``batch`` and ``rows`` are those at the start of the round, with lengths and bonus tokens
        before acceptance. If ``shape`` has 0 steps, the next round need not draft.
        """
        return state, rows

    # host side

    def create_worker(self, args: Any) -> "SpeculativeAlgorithm":
        """Return the algorithm for these engine arguments."""
        return self

    def validate(self, args: Any) -> None:
        """Raise ValueError for engine arguments that are inconsistent or would have no effect."""
        options = [option for option in fields(args) if option.name.startswith(DRAFTING)]
        names = [option.name for option in options if getattr(args, option.name) != option.default]
        if unread := [name for name in names if not self.reads(name)]:
            raise ValueError(
                f"{unread} have no effect with speculative_algorithm="
                f"{args.speculative_algorithm!r}; leave them out, or choose another algorithm"
            )
        self.draft_shape(args)

    def reads(self, option: str) -> bool:
        """Whether this algorithm uses a drafting option; users cannot set an option it ignores."""
        ignored = "speculative_ngram_", "speculative_token_map", "speculative_draft_"
        return not option.startswith(ignored)

    def checked_steps(self, args: Any, steps: int) -> int:
        """Return ``steps`` if a round can draft this many levels; else raise ValueError."""
        least = 0 if args.speculative_adaptive else 1
        if not least <= steps <= MAX_STEPS:
            raise ValueError(
                f"speculative_num_steps={steps} must be from {least} to {MAX_STEPS}; set "
                "speculative_algorithm=None to decode without speculation"
            )
        return steps

    @abstractmethod
    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        """The tier with ``steps`` steps; ``None`` takes them from ``args``, or the default.

        0 steps give ``NO_DRAFTS``. Raises ValueError for sizes that the algorithm cannot draft.
        """

    def fit_shapes(self, args: Any, config: Any) -> tuple[DraftShape, ...]:
        """Fit the tiers in ``args`` to the draft's ``config``.

        Raises ValueError for sizes that this draft does not support.
        """
        return args.shapes

    def open_draft(self, args: Any, target: Any, draft: Any) -> tuple[Any, ...]:
        """Open the checkpoint of the draft network; return it in a tuple, empty if there is none.

        ``draft`` is the engine argument, or its replacement in a weight update. Raises ValueError
        if the target has no such draft, or if the draft does not fit the target.
        """
        return ()

    def draft_model(
        self, config: Any, implementation: str | None, shards: int = 1
    ) -> FlatModel[Any]:
        """The structure of the draft network with this configuration, which devices may share."""
        if self.network is None:
            return FlatModel.empty()
        how: Any = {"implementation": implementation} | ({} if shards == 1 else {"shards": shards})
        return FlatModel.of(partial(type(self).network, config, **how))

    def networks(
        self,
        target: ModelConfig,
        draft_config: Any = None,
        *,
        implementation: str | None = None,
        deterministic: bool = False,
        placement: Placement | None = None,
        draft_tp_size: int | None = None,
    ) -> Networks:
        """Raises ValueError if ``draft_tp_size`` devices cannot share the draft."""
        how = implementation
        if deterministic:  # drafts do not change texts, so only the target needs it
            how = "invariant-interpret" if implementation == "interpret" else "invariant"
        placement = placement or Placement.on()
        model = FlatModel.of(partial(CausalLM, target, implementation=how, shards=placement.count))
        draft = self.draft_model(draft_config, implementation)
        # a subclass may make its network without them
        takes_shards = all(map(_takes_shards, (type(self).network, self.draft_model)))
        config = draft_config if takes_shards else None
        count = draft_shards(draft, config, placement.count, draft_tp_size)
        if count > 1:
            draft = self.draft_model(draft_config, implementation, count)
        return Networks(model, draft, target, draft_config, placement)

    def abstract_state(self, networks: Networks, sizes: StateSizes) -> State:
        return ()

    def abstract_rows(self, networks: Networks, sizes: StateSizes) -> Rows:
        """Shapes and dtypes of the rows by request slot, ``[R, ...]``.

        Rows start as zeros, so the algorithm must treat an all-zero row as "nothing to draft from".
        """
        return ()

    def feature_layers(self, networks: Networks) -> tuple[int, ...]:
        """Target layers whose outputs are the features; empty means the last hidden state.

        By default, the draft's configuration names them.
        """
        return getattr(networks.draft_config, "feature_layers", ())

    @property
    def takes_forced_drafts(self) -> bool:
        """Whether other tokens may replace the drafts: no state is kept of drafted tokens."""
        return True

    @property
    def lookahead(self) -> int:
        """Number of later tokens on which a position's state depends; in the prefix-cache key."""
        return 0

    def adaptive_unsupported_reason(self, args: Any) -> str | None:
        """The reason why the number of steps cannot adapt; ``None`` if it can."""
        return None

    def cache_facts(self) -> tuple[str, ...]:
        """Entries that the compile-cache key has besides specjax's sources and this object's repr.

        By default, they are the sources of the packages that define the class. Add everything else
        that is traced: code from other packages, and arrays, which a repr shortens.
        """
        return source_facts(type(self))

    @staticmethod
    def from_string(name: str | None) -> "SpeculativeAlgorithm | CustomSpecAlgo":
        """The algorithm with this name in upper or lower case; plain decoding for ``None``.

        For an algorithm from another package, it is a :class:`CustomSpecAlgo`. Raises ValueError
        for a name that is not registered.
        """
        from specjax.speculative.registry import find

        return find(name)


def _takes_shards(network: Any) -> bool:
    """Whether devices may share a draft network, as the parameters of what makes it say."""
    make: Any = network
    if isinstance(network, type):  # the metaclass of modules hides their parameters
        make = make.__init__
    return make is not None and "shards" in signature(make).parameters


if not TYPE_CHECKING:  # registry imports this module, and authors import only from here

    def __getattr__(name: str) -> Any:
        if name not in ("CustomSpecAlgo", "register_algorithm"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from specjax.speculative import registry

        return getattr(registry, name)


def kv_pool(config: Any, num_kv: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the KV pool of a network, see ``kernels/kv_format.py``."""
    token = token_kv(config.dtypes.kv, config.num_kv_heads, config.head_dim)
    return jax.ShapeDtypeStruct((config.num_layers, num_kv, *token.shape), token.dtype)


@dataclass(frozen=True)
class Plain(SpeculativeAlgorithm):
    """Plain decoding: drafts no tokens, and has no state or rows."""

    def reads(self, option: str) -> bool:
        return option == "speculative_algorithm"

    def draft_shape(self, args: Any, steps: int | None = None) -> DraftShape:
        return DraftShape.chain(0)

    def propose(self, batch: Batch, state: State, rows: Rows, shape: DraftShape) -> Proposal:
        return chain_input(batch.bonus_tokens[:, None], batch.seq_lens), state


PLAIN = Plain("NONE")
