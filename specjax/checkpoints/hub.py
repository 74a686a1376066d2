"""Downloading checkpoints from the Hugging Face hub."""

import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_METADATA = ["*.json", "*.jinja"]


def download(repo_id: str, knob: str) -> Path:
    """Local snapshot of a repository: configuration, tokenizer and one set of weights.

    Args:
        repo_id: ``owner/name``.
        knob: the argument that the value came from, for errors.

    Raises:
        ValueError: if it is no repository id, or it can be neither downloaded nor found in the
            local cache.
    """
    if not _REPOSITORY.fullmatch(repo_id):
        raise ValueError(
            f"{knob}={repo_id!r} is neither a known name, nor an existing file or directory, nor a "
            "repository id of the form owner/name"
        )
    from huggingface_hub import snapshot_download

    def fetch(weights: str) -> Path:
        # weights in sub-folders and consolidated files are copies in other formats
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=[*_METADATA, weights],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )

    try:
        path = fetch("*.safetensors")
        if not any(path.glob("*.safetensors")):
            path = fetch("pytorch_model*.bin")
    except Exception as error:  # the hub client raises several unrelated types
        raise ValueError(
            f"{knob}={repo_id!r} is no local path, and the repository cannot be downloaded: "
            f"{error}. Without a network, pass a directory that holds the files"
        ) from error
    return path
