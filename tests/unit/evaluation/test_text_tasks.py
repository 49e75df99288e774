"""Our tasks: the same for the same seed, answerable from the text alone, at the distance they say."""

import collections
import re
from itertools import islice

import pytest

from maclaurin.data.recall_rows import NAMES, WORDS
from maclaurin.errors import InputError
from maclaurin.evaluation import Item, Query, TextTask, eval_task, register
from maclaurin.evaluation.eval_task import (
    TaskInMode,
    groups,
    is_ours,
    items_digest,
    kinds,
    listed_tasks,
    members,
    task_named,
)
from maclaurin.evaluation.needles import CommonWords
from maclaurin.evaluation.prose import CHARACTERS_PER_TOKEN, Prose, draws_for, take
from maclaurin.evaluation.text_tasks import HeldOutText, Lines

PROSE = Prose.embedded()
NEEDLES = ("needle", "multikey", "multiquery", "multivalue", "variables")


def items(kind, size=0, number=24, seed=0, prose=PROSE):
    return list(islice(kinds()[kind](size).items(prose, seed), number))


def smallest(kind):
    return kinds()[kind].sizes[0] if kinds()[kind].sizes else 0


# ----------------------------------------------------------------------------------------- all tasks


@pytest.mark.parametrize("kind", kinds())
def test_items_follow_from_the_seed_alone(kind, monkeypatch):
    monkeypatch.setattr("maclaurin.evaluation.text_tasks.held_out_sources", lambda: [LINES, CODE])
    found = [items_digest(items(kind, smallest(kind), 3, seed)) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind not in ("cloze", "lines", "perplexity")])
def test_the_right_choices_are_right_and_the_choices_differ(kind):
    for item in items(kind, smallest(kind)):
        assert item.queries
        assert item.context.endswith("\n")
        for query in item.queries:
            assert len(set(query.choices)) == len(query.choices)
            assert 0 < len(query.right) < len(query.choices)
            assert query.answers == tuple(query.choices[i] for i in query.right)


@pytest.mark.parametrize("kind", ["needle", "multikey", "multiquery", "multivalue", "recall"])
def test_values_come_up_nowhere_but_in_their_facts(kind):
    for item in items(kind, smallest(kind)):
        words = re.findall(r"\w+", item.context)
        assert all(words.count(choice) <= 1 for query in item.queries for choice in query.choices)
        assert not set(item.queries[0].choices) & set(re.findall(r"\w+", item.without))


@pytest.mark.parametrize("kind", [*NEEDLES, "recall", "induction", "words"])
@pytest.mark.parametrize("guess", range(4))
def test_always_the_same_choice_scores_chance(kind, guess):
    task = kinds()[kind](smallest(kind))
    queries = [query for item in items(kind, smallest(kind), 200) for query in item.queries]
    right = sum(guess in query.right for query in queries) / len(queries)
    expected = len(queries[0].right) / len(queries[0].choices)
    assert expected == task.guess
    exact = kind not in ("multivalue", "words")  # their places are random
    assert right == pytest.approx(expected, abs=0 if exact else 0.12)


@pytest.mark.parametrize("kind", [*NEEDLES, "recall"])
def test_facts_stand_inside_running_text(kind):
    """There is text before the first fact and after the last one, and it goes on between sentences."""
    for item in items(kind, smallest(kind)):
        facts = [s for s in item.context.split(". ") if "password" in s or s.startswith("VAR ")]
        assert len(facts) >= 1
        marks = ("The password", "One of the passwords", "VAR ")
        first = min(place for mark in marks if (place := item.context.find(mark)) >= 0)
        assert first > 20
        for query in item.queries:
            assert query.known_until is not None
            assert len(item.context) - query.known_until > 20
            assert item.context[query.known_until - 1] == "."


@pytest.mark.parametrize("kind", [*NEEDLES, "words"])
@pytest.mark.parametrize("size", [256, 1024])
def test_texts_have_the_length_their_name_says(kind, size):
    for item in items(kind, size, 8):
        assert len(item.context) / (size * CHARACTERS_PER_TOKEN) == pytest.approx(1, abs=0.07)


# --------------------------------------------------------------------------------------- each of them


@pytest.mark.parametrize("kind", ["needle", "multikey", "multiquery", "recall"])
def test_each_asked_fact_stands_once_in_the_text(kind):
    for item in items(kind, smallest(kind)):
        for query in item.queries:
            fact = f"{query.prompt} {query.answers[0]}."
            assert item.context.count(fact) == 1
            assert item.context.index(fact) + len(fact) == query.known_until
            others = [choice for choice in query.choices if choice != query.answers[0]]
            stand = [f"is {choice}." in item.context for choice in others]
            assert all(stand) if kind != "needle" else not any(stand)


