"""Texts that a grammar limits: equal to plain decoding with masks, valid, and refused by name."""

import contextlib
import json
import random
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from specjax import Engine, SamplingParams
from specjax.sampling import grammar_request
from specjax.sampling.boundary import Boundary
from specjax.sampling.grammar import Constraint
from specjax.sampling.grammar_compiler import GrammarCompiler
from specjax.sampling.grammar_request import await_answers
from specjax.sampling.params import GRAMMARS as NAMES
from specjax.testing import Files
from specjax.testing.dense import Job, dense_decode, dense_logits
from specjax.testing.files import CONFIG, EOS_ID, LETTERS
from specjax.text.reasoning import ReasoningTags

from .fuzzed_grammars import fuzzed

ON = {"grammar_backend": "llguidance", "max_running_requests": 4, "batch_buckets": (4,)}
PERSON = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "tag": {"enum": ["alpha", "beta"]}},
    "required": ["id", "tag"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": PERSON},
    {"regex": "(ab|ac[0-9]{2,9}){1,4}-end"},
    {"ebnf": 'start: "(" start ")" | "[" start "]" | /[0-9]{1,3}/'},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}},
]
LISTS: list[dict[str, Any]] = [
    {"allowed_token_ids": [3, 17, 40, EOS_ID]},
    {"bad_words": [*"etaoin", "5 "]},
]
SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.2, "min_p": 0.02, "logit_bias": {LETTERS.index("z"): 100.0, 3: 5.0}},
]
GRAMMARS_FILE = Path(__file__).with_name("grammars.jsonl")
CASES = [json.loads(x) for x in GRAMMARS_FILE.read_text().splitlines()]
PROMPT = [5, 17, 40, 3, 17, 40]


@pytest.fixture(scope="module")
def engine(files: Files) -> Iterator[Engine]:
    with files.engine(**ON) as made:
        yield made


@pytest.fixture(scope="module")
def tree(files: Files, engine: Engine) -> Iterator[Engine]:
    sizes = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7, "overlap": True}
    with files.engine(**ON, **sizes, share_weights_with=engine) as made:
        yield made


def compiler_of(engine: Engine) -> GrammarCompiler:
    assert engine.tokenizer is not None
    text = engine.tokenizer.backend.to_str()
    return GrammarCompiler(text, CONFIG.vocab_size, [EOS_ID], spaces=True)


def constraint_of(engine: Engine, grammar: dict[str, Any]) -> Constraint:
    name, text = SamplingParams(**grammar).grammar or ("", "")
    return compiler_of(engine).compile(name, text)


