"""Options of the grammar library: those of the operator hold, and those in a grammar do not.

Also lists of allowed tokens and unwanted words, which become grammars.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.sampling.grammar import LAYOUT, Constraint
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.sampling.params import SamplingParams
from specjax.testing.files import EOS_ID, letter_tokenizer

TOKENIZER = letter_tokenizer()
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ARROWS = {"key_separator": " => ", "whitespace_flexible": False, "lenient": True}
ODD = {"x-guidance": ARROWS}
NESTED = OBJECT | {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": OBJECT | ODD}} | ODD


def compiler(*, spaces: bool = True) -> GrammarCompiler:
    size = TOKENIZER.vocab_size
    return GrammarCompiler(TOKENIZER.backend.to_str(), size, [EOS_ID], spaces=spaces)


SPACED, TIGHT = compiler(), compiler(spaces=False)


def grammars(schema: Any) -> list[dict[str, Any]]:
    """Every grammar in which a schema may stand; its text has ``<`` and ``>`` around the value."""
    text, whole = (
        json.dumps(schema),
        {"type": "array", "items": schema, "minItems": 1, "maxItems": 1},
    )
    if isinstance(schema, dict):
        whole |= {"x-guidance": schema.get("x-guidance", {}), "$defs": schema.get("$defs", {})}
    tag = {"begin": "<", "schema": schema, "end": ">"}
    return [
        {"json_schema": whole},
        {"json_schema": json.dumps(whole)},
        {"ebnf": f'start: "<" %json {text} ">"'},
        {"ebnf": f'start: "<" value ">"\nvalue:%json\n \t{text} // %json {{'},
        {"ebnf": f'start: "<" x ">"\nx: %lark {{\nstart: %json {text}\n}}'},
        {"structural_tag": {"structures": [tag], "triggers": ["<"]}},
    ]


def accepts(made: GrammarCompiler, grammar: dict[str, Any], value: str) -> bool:
    """Whether a text with the value may end as soon as the grammar permits."""
    name, text = SamplingParams(**grammar).grammar or ("", "")
    whole = f"[{value}]" if name == "json_schema" else f"<{value}>"
    ids = ids_of(whole)
    return made.compile(name, text).advance(ids) == len(ids)


@pytest.mark.parametrize("index", range(len(grammars(True))))
def test_options_of_a_schema_have_no_effect(index: int) -> None:
    def check(made: GrammarCompiler, schema: Any, value: str) -> bool:
        return accepts(made, grammars(schema)[index], value)

    for schema in (OBJECT, OBJECT | ODD, OBJECT | {"x-guidance": LAYOUT | {"lenient": True}}):
        assert check(SPACED, schema, '{"a" : 1}')
        assert check(TIGHT, schema, '{"a":1}')
        assert not check(SPACED, schema, '{"a" => 1}')
        assert not check(TIGHT, schema, '{"a" : 1}')
    assert check(TIGHT, NESTED, '{"a":{"a":1}}')
    assert not check(TIGHT, NESTED, '{"a":{"a" => 1}}')
    with pytest.raises(ValueError, match="Unimplemented keys"):
        check(SPACED, {"not": {"type": "null"}} | ODD, "1")
    # the key may be the name of a property, and stand in a value
    named = OBJECT | {"properties": {"x-guidance": {"type": "null"}}, "required": ["x-guidance"]}
    assert check(TIGHT, named, '{"x-guidance":null}')
    assert check(TIGHT, {"enum": [{"x-guidance": 1}]}, '{"x-guidance":1}')


@pytest.mark.parametrize("index", range(len(grammars(True))))
def test_true_and_false(index: int) -> None:
    assert accepts(SPACED, grammars(True)[index], '{"b": [null]}')
    with pytest.raises(ValueError, match="false"):
        accepts(SPACED, grammars(False)[index], "1")


def test_a_whole_schema_may_be_true() -> None:
    def compiled(schema: Any) -> Constraint:
        return SPACED.compile(*SamplingParams(json_schema=schema).grammar)  # type: ignore[misc]

    for schema in (True, "true"):
        assert compiled(schema).advance(ids_of("[1]")) == 3
    for wrong, words in ((False, "false allows no text"), ("3", "must be an object or true")):
        with pytest.raises(ValueError, match=words):
            compiled(wrong)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_the_layout_of_tool_arguments_holds_where_white_space_is_allowed() -> None:
    (_, _, grammar, *_), value = grammars(OBJECT | {"x-guidance": LAYOUT}), '{"a": 1}'
    assert accepts(SPACED, grammar, value)
    assert not accepts(SPACED, grammar, '{"a":1}')
    assert accepts(TIGHT, grammar, '{"a":1}')
    assert not accepts(TIGHT, grammar, value)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "%json {}" // %json {"not": 1} \n', "%json {}"),
        ('start: "\\"%json {}"', '"%json {}'),
        ("start: /%json \\{\\}/", "%json {}"),
        ('start: /a\\/%json \\{\\}/ # "\n', "a/%json {}"),
        ('# %json 3\n%llguidance { }\nstart: "a"', "a"),
        ('root ::= "%json {}"', "%json {}"),
        ('start: /["]/ %json {"enum": [1]} /["]/', '"1"'),
    ],
)
def test_marks_in_strings_and_comments_are_not_schemas(grammar: str, text: str) -> None:
    ids = ids_of(text)
    assert TIGHT.compile("ebnf", grammar).advance(ids) == len(ids)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance .* must be empty"),
        ('start: "a"\n%llguidance {"allow_invalid_utf8": true}', "%llguidance .* must be empty"),
        ("start: %json " + "1" * 5000, "%json needs a JSON value"),
        ("start: %json [", "%json needs a JSON value"),
        ('start: "a" %json {"multipleOf": 10007}', "multipleOf of 10007"),
        ('start: "\\\\" %json {"multipleOf": 10007}', "multipleOf of 10007"),
        ('start: /a"/ %json {"multipleOf": 10007} /"/', "multipleOf of 10007"),
        ('start: <a"b> %json {"multipleOf": 10007} /"/', "multipleOf of 10007"),
    ],
)
def test_refused_options(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SPACED.compile("ebnf", grammar)


def constraint_of(**grammar: Any) -> Constraint:
    params = replace(SamplingParams(**grammar), temperature=0.5)
    name, text = params.grammar or ("", "")
    return SPACED.compile(name, text)


@settings(max_examples=25)
@given(st.sets(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1))
def test_only_the_allowed_tokens_are_allowed(ids: set[int]) -> None:
    """Also after tokens and drafts; an end token only if it is among them."""
    constraint = constraint_of(allowed_token_ids=sorted(ids))
    drafts = [*sorted(ids)[:3], next(i for i in range(EOS_ID + 2) if i not in ids)]
    for token in drafts:
        masks, forced = np.ones((5, constraint.num_words), np.int32), np.ones((5, 2), np.int32)
        constraint.fill([0, *drafts], [-1, *range(len(drafts))], masks, forced)
        for mask in (constraint.mask(), *masks[: len(drafts)]):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert set(np.flatnonzero(bits).tolist()) == ids
        assert constraint.advance([token]) == (token in ids)
        assert not constraint.is_complete


@settings(max_examples=40)
@given(st.lists(st.text("ab/.", min_size=1, max_size=3), min_size=1), st.text("ab/. ", max_size=9))
@example(["\\", "/*", "\n"], "a/b*\\")
@example(["]", "é", "<|x|>"], "a]")
def test_unwanted_words_do_not_occur(words: list[str], text: str) -> None:
    """A text goes on up to the character that would complete one of the words."""
    ends = [i + 1 for i in range(len(text)) if any(text[: i + 1].endswith(x) for x in words)]
    constraint, ids = constraint_of(bad_words=words), ids_of(text)
    assert constraint.advance(ids) == (ends[0] - 1 if ends else len(ids))
    if not ends:
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        allowed = {token for token in range(EOS_ID) if bits[token]}
        letters = {token: TOKENIZER.decode([token]) for token in range(EOS_ID)}
        assert allowed == {i for i, x in letters.items() if not any(w in text + x for w in words)}
        assert bits[EOS_ID]
