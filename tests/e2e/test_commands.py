"""The commands as a user types them, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.text import Text

from maclaurin.cli import help_of
from tests.e2e.command import run
from tests.e2e.in_process import maclaurin

COMMAND = Path(sys.executable).with_name("maclaurin")


def test_version():
    result = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("maclaurin 0.")


def test_without_a_command_it_shows_its_help():
    result = subprocess.run([COMMAND], capture_output=True, text=True, check=False)
    assert "check" in result.stdout + result.stderr


def test_list_shows_every_row_and_finds_the_names_of_the_paper():
    table = run("list", env={**os.environ, "COLUMNS": "200"}).stdout
    assert "softmax" in table
    assert "54 of 54" in table
    assert "gated_softmax_no_in_gate_no_norm" in table
    found = json.loads(run("list", "softmax_divS_gatev2", "--json").stdout)
    assert [row["name"] for row in found] == ["gate"]
    assert found[0]["notation"] == "exp(clamp=5)/len*out"


def test_names_and_notations_are_not_broken_at_80_columns(monkeypatch, capfd):
    from maclaurin.spec.catalogue import catalogue

    monkeypatch.setenv("COLUMNS", "80")
    lines = maclaurin(monkeypatch, capfd, "list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for entry in catalogue:
        assert any(line.split()[:2] == [entry.name, entry.notation] for line in lines), entry.name
    monkeypatch.delenv("COLUMNS")
    assert "gated_softmax_no_in_gate_no_norm" in maclaurin(monkeypatch, capfd, "list").stdout


def test_list_of_nothing_is_an_error_with_near_names():
    assert "Did you mean" in run("list", "retnett", expect=2).stderr


def test_show_tells_formula_recurrence_state_forms_and_what_cancels():
    text = run("show", "taylor(2)*in/len*out/layer").stdout
    for words in (
        "y_t = LayerNorm(",
        "S_t⁽ⁿ⁾",
        "LaTeX",
        "recurrent, in constant memory",
        "len, out",
    ):
        assert words in text
    assert "2,145" in text
    data = json.loads(run("show", "based", "--json").stdout)
    assert data["state"][0] == {"head_size": 16, "features": 153, "numbers": 153 * 17}


def test_show_names_what_the_layer_of_an_entry_adds():
    lines = run("show", "2mamba").stdout.splitlines()
    assert {"layer: convolution = 2", "layer: gates = log_forget: −softplus(Wx + b)"} <= set(lines)


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_typo_gets_the_nearest_names_and_a_caret(command):
    error = run(command, "exp/smu", expect=2).stderr
    assert "Did you mean sum" in error
    assert "\n    exp/smu\n        ^" in error
    assert "Traceback" not in error


def test_the_check_of_the_readme_shows_agreement(monkeypatch, capfd):
    """Every form of both specs runs and agrees, and what is said of a bound is a number or nothing."""
    monkeypatch.setenv("COLUMNS", "80")
    text = maclaurin(monkeypatch, capfd, "check", "exp/l2", "based").stdout
    assert "budget" not in text
    assert "∞" not in text
    assert "exp/l2: exp runs as its series up to order" in text
    assert "all 4 comparisons agree" in text
    assert [
        line for line in text.splitlines() if line.startswith((" exp/l2 ", " taylor(2)/sum ")) and "–" in line
    ] == []


def test_check_says_why_a_form_was_left_out(monkeypatch, capfd):
    arguments = ("check", "exp/sum", "sigmoid(-2)", "--score-size", "3", "--tokens", "8")
    text = " ".join(maclaurin(monkeypatch, capfd, *arguments).stdout.split())
    assert "exp/sum: no order of its series is within 1e-10 for |x| up to" in text
    assert "try a smaller --score-size" in text
    assert "sigmoid(-2): no recurrent form, since no finite state computes the kernel" in text


def test_check_of_some_specs_as_table_json_and_plot(tmp_path):
    figure = tmp_path / "series.svg"
    table = run("check", "exp/sum", "taylor(2,about=mean)/sum", "--plot", str(figure)).stdout
    assert "comparisons agree" in table
    assert figure.read_text().startswith("<?xml")
    data = json.loads(run("check", "exp/l2", "power(2)/sum", "--json").stdout)
    assert data["holds"] is True
    assert {row["form"] for row in data["forms"]} == {"chunked", "recurrent"}
    errors = [point["about_zero"] for point in data["convergence"]]
    assert errors[0] > 0.1
    assert errors[-1] < 1e-9
    bounded = [p for p in data["convergence"] if p["certificate"] is not None]
    assert len(bounded) > 3
    assert all(p["about_zero"] <= p["certificate"] for p in bounded)
    assert all(error < 1e-9 for error in data["softmax_against_torch"].values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_in_lower_precision(dtype):
    data = json.loads(run("check", "exp/l2", "taylor(2)/sum", "--dtype", dtype, "--json").stdout)
    assert data["holds"] is True
    assert {row["form"] for row in data["forms"]} == {"chunked", "recurrent"}


def test_check_on_tensors_of_ones_own(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "qkv.safetensors"
    tensors = {n: torch.randn(1, 20, 2, 4) for n in "qkv"}
    save_file(tensors, path)
    run("check", "taylor(2)/sum", "--inputs", str(path))
    assert "input_gate is missing" in run("check", "exp*in/len", "--inputs", str(path), expect=2).stderr
    tensors["k"][0, 7, 1, 2] = torch.nan
    save_file(tensors, path)
    error = run("check", "taylor(2)/sum", "--inputs", str(path), expect=2).stderr
    assert "k holds nan at [0, 7, 1, 2]" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "no/such/folder/x.svg"], "there is no folder"),
        (["--plot", "/proc/x.svg"], "--plot: /proc cannot be written"),
        (["--plot", "x.gif"], "png, svg or pdf"),
        (["--dtype", "float8"], "use one of float64"),
        (["--inputs", "nothing.safetensors"], "there is no file"),
        (["--inputs", "text.txt"], "text.txt is not a safetensors file"),
        (["--inputs", "."], "is a folder; name a file"),
    ],
)
def test_check_says_at_once_what_it_cannot_do(tmp_path, monkeypatch, capfd, arguments, words):
    (tmp_path / "text.txt").write_text("no tensors here")
    monkeypatch.chdir(tmp_path)
    assert words in maclaurin(monkeypatch, capfd, "check", "exp/sum", *arguments, expect=2).stderr


def test_a_disagreement_is_found(monkeypatch, capsys):
    """The check can fail: a kernel whose polynomial is not its weight is caught."""
    from dataclasses import dataclass
    from typing import ClassVar

    import typer

    from maclaurin.cli.check import check
    from maclaurin.spec import Polynomial, register

    @register
    @dataclass(frozen=True, slots=True)
    class Liar(Polynomial):
        """κ says one thing in parallel and another in its state."""

        notation: ClassVar[str] = "liar"

        @property
        def series(self):
            return (1.0, 1.0, 0.5)

        def coefficients(self, statistics=None):
            return (1.0, 1.0, 0.25)

        @property
        def fused(self):
            return None

    with pytest.raises(typer.Exit) as stopped:
        check(["liar/l2"], tokens=8, key_size=2)
    assert stopped.value.exit_code == 1
    assert "disagree" in capsys.readouterr().out


def test_help_wraps_at_the_terminal_and_keeps_examples_together():
    def command():
        """Do one thing.

        A sentence that the source
        breaks in two.

        [bold]Examples[/]

            maclaurin one

            maclaurin two \\
                --three
        """

    assert help_of(command).split("\n\n")[1] == "A sentence that the source breaks in two."
    shown = Text.from_markup(help_of(command)).plain
    assert shown.endswith("\n\nExamples\n  maclaurin one\n  maclaurin two \\\n      --three")
