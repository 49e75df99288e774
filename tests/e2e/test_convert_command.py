"""`maclaurin convert` as a user types it: convert, recover, load, and errors that leave nothing behind."""

import json

import pytest

from tests.e2e import command
from tests.e2e.training import environment

TAIL = "taylor(2,about=mean)+window(8,sinks=1)/sum"


def maclaurin(*arguments, cwd, expect=0):
    return command.run(*arguments, cwd=cwd, env=environment(), expect=expect)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("convert")
    maclaurin(
        "train", "--size=pico", "--data=stdlib", "--limit-documents=150", "--test-fraction=0.2",
        "--tokenizer=bpe:300", "--length=64", "--steps=20", "--batch-size=4", "--eval-every=0",
        "--eval-rows=8", "--checkpoint-every=0", "--device=cpu", "--out=run", cwd=place,
    )  # fmt: skip
    return place


def test_a_run_is_converted_and_trained_back(folder):
    arguments = (
        "convert", "run", f"--attention={TAIL}", "--out=converted", "--layers=1", "--lengths=64",
        "--match-steps=3", "--text-steps=3", "--lora=2", "--length=32", "--batch-size=2", "--device=cpu",
        "--recall=64", "--questions=4",
    )  # fmt: skip
    result = maclaurin(*arguments, cwd=folder)
    assert "1 of 2 layers converted" in result.stdout
    found = json.loads((folder / "converted" / "conversion.json").read_text())
    assert found["attention"] == ["exp/sum", TAIL]
    for kind in ("perplexity", "recall"):
        figures = {"original", "window_only", "converted", "recovered", "gap_closed_recovered"}
        assert figures <= found[kind]["64"].keys()
    assert found["recovery"]["settings"]["lora"] == 2
    assert found["recovery"]["seconds"] > 0
    assert "facts recalled" in result.stdout
    recovered = found["recall"]["64"]["scores"]["recovered"]
    assert recovered["acc"]["low"] < recovered["acc"]["value"] + 1e-9 < recovered["acc"]["high"] + 1e-9
    assert f"{recovered['acc']['low']:.2f} … {recovered['acc']['high']:.2f}" in result.stdout
    assert f"{recovered['log_odds_gain']['value']:+.2f}" in result.stdout
    assert "bytes per token" in result.stdout
    assert "original" in result.stdout
    assert "softmax" not in result.stdout
    assert "loading run" in result.stderr
    assert "base_model_name_or_path" not in result.stderr
    repeated = maclaurin(*arguments, "--lengths=32", "--recall=99", "--resume", cwd=folder)
    assert "converted is finished: nothing was left to resume" in repeated.stdout
    bare = maclaurin(
        "convert", "run", f"--attention={TAIL}", "--out=converted", "--resume", cwd=folder, expect=2
    )
    assert "converted is finished" in bare.stderr
    assert "--match-steps" in bare.stderr
    again = json.loads((folder / "converted" / "conversion.json").read_text())
    assert again["perplexity"].keys() == {"64"}  # measured as before
    assert again["recall"].keys() == {"64"}
    text = maclaurin("generate", "converted", "--prompt=def", "--max-new-tokens=5", cwd=folder)
    assert "growing with the text" in text.stderr  # the layer left alone keeps its keys


