"""Rows with facts and questions, and with repeated passages, in the training text."""

import dataclasses
import json

import numpy as np
import pytest

from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.data.random_order import Draws
from maclaurin.data.recall_rows import Facts, MixedRows, with_copies, with_questions
from maclaurin.errors import DataError

STOP, NEWLINE, NAMES, WORDS = 1, 2, 100, 200
#: every word is two tokens
FACTS = Facts(
    [[10, NAMES + n, 11] for n in range(40)],
    [[NEWLINE, 10, NAMES + n, 11] for n in range(40)],
    [[WORDS + n, 300 + n] for n in range(40)],
    [STOP],
    [NEWLINE],
)


@pytest.mark.parametrize("reach", [300, 2000])
def test_every_answer_was_told_before_within_reach(reach):
    text = [STOP if n % 17 == 0 else 1000 + n for n in range(4096)]
    row, answers = with_questions(text, FACTS, reach, Draws("test", 1, 0))
    assert len(row) == 4096
    assert len(answers) >= 16
    for first, second in zip(answers[::2], answers[1::2], strict=True):
        assert second == first + 1  # all tokens of an answer
        name, word = row[first - 2], row[first]
        told = [n for n in range(first - 4) if row[n] == word and row[n - 2] == name]
        assert len(told) == 1
        assert row[told[0] + 1] == row[second]
        assert first - told[0] < reach + 150
    left = [token for token in row if token >= 1000]
    assert left == [token for token in text if token >= 1000][: len(left)]  # the text is all there, in order


def test_copies_follow_what_they_copy():
    row = with_copies(list(range(1000)), 200, Draws("test", 1, 0))
    assert len(row) == 1000
    assert sum(token in row[:n] for n, token in enumerate(row)) >= 400


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.jsonl"
    documents = [f"Document {n} says much about many things, and then some more. " * 120 for n in range(60)]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return DataConfig(
        data=str(text), tokenizer="bytes", length=1024, mix=0.5, reach=800, cache=str(tmp_path / "cache")
    )


def test_half_of_the_rows_are_mixed_and_two_thirds_of_those_ask(config):
    mixed = open_source(config, progress=False)
    assert isinstance(mixed, MixedRows)
    asked = []
    for step in range(4):
        batch = mixed.train_batch(step, 6)
        plain = mixed.text.train_batch(step, 6)
        same = (batch.tokens == plain.tokens).all(1)
        assert int(same.sum()) == 3
        asked.append(int((batch.answers.sum(1) > 0).sum()))
        assert not batch.answers[same].any()
        assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()
    assert sum(asked) >= 7  # of eight; a row may have no room for a question
    at = batch.answers.nonzero().tolist()
    row, place = at[0]
    text = mixed.tokenizer.decode(batch.tokens[row, : place + 1].tolist())
    assert " is" in text[-4:]
    assert text.rpartition("\n")[2] in text[:-30]  # told before


def test_a_row_depends_on_its_place_and_seed_alone(config):
    one, again = (open_source(config, progress=False) for _ in range(2))
    third = one.train_batch(3, 6)
    assert (again.train_batch(3, 6).tokens == third.tokens).all()
    shares = [again.train_batch(3, 6, rank=rank, world=2).answers for rank in range(2)]
    assert np.array_equal(np.concatenate([share.numpy() for share in shares]), third.answers.numpy())
    other = open_source(dataclasses.replace(config, seed=1), progress=False)
    assert other.content == one.content
    assert other.fingerprint != one.fingerprint
    nearer = open_source(dataclasses.replace(config, reach=500), progress=False)
    assert len({one.content, nearer.content, one.text.content}) == 3


def test_held_out_rows_are_plain_text(config):
    mixed = open_source(config, progress=False)
    (batch, *_) = mixed.held_out_batches("validation", 2, 2)
    (plain, *_) = mixed.text.held_out_batches("validation", 2, 2)
    assert (batch.tokens == plain.tokens).all()
    assert batch.answers is None


def test_what_cannot_be_mixed_is_an_error(config):
    for change, why in (
        ({"mix": 1.0}, "not a share"),
        ({"length": 256}, "length=512"),
        ({"rows": "documents"}, "packed"),
        ({"cross_documents": False}, "cross_documents"),
        ({"reach": 100}, "reach"),
        ({"data": "mqar"}, "is a task"),
    ):
        with pytest.raises(DataError, match=why):
            open_source(dataclasses.replace(config, **change), progress=False)
