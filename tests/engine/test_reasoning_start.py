"""Reasoning of a model whose tokenizer lacks the token for the first tag."""

from types import SimpleNamespace
from typing import Any

import pytest

from specjax.engine.args import EngineArgs
from specjax.engine.plan import plan_engine
from specjax.engine.requests import RequestFactory
from specjax.sampling.grammar import Constraint
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.sampling.params import SamplingParams
from specjax.testing import Files, letter_tokenizer
from specjax.testing.files import EOS_ID
from specjax.text.reasoning import END, START, ReasoningTags

TOKENIZER = letter_tokenizer()
TOKENIZER.backend.add_tokens([END])
END_ID = TOKENIZER.backend.token_to_id(END)


@pytest.fixture(scope="module")
def factory(files: Files) -> RequestFactory:
    plan = plan_engine(EngineArgs(**files.arguments(reasoning_parser="qwen3")))
    made = RequestFactory(plan, TOKENIZER, SimpleNamespace())  # type: ignore[arg-type]
    vocab_size = plan.target.config.vocab_size
    compiler = GrammarCompiler(TOKENIZER.backend.to_str(), vocab_size, [EOS_ID], spaces=True)
    made._grammars = SimpleNamespace(check=compiler.compile)  # type: ignore[assignment]
    return made


def constraint_of(factory: RequestFactory, prompt: str, **params: Any) -> Constraint | None:
    ids = TOKENIZER.encode(prompt, add_special_tokens=False)
    return factory._grammar(SamplingParams(**params), ids)  # type: ignore[return-value]


def test_a_budget_limits_only_reasoning_that_the_prompt_begins(factory: RequestFactory) -> None:
    assert constraint_of(factory, "hi", thinking_token_budget=3) is None
    assert constraint_of(factory, f"hi{START}x{END}", thinking_token_budget=3) is None
    for prompt in (f"hi{START}", f"hi{START}\n\n"):
        made = constraint_of(factory, prompt, thinking_token_budget=3)
        assert made is not None
        assert made.advance([5, 6, 7]) == 3
        mask = made.mask()
        assert [i for i in range(32 * len(mask)) if mask[i // 32] >> (i % 32) & 1] == [END_ID]


def test_a_grammar_begins_at_once_unless_the_prompt_has_begun_reasoning(
    factory: RequestFactory,
) -> None:
    ids = TOKENIZER.encode("xabc", add_special_tokens=False)
    made = constraint_of(factory, "hi", regex="abc")
    assert made is not None
    assert made.advance(ids) == 0
    made = constraint_of(factory, f"hi{START}\n", regex="abc")
    assert made is not None
    assert made.advance([ids[0], END_ID, *ids[1:]]) == 5


def test_lists_of_tokens_limit_the_reasoning_too(factory: RequestFactory) -> None:
    (a, b) = TOKENIZER.encode("ab", add_special_tokens=False)
    for params in ({"allowed_token_ids": [a, END_ID]}, {"bad_words": ["b"]}):
        made = constraint_of(factory, f"hi{START}\n", **params)
        assert made is not None
        assert made.advance([a, a, b]) == 2


def test_the_last_tag_of_a_prompt() -> None:
    tags = ReasoningTags.of(TOKENIZER)
    assert tags.start is None
    for text, last in (
        (START, START),
        (f"a{START} \n", START),
        (f"a{START}{END}\n", END),
        (f"{START}a", None),
        ("a<think", None),
        ("think>", None),
    ):
        assert tags.last(TOKENIZER.encode(text, add_special_tokens=False)) == last, text
    assert tags.last([]) is None