def test_errors_leave_nothing_behind(folder):
    wrong = {
        "taylor(3)/sum": "can vanish",
        "power(2)*forget/sum": "has gates",
        "softmx": "Did you mean",
    }
    for attention, words in wrong.items():
        result = maclaurin("convert", "run", f"--attention={attention}", "--out=bad", cwd=folder, expect=2)
        assert words in result.stderr
    wrong_options = {
        "--precision=fp8": "fp8",
        "--lengths=9999999": "Give a longer text",
        "--resume": "no conversion to continue",
        "--device=cuda:77": "cuda:77",
    }
    for option, words in wrong_options.items():
        given = ("convert", "run", f"--attention={TAIL}", "--out=bad", "--text-steps=3", option)
        result = maclaurin(*given, cwd=folder, expect=2)
        assert words in result.stderr
    (folder / "there").mkdir()
    (folder / "there" / "conversion.json").write_text("{}")
    again = ("convert", "run", f"--attention={TAIL}", "--out=there", "--resume")
    result = maclaurin(*again, cwd=folder, expect=2)
    assert "is not a conversion" in result.stderr
    result = maclaurin("convert", "nowhere", f"--attention={TAIL}", "--out=bad", cwd=folder, expect=2)
    assert "no folder nowhere" in result.stderr
    (folder / "file").touch()
    for out, words in {"file/x": "cannot be written", "there": "exists already"}.items():
        result = maclaurin("convert", "run", f"--attention={TAIL}", f"--out={out}", cwd=folder, expect=2)
        assert f"{out} {words}" in result.stderr
        assert "loading" not in result.stderr, "before any work"
    assert not list(folder.glob("bad*"))


def test_a_memory_is_chosen_for_a_budget(folder):
    """The table of the decision, a folder that loads, and errors that say what would work."""
    probes = (
        "--at=400",
        "--probe=64",
        "--probe-questions=1",
        "--final-questions=4",
        "--lengths=64",
        "--device=cpu",
    )
    shown = maclaurin("convert", "run", "--constant=60kB", "--dry-run", *probes, cwd=folder)
    assert "taken" in shown.stdout
    assert "keys of each key-value head" in shown.stdout
    assert "frontier: the best plan of each budget" in shown.stdout
    assert "about" in shown.stderr, "the time it will take"
    assert "…" not in shown.stdout, "nothing is cut"
    result = maclaurin("convert", "run", "--memory=40%", "--out=small", *probes, cwd=folder)
    assert "plans, measured on calibration text" in result.stdout
    found = json.loads((folder / "small" / "conversion.json").read_text())
    assert found["chosen"]["plan"]["bytes"] <= found["chosen"]["budget"]["bytes"]
    wrong = {
        ("--memory=40%", f"--attention={TAIL}", "--out=bad"): "give one of --memory",
        ("--memory=40%", "--out=/proc/none/bad"): "cannot be written",
        ("--memory=40%", "--layers=1", "--out=bad"): "--layers cannot be combined with a budget",
        ("--memory=40%", "--keep-sharp=none.json", "--dry-run"): "--keep-sharp cannot be combined",
        ("--memory=900MB", "--out=bad"): "limits nothing",
    }
    for options, words in wrong.items():
        result = maclaurin("convert", "run", *options, *probes, cwd=folder, expect=2)
        assert words in result.stderr
    assert not list(folder.glob("*bad*"))


def test_sharp_layers_are_those_of_this_model(folder):
    """An inspection of other weights is refused."""
    (folder / "text.txt").write_text("The sea was calm, and the ship lay still. " * 40)
    reading = ("--text=text.txt", "--tokens=64", "--orders=1,2", "--windows=none", "--device=cpu")
    maclaurin("inspect", "run", *reading, "--out=inspected", cwd=folder)
    given = (f"--attention={TAIL}", "--lengths=64", "--device=cpu", "--keep-sharp=inspected", "--keep=1")
    maclaurin("convert", "run", *given, "--out=sharp", cwd=folder)
    found = json.loads((folder / "sharp" / "conversion.json").read_text())
    assert sorted(found["reasons"]) == ["kept", "swapped"]
    file = folder / "inspected" / "inspection.json"
    record = json.loads(file.read_text())
    record["model"]["fingerprint"] = "0" * 64
    file.write_text(json.dumps(record))
    result = maclaurin("convert", "run", *given, "--out=other", cwd=folder, expect=2)
    assert "whose weights are not those of run" in result.stderr
    assert not (folder / "other").exists()
