"""Wait for a condition."""

import time
from collections.abc import Callable
from typing import Any

SECONDS = 60.0  # nothing that tests wait for takes longer unless it hangs


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait until the condition is true; fail if it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {seconds} s"
        time.sleep(0.002)
