"""Opening target models: embedded, GGUF, Hugging Face directories and repositories, orbax."""

import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specjax.checkpoints.assemble import Progress, assemble, check_recipes
from specjax.checkpoints.embedded import EMBEDDED_MODELS, find_embedded
from specjax.checkpoints.gguf_model import GGUFSource, checkpoint_dtype, gguf_config
from specjax.checkpoints.gguf_reader import GGUFFile
from specjax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from specjax.checkpoints.hub import download
from specjax.checkpoints.names import is_ignored_target_tensor, target_recipes
from specjax.checkpoints.orbax_store import is_orbax_directory, load_orbax, orbax_config
from specjax.checkpoints.target_config import huggingface_config
from specjax.checkpoints.tensors import TensorSource, open_directory
from specjax.config import DTYPES, ModelConfig
from specjax.models.decoder import CausalLM
from specjax.models.flat import FlatModel
from specjax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target model on disk, of which only the configuration has been read.

    Attributes:
        config: with the dtype that the weights will have, and all end tokens.
        name: what the model was opened as.
        path: the file or directory.
    """

    config: ModelConfig
    name: str
    path: Path
    _open_source: Callable[[], TensorSource] | None
    _open_tokenizer: Callable[[], Tokenizer]

    def load_weights(self, progress: Progress | None = None) -> dict[str, np.ndarray]:
        """All weights by flat name (``FlatModel.of(CausalLM).names``), in ``config.dtype``.

        Args:
            progress: called as ``progress(done, total)``, in weights.

        Raises:
            ValueError: naming tensor, shapes and file if the checkpoint does not fit its
                configuration.
        """
        config = self.config
        flat = FlatModel.of(lambda rngs: CausalLM(config, rngs))
        abstract = dict(zip(flat.names, flat.abstract, strict=True))
        if self._open_source is None:
            return load_orbax(self.path, abstract)
        recipes = target_recipes(config)
        source = self._open_source()
        tied = config.tie_word_embeddings
        check_recipes(recipes, source, lambda name: is_ignored_target_tensor(name, tied=tied))
        return assemble(recipes, source, abstract, progress)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint.

        Raises:
            ValueError: if there is none, or its kind is not supported.
        """
        return self._open_tokenizer()


def open_target(model: str | os.PathLike[str], *, dtype: str = "auto") -> TargetCheckpoint:
    """Find a target model and read its configuration.

    Args:
        model: ``"smollm2-135m"``, a ``.gguf`` file, a directory (Hugging Face, or written by
            :func:`save_orbax`), or a Hugging Face repository id.
        dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"`` for the checkpoint's own (float16 and
            quantised weights become bfloat16).

    Raises:
        ValueError: if the model is not found or not supported.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {['auto', *sorted(DTYPES)]}")
    name = os.fspath(model)
    if name in EMBEDDED_MODELS:
        return _open_gguf(name, find_embedded(name), dtype)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model={name!r}: there is no such file")
        return _open_gguf(name, path, dtype)
    if path.is_file():
        raise ValueError(f"model={name!r} is a file; expected a directory or a .gguf file")
    return _open_directory(name, path if path.is_dir() else download(name, "model"), dtype)


def _open_gguf(name: str, path: Path, dtype: str) -> TargetCheckpoint:
    file = GGUFFile(path)
    resolved = checkpoint_dtype(file) if dtype == "auto" else dtype
    config = gguf_config(file, resolved)
    return TargetCheckpoint(
        config, name, path, lambda: GGUFSource(file, config), lambda: tokenizer_from_gguf(file)
    )


def _open_directory(name: str, path: Path, dtype: str) -> TargetCheckpoint:
    def open_tokenizer() -> Tokenizer:
        return Tokenizer.from_pretrained(path)

    if is_orbax_directory(path):
        config = orbax_config(path, ModelConfig)
        if dtype != "auto":
            config = dataclasses.replace(config, dtype=dtype)
        return TargetCheckpoint(config, name, path, None, open_tokenizer)
    config = huggingface_config(path, dtype)
    return TargetCheckpoint(config, name, path, lambda: open_directory(path), open_tokenizer)
