"""Split weights over the devices of a mesh: each has some heads, inner columns and tokens."""

from dataclasses import dataclass

import numpy as np

AXIS = "tp"  # of the mesh


@dataclass(frozen=True)
class Split:
    """How a weight is cut on ``axis``, where projections of these ``widths`` are joined.

    Each device has its share of every projection, so pieces are not contiguous if there are
    several.
    """

    axis: int
    widths: tuple[int, ...]

    def piece(self, weight: np.ndarray, device: int, count: int) -> np.ndarray:
        """The piece of a whole weight that device number ``device`` of ``count`` has."""
        pieces, start = [], 0
        for width in self.widths:
            own = width // count
            begin = start + device * own
            index = (slice(None),) * self.axis + (slice(begin, begin + own),)
            pieces.append(weight[index])
            start += width
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.axis)
