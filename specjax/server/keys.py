"""API keys in a file, which the server reads again on SIGHUP."""

import logging
from pathlib import Path

from specjax.json_file import read_text

logger = logging.getLogger(__name__)


class KeyFile:
    """The keys in the lines of a file; empty lines and those that begin with # have none.

    Raises ValueError if the path is not a regular UTF-8 file, if the file has no keys, or if a key
    has whitespace or is not printable.

    Attributes:
        keys: the encoded keys, each once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.keys = self._read()

    def reload(self) -> None:
        """Read the file again. If that fails, log the reason and keep the keys."""
        try:
            self.keys = self._read()
        except (OSError, ValueError) as error:
            logger.error("%s; the %d keys from before stay valid", error, len(self.keys))
        else:
            logger.info("read %d API keys from %s", len(self.keys), self._path)

    def _read(self) -> tuple[bytes, ...]:
        try:
            text = read_text(self._path)
        except ValueError as error:
            raise ValueError(f"--api-key-file: {error}") from None
        where, keys = f"--api-key-file={self._path}", []
        # splitlines() would also split at characters that a key must not have
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
            key = line.strip(" \t\r")
            if not key or key.startswith("#"):
                continue
            if key.split() != [key] or not key.isprintable():
                raise ValueError(f"{where}, line {number}: a key must be printable, no whitespace")
            keys.append(key.encode())
        if not keys:
            raise ValueError(f"{where} must have at least one key")
        return tuple(dict.fromkeys(keys))
