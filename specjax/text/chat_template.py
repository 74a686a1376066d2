"""Rendering of chat templates, which come with checkpoints and are not to be trusted.

Jinja's immutable sandbox renders them, in a process that is bounded in time and memory. The helpers
that templates rely on (``raise_exception``, ``tojson``, ``strftime_now``, loop controls,
``{% generation %}``) behave as in transformers.
"""

import atexit
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.checks import short

MAX_SECONDS = 5.0
GRACE_SECONDS = 1.0
MAX_ANSWER = 2**27  # bytes; the process refuses to make a text that would need more
_SANDBOX = Path(__file__).with_name("sandbox.py")


class _Renderer:
    """The process, started when it is needed and after it has died."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                # -P: nothing here may hide a module of the standard library; a session of its own:
                # an interrupt from the terminal is for this process
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SANDBOX)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
            return self._process

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        try:
            request = pickle.dumps((template, variables, MAX_SECONDS))
        except Exception as error:  # pickle raises several unrelated types
            raise ValueError(f"a variable cannot be copied: {error}") from error
        with self._lock:
            process, answer = self.start(), b""
            # the process ends itself after MAX_SECONDS, unless a signal has stopped it
            timer = threading.Timer(MAX_SECONDS + GRACE_SECONDS, process.kill)
            timer.start()
            try:
                answer = _ask(process, request)
            finally:  # also when interrupted: the next answer must not be this one
                timer.cancel()
                if not answer.endswith(b"\n"):
                    self.close()
        if not answer.endswith(b"\n"):
            raise ValueError(f"it takes more than {MAX_SECONDS:g} seconds, or too much memory")
        went_well, text = json.loads(answer)
        if not went_well:
            raise ValueError(text)
        return text

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The answer's line, incomplete if the process ends or the answer is too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(len(request).to_bytes(8) + request)
        process.stdin.flush()
        return process.stdout.readline(MAX_ANSWER)
    except BrokenPipeError:
        return b""


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
# the process and a lock that may be held belong to the parent
os.register_at_fork(after_in_child=_RENDERER.__init__)  # type: ignore[misc]
start_renderer = _RENDERER.start  # ahead of the first conversation, which would wait 0.1 to 0.3 s


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Text of a conversation by Jinja source, which sees the messages and ``variables``.

    It waits for another process: call it from a thread that may wait.

    Raises:
        ValueError: if there is no message, one is malformed, the template refuses them or fails,
            or it takes more than ``MAX_SECONDS`` or more memory than any context needs.
    """
    if not messages:
        raise ValueError("messages=[] is a conversation without turns; give at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{i}]={short(message)} must be a mapping with 'role', a text"
            )
    try:
        plain = [dict(message) for message in messages]
        return _RENDERER.render(template, {"messages": plain, **variables})
    except ValueError as error:
        raise ValueError(f"the chat template refused the conversation: {error}") from error
