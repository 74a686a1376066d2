"""Scripts that end without closing their engine keep their exit status.

``EXITS=20 pytest -m slow tests/engine/test_exit.py`` runs each way of ending 20 times.
"""

import os
import subprocess
import sys

import pytest

from specjax.testing import Files

SECONDS = 120.0
EXITS = int(os.environ.get("EXITS", 2))
START = """
import sys
from specjax import Engine

PARAMS = {"temperature": 0.0, "max_new_tokens": 110, "ignore_eos": True}

def make():
    return Engine(
        sys.argv[1], page_size=4, max_running_requests=1, chunked_prefill_size=1,
        compile_cache_dir=sys.argv[2],
    )
"""
# How a script ends, and the exit status that it asks for.
WAYS = {
    "a global engine": ("engine = make()\nengine.generate('hello', PARAMS)", 0),
    "del as the last line": ("engine = make()\nengine.generate('hello', PARAMS)\ndel engine", 0),
    "a dropped stream": (
        "def main():\n    next(make().generate('hello', PARAMS, stream=True))\nmain()",
        0,
    ),
    "a stream that is half read": (
        "stream = make().generate('hello', PARAMS, stream=True)\nnext(stream)",
        0,
    ),
    "a caller in a daemon thread": (
        "import threading\nengine, started = make(), threading.Event()\n"
        "def run():\n"
        "    for _ in engine.generate('hello', PARAMS, stream=True):\n"
        "        started.set()\n"
        "threading.Thread(target=run, daemon=True).start()\nstarted.wait()",
        0,
    ),
    "sys.exit in a function": (
        "def main():\n    engine = make()\n"
        "    next(engine.generate('hello', PARAMS, stream=True))\n"
        "    sys.exit(7)\nmain()",
        7,
    ),
    "an uncaught exception": (
        "def main():\n    engine = make()\n"
        "    next(engine.generate('hello', PARAMS, stream=True))\n"
        "    raise KeyError('mine')\nmain()",
        1,
    ),
}


@pytest.mark.long_after(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_script_ends_with_its_own_status(files: Files, way: str) -> None:
    script, status = WAYS[way]
    for _ in range(EXITS):
        done = subprocess.run(
            [sys.executable, "-c", START + script, str(files.target), str(files.cache)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert (done.returncode, done.stdout) == (status, ""), done.stderr
        if status == 1:
            assert done.stderr.endswith("KeyError: 'mine'\n")
        else:
            assert not done.stderr
