"""What must not change by accident: names, notations, state sizes, help texts.

`make golden` rewrites the files after a change that is meant.
"""

import inspect
import json
import os
from pathlib import Path

import pytest
from tests.e2e.command import run

import maclaurin
import maclaurin.spec
import maclaurin.testing
from maclaurin import catalogue, parse

HERE = Path(__file__).parent
MEANT = "if this change is meant, run make golden"


@pytest.fixture
def same_as_golden(request):
    def compare(name, text):
        path = HERE / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: run make golden"
        return text == path.read_text()

    return compare


def as_json(data):
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def test_public_names(same_as_golden):
    names = {m.__name__: sorted(m.__all__) for m in (maclaurin, maclaurin.spec, maclaurin.testing)}
    signatures = {f: str(inspect.signature(getattr(maclaurin, f))) for f in ("attention", "plan", "parse")}
    assert same_as_golden("public_names.json", as_json({"names": names, "signatures": signatures})), MEANT


def test_catalogue(same_as_golden):
    rows = {
        e.name: {"notation": e.notation, "aliases": e.aliases, "source": e.source, "extras": str(e.extras)}
        for e in catalogue
    }
    assert same_as_golden("catalogue.json", as_json(rows)), MEANT


def test_formulas(same_as_golden):
    rows = {str(e.spec): [e.spec.formula, e.spec.latex, e.spec.recurrence] for e in catalogue}
    assert same_as_golden("formulas.json", as_json(rows)), MEANT


def test_notations(same_as_golden, built_in_parts):
    """What is accepted and what is refused, in which words; the explorer's parser answers the same."""
    texts = [*(HERE / "notations.txt").read_text().splitlines(), "", *(e.notation for e in catalogue)]
    answers = {text: answer_to(text) for text in dict.fromkeys(texts)}
    assert same_as_golden("notation.json", as_json(answers)), MEANT


def answer_to(text):
    try:
        spec = parse(text)
    except maclaurin.NotationError as problem:
        return {"position": problem.position, "reason": problem.reason}
    return {
        "notation": str(spec),
        "formula": spec.formula,
        "recurrence": spec.recurrence,
        "gates": spec.gates,
        "cancelled": [str(part) for part in spec.cancelled_parts],
        "simplified": str(spec.simplified()),
        "can_vanish": spec.denominator_can_vanish,
        "state": str(spec.state_size(16, 8)) if spec.has_finite_state else None,
    }


def test_state_sizes(same_as_golden):
    specs = [e.spec for e in catalogue if e.spec.has_finite_state and max(e.spec.orders) <= 10]
    specs += [parse("taylor(2,about=mean)+window(64,sinks=1)/sum"), parse("hermite(3)/len")]
    sizes = {str(s): {d: s.state_size(d, d) for d in (16, 32, 64, 128)} for s in specs}
    assert same_as_golden("state_sizes.json", as_json(sizes)), MEANT


@pytest.mark.parametrize(
    "command",
    [
        "",
        "list",
        "show",
        "check",
        "doctor",
        "train",
        "sweep",
        "runs",
        "report",
        "study",
        "study diff",
        "study clean",
        "generate",
        "inspect",
        "convert",
        "eval",
        "bench",
        "explore",
    ],
)
@pytest.mark.slow
def test_help(same_as_golden, command):
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    result = run(*command.split(), "--help", env=environment)
    assert same_as_golden(f"help_{command.replace(' ', '_') or 'maclaurin'}.txt", result.stdout), MEANT
