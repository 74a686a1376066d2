"""Compiled functions on disk, so that a start neither traces nor lowers nor compiles.

An entry is a serialized executable with the trees of its arguments and results. These are pickles
and machine code: reading one is running it, so that entries lie in a folder of the user's own and
owner and mode are checked before a byte is unpickled.
"""

import hashlib
import json
import logging
import os
import pickle
import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from specjax.compiling import keys
from specjax.compiling.folder import PrivateFolder
from specjax.compiling.jax_cache import enable_compile_cache

logger = logging.getLogger(__name__)

FOLDER = "specjax-executables"
_MAGIC = b"specjax executable 1"
_KEY_LETTERS = 32
_REASON_LETTERS = 200


def open_compile_cache(directory: str | Path | None) -> "CompileCache | None":
    """The cache below a folder; JAX's own persistent cache goes to the folder itself.

    Args:
        directory: as :func:`enable_compile_cache` takes it.

    Returns:
        The cache, or ``None`` where nothing is kept: for ``None``, and with a warning for an
        ``"auto"`` folder that cannot be used.

    Raises:
        ValueError: if a folder that was asked for by name cannot be made, or is not the user's
            alone.
    """
    path = enable_compile_cache(directory)
    if path is None:
        return None
    if ":/" in os.fspath(path):  # of a URL; a path object has dropped the second slash
        logger.info("JAX's cache %s is no local folder: no executables are kept", path)
        return None
    try:
        return CompileCache(PrivateFolder(path / FOLDER))
    except (OSError, ValueError) as error:
        if directory != "auto":
            raise ValueError(f"compile_cache_dir={str(directory)!r} is refused: {error}") from error
        logger.warning("executables are not kept: %s; pass compile_cache_dir", error)
        return None