@pytest.mark.parametrize("distance", [64, 256, 1024])
def test_facts_of_recall_are_as_far_back_as_the_name_says(distance):
    for item in items("recall", distance):
        last = max(item.context.rindex(f"is {choice}.") for choice in item.queries[0].choices)
        between = len(item.context) - last + len(item.queries[0].prompt)
        assert 0.9 <= between / (distance * CHARACTERS_PER_TOKEN) <= 1.15


def test_the_same_facts_are_recalled_at_every_distance():
    asked = [[item.queries[0].choices for item in items("recall", size)] for size in (64, 256, 1024)]
    assert asked[0] == asked[1] == asked[2]


def test_all_keys_of_multiquery_are_asked_about_one_text():
    for item in items("multiquery", 256):
        assert len({query.prompt for query in item.queries}) == 4
        assert {query.choices for query in item.queries} == {item.queries[0].choices}


def test_values_of_multivalue_belong_to_the_key():
    for item in items("multivalue", 256):
        (query,) = item.queries
        for place, value in enumerate(query.choices):
            assert (f"{query.prompt} {value}." in item.context) == (place in query.right)
        assert query.written.startswith("The 3 passwords of")


def test_variables_have_the_value_that_the_assignments_give():
    for item in items("variables", 256):
        values = {}
        for name, source in re.findall(r"VAR ([A-Z]{3}) = (\d{5}|VAR [A-Z]{3})\.", item.context):
            values[name] = source if source.isdecimal() else values[source.removeprefix("VAR ")]
        assert len(values) == 12
        (query,) = item.queries
        assert values[query.prompt.split()[4]] == query.answers[0]


@pytest.mark.parametrize("size", [256, 1024, 4096])
def test_common_words_are_four_times_as_common(size):
    for item in items("words", size, 4):
        listed = item.context.removeprefix("A list of words: ").rstrip(".\n").split(", ")
        counts = collections.Counter(listed)
        (query,) = item.queries
        common = {counts[query.choices[i]] for i in query.right}
        rare = {count for word, count in counts.items() if word not in query.answers}
        assert len(common) == len(rare) == 1
        assert common.pop() == CommonWords.often * rare.pop()


@pytest.mark.parametrize("period", [16, 64, 192])
def test_induction_continues_as_the_first_time(period):
    for item in items("induction", period):
        (query,) = item.queries
        words, again = item.context.split(), query.prompt.split()
        assert len(set(words)) == period
        assert words[: len(again)] == again
        assert words[len(again)] == query.answers[0]
        assert item.context[: query.known_until].split() == words[: len(again) + 1]


def test_cloze_words_stand_earlier_but_not_just_before():
    found = items("cloze", number=200)
    assert len(found) > 100
    for item in found:
        (query,) = item.queries
        assert item.without is None
        assert all(choice in item.context for choice in query.choices)
        assert f" {query.answers[0]}" in item.context
        assert not set(query.choices) & set(item.context.split()[-6:])
    shares = collections.Counter(item.queries[0].right[0] for item in found)
    assert min(shares.values()) > len(found) / 8


LINES = "".join(f"x{n} = {n}  # a line of a file\n" for n in range(600))


def test_perplexity_texts_are_complete_lines_of_held_out_files(monkeypatch):
    monkeypatch.setattr("maclaurin.evaluation.text_tasks.held_out_sources", lambda: [LINES, "short = 1\n"])
    texts = [item.context for item in HeldOutText().items(PROSE, 0)]
    assert sorted(texts, key=LINES.index) == sorted(set(texts), key=LINES.index)
    assert all(text in LINES and text.endswith("\n") for text in texts)
    assert len(texts) == 5


CODE = "".join(
    f"    def method_{n}(self, argument_{n}):\n        return self.field_{n} + argument_{n % 7}\n"
    for n in range(60)
)


def test_lines_are_cut_in_two_and_each_end_is_asked_after_all_beginnings(monkeypatch):
    monkeypatch.setattr("maclaurin.evaluation.text_tasks.held_out_sources", lambda: [CODE, "", "x = 1\n"])
    found = items("lines", 32, number=100)
    assert len(found) == Lines.most_of_a_file
    for item in found:
        assert (item.context, item.without) == ("", None)
        beginnings = item.queries[0].choices
        assert len(set(beginnings)) == 4
        assert {query.choices for query in item.queries} == {beginnings}
        assert [query.right for query in item.queries] == [(0,), (1,), (2,), (3,)]
        ends = [query.prompt for query in item.queries]
        assert len(set(ends)) == 4
        assert max(map(len, ends)) - min(map(len, ends)) < Lines.class_width
        for query in item.queries:
            assert f"{query.choices[query.right[0]]} {query.prompt}\n" in CODE
        for beginning in beginnings:
            assert 64 <= len(beginning) <= 128
            assert CODE[CODE.index(beginning) - 1] == "\n", "it begins with a line"
    used = [beginning for item in found for beginning in item.queries[0].choices]
    assert len(set(used)) == len(used), "a line is asked once"


