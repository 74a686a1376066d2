"""Flip single bits in the files of a folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path


class Saved:
    """A folder and the original bytes of all its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        for path, data in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def flips(self, count: int | None = None) -> Iterator[Path]:
        """Yield each file with a flipped bit: one in its middle, or ``count`` over all bytes."""
        sizes = [len(data) for data in self.files.values()]
        places = [(path, len(data) // 2) for path, data in self.files.items() if data]
        if count is not None:
            assert 0 < count <= sum(sizes)
            everywhere = [(path, i) for path, data in self.files.items() for i in range(len(data))]
            places = [everywhere[sum(sizes) * i // count] for i in range(count)]
        for number, (path, at) in enumerate(places):
            self.restore()
            data = bytearray(self.files[path])
            data[at] ^= 1 << number % 8
            path.write_bytes(data)
            yield path
        self.restore()
