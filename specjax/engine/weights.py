"""Weights of an engine: loading them at the start and replacing them later."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import open_target
from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.packed_files import unpacked
from specjax.checkpoints.quantization import quantised_source
from specjax.checkpoints.stacks import unstacked
from specjax.checkpoints.tensors import FLOATS, cast, in_memory, make_weight
from specjax.checks import short
from specjax.engine.loading import stream_weights
from specjax.engine.plan import EnginePlan, open_drafts
from specjax.models.declare import Recipe
from specjax.models.flat import FlatModel, Weights
from specjax.models.hot_head import hot_columns
from specjax.models.pieces import are_equal, joined, moved, put_pieces
from specjax.models.placement import Placement
from specjax.runtime.runner import ModelRunner

# Weights of target and draft by the engine's names, to replace those in use; others stay.
NewWeights = tuple[Mapping[str, Any], Mapping[str, Any]]
NAMED = Path("named_tensors")  # in messages, the file of tensors from memory


def load_weights(
    plan: EnginePlan, shared: tuple[EnginePlan, ModelRunner] | None = None
) -> tuple[Weights, Weights]:
    """Load the weights of target and draft to the device, or make random ones (``"dummy"``).

    The target weights of ``shared`` are reused, and its draft weights if the draft is the same.
    """
    nets, placement = plan.networks, plan.networks.placement
    is_dummy = plan.args.load_format == "dummy"
    with jax.default_device(placement.device):
        if shared is not None:
            base, runner = shared
            there, (target, draft) = base.networks, runner.weights
            places = there.placement, placement
            target = moved(target, there.target, nets.target, places)
            pairs = zip(plan.drafts, base.drafts, strict=False)
            if len(plan.drafts) == len(base.drafts) and all(a.has_weights_of(b) for a, b in pairs):
                return target, moved(draft, there.draft, nets.draft, places)
        elif is_dummy:
            drawn = nets.target.random(0, placement)
            target = placement.move(drawn, nets.target.placed(placement))
        else:
            _compile_checks(plan)
            target = nets.target.order(_streamed(plan.target, nets.target, placement))
        if is_dummy:
            drawn = nets.draft.random(1, placement)
            return target, placement.move(drawn, nets.draft.placed(placement))
    named: dict[str, Any] = {}
    for checkpoint in plan.drafts:
        named |= _streamed(checkpoint, nets.draft, placement)
    with placement.in_order:
        for checkpoint in plan.drafts:
            checkpoint.compare_copies(dict(zip(nets.target.names, target, strict=True)))
        named |= hot_columns(nets, target, named)
    draft = nets.draft.order(named)
    loaded = [(checkpoint, nets.draft, draft) for checkpoint in plan.drafts]
    if shared is None:
        loaded.append((plan.target, nets.target, target))
    for checkpoint, flat, weights in loaded:
        check_finite(dict(zip(flat.names, weights, strict=True)), checkpoint.path)
    return target, draft


def _streamed(
    checkpoint: Checkpoint[Any], flat: FlatModel[Any], place: Placement
) -> dict[str, Any]:
    """Put each weight as soon as it is read, and wait, so that its host memory is free again."""
    return {
        name: jax.block_until_ready(place.put_pieces(weight, flat.split(name)))
        for name, weight in stream_weights(checkpoint)
    }


def weights_from_disk(
    plan: EnginePlan, model_path: str | PathLike[str] | None, draft_path: str | PathLike[str] | None
) -> tuple[EnginePlan, NewWeights]:
    """Return the plan with the new checkpoints, and the weights from the given paths."""
    paths = [path for path in (model_path, draft_path) if path is not None]
    if not paths or not all(isinstance(path, str | PathLike) for path in paths):
        raise ValueError(f"give model_path, draft_path or both; got {model_path=}, {draft_path=}")
    target, drafts, new_target, new_draft = plan.target, plan.drafts, {}, {}
    if model_path is not None:
        opened = open_target(model_path, dtype=target.config.dtype)
        rounds = plan.args.quantize_activations
        target = opened.quantised(plan.args.quantization, rounds_activations=rounds)
        _check_same_config(target, plan.target)
    if draft_path is not None:
        if not drafts:
            raise ValueError(f"draft_path={draft_path!r}, but the engine has no draft network")
        drafts = open_drafts(plan.args, target, draft_path)
        _check_same_config(drafts[0], plan.drafts[0])
        new_draft = drafts[0].load_weights()
    if model_path is not None:
        new_target = target.load_weights()
    return replace(plan, target=target, drafts=drafts), (new_target, new_draft)


def weights_from_tensors(
    plan: EnginePlan, named_tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], *, draft: bool
) -> NewWeights:
    """Convert tensors of the target (with ``draft``: of the draft) to weights by name.

    Tensors may have the engine's names (``FlatModel.names``, matrices ``[in, out]``) or those of
    Hugging Face (matrices ``[out, in]``). If a weight is made from several checkpoint tensors, all
    of these are required. Floats are cast to the model's dtype. Tensors that loading ignores are
    ignored, but at least one other tensor is required.
    """
    if draft and not plan.drafts:
        raise ValueError("draft=True, but the engine has no draft network")
    nets = plan.networks
    flat, owner = (nets.draft, plan.drafts[0]) if draft else (nets.target, plan.target)
    try:
        values = dict(named_tensors)
    except TypeError as error:
        raise ValueError(f"named_tensors={named_tensors!r} must map names to arrays") from error
    # the ids of a hot vocabulary belong to an option, and its columns to the target
    recipes = {name: x for name, x in owner.recipes.items() if not name.startswith("hot_head.")}
    shapes = zip(flat.names, flat.abstract, strict=True)
    abstract = {name: shape for name, shape in shapes if name in recipes}
    dtype, format = owner.config.dtypes.activations, owner.config.quantization
    makers = {x.name: recipe for recipe in recipes.values() for x in recipe.parts}
    makers |= {x: recipe for recipe in recipes.values() for stack in recipe.stacks for x in stack}

    def dtype_of(name: str, value: Any) -> Any:
        """The dtype of a weight in the engine, and of a tensor from which one is made."""
        if name in abstract and jnp.issubdtype(abstract[name].dtype, jnp.floating):
            return abstract[name].dtype
        recipe = makers.get(owner.canonical_name(name))
        is_float = recipe is not None and jnp.issubdtype(recipe.dtype, jnp.floating)
        weight_dtype = np.dtype(recipe.dtype) if recipe is not None and is_float else dtype
        if format is None:
            return weight_dtype
        value_dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
        if recipe is not None and recipe.layout:  # quantised from all of its bits
            return value_dtype
        if "_scale" in name or name.endswith(".scales"):
            return np.dtype(np.float32)
        return weight_dtype if str(value_dtype) in FLOATS else value_dtype

    tensors = {str(x): _copied(x, value, dtype_of(str(x), value)) for x, value in values.items()}
    if not tensors:
        raise ValueError("named_tensors is empty; give the weights to replace")
    weights = {name: tensors.pop(name) for name in abstract if name in tensors}
    tensors = {owner.canonical_name(name): tensors[name] for name in tensors}
    used_names = set[str]()
    # other tensors are cut, joined or quantised on the host
    may_stay = {x.name for recipe in recipes.values() for x in recipe.parts if not x.made_of}
    may_stay.add("lm_head.weight")
    for name, value in tensors.items():
        if format is not None or name not in may_stay:
            tensors[name] = np.asarray(value)
    source = unstacked(unpacked(in_memory(tensors, NAMED), format), recipes)
    source = quantised_source(source, recipes, format, signed=True)
    tensors = {name: source.read(name) for name in source.infos}
    for name, recipe in recipes.items():
        names = {x.name for x in recipe.parts}
        if not names.isdisjoint(tensors):
            used_names |= names
            if name in weights:
                raise ValueError(f"named_tensors has {name!r} whole and in parts; give only one")
            arrays = _parts_of(recipe, abstract[name].dtype, tensors)
            if recipe.layout is None and all(isinstance(x, jax.Array) for x in arrays.values()):
                on_devices = [arrays[x.name] for x in recipe.parts]
                weights[name] = joined(recipe, on_devices, flat.split(name), nets.placement)
            else:
                source = in_memory(jax.tree.map(np.asarray, arrays), NAMED)
                weights[name] = make_weight(recipe, source, np.dtype(abstract[name].dtype))
    strays = sorted(n for n in tensors.keys() - used_names if not (weights and owner.is_ignored(n)))
    if strays:
        raise ValueError(f"named_tensors: {strays[:5]} are not weights of the model")
    table, output = weights.get("embedding.table"), tensors.get("lm_head.weight")
    if not draft and owner.config.tie_word_embeddings and table is not None and output is not None:
        if not are_equal(output, table, nets.placement):
            raise ValueError(
                "named_tensors: 'lm_head.weight' differs from the embeddings, but the model has "
                "tie_word_embeddings=True; leave it out"
            )
    if not weights:
        raise ValueError(f"named_tensors has only {sorted(values)[:5]}, which replace no weights")
    for name in weights:
        module = name.rpartition(".")[0]
        siblings = {f"{module}.{leaf}" for leaf in ("values", "scale", "offset")} & abstract.keys()
        if name in siblings and (missing := sorted(siblings - weights.keys())):
            raise ValueError(f"named_tensors has {name!r} without {missing[0]!r}; give all of them")
    owned = {x.name: name for name in weights for x in recipes[name].parts}
    for name, recipe in recipes.items():
        repeated = next((owned[x.name] for x in recipe.parts if x.name in owned), None)
        if repeated is not None and name not in weights:
            raise ValueError(
                f"named_tensors has {repeated!r} but not {name!r}, which contains the same tensor; "
                "give both"
            )
    for name, weight in weights.items():
        _check_fits(f"weight {name!r}", weight, abstract[name].shape, abstract[name].dtype)
    integers = {name: x for name, x in weights.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    owner.check_values(in_memory({name: np.asarray(x) for name, x in integers.items()}, NAMED))
    return ({}, weights) if draft else (weights, {})


def check_finite(weights: Mapping[str, Any], path: Path | None = None) -> None:
    """Raise ValueError if a weight, of the file ``path`` or of an update, is NaN or infinite."""
    floats = (name for name, x in weights.items() if jnp.issubdtype(x.dtype, jnp.floating))
    # all results are computed before the first is read
    for name, is_finite in [(name, _is_finite(weights[name])) for name in floats]:
        if not jax.device_get(is_finite):
            where, remedy = f" of {path}", "use another file"
            if path is None:
                where, remedy = "", "fix the weight or set allow_nonfinite=True"
            raise ValueError(f"weight {name!r}{where} has values that are not finite; {remedy}")


@cache
def _device_check(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    leaf = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.jit(lambda weight: jnp.isfinite(weight).all()).lower(leaf).compile()


def _compile_checks(plan: EnginePlan) -> None:
    """Start to compile the checks of all weights: 0.2 s per shape on a GPU, as files are read."""
    nets, pool = plan.networks, ThreadPoolExecutor(2)
    for leaf in {*nets.target.placed(nets.placement), *nets.draft.placed(nets.placement)}:
        if nets.placement.device.platform != "cpu" and jnp.issubdtype(leaf.dtype, jnp.floating):
            pool.submit(_device_check, leaf.shape, leaf.dtype, leaf.sharding)
    pool.shutdown(wait=False)


def _is_finite(weight: Any) -> Any:
    devices = weight.devices() if isinstance(weight, jax.Array) else set()
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        check = _device_check(weight.shape, weight.dtype, weight.sharding)
        with Placement(tuple(devices)).in_order_of_all():
            return check(weight)
    # Viewed as integers, non-finite values are at least infinity; 5 times as fast as isfinite.
    array = np.asarray(weight)
    size = array.dtype.itemsize
    infinity = int(np.array(np.inf, array.dtype).view(f"u{size}"))
    sign = 1 << (8 * size - 1)
    return bool(
        array.view(f"i{size}").max(initial=0) < infinity
        and array.view(f"u{size}").max(initial=0) < infinity + sign
    )


def replace_weights(runner: ModelRunner, replacement: NewWeights) -> Iterator[None]:
    """Replace a weight of a runner per iteration, so that the device never holds two models."""
    nets = runner.networks
    for flat, weights in zip((nets.target, nets.draft), replacement, strict=True):
        for i, name in enumerate(flat.names):
            if name in weights:
                placed = put_pieces(weights[name], flat.split(name), nets.placement)
                weight = jax.block_until_ready(placed)
                runner.replace_weight(i, weight, draft=flat is nets.draft)
                yield
    draft = dict(zip(nets.draft.names, runner.weights[1], strict=True))
    with nets.placement.in_order:
        columns = hot_columns(nets, runner.weights[0], draft)
    for name, weight in columns.items():
        runner.replace_weight(nets.draft.names.index(name), weight, draft=True)
        yield


def _check_same_config(fresh: Checkpoint[Any], live: Checkpoint[Any]) -> None:
    names = [field.name for field in fields(live.config) if field.compare]
    values = [(name, getattr(fresh.config, name), getattr(live.config, name)) for name in names]
    differing = ", ".join(f"{name}={a!r} instead of {b!r}" for name, a, b in values if a != b)
    if differing:
        raise ValueError(f"{fresh.path} does not fit the engine: {differing}; make a new engine")


def _check_fits(label: str, value: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(
            f"{label} is {value.dtype} {tuple(value.shape)}, but the engine needs {dtype} {shape}"
        )


def _copied(name: str, value: Any, dtype: Any) -> Any:
    """Copy an array, so that the caller cannot change or donate it; cast floats to ``dtype``."""
    if isinstance(value, jax.Array):
        try:
            if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype != dtype:
                return value.astype(dtype)
            return jax.device_put(value, may_alias=False)
        except RuntimeError as error:
            raise ValueError(f"named_tensors[{name!r}] cannot be copied: {error}") from error
    array = np.array(value)
    if array.dtype == object:
        raise ValueError(f"named_tensors[{name!r}] is a {type(value).__name__}, not an array")
    return cast(array, dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _parts_of(recipe: Recipe, dtype: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a recipe, cast to ``dtype``."""
    names = [x.name for x in recipe.parts]
    if missing := [name for name in names if name not in tensors]:
        present = next(name for name in names if name in tensors)
        raise ValueError(
            f"named_tensors has {present!r} without {short(missing)}, which are parts of the same "
            "weight; give all parts"
        )
    arrays = {name: tensors[name] for name in names}
    for stored in recipe.parts:
        array = arrays[stored.name]
        if jnp.issubdtype(dtype, jnp.floating) and str(array.dtype) in FLOATS:
            # scales may be in another dtype
            is_here = isinstance(array, jax.Array)
            arrays[stored.name] = array.astype(dtype) if is_here else cast(array, dtype)
        _check_fits(f"tensor {stored.name!r}", arrays[stored.name], stored.shape, dtype)
    return arrays
