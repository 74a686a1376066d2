"""Times of prefill calls, measured while serving, to bound how long prompts delay rounds."""

import math
from collections.abc import Sequence

# Weights of a new measurement that is above and below the estimate. The host may notice the end of
# the call before late, so that a call seems short.
WEIGHT_ABOVE, WEIGHT_BELOW = 1 / 4, 1 / 16


class PrefillTimes:
    """Seconds per call by ``widths``, the ascending numbers of tokens that a call can have."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self._measured: dict[int, float] = {}

    def observe(self, width: int, seconds: float) -> None:
        """Record the time of one call."""
        estimate = self._measured.setdefault(width, seconds)
        weight = WEIGHT_ABOVE if seconds > estimate else WEIGHT_BELOW
        self._measured[width] = estimate + weight * (seconds - estimate)

    def seconds(self, width: int) -> float:
        """Estimate the time of a call; infinite if none was measured.

        A call takes at most as long as several narrower calls for as many tokens. So a wide call
        can become affordable without being measured again.
        """
        widths = [x for x in self._measured if x <= width] or sorted(self._measured)[:1]
        return min((self._measured[x] * width / x for x in widths), default=math.inf)

    def widest_within(self, limit: float) -> int:
        """The widest call that takes at most ``limit`` seconds, or else the narrowest of all."""
        fitting = (width for width in self._widths if self.seconds(width) <= limit)
        return max(fitting, default=self._widths[0])
