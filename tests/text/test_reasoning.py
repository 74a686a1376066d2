"""Reasoning apart from the answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.testing.files import letter_tokenizer
from specjax.text.reasoning import END, START, ReasoningTags, split_reasoning

PIECES = st.lists(
    st.sampled_from([START, END, "<", "</", "think>", " ", "\n", "a", "b c", "</thi", "<think"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nyes\n", False, ("why", "yes\n")),
        ("\nwhy </think>yes", True, ("why", "yes")),
        ("<think>why</think>", True, ("why", "")),
        ("yes", False, ("", "yes")),
        (" yes </think> no", False, ("", " yes </think> no")),
        ("why, but too lo", True, ("why, but too lo", "")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        ("<thi", False, ("", "<thi")),
        ("a</thi", True, ("a</thi", "")),
        ("", True, ("", "")),
    ],
)
def test_whole_texts(text: str, is_open: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, is_inside=is_open, is_final=True) == parts


@given(PIECES, st.booleans())
def test_streamed_parts_only_grow_to_those_of_the_whole(text: str, is_open: bool) -> None:
    reasoning, content = split_reasoning(text, is_inside=is_open, is_final=True)
    seen = "", ""
    for end in range(len(text) + 1):
        parts = split_reasoning(text[:end], is_inside=is_open, is_final=False)
        assert all(new.startswith(old) for old, new in zip(seen, parts, strict=True))
        assert reasoning.startswith(parts[0])
        assert content.startswith(parts[1])
        seen = parts


def test_the_last_tag_of_a_prompt() -> None:
    tokenizer = letter_tokenizer()
    with pytest.raises(ValueError, match="needs a tokenizer with the token '</think>'"):
        ReasoningTags.of(tokenizer)
    tags = ReasoningTags(5, 6, frozenset([9]))
    for prompt, last in (
        ([1, 5, 9], START),
        ([1, 5, 9, 6, 9], END),
        ([1, 6, 1], None),
        ([5, 9, 9, 9, 9, 9], None),
        ([], None),
        ([1], None),
        ([6], END),
    ):
        assert tags.last(prompt) == last, prompt