def fill(
    constraint: Constraint, tokens: Sequence[int], parents: Sequence[int], steps: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Masks of a tree's nodes, and its forced tokens, in memory that was used before."""
    words = -(-CONFIG.vocab_size // 32)
    masks = np.full((len(tokens), words), 5, np.int32)
    forced = np.full((len(tokens), 1 + steps), 5, np.int32)
    constraint.fill(tokens, parents, masks, forced)
    return masks, forced


def allowed_by(engine: Engine, grammar: dict[str, Any]) -> Any:
    def allowed(produced: Sequence[int]) -> Collection[int]:
        constraint = constraint_of(engine, grammar)
        assert constraint.advance(produced) == len(produced)
        if constraint.is_complete:
            return ()
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    return allowed


def jobs() -> list[dict[str, Any]]:
    return [
        {"max_new_tokens": 40, "sampling_seed": i} | grammar | how
        for i, (grammar, how) in enumerate(
            [*product(GRAMMARS, SAMPLED), *zip(LISTS, SAMPLED[1:3], strict=True)]
        )
    ]


@pytest.mark.slow
def test_tokens_equal_dense_decoding_with_masks(engine: Engine, tree: Engine) -> None:
    """Alone and among others, with and without grammars, chains and trees."""
    requests = jobs()
    expected = []
    for one in requests:
        job = Job(
            prompt=tuple(PROMPT),
            params=SamplingParams(**one),
            seed=one["sampling_seed"],
            ends=(EOS_ID,),
        )
        grammar = {name: one[name] for name in one if name in NAMES}
        allowed = allowed_by(engine, grammar)
        expected.append(dense_decode(engine.runner.weights[0], job, CONFIG, allowed).tokens)
    assert len({tuple(tokens) for tokens in expected}) > 10
    free = {"max_new_tokens": 30, "temperature": 0.9, "sampling_seed": 99}
    alone = engine.generate(input_ids=PROMPT, sampling_params=free)["output_ids"]
    for one in (engine, tree):
        mixed = [x for request in requests for x in (request, free)]
        outputs = one.generate(input_ids=[PROMPT] * len(mixed), sampling_params=mixed)
        assert [x["output_ids"] for x in outputs[::2]] == expected
        assert all(x["output_ids"] == alone for x in outputs[1::2])
        reasons = {x["meta_info"]["finish_reason"]["type"] for x in outputs[::2]}
        assert reasons == {"stop", "length"}


@pytest.mark.slow
def test_finished_answers_are_valid(engine: Engine, tree: Engine) -> None:
    """Chains and trees give the answers of plain decoding."""
    requests, cases = [], []
    for i, case in enumerate(CASES):
        grammar = {name: case[name] for name in case if name in ("json_schema", "regex", "ebnf")}
        with contextlib.suppress(ValueError):  # the tokenizer has ASCII only
            constraint_of(engine, grammar)
            cases.append(case)
            requests.append(
                grammar | {"temperature": 1.0, "sampling_seed": i, "max_new_tokens": 120}
            )
    assert len(cases) >= 56
    outputs, others, plain = (
        one.generate(input_ids=[PROMPT] * len(cases), sampling_params=[x | more for x in requests])
        for one, more in ((engine, {}), (tree, {}), (engine, {"speculative": False}))
    )
    for more in (others, plain):
        assert [x["output_ids"] for x in more] == [x["output_ids"] for x in outputs]
    num_finished = 0
    for case, output in zip(cases, outputs, strict=True):
        if output["meta_info"]["finish_reason"]["type"] != "stop":
            continue
        num_finished += 1
        if "json_schema" in case:
            jsonschema.validate(json.loads(output["text"]), case["json_schema"])
        else:
            assert re.fullmatch(case.get("check") or case["regex"], output["text"])
    assert num_finished > 25


@pytest.mark.slow
def test_random_grammars_disturb_nobody(engine: Engine) -> None:
    """150 of them, valid or not, next to a request without a grammar."""
    free = {"max_new_tokens": 500, "temperature": 0.9, "sampling_seed": 5, "ignore_eos": True}
    expected = engine.generate(input_ids=PROMPT, sampling_params=free)["output_ids"]
    others: list[Any] = []

    def run(seed: int) -> bool:
        params = fuzzed(seed) | {"max_new_tokens": 6, "sampling_seed": seed}
        before = time.thread_time()
        try:
            stream = engine.generate(input_ids=PROMPT, sampling_params=params, stream=True)
        except ValueError:
            return False
        finally:
            # they take at most 0.3 s; without limits some take minutes
            assert time.thread_time() - before < 3
        return all("meta_info" in part for part in stream)

    def other() -> None:
        while len(others) < 3:
            others.append(engine.generate(input_ids=PROMPT, sampling_params=free)["output_ids"])

    thread = threading.Thread(target=other)
    thread.start()
    with ThreadPoolExecutor(3) as pool:
        accepted = sum(pool.map(run, range(150)))
    thread.join()
    assert 30 < accepted < 120
    assert others == [expected] * 3
    assert engine.debug_state()["pages_held"] == 0


def test_forced_tokens_are_drafted(engine: Engine) -> None:
    """The head knows nothing of this text, of which each token follows from the one before."""
    text = LETTERS[:60]
    output = engine.generate(
        input_ids=PROMPT, sampling_params={"regex": re.escape(text), "max_new_tokens": 80}
    )
    assert output["text"] == text
    # the first round has the head's drafts
    assert output["meta_info"]["spec_accept_length"] > 3.5
    plain = {"regex": re.escape(text), "max_new_tokens": 80, "speculative": False}
    assert engine.generate(input_ids=PROMPT, sampling_params=plain)["text"] == text


def test_log_probabilities_are_those_of_allowed_tokens(engine: Engine) -> None:
    params = {"regex": "abcd[xy]", "temperature": 1.0, "sampling_seed": 1, "max_new_tokens": 20}
    output = engine.generate(
        input_ids=PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=3
    )
    meta = output["meta_info"]
    values = [value for value, *_ in meta["output_token_logprobs"]]
    assert values[:4] == pytest.approx([0.0] * 4, abs=1e-6)
    best = {token: value for value, token, _ in meta["output_top_logprobs"][4]}
    assert np.exp([best[LETTERS.index(x)] for x in "xy"]).sum() == pytest.approx(1, abs=1e-5)


def test_a_text_that_cannot_go_on_ends_with_a_reason(engine: Engine) -> None:
    """The tokenizer has no token for the third character."""
    output = engine.generate(
        input_ids=[PROMPT, PROMPT],
        sampling_params=[{"regex": "abé*éz", "max_new_tokens": 9}, {"max_new_tokens": 9}],
    )
    reason = output[0]["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "grammar: no token may follow" in reason["message"]
    assert output[0]["text"] == "ab"
    assert len(output[1]["output_ids"]) == 9


def test_nothing_is_compiled_and_requests_may_leave(engine: Engine) -> None:
    before = len(engine.runner.compiled.report)
    stream = engine.generate(
        input_ids=PROMPT,
        sampling_params={"regex": "[ab]{90}", "max_new_tokens": 90},
        stream=True,
    )
    others: list[Any] = []

    def other() -> None:
        others.append(engine.generate(input_ids=PROMPT, sampling_params=jobs()[1]))

    thread = threading.Thread(target=other)
    for i, _ in enumerate(stream):
        if i == 3:
            thread.start()
        if i == 8:
            break
    stream.close()
    thread.join()
    assert others == [engine.generate(input_ids=PROMPT, sampling_params=jobs()[1])] or (
        others[0]["output_ids"]
        == engine.generate(input_ids=PROMPT, sampling_params=jobs()[1])["output_ids"]
    )
    assert len(engine.runner.compiled.report) == before
    assert engine.debug_state()["pages_held"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "a(b"}, "(?s)regex=.*unclosed group"),
        ({"json_schema": {"type": "nothing"}}, "json_schema=.*Invalid type: nothing"),
        ({"json_schema": {"not": {"type": "null"}}}, "json_schema=.*Unimplemented keys.*not"),
        ({"json_schema": "{"}, "json_schema='{'"),
        ({"ebnf": "start: foo"}, "ebnf=.*unknown name"),
        ({"structural_tag": {"structures": []}}, "structural_tag"),
        ({"regex": "x" * 2**16 + "y"}, "regex has 65537 characters; at most 65536"),
        ({"json_schema": {"multipleOf": 10007}}, "multipleOf of 10007 is not supported; the lim"),
        (
            {"json_schema": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
            "multipleOf of 988027 is not supported",
        ),
        ({"json_schema": {"enum": ["a", -(2**63) + 512]}}, "json_schema=.*must be above -922337"),
        ({"ebnf": f'start: "%json {{" %json {{"const": {-(2**63)}}}'}, "ebnf=.*must be above"),
        ({"structural_tag": {"structures": [{"begin": 1}], "triggers": ["a"]}}, "structural_tag="),
        (
            {
                "json_schema": {
                    "$ref": "#/$defs/a",
                    "multipleOf": 9973,
                    "$defs": {"a": {"multipleOf": 9967}},
                }
            },
            "multipleOf of 99400891 is not supported",
        ),
        (
            {"json_schema": {"type": "integer", "minimum": -1e300, "maximum": -1e19}},
            "must be above",
        ),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "a", "schema": 'start: "b"', "end": "c"}],
                    "triggers": ["a"],
                }
            },
            "schema='start: \"b\"' must be an object",
        ),
        ({"json_schema": '{"multipleOf": 1' + "0" * 400 + "}"}, "too large"),
        ({"regex": "a?" * 20000}, "regex=.*too big"),
        ({"structural_tag": "[" * 50000}, "structural_tag=.*too deep"),
        ({"regex": "é"}, "regex='é': it allows no text"),
        ({"regex": "a", "ebnf": "b"}, "give at most one of"),
        ({"regex": "a", "bad_words": ["b"]}, "give at most one of"),
        ({"allowed_token_ids": [10**6]}, r"allowed_token_ids must be in \[0, .*got \[1000000"),
        ({"bad_words": ["\ud800"]}, "(?s)bad_words=.*not a Unicode scalar"),
        ({"regex": 3}, "regex=3 must be a string"),
        ({"regex": "a", "min_new_tokens": 2}, "min_new_tokens=2 must be 0 with regex"),
    ],
)
def test_refusals(engine: Engine, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(input_ids=PROMPT, sampling_params=params)


def test_a_refused_call_leaves_no_process(engine: Engine) -> None:
    """The first input is right, and its grammar has a process when the second is refused."""
    assert engine._factory._grammars is not None
    processes = engine._factory._grammars.processes
    for number, wrong in enumerate(({"regex": "("}, {"stop_token_ids": [10**6]})):
        params = [{"regex": f"a{{{number + 1}}}"}, wrong]
        with pytest.raises(ValueError, match=r"regex|stop_token_ids") as refusal:
            engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=params)
        assert len(processes._processes) == len(processes._idle)
        assert refusal.value.__traceback__ is not None  # and with it all that the call had


