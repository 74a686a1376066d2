"""Messages of harmony, their parts, and where a grammar begins in them."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.sampling.boundary import BEGIN, Boundary, BoundaryWalk
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.testing import letter_tokenizer
from specjax.text.harmony import END, MARKS, MAX_HEADER, MAX_MESSAGES, Harmony, MessageReader
from specjax.text.parts import TextParts, Tools
from specjax.text.tool_formats import FORMATS, ToolCall

from ..support.tokenizers import harmony_tokenizer

TOKENIZER = harmony_tokenizer("analysis", "final")
HARMONY = Harmony.of(TOKENIZER)
BEFORE = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
ANSWER = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
ARGUMENTS = '{"x": 1}'
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


PROMPT = encode(BEFORE)


def read_messages(text: str, *, is_final: bool = True) -> list[tuple[str, str, str]]:
    messages = MessageReader(HARMONY, PROMPT).read(text, encode(text), is_final=is_final)
    return [(x.channel, x.recipient, text[x.begin : x.end]) for x in messages]


def make_parts(prompt: str = BEFORE, **options: Any) -> TextParts:
    numbers = itertools.count()
    names = options.pop("names", ["f", "g"])
    tools = Tools(TOOLS, names, format=FORMATS["gpt-oss"], new_id=lambda: str(next(numbers)))
    tools = tools._replace(is_parallel=options.pop("is_parallel", True))
    return TextParts(tools=tools, **HARMONY.parts(encode(prompt), ""), **options)


def read_parts(text: str, **options: Any) -> tuple[str, str, list[ToolCall]]:
    parts = make_parts(**options)
    parts.read(text, encode(text), is_final=True)
    return parts.reasoning, parts.content, [call._replace(id="") for call in parts.calls]


HEADERS = st.sampled_from(
    [
        ("<|channel|>analysis", "analysis", ""),
        ("<|channel|>commentary", "commentary", ""),
        ("<|channel|>final <|constrain|>json", "final", ""),
        ("<|channel|>final", "final", ""),
        ("<|channel|>commentary to=functions.f <|constrain|>json", "commentary", "functions.f"),
        ("<|channel|>commentary to=f json", "commentary", "f"),
        (" to=functions.g<|channel|>commentary<|constrain|>json", "commentary", "functions.g"),
        (" to=python<|channel|>analysis code", "analysis", "python"),
    ]
)
CONTENTS = st.sampled_from(["", "Hi", " ", "to=g", "<|start|>final<|message|>", '{"x": [1]}'])
MESSAGES = st.lists(st.tuples(HEADERS, CONTENTS, st.sampled_from(["<|end|>", "<|call|>"])))


def written(messages: Any) -> str:
    """The text of messages; marks within contents are text only if nothing ends there."""
    texts = [f"{header[0]}<|message|>{content}{end}" for header, content, end in messages]
    return BEFORE.join(texts)


@given(MESSAGES)
@settings(max_examples=40)
def test_messages_of_every_prefix(messages: Any) -> None:
    text = written(messages)
    ids = encode(text)
    expected = [(*header[1:], content) for header, content, _ in messages]
    assert read_messages(text) == expected
    growing = MessageReader(HARMONY, PROMPT)
    for end in range(len(ids) + 1):
        part = HARMONY.decode(ids[:end])
        found = growing.read(part, ids[:end], is_final=False)
        *whole, last = [*found, None]
        assert [(x.channel, x.recipient, part[x.begin : x.end]) for x in whole[:-1]] == expected[
            : max(0, len(whole) - 1)
        ]
        assert last is None
        if whole:
            *header, content = expected[len(whole) - 1]
            assert [whole[-1].channel, whole[-1].recipient] == header
            assert content.startswith(part[whole[-1].begin : whole[-1].end])


PIECES = st.sampled_from([*MARKS, "analysis", "final", "assistant", " to=functions.f", "h", "{}"])


@given(MESSAGES.map(written) | st.lists(PIECES, max_size=12).map("".join), *[st.booleans()] * 2)
@settings(max_examples=60)
def test_what_is_new_adds_up_to_the_parts(text: str, is_separate: bool, is_parallel: bool) -> None:
    """However the tokens come, and also if some of their text comes later."""
    rng = random.Random(text)
    ids = encode(text)
    options = {"is_separate": is_separate, "is_parallel": is_parallel}
    parts, end, shown = make_parts(**options), 0, ""
    reasoning, content, calls = "", "", dict[int, str]()
    while end < len(ids):
        end = min(len(ids), end + rng.randint(1, 6))
        shown = max(shown, HARMONY.decode(ids[: max(0, end - rng.randint(0, 3))]), key=len)
        is_final = end == len(ids)
        more, added, new_calls = parts.read(
            text if is_final else shown, ids[:end], is_final=is_final
        )
        reasoning, content = reasoning + more, content + added
        for i, call in new_calls:
            assert (i in calls) == (call.id == "")
            calls[i] = calls.get(i, "") + call.arguments
    expected = read_parts(text, **options)
    assert (reasoning, content) == expected[:2]
    assert list(calls.values()) == [call.arguments for call in expected[2]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"{THOUGHT}{BEFORE}{ANSWER}Hi", ("hm", "Hi", [])),
        (f"{THOUGHT}{BEFORE}{THOUGHT}{BEFORE}{ANSWER}Hi<|return|>", ("hm\n\nhm", "Hi", [])),
        (
            f"<|channel|>commentary<|message|>So:<|end|>{BEFORE}{CALL}{ARGUMENTS}<|call|>",
            ("", "So:", [ToolCall("f", ARGUMENTS, "", 3)]),
        ),
        (f"{CALL}{ARGUMENTS} ", ("", "", [ToolCall("f", ARGUMENTS)])),
        (f"{CALL}" + '{"x"', ("", "", [ToolCall("f", '{"x"')])),
        # the text ends in a header
        (f"{THOUGHT}{BEFORE}<|channel|>comm", ("hm", "", [])),
        ("<|channel|>commentary to=functions.f <|constrain|>", ("", "", [])),
        # no messages, or others
        ("Hello there", ("", "Hello there", [])),
        ("a" * (MAX_HEADER + 9), ("", "a" * (MAX_HEADER + 9), [])),
        (f"{THOUGHT}so<|start|>assistant{ANSWER}Hi", ("hm", "so\n\nHi", [])),
        (f"<|channel|>final Hello{END}", ("", "<|channel|>final Hello", [])),
        (f"{END}{ANSWER}Hi", ("", "Hi", [])),
        (f"{BEFORE}{ANSWER}Hi", ("", "Hi", [])),
        ("<|message|>Hi", ("", "Hi", [])),
        ("<|channel|>other<|message|>Hi", ("", "Hi", [])),
        (f"{ANSWER}a<|start|>b<|channel|>c{END}", ("", "a<|start|>b<|channel|>c", [])),
        (" to=functions.h<|message|>{}", ("", " to=functions.h<|message|>{}", [])),
        (" to=python<|channel|>analysis code<|message|>1", ("1", "", [])),
    ],
)
def test_parts_of_texts(text: str, parts: Any) -> None:
    assert read_parts(text) == parts


def test_other_prompts() -> None:
    text = f"{ANSWER}Hi"
    assert read_parts("Hi", prompt="no messages") == ("", "Hi", [])
    assert read_parts(text, prompt="no messages") == ("", text, [])
    assert read_parts(f"m<|end|>{BEFORE}{text}", prompt=f"{BEFORE}{THOUGHT[:-8]}") == (
        "m",
        "Hi",
        [],
    )
    assert read_parts("Hi", prompt=f"{BEFORE}{ANSWER}") == ("", "Hi", [])
    assert read_parts(f"al<|message|>Hi{END}", prompt=f"{BEFORE}<|channel|>fin") == ("", "Hi", [])


def test_choices_do_not_read_the_prompt_again(monkeypatch: Any) -> None:
    """It may end with a long message that is continued."""
    fields = HARMONY.parts(encode(f"{BEFORE}<|channel|>analysis<|message|>{'h' * 500}"), "")
    monkeypatch.setattr(MessageReader, "_push", None)
    first, other = (TextParts(**fields) for _ in range(2))
    monkeypatch.undo()
    text = f"m{END}{BEFORE}{ANSWER}Hi{END}"
    first.read(text, encode(text), is_final=False)
    other.read("h", encode("h"), is_final=False)
    found = [(parts.reasoning, parts.content) for parts in (first, other)]
    assert found == [("m", "Hi"), ("h", "")]


def test_reasoning_in_the_content() -> None:
    text = f"{THOUGHT}{BEFORE}{ANSWER}Hi"
    assert read_parts(text, is_separate=False) == ("", text, [])
    called = f"{THOUGHT}{BEFORE}{CALL}{ARGUMENTS}"
    assert read_parts(called, is_separate=False) == (
        "",
        THOUGHT,
        [ToolCall("f", ARGUMENTS, "", 39)],
    )
    assert read_parts(called, names=[])[2] == []


def test_a_text_that_is_cut_at_a_stop_string() -> None:
    """Its tokens go on."""
    ids = encode(f"{THOUGHT}{BEFORE}{ANSWER}Hi you<|return|>")
    parts = make_parts()
    parts.read(f"{THOUGHT}{BEFORE}{ANSWER}Hi", ids, is_final=True)
    assert (parts.reasoning, parts.content) == ("hm", "Hi")
    parts = make_parts()
    parts.read(THOUGHT[:31], ids, is_final=True)
    assert (parts.reasoning, parts.content) == ("h", "")


@pytest.mark.parametrize("message", [f"{ANSWER}Hi{END}{BEFORE}", f"<|message|>{END}<|start|>"])
def test_messages_without_end(message: str) -> None:
    """After a number of messages, all is content, however the tokens come."""
    text = message * (2 * MAX_MESSAGES)
    ids = encode(text)
    growing, rest = MessageReader(HARMONY, PROMPT), text.split(END, MAX_MESSAGES)[-1]
    for end in (*range(0, len(ids), 97), len(ids)):
        part = HARMONY.decode(ids[:end])
        found = growing.read(part, ids[:end], is_final=False)
        assert len(found) <= MAX_MESSAGES + 1
    *_, last = found
    assert (text[last.begin :], last.end) == (rest, None)
    parts, contents = make_parts(), list[str]()
    for part in parts.cuts(text, ids):
        contents.append(parts.read(part, ids, is_final=part == text)[1])
    assert "".join(contents).endswith(rest)
    assert len(contents) <= MAX_MESSAGES + 1


def test_headers_of_marks_are_short() -> None:
    marks = "<|channel|><|constrain|>" * MAX_HEADER
    assert read_messages(f"{marks}<|message|>Hi{END}") == [("", "", f"{marks}<|message|>Hi")]


def test_counts_of_tokens() -> None:
    text = f"{THOUGHT}{BEFORE}{THOUGHT}{BEFORE}{ANSWER}Hi<|return|>"
    ids, thought = encode(text), len(encode(THOUGHT))
    parts = make_parts()
    parts.read(text, ids, is_final=True)
    assert parts.count(ids) == (2 * thought + len(PROMPT), len(ids) - 3)
    parts = make_parts()
    parts.read(THOUGHT[:31], ids[: thought - 2], is_final=True)
    assert parts.count(ids[: thought - 2]) == (thought - 2, thought - 2)


def test_a_tokenizer_without_the_marks() -> None:
    with pytest.raises(ValueError, match=r"needs tokens for \['<\|call\|>', "):
        Harmony.of(letter_tokenizer())


def boundary_of(prompt: str = BEFORE, budget: int | None = None, grammar: str = "") -> Any:
    return HARMONY.boundary(encode(prompt), grammar, budget, is_list=False)


@given(MESSAGES)
@settings(max_examples=40)
def test_a_grammar_begins_at_the_first_content_of_final(messages: Any) -> None:
    text = written(messages)
    ids = encode(text)
    found = MessageReader(HARMONY, PROMPT).read(text, ids, is_final=True)
    expected = next((x.content_token for x in found if x.channel == "final"), None)
    walk = BoundaryWalk(Boundary(**boundary_of()))
    place, begin = walk.start, None
    for i, token in enumerate(ids, 1):
        place = walk.next(place, token)
        if place[0] == BEGIN:
            begin = i
            break
    assert begin == expected


def test_prompts_with_which_a_grammar_begins_at_once() -> None:
    for prompt in ("text", f"{BEFORE}{ANSWER}", f"{BEFORE}{ANSWER}Hi"):
        assert boundary_of(prompt) is None
    assert boundary_of(grammar='start: <|channel|> "x" <|message|>') is None
    assert boundary_of(f"{BEFORE}{ANSWER}Hi{END}{BEFORE}") is not None
    with pytest.raises(ValueError, match="thinking_token_budget=3 must be None with a forced call"):
        boundary_of(grammar="<|message|>", budget=3)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    ends = [TOKENIZER.backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    return GrammarCompiler(TOKENIZER.backend.to_str(), TOKENIZER.vocab_size, ends, spaces=True)


def allowed(masks: np.ndarray) -> list[str | None]:
    """The text of the tokens that each mask allows; ``None`` if it allows all."""
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")
    return [None if row.all() else HARMONY.decode(np.flatnonzero(row).tolist()) for row in bits]


def test_drafts_across_the_boundary(compiler: GrammarCompiler) -> None:
    """A chain whose tokens end the reasoning, and go on in the answer."""
    text = f"m<|end|>{BEFORE}{ANSWER}ac"
    made = compiler.compile("regex", "[ab]c", Boundary(**boundary_of()))
    made.advance(encode(f"{THOUGHT[:-9]}"))
    ids = [0, *encode(text)]
    masks = np.zeros((len(ids), made.num_words), np.int32)
    forced = np.zeros((len(ids), 3), np.int32)
    made.fill(ids, range(-1, len(ids) - 1), masks, forced)
    assert allowed(masks) == [*[None] * (len(ids) - 3), "ab", "c", "<|return|><|call|>"]
    assert HARMONY.decode([forced[-2, 0]]) == "c"
    assert made.advance(ids[1:]) == len(ids) - 1
    assert made.is_complete


def test_a_budget_ends_the_reasoning_for_good(compiler: GrammarCompiler) -> None:
    made = compiler.compile(None, "", Boundary(**boundary_of(budget=3)))
    chain = encode(f"<|channel|>analysis<|message|>abc<|end|>{BEFORE}<|channel|>final<|message|>d")
    ids = [0, *chain]
    masks, forced = (
        np.zeros((len(ids), made.num_words), np.int32),
        np.zeros((len(ids), 1), np.int32),
    )
    made.fill(ids, range(-1, len(ids) - 1), masks, forced)
    at = len(encode("<|channel|>analysis<|message|>abc"))
    assert allowed(masks[[at]]) == [END]
    assert forced[at].tolist() == [HARMONY.ids[END]]
    (channel,) = (
        i for i, token in enumerate(ids) if i > at and HARMONY.decode([token]) == "<|channel|>"
    )
    barred = np.unpackbits(~masks[channel].view(np.uint8), bitorder="little")
    assert HARMONY.decode(np.flatnonzero(barred).tolist()) == "analysis"
    others = [i for i in range(len(ids)) if i not in (at, channel)]
    assert (masks[others] == -1).all()


@pytest.mark.parametrize("reasoning", ["", THOUGHT + BEFORE, 2 * (THOUGHT + BEFORE)])
@pytest.mark.parametrize(
    "header",
    [
        *("<|channel|>commentary to=functions.{}", " to=functions.{}<|channel|>commentary"),
        *(
            "<|channel|>commentary to=functions.{} json",
            " to=functions.{}<|channel|>commentary json",
        ),
        "<|channel|>commentary to=functions.{} <|constrain|>json",
        " to=functions.{}<|channel|>commentary<|constrain|>json",
    ],
)
def test_forced_calls(compiler: GrammarCompiler, reasoning: str, header: str) -> None:
    tools = Tools(TOOLS, ["f", "g"], is_required=True, format=FORMATS["gpt-oss"])
    grammar = tools.grammar({})["ebnf"]
    assert boundary_of(grammar=grammar) is None
    text = f"{reasoning}{header.format('g')}<|message|>{ARGUMENTS}"
    made = compiler.compile("ebnf", grammar)
    ids = encode(text)
    assert made.advance(ids) == len(ids)
    assert made.is_complete
    assert read_parts(text)[2] == [ToolCall("g", ARGUMENTS)]
    for wrong in (
        header.format("h"),
        f"{header.format('f')}<|message|>[",
        ANSWER,
        "Hi",
        "<|call|>",
    ):
        made = compiler.compile("ebnf", grammar)
        ids = encode(reasoning + wrong)
        assert made.advance(ids) < len(ids), wrong


def test_other_grammars_of_tools() -> None:
    """A schema of answers holds in the channel final, and calls are free."""
    tools = Tools(TOOLS, ["f", "g"], format=FORMATS["gpt-oss"])
    assert tools.grammar({}, answer=SCHEMA) == {}
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]  # type: ignore[dict-item, operator]
    assert tools._replace(declared=strict, names=["f"]).grammar({}) == {}


def test_history() -> None:
    """Each message of the assistant has one call, before its result."""
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    user = {"role": "user", "content": "Go"}
    turn = {"role": "assistant", "content": "So:", "reasoning_content": "hm"}
    last = {"role": "assistant", "content": "Hi", "reasoning_content": "ok"}
    variables = {"reasoning_effort": "max"}
    found = HARMONY.history([user, turn | {"tool_calls": calls}, *results, last], variables)
    assert variables == {"reasoning_effort": "high"}
    empty = turn | {"content": ""}
    assert found == [
        user,
        empty | {"thinking": "hm\n\nSo:", "tool_calls": calls[:1]},
        results[1],
        empty | {"thinking": "", "tool_calls": calls[1:]},
        results[0],
        last | {"thinking": "ok"},
    ]
    single = [turn | {"tool_calls": calls[:1]}, results[1], {"role": "tool", "content": "c"}]
    assert HARMONY.history(single, {})[1:] == single[1:]
    # ids that each turn uses again, or none
    two = [*single[:2], *single[:2], turn | {"tool_calls": calls}, *results, last]
    assert [m for m in HARMONY.history(two, {}) if m["role"] == "tool"] == [
        *single[1:2] * 2,
        results[1],
        results[0],
    ]
    odd = [turn | {"tool_calls": [{"id": []}, {}]}, single[1] | {"tool_call_id": []}, single[2]]
    assert HARMONY.history(odd, {"reasoning_effort": []})[2:] == odd[1:]
    with pytest.raises(ValueError, match="reasoning_content=3 must be a string"):
        HARMONY.history([turn | {"reasoning_content": 3}], {})
    assert HARMONY.stop_ids == {HARMONY.ids["<|return|>"], HARMONY.ids["<|call|>"]}
