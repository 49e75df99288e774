"""Tasks that a training run is asked: their names, their items, and how long their texts are."""

import pytest

from maclaurin import InputError
from maclaurin.evaluation.evaluate import items_fingerprint, longest_text, numbers_of, run_task, task_items


def test_tasks_are_named_without_the_first_word():
    assert run_task("induction_16").name == "maclaurin_induction_16"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inductoin_16", "there is no task 'inductoin_16'.*Did you mean induction_16"),
        ("maclaurin_cloze", "named without maclaurin_"),
        ("recall", "the task is called maclaurin_recall_64"),
        ("hellaswag", "there is no task"),
    ],
)
def test_unknown_task_names_are_one_error(name, words):
    with pytest.raises(InputError, match=words):
        run_task(name)


def test_the_numbers_of_a_task_follow_from_how_it_is_asked():
    assert numbers_of("induction_8") == ("acc", "log_odds", "log_odds_gain")
    assert numbers_of("cloze") == ("acc", "log_odds")
    assert numbers_of("lines_32") == ("acc", "log_odds")
    assert numbers_of("recall_64_exact") == ("exact_match",)
    assert numbers_of("perplexity")[0] == "bits_per_byte"


def test_other_items_have_another_fingerprint():
    found = {
        items_fingerprint(*asked)
        for asked in (
            ("induction_8", 4, 0),
            ("induction_8", 5, 0),
            ("induction_8", 4, 1),
            ("induction_9", 4, 0),
        )
    }
    assert len(found) == 4
    assert len(task_items("induction_8", 4, 0)) == 4


@pytest.mark.slow
def test_the_longest_text_is_that_of_a_question_with_its_longest_choice():
    (item,) = task_items("induction_8", 1, 0)
    (query,) = item.queries
    expected = max(len(f"{item.context}{query.prompt} {choice}") for choice in query.choices)
    assert longest_text("induction_8", 1, 0, list) == expected
    (item,) = task_items("lines_32", 1, 0)
    ends = [len(f"{choice} {query.prompt}") for query in item.queries for choice in query.choices]
    assert longest_text("lines_32", 1, 0, list) == max(ends)
    assert longest_text("perplexity", 1, 0, list) == 0, "it is read in windows"
