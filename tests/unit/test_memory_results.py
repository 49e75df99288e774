"""The results file of benchmarks/memory.py: which run measured what, and choices that are out of date."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def memory():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("memory")
    finally:
        sys.path.remove(folder)


def test_every_arm_says_which_run_measured_it(memory):
    one, other = ({"machine": {"gpu": name}, "settings": {"questions": 200}} for name in ("H200", "A100"))
    arm = {}
    for run, name in ((one, "recall 256"), (other, "recall 1024"), (one, "perplexity 1024")):
        memory.note_run(arm, run, name)
    assert arm["runs"] == [
        {**one, "measures": ["recall 256", "perplexity 1024"]},
        {**other, "measures": ["recall 1024"]},
    ]
    memory.note_run(arm, other, "recall 256")  # measured again: the later run counts
    assert [run["measures"] for run in arm["runs"]] == [["perplexity 1024"], ["recall 1024", "recall 256"]]


def test_a_choice_made_by_something_else_is_retired_and_its_arms_are_kept(memory):
    found = {
        "chosen": {"8 MB": {"attention": ["a"]}, "30%": {"attention": ["b"], "key": "new"}},
        "arms": {"original": {}, "8 MB, trained": {"recall": 1}, "8 MB: window": {}, "30%": {}},
        "speed": {"reading 1 x 8192, 8 MB": 2, "reading 1 x 8192, original": 1},
    }
    assert memory.retire_unless(found, "30%", "new")
    assert not memory.retire_unless(found, "8 MB", "new")
    assert not memory.retire_unless(found, "8 MB", "new")  # there is none any more
    assert found["chosen"].keys() == {"30%"}
    assert found["retired"] == {"8 MB [choice without a key]": {"attention": ["a"]}}
    assert found["arms"] == {
        "original": {},
        "30%": {},
        "8 MB, trained [choice without a key]": {"recall": 1},
        "8 MB: window [choice without a key]": {},
    }
    assert found["speed"].keys() == {
        "reading 1 x 8192, original",
        "reading 1 x 8192, 8 MB [choice without a key]",
    }


def test_the_key_of_a_choice_changes_with_what_it_depends_on(memory):
    assert memory.digest({"at": 4096}, "code") == memory.digest({"at": 4096}, "code")
    assert memory.digest({"at": 4096}, "code") != memory.digest({"at": 4096}, "other code")
    assert len(memory.code_of_the_choice()) == 16


def test_settings_of_one_run_are_not_taken_for_those_of_all(memory, tmp_path):
    file = tmp_path / "memory.json"
    file.write_text('{"machine": {"gpu": "H200"}, "settings": {"questions": 200}, "arms": {"original": {}}}')
    found = memory.Results.open(file, None).found
    assert found.keys() == {"arms", "unattributed"}
    assert found["unattributed"]["settings"] == {"questions": 200}