class CompileCache:
    """Executables and JSON values by configuration, in one folder.

    An executable lies under the key of its lowered module. A link to it lies under a key that is
    known before anything is traced. Where only sources or configuration differ, and not what is
    compiled, a new link is all that is written.

    Whatever is damaged, stale or of another key counts as missing, with a warning. Several
    processes may read and write at once: the last one to write an entry wins, with the same entry.

    Args:
        folder: where entries lie.
        configuration: what the functions close over, as values with a telling ``repr``.
    """

    def __init__(self, folder: PrivateFolder, configuration: Sequence[Any] = ()) -> None:
        self._folder = folder
        self._key = keys.configuration_key(configuration)

    @property
    def path(self) -> Path:
        """The folder of the entries."""
        return self._folder.path

    def bound(self, *configuration: Any) -> "CompileCache":
        """The same folder for the functions of a configuration."""
        return CompileCache(self._folder, configuration)

    def function_key(
        self,
        key: Hashable,
        function: Any,
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The key of a function of this configuration; see :func:`keys.function_key`."""
        return keys.function_key(self._key, key, function, arguments, options)

    def load(self, label: str, key: str, arguments: Sequence[Any]) -> tuple[Compiled, int] | None:
        """An executable and the size of its entry in bytes, or ``None`` where it is missing.

        Args:
            label: name of the function, for people.
            key: its :meth:`function_key`.
            arguments: its abstract arguments, which the entry has to fit.
        """
        link = self._load_json(_entry_name(label, key, ".json"), key)
        if link is None:
            return None
        entry = str(link.get("entry"))
        path = self.path / _entry_name(label, entry)
        found = self.load_entry(label, entry, arguments)
        if found is None and not path.exists():
            logger.warning("%s is missing and built anew", path)
        return found

    def load_entry(
        self, label: str, entry: str, arguments: Sequence[Any]
    ) -> tuple[Compiled, int] | None:
        """:meth:`load` by the key of the entry itself, a :func:`keys.lowered_key`."""
        name = _entry_name(label, entry)
        data = self._read(name)
        if data is None:
            return None
        try:
            compiled = _unpacked(data, entry)
            _check_arguments(compiled, arguments)
        except Exception as error:  # unpickling may raise anything
            reason = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
            logger.warning("%s is built anew: %s", self.path / name, reason)
            return None
        return compiled, len(data)

    def store(self, label: str, entry: str, compiled: Compiled) -> int | None:
        """Keep an executable; returns the bytes of its entry, or ``None`` where that failed.

        It must have been compiled in this process, past JAX's persistent cache
        (:func:`specjax.compiling.jax_cache.bypassed`).
        """
        name = _entry_name(label, entry)
        try:
            data = _packed(compiled, entry)
            self._folder.write(name, data)
        except Exception as error:  # a start must not fail for want of a cache
            reason = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
            logger.warning("%s is not kept: %s", self.path / name, reason)
            return None
        return len(data)

    def link(self, label: str, key: str, entry: str) -> None:
        """Let :meth:`load` find an entry under a :meth:`function_key`."""
        self._store_json(_entry_name(label, key, ".json"), key, {"entry": entry})

    def load_json(self, name: str) -> dict[str, Any] | None:
        """A value stored for this configuration and environment, or ``None``."""
        return self._load_json(_entry_name(name, self._key, ".json"), self._key)

    def store_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a JSON value for this configuration and environment, whatever the weights."""
        self._store_json(_entry_name(name, self._key, ".json"), self._key, value)

    def prune(self, seconds: float, now: float) -> int:
        """Delete entries that nothing has read for so many seconds; returns their number."""
        self._folder.remove_abandoned()
        count = 0
        for name in self._folder.names():
            with suppress(FileNotFoundError):
                if now - (self.path / name).stat().st_mtime > seconds:
                    self._folder.remove(name)
                    count += 1
        return count

    def _load_json(self, file: str, key: str) -> dict[str, Any] | None:
        data = self._read(file)
        if data is None:
            return None
        try:
            content = json.loads(data)
            if content["key"] != key:
                raise ValueError("it has another key")
            value = content["value"]
            if not isinstance(value, dict):
                raise ValueError("its value is no object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:_REASON_LETTERS]
            logger.warning("%s is ignored: %s", self.path / file, reason)
            return None
        return value

    def _store_json(self, file: str, key: str, value: Mapping[str, Any]) -> None:
        text = json.dumps({"key": key, "value": value}, indent=1)
        try:
            self._folder.write(file, text.encode())
        except (OSError, ValueError) as error:
            logger.warning("%s is not kept: %s", self.path / file, error)

    def _read(self, name: str) -> bytes | None:
        try:
            data = self._folder.read(name)
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s", self.path / name, error)
            return None
        if data is not None:
            with suppress(OSError):
                os.utime(self.path / name)  # for prune
        return data


def _entry_name(label: str, key: str, suffix: str = ".xla") -> str:
    return f"{re.sub(r'[^A-Za-z0-9._]+', '-', label)}-{key[:_KEY_LETTERS]}{suffix}"


def _packed(compiled: Compiled, key: str) -> bytes:
    """Magic line, key and checksum of the rest, then the pickle."""
    payload = pickle.dumps(serialize_executable.serialize(compiled))
    checksum = hashlib.sha256(payload).hexdigest()
    return b"\n".join((_MAGIC, key.encode(), checksum.encode(), payload))


def _unpacked(data: bytes, key: str) -> Compiled:
    parts = data.split(b"\n", 3)
    if len(parts) != 4 or parts[0] != _MAGIC:
        raise ValueError("it is no entry of this version")
    if parts[1] != key.encode():
        raise ValueError("it has another key")
    if hashlib.sha256(parts[3]).hexdigest() != parts[2].decode(errors="replace"):
        raise ValueError("it is damaged")
    serialized, in_tree, out_tree = pickle.loads(parts[3])
    # all functions run on one device; the default is all that there are
    return serialize_executable.deserialize_and_load(
        serialized, in_tree, out_tree, execution_devices=jax.devices()[:1]
    )


def _check_arguments(compiled: Compiled, arguments: Sequence[Any]) -> None:
    expected, structure = jax.tree.flatten((tuple(arguments), {}))
    in_tree: Any = compiled.in_tree
    if in_tree != structure:
        raise ValueError("it takes arguments of another structure")
    for found, leaf in zip(jax.tree.leaves(compiled.in_avals), expected, strict=True):
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(f"it takes {found}, not {leaf.dtype}{list(leaf.shape)}")
