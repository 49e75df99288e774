"""The notation box answers as the library's parser does: the same golden file, the same words."""

import json
from pathlib import Path

import pytest

from maclaurin import NotationError, catalogue, resolve
from tests.explorer.node import needs_node, run_in_node

pytestmark = pytest.mark.usefixtures("built_in_parts")
GOLDEN = Path(__file__).parents[1] / "golden" / "notation.json"

ANSWERS = """
import { NotationError, parse, print, resolve } from "./notation.js";
const refused = ({ position, reason }) => ({ position, reason });
function answerTo(text) {
  try {
    const spec = parse(text);
    return {
      notation: spec.notation, formula: spec.formula, recurrence: spec.recurrence, gates: spec.gates,
      cancelled: spec.cancelledParts.map(print), simplified: spec.simplified().notation,
      can_vanish: spec.denominatorCanVanish,
      state: spec.hasFiniteState ? String(spec.stateSize(16, 8)) : null,
    };
  } catch (problem) {
    if (!(problem instanceof NotationError)) throw problem;
    return refused(problem);
  }
}
"""


@needs_node
def test_the_same_texts_are_accepted_and_refused_with_the_same_words(tmp_path):
    golden = json.loads(GOLDEN.read_text())
    script = (
        ANSWERS + "const answer = (texts) => Object.fromEntries(texts.map((text) => [text, answerTo(text)]));"
    )
    found = run_in_node(tmp_path, script, list(golden))
    assert {text: found[text] for text in golden if found[text] != golden[text]} == {}
    assert sum("reason" in answer for answer in golden.values()) > 60


@needs_node
def test_names_of_the_catalogue_and_their_typos(tmp_path):
    entries = [{"name": e.name, "aliases": e.aliases, "notation": e.notation} for e in catalogue]
    texts = [*catalogue.names(), "softmx", "basd", " based ", "taylr", "exp/sun", "retnett/sum"]

    def expected(text):
        try:
            return str(resolve(text))
        except NotationError as problem:
            return {"position": problem.position, "reason": problem.reason}

    script = (
        ANSWERS
        + """
    const answer = ({ entries, texts }) => texts.map((text) => {
      try { return resolve(text, entries).notation; } catch (problem) { return refused(problem); }
    });
    """
    )
    assert run_in_node(tmp_path, script, {"entries": entries, "texts": texts}) == [expected(t) for t in texts]
