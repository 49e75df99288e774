"""The doctor finds programs right that are, and a program that is wrong, fails or is left out."""

import os

import pytest
import torch
from tests.e2e.command import run, run_code

from maclaurin.bench import check_programs
from maclaurin.programs.stock_softmax import StockSoftmax

CPU = torch.device("cpu")


def findings(program):
    return [trial.run() for trial in check_programs.trials(CPU) if trial.program.name == program]


@pytest.mark.parametrize("program", ["token step", "stock softmax", "plain recurrent"])
@pytest.mark.slow
def test_right_programs_are_found_right(program):
    found = findings(program)
    assert len(found) == check_programs.SPECS_PER_PROGRAM
    assert all(finding.is_right for finding in found), found


def test_a_small_error_is_found(monkeypatch):
    right = StockSoftmax.run
    monkeypatch.setattr(StockSoftmax, "run", lambda self, call: (right(self, call)[0] * 1.001, None))
    assert not any(finding.is_right for finding in findings("stock softmax"))


def test_a_wrong_gradient_is_found(monkeypatch):
    right = StockSoftmax.run

    def detached(self, call):
        y, _ = right(self, call._replace(inputs=call.inputs._replace(v=call.inputs.v.detach())))
        return y + 0 * call.inputs.v.sum(), None

    monkeypatch.setattr(StockSoftmax, "run", detached)
    for finding in findings("stock softmax"):
        assert finding.output_error <= finding.limit < finding.gradient_error
        assert not finding.is_right


def test_an_exception_is_a_finding(monkeypatch):
    def fails(self, call):
        raise RuntimeError("out of registers\nand more")

    monkeypatch.setattr(StockSoftmax, "run", fails)
    assert {finding.problem for finding in findings("stock softmax")} == {"RuntimeError: out of registers"}


@pytest.mark.slow
def test_the_command_says_what_was_found(tmp_path):
    pytest.importorskip(
        "altair"
    )  # the server of commands loads all of them; a GPU machine may have no charts
    said = run("doctor", "--device=cpu", f"--out={tmp_path / 'doctor.json'}").stdout
    assert "checks pass on cpu" in said
    assert "Triton programs on cpu: no" in said
    assert '"right": true' in (tmp_path / "doctor.json").read_text()


@pytest.mark.slow
def test_programs_can_be_left_out():
    code = (
        "import torch, maclaurin; q = torch.randn(1, 9, 2, 4); plan = maclaurin.plan(q, q, q, 'exp/sum'); "
        "print(plan.program, [why for p, why in plan.refusals.items() if p.name == 'stock softmax'])"
    )
    environment = {**os.environ, "MACLAURIN_WITHOUT": "stock softmax, plain parallel"}
    result = run_code(code, env=environment)
    assert result.stdout.strip() == "plain parallel ['MACLAURIN_WITHOUT excludes it']"
