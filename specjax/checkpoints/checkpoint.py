"""A model on disk: its configuration, and its weights by the names of the engine."""

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from specjax.checkpoints.quantization import quantised_source
from specjax.checkpoints.stacks import unstacked
from specjax.checkpoints.tensors import FLOATS, TensorSource, make_weight
from specjax.compiling.pool import usable_cores
from specjax.config import Quantization, TransformerConfig
from specjax.models.declare import Recipe, Recipes
from specjax.models.flat import recipes_of

GROUP = 128  # inputs that share a scale if a matrix is quantised to 4 bits while it is loaded
# of copies, every 32nd row is compared; rounding to bfloat16 makes a relative difference of 0.002
STEP, MAX_DIFFERENCE = 32, 0.05
C = TypeVar("C", bound=TransformerConfig)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint(Generic[C]):
    """A model on disk. Only its configuration was read; weights are loaded in ``config.dtype``."""

    config: C
    path: Path
    _open_source: Callable[[], TensorSource]
    _network: ClassVar[Callable[..., Any]]  # builds the module of a configuration
    # whether ``quantization`` applies to its whole matrices if it is a draft
    quantises_drafts: ClassVar[bool] = True
    is_in_memory: ClassVar[bool] = False  # its weights need no reading

    def quantised(self, kind: str | None, *, rounds_activations: bool = False) -> Self:
        """The same model with its matrices quantised as ``kind``; ``None``: as they are.

        Raises ValueError if its files have another kind, or if they do not permit the rounding of
        activations (see :class:`~specjax.config.Quantization`).
        """
        format = self.config.quantization
        if kind is not None and format is not None and format.kind != kind:
            raise ValueError(
                f"quantization={kind!r}, but the matrices of {self.path} are {format}; set it to "
                f"None or {format.kind!r}"
            )
        if kind is not None and format is None:
            format = Quantization(kind, group=GROUP if kind == "int4" else None)
        if format is not None:
            format = replace(format, rounds_activations=rounds_activations)
        elif rounds_activations:
            raise ValueError(
                "quantize_activations=True needs quantised matrices; set quantization to 'fp8' or "
                f"'int8', because those of {self.path} are whole"
            )
        return replace(self, config=replace(self.config, quantization=format))

    def quantised_draft(self, kind: str | None, *, rounds_activations: bool = False) -> Self:
        """The same draft with its matrices as they are stored, else quantised as ``kind``.

        Logs a warning if ``rounds_activations`` cannot apply to it.
        """
        stored = self.config.quantization
        kind = kind if stored is None else stored.kind
        is_whole = kind is None or (stored is None and not self.quantises_drafts)
        if rounds_activations and is_whole:
            logger.warning("quantize_activations: the draft %s stays whole", self.path)
        elif rounds_activations and stored is not None and not stored.permits_rounding:
            text = "quantize_activations: %s: quantization_config (%s) does not permit it"
            logger.warning(text, self.path / "config.json", stored)
            rounds_activations = False
        return self if is_whole else self.quantised(kind, rounds_activations=rounds_activations)

    def source(self) -> TensorSource:
        """The tensors on disk, quantised if the configuration is and they are not."""
        source = unstacked(self._open_source(), self.recipes)
        return quantised_source(source, self.recipes, self.config.quantization)

    def describe(self) -> str:
        """Summarize the resolved settings in one line."""
        raise NotImplementedError

    def check_weights(self) -> None:
        """Raise ValueError if names, shapes or dtypes on disk do not fit the configuration."""
        self._checked_recipes(self.source())

    def load_weights(self) -> dict[str, np.ndarray]:
        """Load all weights by the model's names, in ``config.dtype`` (``d2t`` in int32).

        Raises ValueError if a tensor cannot be read, or as :meth:`check_weights` does.
        """
        source = self.source()
        recipes = self._checked_recipes(source)

        def make(recipe: Recipe) -> np.ndarray:
            return make_weight(recipe, source, np.dtype(recipe.dtype))

        # the largest first, so that no thread still loads a large one when the others are idle
        by_size = sorted(recipes, key=lambda name: -math.prod(recipes[name].shape))
        with ThreadPoolExecutor(max_workers=min(8, usable_cores())) as pool:
            loaded = pool.map(make, (recipes[name] for name in by_size))
            weights = dict(zip(by_size, loaded, strict=True))
        return {name: weights[name] for name in recipes}

    @cached_property
    def recipes(self) -> Recipes:
        """The recipe of each weight by name; in recipes, tensors have canonical names."""
        return recipes_of(type(self)._network, self.config)

    def has_weights_of(self, other: "Checkpoint[Any]") -> bool:
        """Whether this checkpoint gives the weights that ``other`` gives."""
        configs = self.config, other.config
        # fields that are not compared
        exponents = [getattr(config, "kv_exponents", ()) for config in configs]
        ids = [hot and hot.ids for hot in (getattr(config, "hot", None) for config in configs)]
        is_equal = (configs[0], exponents[0], ids[0]) == (configs[1], exponents[1], ids[1])
        return is_equal and self.path.resolve() == other.path.resolve()

    @property
    def copies(self) -> tuple[tuple[str, str], ...]:
        """Pairs of tensors that may repeat the target's embeddings and its output head."""
        return ()

    def compare_copies(self, target: Mapping[str, Any]) -> None:
        """Warn if copies of the target's embeddings or output head differ from its weights."""
        if not self.copies:
            return
        source, table = self._open_source(), target["embedding.table"][::STEP]
        refs = {name: table for names in self.copies for name in names}
        for _, name in self.copies:
            if "lm_head.kernel" in target:
                refs[name] = target["lm_head.kernel"][:, ::STEP].T
            elif "lm_head.kernel.values" in target:
                del refs[name]  # it was quantised, so it differs
        for name, ref in refs.items():
            raw = np.asarray(source.read(name)[::STEP] if name in source.infos else ref, np.float32)
            if raw.shape == ref.shape and abs(raw - ref).sum() > MAX_DIFFERENCE * abs(raw).sum():
                text = "%r in %s differs from the target's, which is used: drafts may be rejected"
                logger.warning(text, name, source.infos[name].path)

    def canonical_name(self, name: str) -> str:
        """Map the published name of a tensor to its name in :meth:`recipes`."""
        return name

    def check_values(self, source: TensorSource) -> None:
        """Check the values of a source's tensors; the ValueError names the tensor."""

    def is_ignored(self, name: str) -> bool:
        raise NotImplementedError

    def _checked_recipes(self, source: TensorSource) -> Recipes:
        """Return the recipe of each weight after checking the tensors of ``source``."""
        infos, recipes = source.infos, self.recipes
        tensors = {p.name: (p, r) for r in recipes.values() for p in r.parts}
        if missing := [tensor for tensor, _ in tensors.values() if tensor.name not in infos]:
            lines = [f"{tensor.name!r} {tensor.shape}" for tensor in missing]
            raise ValueError(
                f"{source.path} lacks {len(missing)} tensor(s) that its configuration requires: "
                f"{_listed(lines)}"
            )
        for name, (tensor, recipe) in tensors.items():
            info = infos[name]
            if info.shape != tensor.shape:
                raise ValueError(
                    f"tensor {name!r} in {info.path} has shape {info.shape}, but the configuration "
                    f"requires {tensor.shape}"
                )
            if info.dtype not in FLOATS and recipe.dtype not in ("int32", info.dtype):
                raise ValueError(
                    f"tensor {name!r} in {info.path} is {info.dtype}; weights must be one of "
                    f"{', '.join(FLOATS)}"
                )
        # frequencies, which the configuration has, in a module of the model
        modules: set[str] = {
            name[: at + 1] for name in tensors for at, x in enumerate(name) if x == "."
        }
        used_names = {f"{module}rotary_emb.inv_freq" for module in ("", *modules)} | tensors.keys()
        if unknown := {n for n in infos.keys() - used_names if not self.is_ignored(n)}:
            lines = [f"{n!r} {infos[n].shape} in {infos[n].path}" for n in sorted(unknown)]
            raise ValueError(
                f"{source.path} has {len(unknown)} tensors that the model does not use: "
                f"{_listed(lines)}; it may be of another architecture"
            )
        self.check_values(source)
        return recipes


def _listed(lines: list[str]) -> str:
    return ", ".join([*lines[:5], *(["..."] if len(lines) > 5 else [])])
