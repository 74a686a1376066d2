"""Corpora, packing, splitting and the draft vocabulary."""

from itertools import islice

import numpy as np
import pytest

from specjax.training.data import Corpus, batches, draft_vocabulary, pack


def test_packing_keeps_sequences_whole_and_separate(corpus):
    rows = pack(corpus, 24, 0)
    found = []
    for line in range(len(rows.tokens)):
        segments = rows.segments[line]
        used = np.count_nonzero(segments)
        assert (segments[used:] == 0).all()
        assert not rows.starts[line, used:].any()
        for segment in range(1, segments.max() + 1):
            where = segments == segment
            assert (np.diff(np.flatnonzero(where)) == 1).all()
            assert rows.positions[line, where].tolist() == list(range(where.sum()))
            prompt = int(np.flatnonzero(rows.starts[line, where])[0]) + 1
            assert rows.starts[line, where][prompt - 1 :].all()
            found.append((prompt, rows.tokens[line, where].tolist()))
    expected = [(x.prompt_len, x.tokens[:24].tolist()) for x in corpus]
    assert sorted(found) == sorted(expected)
    # best fit: no two rows fit into one
    free = np.sort((rows.segments == 0).sum(axis=1))
    assert free.sum() < 24 * 2


def test_joined_sequences_share_a_text(corpus):
    apart, mixed, joined = (pack(corpus, 48, 0, join) for join in (0.0, 0.5, 1.0))
    np.testing.assert_array_equal(apart.texts, apart.segments)
    np.testing.assert_array_equal(joined.texts, joined.segments > 0)
    positions = np.arange(48) * (joined.segments > 0)
    np.testing.assert_array_equal(joined.positions, positions)
    for rows in (mixed, joined):  # only texts and positions differ
        for name in ("tokens", "segments", "starts"):
            np.testing.assert_array_equal(getattr(rows, name), getattr(apart, name))
    assert 0 < np.count_nonzero(mixed.texts < mixed.segments) < np.count_nonzero(mixed.texts)
    for line, texts in enumerate(mixed.texts):
        for text in range(1, texts.max() + 1):
            where = texts == text
            assert mixed.positions[line, where].tolist() == list(range(where.sum()))
            # a text begins with a whole sequence
            first = mixed.segments[line, where][0]
            np.testing.assert_array_equal(where[mixed.segments[line] == first], True)


def test_packing_cuts_long_sequences_and_drops_those_without_an_answer():
    corpus = Corpus.of([([1] * 4, [2] * 20, "a"), ([3] * 9, [4] * 20, "a")])
    rows = pack(corpus, 10, 0)
    assert rows.tokens.tolist() == [[1] * 4 + [2] * 6]


def test_held_out_prompts_are_not_trained_on(corpus):
    doubled = Corpus([*corpus, *corpus[:10]])
    kept, held = doubled.split(0.25, 0)
    assert len(kept) + len(held) == len(doubled)
    prompts = [{tuple(x.tokens[: x.prompt_len]) for x in part} for part in (kept, held)]
    assert not prompts[0] & prompts[1]
    assert len(prompts[1]) == 10
    with pytest.raises(ValueError, match="leaves nothing"):
        doubled.split(1.0, 0)


def test_corpus_round_trip(corpus, tmp_path):
    path = tmp_path / "new" / "corpus"  # no suffix is added
    corpus.save(path)
    again = Corpus.load(path)
    damaged = tmp_path / "damaged.npz"
    for content in (b"", b"PK", path.read_bytes()[:200]):
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged\.npz"):
            Corpus.load(damaged)
    for ours, theirs in zip(again, corpus, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert ours.tokens.dtype == theirs.tokens.dtype == np.int32
        assert ours[1:] == theirs[1:]
    assert again.answer_tokens == sum(len(x.tokens) - x.prompt_len for x in corpus)
    Corpus().save(path)
    assert Corpus.load(path) == []
    figures = corpus.describe()
    assert figures["even"]["sequences"] == figures["odd"]["sequences"] == 20
    assert sum(row["answer_tokens"] for row in figures.values()) == corpus.answer_tokens


def test_saving_a_corpus_is_atomic(corpus, tmp_path, monkeypatch):
    path = tmp_path / "corpus.npz"
    corpus.save(path)
    before = path.read_bytes()

    def fail(file, **arrays):
        file.write(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="full"):
        corpus.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_draft_vocabulary_is_the_most_frequent_answer_tokens_ascending():
    corpus = Corpus.of([([9] * 50, [5, 5, 5, 2, 2, 8], "a"), ([1], [2, 2, 11], "a")])
    assert draft_vocabulary(corpus, 2, 12).tolist() == [2, 5]
    assert draft_vocabulary(corpus, 4, 12).tolist() == [2, 5, 8, 11]
    # the lowest unused ids fill the rest of the vocabulary; tokens of prompts do not count
    assert draft_vocabulary(corpus, 6, 12).tolist() == [0, 1, 2, 5, 8, 11]


def test_batches_resume(corpus):
    rows = pack(corpus, 24, 0)
    size, per_epoch = 3, len(rows.tokens) // 3
    whole = list(islice(batches(rows, size, 5), 3 * per_epoch))
    later = list(islice(batches(rows, size, 5, per_epoch + 1), per_epoch))
    for a, b in zip(whole[per_epoch + 1 :], later, strict=False):
        np.testing.assert_array_equal(a.tokens, b.tokens)
    epochs = [
        np.concatenate([b.tokens for b in whole[e * per_epoch : (e + 1) * per_epoch]])
        for e in range(3)
    ]
    assert not np.array_equal(epochs[0], epochs[1])
    if len(rows.tokens) % size == 0:
        assert sorted(map(tuple, epochs[0])) == sorted(map(tuple, rows.tokens))
    with pytest.raises(ValueError, match="--batch-rows=1000"):
        next(batches(rows, 1000, 0))
