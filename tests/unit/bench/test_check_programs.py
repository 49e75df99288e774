"""The doctor finds programs right that are, and a program that is wrong, fails or is left out."""

import os

import pytest
import torch
from tests.e2e.command import run, run_code

from maclaurin.bench import check_programs
from maclaurin.programs import triton as gpu
from maclaurin.programs.stock_softmax import StockSoftmax

CPU = torch.device("cpu")


def findings(program):
    return [trial.run() for trial in check_programs.trials(CPU) if trial.program.name == program]


@pytest.mark.parametrize("program", ["token step", "stock softmax", "plain recurrent"])
@pytest.mark.slow
def test_right_programs_are_found_right(program):
    found = findings(program)
    assert len({finding.spec for finding in found}) == 3
    assert {finding.shape.d for finding in found} == {16, 8, 7}
    assert all(finding.is_right for finding in found), found


@pytest.mark.slow
def test_other_shapes_are_grouped_heads_and_odd_sizes():
    """For every program of a CPU, in one dtype, next to the usual shape."""
    planned = list(check_programs.trials(CPU))
    for name in {trial.program.name for trial in planned}:
        shapes = [trial.shape for trial in planned if trial.program.name == name]
        assert set(check_programs.OTHER_SMALL_SHAPES) <= set(shapes), name
    large, odd = check_programs.OTHER_SHAPES
    assert (large.d, large.group) == (128, 4)
    assert all(size % 2 for size in (large.tokens, odd.tokens, odd.d, odd.e, odd.group))


@pytest.mark.skipif(not gpu.INSTALLED or gpu.INTERPRETED, reason="the table of a GPU needs triton, compiled")
@pytest.mark.slow
def test_every_program_of_a_gpu_is_checked_at_every_kind_of_shape(monkeypatch):
    """As far as the plan goes: tensors are on the CPU, and only the call says that it is for a GPU."""
    call, tensors = check_programs._call, check_programs.random_tensors
    monkeypatch.setattr(
        check_programs, "_call", lambda case: call(case)._replace(device=torch.device("cuda"))
    )
    monkeypatch.setattr(check_programs, "random_tensors", lambda *sizes, device: tensors(*sizes))
    planned = list(check_programs.trials(torch.device("cuda")))
    for program in check_programs.PROGRAMS:
        if program.name == "pairs in cache":  # of CPUs
            continue
        own = [trial for trial in planned if trial.program is program]
        assert {trial.dtype for trial in own} == {torch.bfloat16, torch.float16, torch.float32}, program
        assert len({trial.shape for trial in own}) == 3, program
    assert len(planned) <= 150, "each takes seconds of compilation"


def test_a_program_that_is_wrong_at_one_shape_is_named_with_it(monkeypatch):
    right = StockSoftmax.run

    def wrong_if_odd(self, call):
        y, state = right(self, call)
        return (y * 1.1 if call.inputs.q.shape[3] % 2 else y), state

    monkeypatch.setattr(StockSoftmax, "run", wrong_if_odd)
    assert [f.title for f in findings("stock softmax") if not f.is_right] == ["exp/sum, d=7"]


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
