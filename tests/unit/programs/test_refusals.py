"""How programs combine their reasons to refuse a call."""

import ast
from pathlib import Path

import pytest
import torch

import maclaurin
from maclaurin.programs import program
from maclaurin.programs.program import first_reason

SOURCES = sorted(Path(program.__file__).parent.rglob("*.py"))


def test_the_first_reason_is_given_and_later_ones_are_not_computed():
    def fails():
        raise AssertionError("not needed")

    assert first_reason(lambda: None, lambda: "too wide", fails) == "too wide"
    assert first_reason(lambda: None, lambda: None) is None


def refusals(tree):
    """Every call of a function that gives a reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("cannot", "refuses") or name.lstrip("_").startswith(("refuse_", "why_")):
                yield node


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_refusal_is_a_condition(source):
    """`a or b` and `if a` branch on the text, which torch.compile (2.11) cannot trace if it is formatted."""
    tree = ast.parse(source.read_text())
    found = {id(node) for node in refusals(tree)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.BoolOp) else []
        parts = [*parts, *([node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else [])]
        assert not any(id(part) in found for part in parts), f"{source.name}:{node.lineno}"


@pytest.mark.slow
def test_a_call_that_programs_refuse_with_formatted_texts_is_traced_in_one_graph():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    for spec in ("taylor(2)+window(2,kept=1)/sum", "taylor(13)/running", "exp(clamp=5)/len"):
        gates = {a.name: torch.randn(1, 6, 2) for a in maclaurin.parse(spec).arguments}

        def call(q, k, v, spec=spec, gates=gates):
            return maclaurin.attention(q, k, v, spec, gates=gates)

        compiled = torch.compile(call, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
