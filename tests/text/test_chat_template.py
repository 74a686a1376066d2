"""The process that renders chat templates."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from specjax.text.chat_template import render_chat_template

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


TEXT = '{"x":[1, "é"],  "y": null}'
DUMPED = '{"x": [1, "é"], "y": null}'
# how templates write a call's arguments, and what they give for those of TEXT
USES = [
    ("{{ 'f' + a + ';' }}", "f" + TEXT + ";"),
    ("{{ a + ';' }}", TEXT + ";"),
    ("{{ 'f' ~ a }}", "f" + TEXT),
    ("{{ a }}", TEXT),
    ("{{ a | trim }}", TEXT),
    ("{{ '%s' | format(a) }}", TEXT),
    ("{{ a | tojson }}", DUMPED),
    ("{{ {'a': a} | tojson }}", f'{{"a": {DUMPED}}}'),
    ("{% for k, v in a.items() %}{{ k }}={{ v | tojson }};{% endfor %}", 'x=[1, "é"];y=null;'),
    ("{% for k in a %}{{ k }}{% endfor %}{{ a.x[1] }}", "xyé"),
    ("{% if a is mapping %}{{ a | tojson }}{% else %}{{ a }}{% endif %}", DUMPED),
    ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", DUMPED),
    ("{{ a.strip() }}", TEXT),
    ("{{ a.startswith('{') and a[0] == '{' }}", "True"),
    ("{{ a[0] }}{{ a[-1] }}", "{}"),
    ("{{ a[5:] }}", TEXT[5:]),
    ("{% if a is not string %}{{ raise_exception('no text') }}{% endif %}{{ a }}", TEXT),
    ("{{ a }}{{ '1' in a }}{{ 'x' in a }}{{ 'z' in a }}", TEXT + "TrueTrueFalse"),
    ("{{ a }}{{ a | length > 20 }}", TEXT + "True"),
    # where nothing prints them, they are objects
    ("{{ '1' in a }}{{ 'x' in a }}{{ a | length }}", "FalseTrue2"),
    ("{{ a }}{{ a | length }}{% for k in a.keys() %}{{ k }}{% endfor %}", TEXT + "2xy"),
]


@pytest.mark.parametrize(("use", "expected"), USES)
@pytest.mark.parametrize("path", ["function.arguments", "arguments"])
def test_templates_use_arguments_as_objects_and_as_text(use: str, expected: str, path: str) -> None:
    template = f"{{% set a = messages[0].tool_calls[0].{path} %}}{use}"

    def render(arguments: Any) -> str:
        call: Any = {"name": "f", "arguments": arguments}
        call = {"type": "function", "function": call} if path != "arguments" else call
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        return render_chat_template(template, messages, {})

    assert render(TEXT) == expected
    # an object is written as json.dumps does
    assert render(json.loads(TEXT)) == expected.replace(TEXT, DUMPED).replace(TEXT[5:], DUMPED[5:])


def test_a_template_that_fails_with_objects_and_texts_gives_its_first_reason() -> None:
    template = "{{ raise_exception(messages[0].tool_calls[0].arguments is string) }}"
    messages = [{"role": "assistant", "tool_calls": [{"arguments": TEXT}]}]
    with pytest.raises(ValueError, match=r"False$"):
        render_chat_template(template, messages, {})


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1]", "3", None, [1], 3])
def test_other_arguments_stay(arguments: Any) -> None:
    """No arguments, as some clients write them, are also an empty object."""
    calls: Any = [{"function": {"name": "f", "arguments": arguments}}, 3, {"function": None}, {}]
    messages = [{"role": "user", "tool_calls": 5}, {"role": "assistant", "tool_calls": calls}]
    template = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert render_chat_template(template, messages, {}) == str(arguments)
    template = template.replace(" }}", ".items() | length }}")
    if arguments == "":
        assert render_chat_template(template, messages, {}) == "0"
    else:
        with pytest.raises(ValueError, match="items"):
            render_chat_template(template, messages, {})
