"""The two commands of the example, as in its documentation."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "disaggregation.py"
SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.long
def test_one_command_each() -> None:
    command = [sys.executable, "-u", str(EXAMPLE)]
    with subprocess.Popen(
        [*command, "prefill", "--address", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as prefill:
        try:
            assert prefill.stdout is not None
            found = re.search(r"at (127\.0\.0\.1:\d+);", prefill.stdout.readline())
            assert found is not None
            done = subprocess.run(
                [*command, "decode", "One, two, three,", "--address", found[1]],
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert done.returncode == 0, done.stderr
            prefill.send_signal(signal.SIGINT)
            assert prefill.wait(SECONDS) == 0
        finally:
            prefill.kill()
    assert done.stdout.startswith("One, two, three,")
    assert " prompt tokens, 0 of them computed in this process" in done.stdout
    assert "first token after" in done.stdout