def test_an_engine_without_grammars_refuses_them(base_engine: Engine) -> None:
    """The refusal states the price of the option."""
    price = r"regex='a' needs .* grammar_backend='llguidance', .* three more functions for each"
    with pytest.raises(ValueError, match=price):
        base_engine.generate(input_ids=PROMPT, sampling_params={"regex": "a"})


def test_structural_tags_limit_what_is_between_them(engine: Engine) -> None:
    tag = {
        "structures": [{"begin": "<f=", "schema": {"enum": [12]}, "end": ">"}],
        "triggers": ["<f="],
    }
    constraint = constraint_of(engine, {"structural_tag": json.dumps(tag)})
    assert engine.tokenizer is not None
    for text, count in (("anything<f=12>more", 18), ("a<f=13>", 5)):
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        fresh = constraint_of(engine, {"structural_tag": json.dumps(tag)})
        assert fresh.advance(ids) == count, text
    assert constraint.error == ""


@pytest.mark.slow
def test_drafts_use_up_no_limit_of_the_text(engine: Engine) -> None:
    """Drafted branches add states to their lexer, whose limit a matcher without them replaces."""
    grammar = {"regex": "a[0-9]{9}|b[ab]*a[ab]{40}c"}
    drafted, rng = constraint_of(engine, grammar), random.Random(0)
    letters = [LETTERS.index(x) for x in "ab"]
    count, num_replays = 0, 0
    replay = drafted._replay

    def counted(path: Sequence[int]) -> Any:
        nonlocal num_replays
        num_replays += 1
        return replay(path)

    drafted._replay = counted  # type: ignore[method-assign]
    while not num_replays and count < 2000:
        count += 1
        tokens = [0, letters[1], *(rng.choice(letters) for _ in range(60))]
        masks, _ = fill(drafted, tokens, range(-1, 61))
        assert not drafted.error
        np.testing.assert_array_equal(masks[0], constraint_of(engine, grammar).mask())
    assert num_replays
    fresh = constraint_of(engine, grammar)
    assert fresh.advance(tokens[1:]) == 61
    np.testing.assert_array_equal(masks[-1], fresh.mask())
    ids = [LETTERS.index(x) for x in "a123456789"]
    assert drafted.advance(ids) == 10
    assert drafted.is_complete


