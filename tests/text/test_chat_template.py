"""The process that renders chat templates."""

import os
import subprocess
import sys

import pytest

FORKED = """
import os, sys
from specjax.text.chat_template import render_chat_template

def render():
    messages = [{"role": "user", "content": "hi"}]
    return render_chat_template("{{ messages[0].content }}", messages, {})

assert render() == "hi"
child = os.fork()
if child == 0:
    assert render() == "hi"
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
child = os.fork()
if child == 0:
    sys.exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
assert render() == "hi"
"""


@pytest.mark.slow
def test_forked_children_render_and_end() -> None:
    """The parent's process answers only the parent, and its pipe does not block a child's exit."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-P", "-c", FORKED], check=True, timeout=60, env=environment)
