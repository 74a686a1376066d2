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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled

from specjax.compiling.folder import make_private_folder, read_private, write_private
from specjax.compiling.jax_cache import set_cache_folder
from specjax.compiling.keys import digest_of, environment

logger = logging.getLogger(__name__)

FOLDER = "specjax-executables"
FORMAT = 2
_DIGEST_LETTERS = 64  # of SHA-256, as hexadecimal


def open_compile_cache(directory: str | os.PathLike[str] | None) -> "CompileCache | None":
    """The cache below a folder; JAX's own persistent cache goes to the folder itself.

    ``"auto"`` is the folder that JAX is configured with already, or else ``specjax`` in the user's
    cache folder; where it cannot be used there is a warning and no cache, as for ``None``.
    ValueError if a named folder cannot be made, or is not the user's alone.
    """
    if directory is None:
        return None
    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    is_auto = directory == "auto"
    is_jaxs = is_auto and bool(configured)
    name = os.fspath(directory)
    if is_auto:
        name = configured or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "specjax")
    try:
        if not name or ":/" in name:  # of a URL; a path object has dropped its second slash
            raise ValueError(
                "it is no local folder; executables are kept in one alone, and JAX takes a URL for "
                "its own cache from JAX_COMPILATION_CACHE_DIR"
            )
        path = Path(name).expanduser()
        if not is_jaxs:
            make_private_folder(path)
        make_private_folder(path / FOLDER)
    except (OSError, ValueError, RuntimeError) as error:  # the last: a home that is not known
        if not is_auto:
            raise ValueError(f"compile_cache_dir={str(directory)!r} is refused: {error}") from error
        logger.warning("compiled functions are not kept: %s; pass compile_cache_dir", error)
        return None
    if not is_jaxs:
        set_cache_folder(path)
    return CompileCache(path / FOLDER)


class CompileCache:
    """Executables and JSON values by configuration, in one private folder.

    Whatever is damaged, stale or of another key counts as missing, with a warning. Several
    processes may read and write at once: the last one to write an entry wins, with the same entry.
    ``facts`` are what the functions depend on beside their arguments and this package's sources, as
    values with a telling ``repr``; ``devices`` what they run on, by default the first one.
    """

    def __init__(
        self, path: Path, facts: Sequence[Any] = (), devices: Sequence[jax.Device] = ()
    ) -> None:
        self.path = path
        self._devices = tuple(devices or jax.devices()[:1])
        text = repr(tuple(facts))
        if " at 0x" in text:
            raise ValueError(f"configuration={text} has an address; give values with a repr")
        self._key = digest_of([FORMAT, environment(self._devices), text])

    def bound(self, *facts: Any, devices: Sequence[jax.Device] = ()) -> "CompileCache":
        """The same folder for other facts and devices."""
        return CompileCache(self.path, facts, devices)

    def key(
        self, label: str, function: Any, arguments: Any, options: Mapping[str, Any] | None = None
    ) -> str:
        """The name that the executable of a jitted function with abstract arguments is kept under.

        What the function closes over and which arguments it donates have no representation of their
        own: they follow from the sources, the facts and the label.
        """
        leaves, structure = jax.tree.flatten(tuple(arguments))
        described = [str(structure), *map(repr, leaves)]
        given = sorted((name, repr(value)) for name, value in (options or {}).items())
        name = getattr(function, "__name__", "")
        return self._name(label, digest_of([self._key, label, name, described, given]), "xla")

    def load(self, key: str, arguments: Sequence[Any]) -> tuple[Compiled, int] | None:
        """The executable of a :meth:`key` that fits abstract arguments, and its bytes on disk."""
        path = self.path / key
        with _warned(path, "is built anew"):
            data = _read(path)
            if data is None:
                return None
            digest, payload = data[:_DIGEST_LETTERS], data[_DIGEST_LETTERS:]
            if digest != _checksum(key, payload):
                raise ValueError("it is damaged, or of another key or version")
            serialized, in_tree, out_tree = pickle.loads(payload)
            client = self._devices[0].client
            # without execution_devices it would take all that there are
            compiled = serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, backend=client, execution_devices=self._devices
            )
            if _shapes(compiled.args_info) != _shapes((tuple(arguments), {})):
                raise ValueError("it takes other arguments")
            return compiled, len(data)
        return None

    def store(self, key: str, compiled: Compiled) -> int | None:
        """Keep an executable that was compiled here and :func:`bypassed`; returns its bytes."""
        path = self.path / key
        with _warned(path, "is not kept"):
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            data = _checksum(key, payload) + payload
            write_private(path, data)
            return len(data)
        return None

    def load_json(self, name: str) -> dict[str, Any] | None:
        """A value stored for this configuration and environment, or ``None``."""
        path = self.path / self._name(name, self._key, "json")
        with _warned(path, "is built anew"):
            data = _read(path)
            if data is None:
                return None
            content = json.loads(data)
            value = content["value"]
            if content["key"] != self._key or not isinstance(value, dict):
                raise ValueError("it has another key, or its value is no object")
            return value
        return None

    def store_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a JSON value for this configuration and environment, whatever the weights."""
        path = self.path / self._name(name, self._key, "json")
        with _warned(path, "is not kept"):
            text = json.dumps({"key": self._key, "value": value}, indent=1)
            write_private(path, text.encode())

    def prune(self, seconds: float) -> int:
        """Delete entries that nothing has read for so many seconds; returns their number."""
        oldest, count = time.time() - seconds, 0
        for path in self.path.iterdir():
            with suppress(OSError):  # gone meanwhile, or a folder
                if path.lstat().st_mtime < oldest:
                    path.unlink()
                    count += 1
        return count

    def _name(self, label: str, digest: str, suffix: str) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._]+', '-', label)}-{digest[:32]}.{suffix}"


def _read(path: Path) -> bytes | None:
    data = read_private(path)
    if data is not None:
        with suppress(OSError):
            os.utime(path)  # for prune
    return data


def _checksum(key: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(payload)
    return digest.hexdigest().encode()


def _shapes(arguments: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


@contextmanager
def _warned(path: Path, what: str) -> Iterator[None]:
    """Nothing that goes wrong with an entry ends a start; unpickling may raise anything."""
    try:
        yield
    except Exception as error:
        logger.warning("%s %s: %s", path, what, f"{type(error).__name__}: {error}"[:400])