def test_held_out_lines_are_enough_for_a_thousand_questions():
    assert len(items("lines", 32, number=250)) == 250


def test_tables_of_numbers_are_not_asked(monkeypatch):
    table = "".join(f"    0x{n:04x}: 0x{n + 3:04x},     #  LATIN LETTER NUMBER {n}\n" for n in range(300))
    monkeypatch.setattr("maclaurin.evaluation.text_tasks.held_out_sources", lambda: [table])
    assert items("lines", 32) == []


def test_held_out_files_are_many_and_none_is_most_of_them():
    from maclaurin.evaluation.prose import held_out_sources

    sizes = [len(source) for source in held_out_sources()]
    assert len(sizes) >= 40
    assert max(sizes) <= 0.11 * sum(sizes)


# ----------------------------------------------------------------------------------------- the prose


def test_words_are_different_and_enough():
    for words in (NAMES, WORDS):
        assert len(set(words)) == len(words)
    assert len(WORDS) >= kinds()["induction"].largest


def test_the_embedded_prose_lasts_for_long_texts():
    assert sum(map(len, PROSE.sentences)) > 60_000
    assert all(sentence[0].isupper() or not sentence[0].isalpha() for sentence in PROSE.sentences)
    assert len(PROSE.sha256) == 64


def test_sentences_are_taken_up_to_a_length_and_start_again_at_the_end():
    prose = Prose("three", ("This is the first sentence. Here is a second one, too. And this is the third.",))
    assert prose.sentences == (
        "This is the first sentence.",
        "Here is a second one, too.",
        "And this is the third.",
    )
    stream = prose.from_random_place(draws_for("x", 0, 0))
    assert len({next(stream) for _ in range(3)}) == 3
    taken = take(prose.from_random_place(draws_for("x", 0, 0)), 70)
    assert 60 <= len(" ".join(taken)) <= 72
    assert all(sentence.endswith(".") for sentence in taken)


def test_a_text_of_ones_own(tmp_path):
    file = tmp_path / "novel.txt"
    file.write_text(
        "".join(f"Here stands sentence number {n}, and no other.\nIt ends.\n\n" for n in range(30))
    )
    prose = Prose.read(file)
    assert prose.name == "novel.txt"
    assert len(prose.paragraphs) == 30
    assert "sentence number" in items("recall", 64, 1, prose=prose)[0].context
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"Line {n} is a paragraph of its own.\n" for n in range(30)))
    assert len(Prose.read(lines).paragraphs) == 30


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"Too short. By far.", "has 0 sentences; at least 20"),
        (b"caf\xe9 " * 50, "is not UTF-8 text"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path, content, words):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        Prose.read(file)
    with pytest.raises(InputError, match=r"there is no file .*texd.txt. Did you mean .*text.txt"):
        Prose.read(tmp_path / "texd.txt")


# ----------------------------------------------------------------------------------------- the names


@pytest.mark.parametrize("task", listed_tasks(), ids=lambda task: task.name)
def test_a_task_is_found_by_its_name(task):
    assert task_named(task.name) == task
    assert is_ours(task.name)
    assert members(task.name) == (task.name,)
    assert task.measures


def test_any_size_has_a_name():
    task = task_named("maclaurin_multikey_5000_exact")
    assert (task.task.size, task.mode, task.chance) == (5000, "written", 1 / len(WORDS))
    assert task_named("maclaurin_recall_77").chance == 0.25
    assert task_named("hellaswag") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("maclaurin_recall", None),
        ("maclaurin_needle", "is called maclaurin_needle_256"),
        ("maclaurin_cloze_64", "is called maclaurin_cloze"),
        ("maclaurin_needle_64", "from 256 to"),
        ("maclaurin_induction_500", "from 8 to 192"),
        ("maclaurin_cloze_exact", "leave out _exact"),
        ("maclaurin_recal_64", "Did you mean maclaurin_recall_64"),
    ],
)
def test_unknown_task_names_are_explained(name, words):
    if words is None:
        assert members(name) == groups()[name]
        return
    with pytest.raises(InputError, match=words):
        members(name)


def test_groups_hold_tasks():
    for group, names in groups().items():
        assert names
        assert all(task_named(name) for name in names), group
    assert len(groups()["maclaurin_ruler"]) == 6 * 3


def test_a_task_of_ones_own(monkeypatch):
    monkeypatch.setattr(eval_task, "_KINDS", dict(eval_task._KINDS))

    @register("parrot")
    class Parrot(TextTask):
        sizes = (2,)
        measures = "a repeated word"
        guess = 0.5

        def items(self, prose, seed):
            yield Item("one two one\n", (Query("one", ("two", "three"), (0,)),))

    assert task_named("maclaurin_parrot_7") == TaskInMode(Parrot(7), "choices")
    assert task_named("maclaurin_parrot_7").name == "maclaurin_parrot_7"
