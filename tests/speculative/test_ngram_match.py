"""Matches, corpora and their trees, compared with a Python implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.speculative.ngram import open_corpus, sort_corpus
from specjax.speculative.ngram_match import (
    NO_TOKEN,
    Continuations,
    from_corpus,
    from_history,
    joined,
    last_tokens,
    ngram_tree,
)

WINDOW = (1, 12)
DOCUMENTS = [list(range(1, 11)), [1, 2, 3, 44, 55, 66, 77, 88, 99, 100]]
CONTEXT = 24


@partial(jax.jit, static_argnames=("nodes", "by_frequency"))
def draft(history, num_tokens, tokens, order, *, nodes, by_frequency):
    sizes = {"window": WINDOW, "most": 10, "length": nodes - 1}
    ends = last_tokens(history, num_tokens, WINDOW[1])
    found = joined(
        from_history(history, num_tokens, **sizes), from_corpus(tokens, order, ends, **sizes)
    )
    roots = jnp.take_along_axis(history, num_tokens[:, None] - 1, axis=1)[:, 0]
    return ngram_tree(roots, num_tokens, found, num_draft_tokens=nodes, by_frequency=by_frequency)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "by_frequency", "expected", "count"),
    [
        ([1, 2, 3], False, [3, 4, 44, 5, 55, 6, 66, 77], 7),
        ([1, 2, 3], True, [3, 44, 4, 55, 5, 66, 6, 7], 7),
        ([3, 44], False, [44, 55, 66, 77, 88, 99, 100, 0], 6),
        ([3, 44], True, [44, 55, 66, 77, 88, 99, 100, 0], 6),
        ([10], False, [10, 0, 0, 0, 0, 0, 0, 0], 0),  # a match does not cross documents
        ([3, 6, 999], False, [999, 0, 0, 0, 0, 0, 0, 0], 0),
        ([7, 9, 7], False, [7, 8, 9, 9, 7, 10, 9, 7], 7),  # the end of the text, repeatedly
    ],
)
def test_drafts_of_a_corpus(query, by_frequency, expected, count):
    """Golden cases from SGLang's n-gram corpus, and the ends of a document."""
    history = np.full((1, CONTEXT), 4, np.int32)  # garbage after the text; also in the corpus
    history[0, : len(query)] = query
    tree = draft(
        history,
        np.array([len(query)], np.int32),
        *sort_corpus(DOCUMENTS, WINDOW[1]),
        nodes=8,
        by_frequency=by_frequency,
    )
    assert tree.num_proposed.tolist() == [count]
    assert tree.draft_tokens.tolist() == [expected]


def agreeing(text, place, ends):
    """Number of tokens up to a position that agree with the end of another text."""
    both = zip(reversed(text[: place + 1]), reversed(ends), strict=False)
    count = 0
    for ours, theirs in list(both)[: WINDOW[1]]:
        if ours != theirs:
            break
        count += 1
    return count


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=CONTEXT)


@pytest.mark.slow
@settings(max_examples=60)
@given(text=TEXTS, garbage=st.integers(0, 3), least=st.integers(1, 3))
def test_matches_of_a_history(text, garbage, least):
    history = np.full((1, CONTEXT), garbage, np.int32)
    history[0, : len(text)] = text
    found = from_history(
        history, np.array([len(text)], np.int32), window=(least, 12), most=4, length=5
    )
    places = sorted(
        ((agreeing(text, place, text), place) for place in range(len(text) - 1)), reverse=True
    )
    best = [(count, place) for count, place in places if count >= least][:4]
    matched = [count for count, _ in best]
    assert found.matched.tolist() == [matched + [0] * (4 - len(best))]
    for i, (_, place) in enumerate(best):
        longer = list(text)
        for _ in range(5):  # periodic text
            longer.append(longer[place + 1 - len(text)])
        assert found.tokens[0, i].tolist() == longer[place + 1 :][:5], (text, place)


@pytest.mark.slow
@settings(max_examples=12)  # each example compiles new shapes
@given(
    documents=st.lists(TEXTS, min_size=1, max_size=6).filter(lambda d: max(map(len, d)) > 1),
    text=TEXTS,
    copies=st.integers(1, 30),
)
def test_the_longest_matches_of_a_corpus_are_found(documents, text, copies):
    """Over several steps of the search; ends of documents do not match."""
    documents = documents * copies
    tokens, order = sort_corpus(documents, WINDOW[1])
    assert sorted(order.tolist()) == [
        i for i in range(len(tokens) - 1) if min(tokens[i], tokens[i + 1]) >= 0
    ]
    history = np.array([text + [0] * (CONTEXT - len(text))], np.int32)
    ends = last_tokens(history, np.array([len(text)]), WINDOW[1])
    found = from_corpus(tokens, order, ends, window=WINDOW, most=3, length=4)
    every = [(agreeing(d, i, text), d[i + 1 : i + 5]) for d in documents for i in range(len(d) - 1)]
    lengths = sorted((count for count, _ in every if count), reverse=True)
    matched = [count for count in found.matched[0].tolist() if count]
    assert matched == lengths[: len(matched)]
    assert len(matched) == min(3, len(lengths))
    for count, behind in zip(matched, found.tokens[0].tolist(), strict=False):
        assert (count, [token for token in behind if token >= 0]) in every