def test_siblings_have_their_own_masks(engine: Engine) -> None:
    """Grammars with ``max_tokens`` support no rollback."""
    grammar = {"ebnf": 'start: a b\na[max_tokens=3]: /[a-z]*/\nb: "0" /[a-z]{5}/'}
    tokens, parents = [0, 3, 4, 5, 6], [-1, 0, 0, 0, 2]
    masks, _ = fill(constraint_of(engine, grammar), tokens, parents)
    for node, path in enumerate([[], [3], [4], [5], [4, 6]]):
        fresh = constraint_of(engine, grammar)
        assert fresh.advance(path) == len(path)
        np.testing.assert_array_equal(masks[node], fresh.mask())


@pytest.mark.slow
def test_late_masks_change_no_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience, every answer is late, and the requests take turns in rounds."""
    params = [*jobs()[1::4], {"max_new_tokens": 30, "temperature": 0.9, "sampling_seed": 99}]
    inputs = {"input_ids": [PROMPT] * len(params), "sampling_params": params}
    expected = [output["output_ids"] for output in engine.generate(**inputs)]
    monkeypatch.setattr(grammar_request, "PATIENCE", 0.0)
    assert [output["output_ids"] for output in engine.generate(**inputs)] == expected


@pytest.mark.slow
def test_the_end_of_a_process_ends_its_request_only(engine: Engine) -> None:
    both = [{"regex": "[ab]{400}", "max_new_tokens": 400}, {"max_new_tokens": 9}]
    stream = engine.generate(input_ids=[PROMPT] * 2, sampling_params=both, stream=True)
    ends: dict[int, dict[str, Any]] = {}
    for part in stream:
        if not part["index"] and len(part["output_ids"]) < 20:
            grammars = engine._factory._grammars
            assert grammars is not None
            processes = grammars.processes
            # not those that wait for the grammars of later tests
            for process in [x for x in processes._processes.values() if x not in processes._idle]:
                process.end()
        if part["meta_info"]["finish_reason"]:
            ends[part["index"]] = part
    assert ends[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert "CPU seconds" in ends[0]["meta_info"]["finish_reason"]["message"]
    assert len(ends[1]["output_ids"]) == 9


def boundary_of(start: int | None, end: int, budget: int | None = None, **tags: Any) -> Boundary:
    """Of reasoning that the completion begins with the token ``start``, or the prompt has begun."""
    begin = 49 if start is None else start
    prompt = [begin] if start is None else []
    fields = ReasoningTags(begin, end, **tags).boundary(prompt, "", budget, is_list=False)
    assert fields is not None
    return Boundary(**fields)


def test_a_grammar_may_begin_after_a_token(engine: Engine) -> None:
    """In a tree, nodes before the token, after it, and on a branch without it."""
    compiler, after = compiler_of(engine), 50
    tokens, parents = [0, 7, 50, 0, 9, 50], [-1, 0, 1, 2, 1, 2]
    made = compiler.compile("regex", "[ab]c", boundary_of(None, after))
    assert (made.mask() == -1).all()
    masks, forced = fill(made, tokens, parents)
    assert [(mask == -1).all() for mask in masks] == [True, True, False, False, True, True]
    fresh = compiler.compile("regex", "[ab]c")
    np.testing.assert_array_equal(masks[2], fresh.mask())
    fresh.advance([0])
    np.testing.assert_array_equal(masks[3], fresh.mask())
    assert forced[3].tolist() == [2, -1, -1, -1]
    assert made.advance([7, 9, 50, 1, 2, 3]) == 5
    assert made.is_complete


@pytest.mark.parametrize("grammar", ["[ab]c", None])
def test_a_budget_ends_the_reasoning(engine: Engine, grammar: str | None) -> None:
    """Nodes of a chain around the last token of the budget, and the text so far."""
    compiler, boundary = compiler_of(engine), boundary_of(None, 50, 3)

    def make() -> Constraint:
        return compiler.compile("regex" if grammar else None, grammar or "", boundary)

    made = make()
    assert made.advance([7]) == 1
    tokens, parents = [7, 8, 9, 50, 0, 4], [-1, 0, 1, 2, 3, 2]
    masks, forced = fill(made, tokens, parents)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little").reshape(6, -1)
    assert (masks[[0, 1, 5]] == -1).all()
    assert np.flatnonzero(bits[2]).tolist() == [50]
    assert forced[2].tolist() == [50, -1, -1, -1]
    if grammar:
        assert [np.flatnonzero(row).tolist() for row in bits[3:5]] == [[0, 1], [2]]
    else:
        assert (masks[3:5] == -1).all()
    assert made.advance([8, 9]) == 2
    assert np.flatnonzero(np.unpackbits(made.mask().view(np.uint8), bitorder="little")) == [50]
    assert made.advance([50, 1]) == 2
    assert (made.mask() == -1).all() == (grammar is None)
    # the completion reasons if it begins with 60, also after 70
    for begin, free in (([60], False), ([70, 70, 60], False), ([61], True), ([70, 61], True)):
        made = compiler.compile(None, "", boundary_of(60, 50, 0, spaces=frozenset([70])))
        assert (made.mask() == -1).all()
        masks, _ = fill(made, [5, *begin], range(-1, len(begin)))
        made.advance(begin)
        assert (made.mask() == -1).all() == free
        assert ((masks == -1).all(axis=1) == ([True] * len(begin) + [free])).all()


def test_rules_may_be_nested_deeply(engine: Engine) -> None:
    """They would overflow the stack of other threads, and so end the process."""
    rules = "".join(f'A{i}: ("a" A{i + 1})? "b"\n' for i in range(2500))
    chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1200)}
    schema = {"$ref": "#/$defs/a0", "$defs": chain | {"a1200": {"type": "null"}}}
    grammars = engine._factory._grammars
    assert grammars is not None
    for kind, text in (
        ("ebnf", f'start: A0\n{rules}A2500: "c"'),
        ("json_schema", json.dumps(schema)),
    ):
        request = grammars.check(kind, text).request()
        assert request.prepare([], 0)
        assert request.mask is not None
        ids = np.flatnonzero(np.unpackbits(request.mask.view(np.uint8), bitorder="little"))
        request.send(ids[-1:].tolist())
        await_answers([request], 10)
        assert request.answer.num_accepted == 1
        assert request.prepare(ids[-1:].tolist(), 10)
        assert request.mask.any()
        request.close()


@pytest.mark.slow
def test_samples_have_the_distribution_of_allowed_tokens(engine: Engine) -> None:
    """Chi-square over 16 texts; 37.7 is exceeded in one of 1,000 runs."""
    letters, count, weights = [LETTERS.index(x) for x in "abcd"], 300, engine.runner.weights[0]

    def shares(ids: list[int]) -> np.ndarray:
        logits = dense_logits(weights, ids, CONFIG)[-1][letters].astype(np.float64) / 2
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    expected = np.concatenate(
        [p * shares([*PROMPT, x]) for p, x in zip(shares(PROMPT), letters, strict=True)]
    )
    params = [
        {"regex": "[a-d]{2}", "temperature": 2.0, "sampling_seed": i, "max_new_tokens": 5}
        for i in range(count)
    ]
    outputs = engine.generate(input_ids=[PROMPT] * count, sampling_params=params)
    texts = [x + y for x in "abcd" for y in "abcd"]
    found = [sum(output["text"] == text for output in outputs) for text in texts]
    assert sum(found) == count
    assert ((found - count * expected) ** 2 / (count * expected)).sum() < 37.7
