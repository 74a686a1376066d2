"""API keys in a file, which the server reads again on SIGHUP."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


class KeyFile:
    """The keys in the lines of a file; empty lines and those that begin with # have none.

    Raises ValueError if the file has no keys, or if a key has whitespace or is not printable.
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

    def _read(self) -> tuple[str, ...]:
        keys = []
        for number, line in enumerate(self._path.read_text(encoding="utf-8").splitlines(), 1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if key.split() != [key] or not key.isprintable():
                raise ValueError(f"{self._path}, line {number}: a key must have no whitespace")
            keys.append(key)
        if not keys:
            raise ValueError(f"--api-key-file={self._path} must have at least one key")
        return tuple(keys)