@pytest.mark.slow
def test_of_equal_places_in_a_corpus_the_latest_are_taken():
    """If the whole window agrees, earlier documents do not matter."""
    documents = [[*[50 + i, 9, 9][: i % 3], 1, 2, 3, 100 + i] for i in range(40)]
    documents = [[7, 1, 2, 3, 100 + i] for i in range(40)] + documents
    tokens, order = sort_corpus(documents, 3)
    text = np.array([[8, 1, 2, 3]], np.int32)
    ends = last_tokens(text, np.array([4]), 3)
    found = from_corpus(tokens, order, ends, window=(1, 3), most=4, length=2)
    assert found.tokens[0].tolist() == [[139, -1], [138, -1], [137, -1], [136, -1]]


def paths(tree, count):
    """Tokens from the root to every proposed node."""
    tokens, parents = tree.draft_tokens[0].tolist(), tree.parents[0].tolist()
    found = {0: ()}
    for row in range(1, count + 1):
        found[row] = (*found[parents[row]], tokens[row])
    return found


@pytest.mark.slow
@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=4), min_size=5, max_size=5),
    matched=st.lists(st.integers(1, 12), min_size=5, max_size=5),
    nodes=st.sampled_from([2, 6, 16]),
    by_frequency=st.booleans(),
)
def test_trees_of_continuations(texts, matched, nodes, by_frequency):
    """Each beginning of a continuation is one node, parents first; the mask is ancestry."""
    matched = sorted(matched, reverse=True)
    grid = np.array([text + [NO_TOKEN] * (4 - len(text)) for text in texts], np.int32)[None]
    counts = np.array([[m if text else 0 for m, text in zip(matched, texts, strict=True)]])
    tree = ngram_tree(
        jnp.array([9]),
        jnp.array([0]),
        Continuations(jnp.asarray(grid), jnp.asarray(counts)),
        num_draft_tokens=nodes,
        by_frequency=by_frequency,
    )
    beginnings = {tuple(text[: n + 1]) for text in texts for n in range(len(text))}
    count = int(tree.num_proposed[0])
    assert count == min(len(beginnings), nodes - 1)
    found = paths(tree, count)
    assert len(set(found.values())) == count + 1
    assert set(found.values()) <= beginnings | {()}
    depths, mask = tree.positions[0].tolist(), np.asarray(tree.tree_mask[0])
    for row in range(nodes):
        is_real = row <= count
        path = found[row] if is_real else (None,)
        assert depths[row] == len(path)
        sees = {other for other in found if is_real and found[other] == path[: len(found[other])]}
        assert set(np.flatnonzero(mask[row]).tolist()) == (sees if is_real else {0, row})
        assert tree.parents[0, row] < row


@pytest.mark.slow
def test_the_likelier_is_drafted_deeper():
    """A long match is drafted deep; by frequency, common continuations come before recent ones."""
    texts = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3], [3, 3, 3, 3]]
    grid = jnp.asarray([texts], jnp.int32)

    def drafted(matched, by_frequency):
        some = Continuations(grid, jnp.asarray([matched]))
        ints = jnp.array([9]), jnp.array([0])
        tree = ngram_tree(*ints, some, num_draft_tokens=5, by_frequency=by_frequency)
        return sorted(
            paths(tree, int(tree.num_proposed[0])).values(), key=lambda path: (len(path), path)
        )[1:]

    assert drafted([12, 1, 1, 1], False) == [(1,) * n for n in (1, 2, 3, 4)]
    assert drafted([12, 12, 12, 12], False) == [(1,), (2,), (3,), (1, 1)]
    # a short match counts as a long one once enough of it is accepted
    assert drafted([3, 1, 0, 0], False) == [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]
    assert drafted([2, 1, 0, 0], False) == [(1,), (2,), (1, 1), (1, 1, 1)]
    assert drafted([12, 12, 12, 12], True) == [(3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[1, 2]\n[3, 4, 5]\n", "line 2: more than .*max_tokens=4 tokens"),
        ("[1, 61]\n", r"line 1: .* vocab_size=61\).*; got values from 1 to 61"),
        ("[-1]\n", "line 1: token ids must be in .* got values from -1"),
        ("\n{}\n", "line 2: neither a string nor a list"),
        ("[1, true]\n", "line 1: neither"),
        ("[1\n", "line 1: "),
        ('"a text"\n', "line 1: a text needs a tokenizer"),
        ("[]\n[1]\n", "a document of two or more tokens"),
        (None, "corpus.jsonl"),
    ],
)
def test_bad_corpora_are_refused(tmp_path, lines, message):
    path = tmp_path / "corpus.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(ValueError, match=f"external_corpus_path='.*': .*{message}"):
        open_corpus(path, None, vocab_size=61, max_tokens=4, window=12)


def test_a_corpus_is_read(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("[7, 8, 7]\n\n[]\n[8]\n")
    corpus = open_corpus(path, None, vocab_size=61, max_tokens=4, window=2)
    weights = corpus.load_weights()
    assert weights["tokens"].tolist() == [-1, 7, 8, 7, -1, 8, -1]
    assert weights["order"].tolist() == [1, 2]
    assert corpus.quantised_draft("int8", rounds_activations=True) is corpus
    assert corpus.config.num_places == 2


def test_the_texts_of_a_corpus_are_made_of_tokens(tmp_path):
    """Texts may hold line separators; no tokens are added at their ends."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('"ab\u2028"\n', encoding="utf-8")

    class Letters:
        def encode(self, text, add_special_tokens=True):
            return [60] * add_special_tokens + [ord(letter) % 50 for letter in text]

    corpus = open_corpus(path, Letters(), vocab_size=61, max_tokens=9, window=2)
    assert corpus.load_weights()["tokens"].tolist() == [-1, 47, 48, 0x2028 % 50, -1]
