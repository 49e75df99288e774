"""Our tasks: the same for the same seed, answerable from the text alone, at the distance they say."""

import collections
import json
from pathlib import Path

import pytest

from maclaurin.data.errors import DataError
from maclaurin.data.standard_library import StandardLibrary
from maclaurin.evaluation import prepare
from maclaurin.evaluation.own_task import Text
from maclaurin.evaluation.prose import docstrings
from maclaurin.evaluation.recall import CHARACTERS_PER_TOKEN
from maclaurin.evaluation.task_set import DISTANCES, OWN_GROUPS, OWN_TASKS, PERIODS, is_own
from maclaurin.evaluation.words import NAMES, THINGS

_NOUNS = """record stream buffer handler parser socket thread signal packet module object string number matrix
vector window button folder driver device memory kernel branch commit"""
NOUNS = _NOUNS.split()


def passage(first):
    """A docstring whose words come back after a while."""
    start = first % len(NOUNS)
    return " ".join(f"the {noun} is kept" for noun in [*NOUNS[start:], *NOUNS[:start]] * 2)


TEXT = Text(
    prose=[passage(first) for first in range(80)],
    held_out=[f"x{n} = {n}  # a line\n" * 600 for n in range(4)],
)


def items(name, seed=0, text=TEXT):
    return list(OWN_TASKS[name].items(text, seed))


@pytest.mark.parametrize("name", OWN_TASKS)
def test_items_follow_from_the_seed_alone(name):
    assert items(name) == items(name)
    assert items(name) != items(name, seed=1)
    assert len(items(name)) >= 3


@pytest.mark.parametrize("name", [n for n in OWN_TASKS if "recall" in n])
def test_each_asked_fact_stands_once_and_before_the_filler(name):
    for item in items(name):
        fact = item["text"].splitlines()[-1] + " " + item["value"] + "."
        assert item["text"].count(fact) == 1
        assert item["text"].index(fact) + len(fact) == item["known_until"]
        assert item["choices"][item["answer"]] == item["value"]
        assert all(f"is {choice}." in item["text"] for choice in item["choices"])
        assert len(set(item["choices"])) == 4


@pytest.mark.parametrize("distance", DISTANCES)
def test_all_facts_are_as_far_back_as_the_name_says(distance):
    for item in items(f"maclaurin_recall_{distance}"):
        last_fact = "\n".join(item["text"].split("\n", 4)[:4])
        between = len(item["text"]) - len(last_fact)
        assert 1 <= between / (distance * CHARACTERS_PER_TOKEN) <= 1.15


def test_the_same_facts_are_asked_at_every_distance_by_choice_and_by_writing():
    asked = [[(i["value"], i["choices"]) for i in items(n)] for n in OWN_TASKS if "recall" in n]
    assert all(each == asked[0] for each in asked)


@pytest.mark.parametrize("guess", range(4))
def test_a_fixed_guess_scores_chance(guess):
    for limit in (4, 8, 40, 200):
        found = items("maclaurin_recall_64")[:limit]
        assert sum(item["answer"] == guess for item in found) == limit / 4


@pytest.mark.parametrize("period", PERIODS)
def test_induction_continues_the_first_time(period):
    for item in items(f"maclaurin_induction_{period}"):
        words = item["text"].split()
        again = len(words) - period
        assert 1 <= again < period
        assert len(set(words[:period])) == period
        assert words[period:] == words[:again]
        assert item["value"] == words[again]
        assert item["text"][: item["known_until"]].split() == words[: again + 1]


def test_cloze_words_all_stand_earlier_but_not_just_before():
    found = items("maclaurin_cloze")
    for item in found:
        words = [word for word in item["text"].split() if word in NOUNS]
        assert item["choices"][item["answer"]] == item["value"]
        assert len(set(item["choices"])) == 4
        assert all(choice in words for choice in item["choices"])
        assert not set(item["choices"]) & set(words[-12:])
    shares = collections.Counter(item["answer"] for item in found)
    assert min(shares.values()) > len(found) / 8


def test_chance_is_that_of_not_having_seen_the_answer():
    assert OWN_TASKS["maclaurin_recall_256"].chance == OWN_TASKS["maclaurin_cloze"].chance == 0.25
    assert OWN_TASKS["maclaurin_recall_256_exact"].chance == 1 / len(THINGS)
    assert OWN_TASKS["maclaurin_induction_64"].chance == 1 / len(THINGS)
    assert OWN_TASKS["maclaurin_perplexity"].chance is None


def test_words_are_different_and_enough():
    for words in (NAMES, THINGS):
        assert len(set(words)) == len(words)
    assert len(THINGS) >= max(PERIODS)


def test_perplexity_texts_are_pieces_of_the_held_out_files():
    texts = [item["text"] for item in items("maclaurin_perplexity")]
    assert all(any(text in source for source in TEXT.held_out) for text in texts)
    assert len(set(texts)) > 1


def test_docstrings_without_examples_and_code():
    source = '"""A module that explains itself in more than eight words here.\n\n>>> f(1)\n1\n"""\nx = "no"\n'
    assert list(docstrings([source, "def broken(:", '"""Short."""'])) == [
        "A module that explains itself in more than eight words here."
    ]


def test_a_library_without_enough_text_is_told(tmp_path):
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(DataError, match="too little text"):
        prepare.prepared_tasks(0, corpus=StandardLibrary(folder=tmp_path), cache=str(tmp_path / "cache"))


@pytest.fixture
def library(tmp_path):
    """A standard library of a few files."""
    folder = tmp_path / "library"
    folder.mkdir()
    for n in range(200):
        (folder / f"m{n}.py").write_text(
            f'"""{passage(n)} number {n}."""\n' + f"x{n} = {n}  # and more\n" * 200
        )
    return StandardLibrary(folder=folder)


def test_prepared_tasks_are_whole_fingerprinted_and_made_once(library, tmp_path):
    cache = str(tmp_path / "cache")
    folder = prepare.prepared_tasks(0, corpus=library, cache=cache)
    known = prepare.task_fingerprints(folder)
    assert set(known) == set(OWN_TASKS)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare.prepared_tasks(0, corpus=library, cache=cache) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    other = prepare.prepared_tasks(1, corpus=library, cache=cache)
    assert prepare.task_fingerprints(other)["maclaurin_recall_64"] != known["maclaurin_recall_64"]


def test_a_damaged_task_is_made_again(library, tmp_path):
    folder = prepare.prepared_tasks(0, corpus=library, cache=str(tmp_path / "cache"))
    damaged = folder / "maclaurin_cloze.jsonl"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-40])
    prepare.prepared_tasks(0, corpus=library, cache=str(tmp_path / "cache"))
    assert damaged.read_bytes() == whole


def test_held_out_text_is_what_runs_test_on():
    text = prepare.task_text(StandardLibrary())
    assert len(text.held_out) >= 5
    assert len(text.prose) > 500


def test_the_groups_in_the_files_are_those_we_list(library, tmp_path):
    yaml = pytest.importorskip("yaml")
    folder = prepare.prepared_tasks(0, corpus=library, cache=str(tmp_path / "cache"))
    files = [yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")]
    groups = {file["group"]: file["task"] for file in files if "group" in file}
    assert set(groups) == set(OWN_GROUPS)
    assert all(is_own(member) for members in groups.values() for member in members)
    for file in files:
        if "group" not in file:
            lines = Path(file["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
            assert "text" in json.loads(lines[0])
