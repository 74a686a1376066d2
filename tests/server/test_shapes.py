"""Shapes of answers, and documentation of every field."""

import json
import math
import re
from pathlib import Path

import pytest

from specjax.sampling.params import SamplingParams
from specjax.server import fields, scrape
from specjax.server.answers import LEAST, ChoicesAnswer, Cursor, speculative_metrics, usage
from specjax.server.app import make_app
from specjax.server.chat import ChatAnswer
from specjax.server.completions import CompletionAnswer
from specjax.server.native import NativeAnswer
from specjax.text.completion import TokenTexts

from ..support.tokenizers import byte_tokenizer

DOCS = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def answer(kind: type[ChoicesAnswer], texts: TokenTexts) -> ChoicesAnswer:
    return kind(id="", model="", texts=texts, params=SamplingParams(), prompt_ids=[])


def test_offsets_count_characters_of_the_text() -> None:
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = [*tokenizer.encode("a€b"), 256, ord("c")]
    chosen = [(None, ids[0], None), *((-1.0, i, None) for i in ids[1:])]
    tops = [None, *([(-0.5, ord("x"), None), (-1.0, i, None)] for i in ids[1:])]
    completion, sent = answer(CompletionAnswer, texts), Cursor(offset=10)
    lists = completion.logprobs(sent, chosen, tops)
    assert lists["text_offset"] == [10, 11, 12, 12, 12, 13, 13]
    assert sent.offset == 14
    assert lists["top_logprobs"][0] is None
    assert lists["top_logprobs"][-1] == {"x": -0.5, "c": -1.0}
    more = completion.logprobs(Cursor(), chosen, ())
    assert more["top_logprobs"][1:] == [{texts.of(i)[0]: -1.0} for i in ids[1:]]


def test_infinity_is_not_json() -> None:
    texts, triple = TokenTexts(byte_tokenizer()), (-math.inf, 97, None)
    lists, chat = (
        answer(kind, texts).logprobs(Cursor(), [triple], [[triple]])
        for kind in (CompletionAnswer, ChatAnswer)
    )
    assert lists["token_logprobs"] == [LEAST]
    assert chat["content"][0]["logprob"] == LEAST
    meta = {"output_token_logprobs": [triple], "output_top_logprobs": [[triple], None]}
    whole = NativeAnswer(False, True, None).body([{"meta_info": meta}])
    assert json.loads(whole)["meta_info"]["output_token_logprobs"] == [[LEAST, 97, None]]


def test_usage_counts_a_prompt_once() -> None:
    metas = [{"prompt_tokens": 5, "completion_tokens": i, "cached_tokens": i} for i in range(4)]
    assert usage(metas, 2) == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_acceptance_is_summed_over_choices() -> None:
    def meta(histogram: list[int], proposed: int) -> dict[str, object]:
        accepted = sum(i * count for i, count in enumerate(histogram))
        return {
            "spec_verify_ct": sum(histogram),
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": proposed,
            "spec_correct_drafts_histogram": histogram,
        }

    figures = speculative_metrics([meta([1, 0, 2], 6), {}, meta([1, 1, 0], 4)])
    assert figures == {
        "speculative_decoding": {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.5,
            "acceptance_histogram": [2, 1, 2],
            "num_spec_steps": 5,
            "num_accepted_draft_tokens": 5,
            "num_draft_tokens": 10,
            "num_spec_tokens": 2,
        }
    }
    assert speculative_metrics([{}]) is None


# documentation


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            *fields.IGNORED,
            *fields.REFUSED,
            *fields.NAMES,
            *(f"vllm:{a.name}" for a in scrape.ALIASES),
        }
    ),
)
def test_documentation_names_every_field(name) -> None:
    assert re.search(rf"`{re.escape(name)}(_total)?`", DOCS) or name.startswith("guided_")


def test_documentation_names_every_route(engine) -> None:
    for route in make_app(engine).routes:
        assert route.path.replace("{name:path}", "{id}") in DOCS
