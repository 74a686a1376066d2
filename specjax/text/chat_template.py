"""Renders chat templates. They come with checkpoints and are not trusted.

Jinja's immutable sandbox renders them in a process with limits on time and memory. The helpers
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
MAX_ANSWER = 2**27  # bytes; the process refuses to render a longer text
_SANDBOX = Path(__file__).with_name("sandbox.py")


class _Renderer:
    """The rendering process. It is started on demand, and again after it has died."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                # -P: files in this folder must not shadow modules of the standard library. New
                # group: an interrupt from the terminal must reach only the parent. A session of its
                # own would have the same share of the cores as the engine.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SANDBOX)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    process_group=0,
                )
            return self._process

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        try:
            request = pickle.dumps((template, variables, MAX_SECONDS))
        except Exception as error:  # pickle raises several unrelated types
            raise ValueError(f"a template variable cannot be copied: {error}") from error
        with self._lock:
            process, answer = self.start(), b""
            # the process ends itself after MAX_SECONDS; if a signal has stopped it, kill it
            timer = threading.Timer(MAX_SECONDS + GRACE_SECONDS, process.kill)
            timer.start()
            try:
                answer = _ask(process, request)
            finally:  # also when interrupted: the next call must not read this answer
                timer.cancel()
                if not answer.endswith(b"\n"):
                    self.close()
        if not answer.endswith(b"\n"):
            raise ValueError(f"rendering takes more than {MAX_SECONDS:g} s or too much memory")
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
    """Return the answer line. It is cut off if the process ends early or the line is too long."""
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
# after a fork the process, and the lock if it is held, belong to the parent
os.register_at_fork(after_in_child=_RENDERER.__init__)  # type: ignore[misc]
start_renderer = _RENDERER.start  # early start: saves the first conversation 0.1 to 0.3 s


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render a conversation with a Jinja template, which gets the messages and ``variables``.

    Blocks until another process has rendered the text.

    Raises:
        ValueError: if the list is empty, a message is malformed, the template fails or refuses
            the messages, or rendering takes more than ``MAX_SECONDS`` or too much memory.
    """
    if not messages:
        raise ValueError("messages=[] is empty; pass at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{i}]={short(message)} must be a mapping with 'role', a string"
            )
    try:
        plain = [dict(message) for message in messages]
        return _RENDERER.render(template, {"messages": plain, **variables})
    except ValueError as error:
        raise ValueError(f"the chat template refused the conversation: {error}") from error
