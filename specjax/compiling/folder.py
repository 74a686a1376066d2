"""A folder that belongs to its user alone, whose files are written whole or not at all.

What lies in it is executed, so that everything is refused that somebody else could have put there.
"""

import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

# a writer that was killed leaves its temporary file; no write takes that long
ABANDONED_SECONDS = 3600.0
_TEMPORARY = ".tmp-"


class PrivateFolder:
    """A folder of mode 0700, made if it is missing.

    Owner and mode are those of what was opened, not of what a path named a moment before.

    Args:
        path: the folder; its parents are made too.

    Raises:
        OSError: if it cannot be made.
        ValueError: if it is a symbolic link, belongs to another user, or can be written by others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._opened():
            pass

    def read(self, name: str) -> bytes | None:
        """The contents of a file; ``None`` where there is none.

        Raises:
            OSError: if it cannot be read.
            ValueError: if the folder or the file is not the user's alone.
        """
        with self._opened() as folder:
            if not os.path.lexists(self.path / name):
                return None
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise ValueError(f"{self.path / name} is a symbolic link; delete it")
            with open(_open_file(name, folder), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"{self.path / name} is not a file; delete it")
                _check_owner(self.path / name, status)
                return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file in one step, so that readers see all of it or what was there before.

        Raises:
            OSError: if it cannot be written.
            ValueError: if the folder is not the user's alone.
        """
        temporary = f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        with self._opened() as folder:
            try:
                with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
                    file.write(data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def names(self) -> list[str]:
        """Names of the files, sorted, without those that are being written."""
        with self._opened() as folder:
            return sorted(name for name in os.listdir(folder) if not name.startswith(_TEMPORARY))

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is no error."""
        with self._opened() as folder, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def remove_abandoned(self) -> None:
        """Delete what writers that were killed have left."""
        now = time.time()
        with self._opened() as folder:
            for name in os.listdir(folder):
                if not name.startswith(_TEMPORARY):
                    continue
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if now - status.st_mtime > ABANDONED_SECONDS:
                        os.unlink(name, dir_fd=folder)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, checked."""
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a symbolic link; give the folder that it points to")
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_owner(self.path, os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)


def _open_file(name: str, folder: int) -> int:
    # a named pipe in place of the file must not hold up the reader
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)


def _check_owner(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if status.st_uid != user:
        raise ValueError(
            f"{path} belongs to user {status.st_uid}, not to user {user}; what others have written "
            "is not executed: use a folder of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{path} can be written by others (mode {mode:04o}); chmod go-w {path}")
