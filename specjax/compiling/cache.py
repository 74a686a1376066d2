"""Cache of compiled functions on disk, so that a start neither traces nor lowers nor compiles.

An entry is a serialized executable with the trees of its arguments and results: pickles and machine
code. Loading an entry executes its code. Entries are therefore stored in a private folder of the
user, and owner and mode are checked before anything is unpickled.
"""

import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from specjax.compiling.digest import digest_files

logger = logging.getLogger(__name__)

FOLDER = "specjax-executables"
FORMAT = 2
_DIGEST_LETTERS = 64  # hexadecimal digits of SHA-256


def open_compile_cache(
    directory: str | os.PathLike[str] | None, *facts: Any, devices: Sequence[jax.Device] = ()
) -> "CompileCache | None":
    """Open the cache for ``facts`` in a subfolder; JAX's persistent cache uses the folder itself.

    ``"auto"`` is the folder that JAX is configured with, or else ``specjax`` in the user's cache
    folder. If this folder cannot be used, log a warning and return ``None``, as without a
    directory. Raises ValueError if a named folder cannot be made or is not private.
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
        if not name or ":/" in name:  # a URL; path objects drop its second slash
            raise ValueError(
                "it must be a local folder; set JAX_COMPILATION_CACHE_DIR to use a URL for JAX's "
                "own cache"
            )
        path = Path(name).expanduser()
        if not is_jaxs:
            make_private_folder(path)
        make_private_folder(path / FOLDER)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: unknown home folder
        if not is_auto:
            raise ValueError(f"compile_cache_dir={str(directory)!r} is refused: {error}") from error
        logger.warning("compiled functions are not cached: %s; set compile_cache_dir", error)
        return None
    if not is_jaxs:  # let JAX cache everything that it compiles
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        _set("jax_compilation_cache_dir", str(path))
    return CompileCache(path / FOLDER, facts, devices)


class CompileCache:
    """Executables and JSON values by configuration, in one private folder.

    Damaged or stale entries, and entries with another key, cause a warning and count as missing.
    Several processes may read and write at once; the last writer of an entry wins. ``facts`` are
    all values that the functions depend on, apart from their arguments and this package's sources.
    Facts with equal ``repr`` must be interchangeable. ``devices`` run the functions.
    """

    def __init__(
        self, path: Path, facts: Sequence[Any] = (), devices: Sequence[jax.Device] = ()
    ) -> None:
        self.path = path
        self._devices = tuple(devices or jax.devices()[:1])
        text = repr(tuple(facts))
        if " at 0x" in text:
            raise ValueError(
                f"the repr of configuration={text} contains a memory address and cannot be a cache "
                "key; define a stable __repr__"
            )
        self._key = digest_of([FORMAT, environment(self._devices), text])

    def key(
        self, label: str, function: Any, arguments: Any, options: Mapping[str, Any] | None = None
    ) -> str:
        """Return the file name for the executable of a jitted function with abstract arguments.

        Closures and donated arguments follow from the sources, the facts and the label.
        """
        leaves, structure = jax.tree.flatten(tuple(arguments))
        described = [str(structure), *map(repr, leaves)]
        settings = sorted((name, repr(value)) for name, value in (options or {}).items())
        name = getattr(function, "__name__", "")
        return self._name(label, digest_of([self._key, label, name, described, settings]), "xla")

    def load(self, key: str, arguments: Sequence[Any]) -> tuple[Compiled, int] | None:
        """Return the executable stored under a key and its size in bytes; ``None`` if missing."""
        path = self.path / key
        with _warned(path, "is rebuilt"):
            data = read_private(path)
            if data is None:
                return None
            digest, payload = data[:_DIGEST_LETTERS], data[_DIGEST_LETTERS:]
            if digest != _checksum(key, payload):
                raise ValueError("it is damaged, or has another key or version")
            serialized, in_tree, out_tree = pickle.loads(payload)
            client = self._devices[0].client
            # without execution_devices it would use all devices
            compiled = serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, backend=client, execution_devices=self._devices
            )
            if _shapes(compiled.args_info) != _shapes((tuple(arguments), {})):
                raise ValueError("it was compiled for other argument shapes or dtypes")
            return compiled, len(data)
        return None

    def store(self, key: str, compiled: Compiled) -> int | None:
        """Store an executable compiled within :func:`bypassed`; returns its size in bytes."""
        path = self.path / key
        with _warned(path, "is not stored"):
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            data = _checksum(key, payload) + payload
            write_private(path, data)
            return len(data)
        return None

    def load_json(self, name: str) -> dict[str, Any] | None:
        """Return the value stored for this configuration and environment, or ``None``."""
        path = self.path / self._name(name, self._key, "json")
        with _warned(path, "is rebuilt"):
            data = read_private(path)
            if data is None:
                return None
            content = json.loads(data)
            value = content["value"]
            if content["key"] != self._key or not isinstance(value, dict):
                raise ValueError("it has another key, or its value is not an object")
            return value
        return None

    def store_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Store a JSON value for this configuration and environment, with any weights."""
        path = self.path / self._name(name, self._key, "json")
        with _warned(path, "is not stored"):
            text = json.dumps({"key": self._key, "value": value}, indent=1)
            write_private(path, text.encode())

    def prune(self, seconds: float) -> int:
        """Delete entries that were not read for this many seconds; returns their number."""
        oldest, count = time.time() - seconds, 0
        for path in self.path.iterdir():
            with suppress(OSError):  # deleted meanwhile, or a folder
                if path.lstat().st_mtime < oldest:
                    path.unlink()
                    count += 1
        return count

    def _name(self, label: str, digest: str, suffix: str) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._]+', '-', label)}-{digest[:32]}.{suffix}"


