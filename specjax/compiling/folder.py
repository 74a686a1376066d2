"""Files in a folder that belongs to its user alone, written whole or not at all.

What lies there is executed, so that everything is refused that somebody else could have put there.
"""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Make a folder of mode 0700 where it is missing; others' are refused with ``ValueError``."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check(path, path.lstat())


def read_private(path: Path) -> bytes | None:
    """The contents of a file, ``None`` where there is none; refused as a folder is."""
    _check(path.parent, path.parent.lstat())
    try:
        # a named pipe in place of the file must not hold up the reader
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            # of what was opened, not of what the path named a moment before
            _check(path, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        return None


def write_private(path: Path, data: bytes) -> None:
    """Replace a file in one step, of mode 0600; refused as its folder is."""
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
        raise ValueError(f"{path} is a symbolic link or a special file; delete it or give its goal")
    if status.st_uid != user:
        raise ValueError(
            f"{path} belongs to user {status.st_uid}, not to user {user}; what others have written "
            "is not executed: use a folder of your own"
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path} is shared (mode {stat.S_IMODE(mode):04o}); chmod go-w {path}")
