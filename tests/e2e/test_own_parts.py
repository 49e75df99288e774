"""Parts of one's own on the command line, in saved models and from installed packages."""

import importlib.metadata
import sys

import pytest

from maclaurin import InputError
from maclaurin.extensions import extensions_of, load_entry_points
from maclaurin.spec import parse
from maclaurin.spec.part import _registry
from tests.e2e.command import run
from tests.e2e.in_process import maclaurin

PART = """
import math
from dataclasses import dataclass
from typing import ClassVar
from maclaurin.spec import Polynomial, register, whole

@register
@dataclass(frozen=True, slots=True)
class {cls}(Polynomial):
    notation: ClassVar[str] = "{name}"
    order: int = whole(at_least=0)

    @property
    def series(self):
        return tuple((n % 2 == 0) / math.factorial(n) for n in range(self.order + 1))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a file that defines the part `evenexp`, which no test leaves behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maclaurin.spec.part._registry", {k: dict(v) for k, v in _registry.items()})
    (tmp_path / "even.py").write_text(PART.format(cls="EvenExp", name="evenexp"), encoding="utf-8")
    yield tmp_path
    for name in ("even", "maclaurin_own_even", "maclaurin_own_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "words",
    [
        ("--import", "even.py", "show", "evenexp(4)/sum"),
        ("show", "evenexp(4)/sum", "--import", "even"),
        ("show", "--import=even.py", "evenexp(4)/sum"),
    ],
)
def test_a_file_or_module_is_imported_wherever_the_option_stands(folder, monkeypatch, capfd, words):
    assert "as a recurrent network" in maclaurin(monkeypatch, capfd, *words).stdout


def test_errors_of_the_file_are_one_message_with_the_line(folder, monkeypatch, capfd):
    (folder / "broken.py").write_text("x = 1\nx.no\n", encoding="utf-8")
    told = maclaurin(monkeypatch, capfd, "show", "exp/sum", "--import", "broken.py", expect=2).stderr
    assert "--import broken.py, line 2: AttributeError" in told
    told = maclaurin(monkeypatch, capfd, "show", "exp/sum", "--import", "absent.py", expect=2).stderr
    assert "there is no file absent.py" in told
    told = maclaurin(monkeypatch, capfd, "show", "exp/sum", "--import", expect=2).stderr
    assert "--import needs" in told


def test_a_saved_model_names_the_module_it_needs(folder, monkeypatch, capfd):
    shape = ("--size", "pico", "--data", "mqar:pairs=2,vocab=16,length=12", "--steps", 1, "--batch-size", 2)
    train = ("train", "--attention", "evenexp(2)/sum", *shape, "--eval-rows", 2, "--out", "run")
    maclaurin(monkeypatch, capfd, *train, "--import", "even.py")
    from maclaurin.models import MaclaurinConfig

    config = MaclaurinConfig.from_pretrained("run/model")
    assert config.imports == ["even.py"]
    assert len(config.layer_attention()) == config.num_hidden_layers
    _forget("evenexp")
    with pytest.raises(
        InputError, match=r"defined in even\.py: import that first, or give --import even\.py"
    ):
        MaclaurinConfig.from_pretrained("run/model").layer_attention()


def test_installed_packages_name_their_parts_as_entry_points(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    point = importlib.metadata.EntryPoint("even", "even", "maclaurin.parts")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    load_entry_points.cache_clear()
    load_entry_points()
    load_entry_points.cache_clear()
    (found,) = extensions_of([parse("evenexp(4)/sum")])
    assert found.name == "even"
    assert extensions_of([parse("exp/sum")]) == ()


def _forget(notation):
    from maclaurin.spec import part

    for known in part._registry.values():
        known.pop(notation, None)
    for forget in part._after_registration:
        forget()


def test_a_resumed_run_names_the_file_its_parts_are_in(folder):
    data = ["--data", "mqar:pairs=2,vocab=16,length=12"]
    settings = ["--size", "pico", *data, "--eval-every", "0", "--eval-rows", "4", "--out", "run"]
    run(
        "train", "--import", "even.py", "--attention", "evenexp(2)/sum", "--steps", "2", *settings, cwd=folder
    )
    resumed = run("train", "--resume", "--steps", "3", "--out", "run", cwd=folder, expect=2)
    assert "there is no kernel 'evenexp'" in resumed.stderr
    assert "add --import even.py" in resumed.stderr
