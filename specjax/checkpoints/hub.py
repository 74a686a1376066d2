"""Downloading checkpoints from the Hugging Face hub."""

import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def download(repo_id: str, knob: str, revision: str | None = None) -> Path:
    """Local snapshot of a repository: configuration, tokenizer and one set of weights.

    ``knob`` is the argument that the value came from, for errors; ``revision`` is a branch, tag or
    commit.
    """
    if not _REPOSITORY.fullmatch(repo_id):
        raise ValueError(
            f"{knob}={repo_id!r} is neither a known name, nor an existing file or directory, nor a "
            "repository id of the form owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        for weights in ("*.safetensors", "pytorch_model*.bin"):
            # weights in sub-folders and consolidated files are copies in other formats
            wanted, copies = ["*.json", "*.jinja", weights], ["*/*", "consolidated*"]
            path = Path(
                snapshot_download(
                    repo_id, revision=revision, allow_patterns=wanted, ignore_patterns=copies
                )
            )
            if any(path.glob(weights)):
                break
    except Exception as error:  # the hub client raises several unrelated types
        raise ValueError(
            f"{knob}={repo_id!r} is no local path, and the repository cannot be downloaded: "
            f"{str(error).rstrip('.')}. Without a network, pass a directory that holds the files"
        ) from error
    return path