def _checksum(key: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(payload)
    return digest.hexdigest().encode()


def _shapes(arguments: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(arguments)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


@contextmanager
def _warned(path: Path, failure: str) -> Iterator[None]:
    """Log any error with an entry instead of raising it; unpickling may raise anything."""
    try:
        yield
    except Exception as error:
        logger.warning("%s %s: %s", path, failure, f"{type(error).__name__}: {error}"[:400])


def make_private_folder(path: Path) -> None:
    """Make a folder of mode 0700 if it is missing; raises ValueError if it is not private."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check(path, path.lstat())


def read_private(path: Path) -> bytes | None:
    """Return a file's bytes, ``None`` if it is missing; raises ValueError if it is not private."""
    _check(path.parent, path.parent.lstat())
    try:
        # O_NONBLOCK: a named pipe under this name must not block the reader
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            # check the opened file: the path may have changed
            _check(path, os.fstat(file.fileno()))
            with suppress(OSError):
                os.utime(file.fileno())  # for prune
            return file.read()
    except FileNotFoundError:
        return None


def write_private(path: Path, data: bytes) -> None:
    """Replace a file of mode 0600 atomically; raises ValueError if its folder is not private."""
    _check(path.parent, path.parent.lstat())
    temporary = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _check(path: Path, status: os.stat_result) -> None:
    user, mode = os.geteuid(), status.st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise ValueError(f"{path} is a symbolic link or special file; delete it or pass its target")
    if status.st_uid != user:
        raise ValueError(
            f"{path} belongs to user {status.st_uid}, not to user {user}; loading it would execute "
            "that user's code: use a folder that you own"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"others can write to {path} (mode {mode & 0o7777:04o}); chmod go-w {path}"
        )


_BYPASS = threading.RLock()


@contextmanager
def bypassed() -> Iterator[dict[str, str | bool]]:
    """Compile inside the block without JAX's persistent cache; one thread at a time can be inside.

    An executable from that cache cannot be serialized: the copy fails when it runs, not when it
    is loaded. The setting is global, so compilations in other threads are not cached meanwhile
    either. Yields compiler options that keep XLA's autotuning cache on.
    """
    with _BYPASS:
        options = _autotune_options()
        was_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        _set("jax_enable_compilation_cache", False)
        try:
            yield options
        finally:
            _set("jax_enable_compilation_cache", was_enabled)


def _set(name: str, value: object) -> None:
    jax.config.update(name, value)
    # otherwise JAX keeps the cache object and the switch of the first compilation
    compilation_cache.reset_cache()


def _autotune_options() -> dict[str, str | bool]:
    """Return the options that JAX itself sets while its cache is on."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    name = "xla_gpu_per_fusion_autotune_cache_dir"
    kinds = jax.config.jax_persistent_cache_enable_xla_caches or ""  # type: ignore[attr-defined]
    if folder is None or jax.default_backend() != "gpu" or not (kinds == "all" or name in kinds):
        return {}
    return {
        name: str(Path(folder) / name),
        "xla_gpu_experimental_autotune_cache_mode": "AUTOTUNE_CACHE_MODE_UPDATE",
    }


PACKAGES = ("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "flax")
# JAX settings that change compiled code
SETTINGS = (
    "jax_allow_f16_reductions jax_debug_infs jax_debug_nans jax_default_matmul_precision "
    "jax_default_prng_impl jax_disable_most_optimizations jax_enable_x64 "
    "jax_exec_time_optimization_effort jax_optimization_level jax_pallas_use_mosaic_gpu "
    "jax_random_seed_offset jax_threefry_partitionable"
).split()


def environment(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Return the current devices, library versions, sources and settings, by name."""
    facts = {
        "python": f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
        "runtime": " ".join(devices[0].client.platform_version.split()),
        "devices": f"{[(d.id, d.device_kind) for d in devices]} of {len(jax.devices())}",
        "sources": source_digest(),
        "XLA_FLAGS": _xla_flags(),
    }
    if devices[0].platform == "cpu":
        facts["cpu"] = _cpu_features()
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts | {name: repr(getattr(jax.config, name, None)) for name in SETTINGS}


@functools.cache
def source_digest(*roots: str) -> str:
    """Hash all Python sources below ``roots`` (default: specjax with its kernels)."""
    import specjax
    import specjax.kernels

    paths = roots or (*specjax.__path__, *specjax.kernels.__path__)
    return digest_files(map(Path, paths), ending=".py")


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # XLA reads a file of that name
        with suppress(OSError):
            flags = Path(flags).read_text(errors="replace")
    return " ".join(flags.split())


def _cpu_features() -> str:
    """Hash the processor's model and instruction sets, as Linux lists them."""
    with suppress(OSError):
        names = ("model name", "flags", "Features", "CPU")
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return digest_of(sorted({line for line in lines if line.startswith(names)}))
    return platform.processor()


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
