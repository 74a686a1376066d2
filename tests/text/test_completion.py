"""Text of a request: stop strings, whole characters and streamed text."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.checkpoints import open_target
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.text.completion import CompletionText
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer
from specjax.types import DraftShape

from ..support.runners import make_request


@cache
def tokenizer() -> Tokenizer:
    return open_target("smollm2-135m").load_tokenizer()


def make(stop=None, *, limit: int = 10_000, ends: frozenset[int] = frozenset()) -> Request:
    params = SamplingParams(max_new_tokens=limit, stop=stop)
    return make_request([1], params, ends=ends, decoder=IncrementalDecoder(tokenizer()), width=4)


def feed(request: Request, ids: list[int], sizes: list[int]) -> list[str]:
    """Append tokens in rounds of the given sizes (repeated); return the streamed texts."""
    request.append_first(ids[0])
    shown, at, turn = [request.streamed_text()], 1, 0
    while at < len(ids) and not request.is_finished:
        size = sizes[turn % len(sizes)]
        tokens = ids[at : at + size]
        request.append_round(tokens, 4, len(tokens) - 1, DraftShape.chain(4))
        shown.append(request.streamed_text())
        at, turn = at + size, turn + 1
    return shown


def cut(ids: list[int], stops: list[str]) -> tuple[str, int, bool]:
    """Return text, token count and whether a stop string ended it, by decoding every prefix.

    Prefixes that end inside a character are skipped.
    """
    for count in range(1, len(ids) + 1):
        whole = tokenizer().decode(ids[:count])
        if count < len(ids) and whole.endswith("\ufffd"):
            continue
        hits = [whole.find(stop) for stop in stops if stop in whole]
        if hits:
            return whole[: min(hits)], count, True
    return tokenizer().decode(ids), len(ids), False


TEXT = "One, two;\n\nthree: naïve café, 日本語 👩‍👧 done.\n\nEND of it <|x|> ENDING"


@pytest.mark.parametrize("sizes", [[1], [5], [2, 3, 1]], ids=str)
@pytest.mark.parametrize(
    "stop",
    [
        "three",
        "\n\n",
        ", t",  # across token borders
        "ne, two;\n",
        "é",
        "本語 👩",  # across characters of several tokens
        "👧",
        ["END", "ENDING"],
        ["done.\n\nEND of", "ne.", "one."],
        ["x", "|x|>"],
        TEXT,
        "O",
        "never there",
        ["G", "NG"],
    ],
    ids=repr,
)
def test_stop_strings(stop, sizes) -> None:
    ids = tokenizer().encode(TEXT)
    stops = [stop] if isinstance(stop, str) else stop
    request = make(stop, limit=len(ids))
    shown = feed(request, ids, sizes)
    text, count, is_stopped = cut(ids, stops)
    assert request.text == text
    assert request.output_ids == ids[:count]
    assert not any(one in request.text for one in stops)
    reason = request.finish_reason
    if is_stopped:
        assert reason is not None
        assert reason["type"] == "stop"
        assert reason["matched"] in stops
    else:
        assert reason == {"type": "length", "length": len(ids)}
    for before, after in zip(shown, [*shown[1:], text], strict=True):
        assert after.startswith(before)
        assert "\ufffd" not in before


pieces = st.sampled_from(["a", "b", "ab", " ", "the", "\n", "é", "日", "👩", "abba", " and", "."])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(pieces, min_size=1, max_size=25).map("".join),
    st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_streamed_text_is_final(text, stops, sizes) -> None:
    ids = tokenizer().encode(text)
    request = make(stops, limit=len(ids))
    shown = feed(request, ids, sizes)
    wanted, count, _ = cut(ids, stops)
    assert (request.text, len(request.output_ids)) == (wanted, count)
    for before, after in zip(shown, [*shown[1:], wanted], strict=True):
        assert after.startswith(before)


class Letters:
    """A decoder with one letter per token."""

    def push(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


@settings(deadline=None, max_examples=300)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_the_first_and_shortest_stop_string_is_found_at_once(text, stops) -> None:
    completion, said = CompletionText(Letters(), stops), ""  # type: ignore[arg-type]
    for letter in text:
        said += letter
        _, found = completion.add([ord(letter)], flush=False)
        hits = [(said.find(stop), stop) for stop in stops if stop in said]
        if hits:
            at, stop = min(hits)
            assert (found, completion.text) == (stop, said[:at])
            return
        starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
        held = max((len(start) for start in starts if said.endswith(start)), default=0)
        assert (found, completion.streamed()) == (None, said[: len(said) - held])


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
    ids = [tokenizer().encode(letter)[0] for letter in "xabay"]
    request = make("abab")
    assert feed(request, ids, [1]) == ["x", "x", "x", "x", "xabay"]
    request = make("abab")
    feed(request, ids[:-1], [1])
    assert request.streamed_text() == "x"
    request.finish({"type": "abort"})
    assert request.streamed_text() == request.text == "xaba"


def test_a_limit_inside_a_character_keeps_text_and_tokens_in_step() -> None:
    ids = tokenizer().encode("hi 👩🏽")[:-1]
    request = make(limit=len(ids))
    shown = feed(request, ids, [1])
    assert request.text == tokenizer().decode(ids)
    assert "\ufffd" not in "".join(shown[:-1])


def test_an_end_token_adds_no_text() -> None:
    ids = tokenizer().encode("hello world")
    request = make(ends=frozenset(ids[1:]))
    feed(request, ids, [4])
    assert request.output_ids == ids[:2]
    assert request.text == "hello"
    assert request.finish_reason == {"type": "stop", "matched": ids[1]}


def test_special_tokens_are_not_text() -> None:
    special = tokenizer().backend.token_to_id("<|im_start|>")
    assert special is not None
    request = make()
    feed(request, [special, *tokenizer().encode("hi"), special], [2])
    assert request.text == "hi"


def test_a_stop_string_inside_an_accepted_run_cuts_its_tail() -> None:
    ids = tokenizer().encode("a b c d e")
    request = make(" c")
    request.append_first(ids[0])
    request.append_round(ids[1:], 4, 4, DraftShape.chain(4))
    assert request.text == "a b"
    assert request.output_ids == ids[:3]
    meta = request.result()["meta_info"]
    assert meta["spec_num_correct_drafts"] == meta["spec_num_proposed_drafts"] == 2
    assert meta["spec_correct_drafts_histogram"] == [0, 0, 1, 0, 0]
    assert meta["finish_reason"] == {"type": "stop", "matched": " c"}


def test_text_held_as_half_a_character_can_complete_a_stop_string() -> None:
    """A token may complete characters and start another one; no stop string is missed."""
    first, second = tokenizer().encode("x"), tokenizer().encode("👩🏽")
    ids = [*first, second[0]]
    request = make("\ufffd", limit=len(ids))
    feed(request, ids, [1])
    assert request.text == "x"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_a_special_token_may_be_a_stop_string(skips: bool, keeps: bool, size: int) -> None:
    start = tokenizer().backend.token_to_id("<|im_start|>")
    end = tokenizer().backend.token_to_id("<|im_end|>")
    half = tokenizer().encode("日")[0]  # of a character
    ids = [*tokenizer().encode("One"), start, *tokenizer().encode("two"), half, end, 5]
    text = "One" + "<|im_start|>" * (not skips) + "two\ufffd" + "<|im_end|>" * keeps
    for stops in (["<|im_end|>"], ["<|im_end|>", "o\n", "<|im_end|>\n"]):
        decoder = IncrementalDecoder(tokenizer(), skip_special_tokens=skips)
        completion = CompletionText(decoder, stops, keeps_stop=keeps)
        done = 0
        for at in range(0, len(ids), size):
            count, found = completion.add(ids[at : at + size], flush=False)
            done += count
            if found is not None:
                break
        assert (done, found, completion.text) == (len(ids) - 1, "<|im_end|>", text)
