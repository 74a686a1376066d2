"""Opening modules of multi-token prediction: those of a target's own checkpoint, or of another."""

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from specjax.checkpoints.assemble import Checkpoint
from specjax.checkpoints.draft_config import check_pair
from specjax.checkpoints.huggingface import huggingface_config
from specjax.checkpoints.orbax import is_orbax_directory
from specjax.checkpoints.target import TargetCheckpoint, download
from specjax.checkpoints.tensors import open_directory
from specjax.config import ModelConfig
from specjax.json_file import Fields, Size
from specjax.models.recipes import MTP_PREFIX, Recipes
from specjax.models.registry import mtp_recipes

_EXPERTS = re.compile(r"\.mlp\.(experts|shared_experts?|gate)\.")


@dataclass(frozen=True)
class MtpCheckpoint(Checkpoint[ModelConfig]):
    """Modules on disk, as many as are drafted with; all else in the files is ignored."""

    def describe(self) -> str:
        """One line with how many, place and rotary base."""
        config = self.config
        return (
            f"{config.num_layers} modules of multi-token prediction of {self.path}: "
            f"rope_theta={config.rope_theta:g}, dtype {config.dtype}"
        )

    def recipes(self) -> Recipes:
        return mtp_recipes(self.config)

    def _is_ignored(self, name: str) -> bool:
        """The target's tensors, and those of modules that are not drafted with."""
        return _module_of(name) not in range(self.config.num_layers)


def open_mtp(
    draft: str | os.PathLike[str] | None,
    target: TargetCheckpoint,
    *,
    num_modules: int,
    rope_theta: float | None = None,
) -> MtpCheckpoint:
    """Find the first modules of multi-token prediction and read their configuration.

    Args:
        draft: a Hugging Face directory with tensors ``model.mtp_layers.*``, or a repository id;
            ``None`` for the target's own checkpoint.
        target: whose family, embeddings and output head the modules share.
        num_modules: modules to draft with.
        rope_theta: replaces the rotary base.

    Raises:
        ValueError: there are no such modules or too few, they do not fit the target, or are
            mixtures of experts.
    """
    path = target.path if draft is None else Path(draft).expanduser()
    if draft is not None and not os.path.isdir(path):
        path = download(os.fspath(draft), "draft")
    if not (path / "config.json").is_file() or is_orbax_directory(path):
        raise ValueError(
            f"draft={draft!r}: {path} is no Hugging Face directory, which modules of multi-token "
            "prediction are read from; pass draft=DIRECTORY"
        )
    source = open_directory(path)
    names = [name for name in source.infos if name.startswith(MTP_PREFIX)]
    if experts := next(filter(_EXPERTS.search, names), None):
        raise ValueError(f"{path}: {experts!r} is of a mixture of experts, which is not supported")
    stated = Fields.read(path / "config.json").get("num_nextn_predict_layers", Size, 0)
    count = len(set(map(_module_of, names)))
    if not count or count < stated:
        raise ValueError(
            f"{path} has the tensors {MTP_PREFIX}* of {count} modules of multi-token prediction, "
            f"and num_nextn_predict_layers={stated}; pass draft=DIRECTORY of a checkpoint with them"
        )
    if num_modules > count:
        raise ValueError(
            f"speculative_num_steps={num_modules} exceeds the {count} module(s) of {path}, one a "
            "drafted token; lower it, or candidate_steps where it adapts"
        )
    model = huggingface_config(path, target.config.dtype)
    check_pair(path / "config.json", model.vocab_size, model.hidden_size, target.config)
    theta = model.rope_theta if rope_theta is None else rope_theta
    config = dataclasses.replace(
        model, num_layers=num_modules, rope_theta=theta, sliding_window=None
    )
    return MtpCheckpoint(config, path, lambda: source)


def _module_of(name: str) -> int | None:
    """The module that a tensor is of, ``None`` for others."""
    found = re.match(re.escape(MTP_PREFIX) + r"(\d+)\.", name)
    return int(found[1]) if found else None
