"""Every command and every piece of Python in README and docs works as written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import command

ROOT = Path(__file__).parents[2]
DOCS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS)]


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python")).replace("class TestCosh", "class _TestCosh")
    source = tmp_path / "page.py"
    source.write_text(code)
    result = command.run_script(source, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def commands(page):
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [line.split("#")[0].strip() for line in lines if line.startswith("maclaurin ")]


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)])
def test_commands_run_one_after_the_other(page, tmp_path):
    env = {"PATH": str(Path(sys.executable).parent), "OMP_NUM_THREADS": "1"}
    for line in commands(page):
        if set(line) & set("|<>&;$*"):
            result = subprocess.run(
                line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
        else:
            result = command.run(*shlex.split(line)[1:], cwd=tmp_path, env=env, expect=None)
        assert result.returncode == 0, line + result.stderr


def test_make_targets_named_in_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {t for page in PAGES for t in re.findall(r"\bmake ([a-z-]+)", "\n".join(code_of(page)))}
    assert {"study", "test"} <= named
    assert [t for t in sorted(named) if f"\n{t}:" not in makefile] == []


def code_of(page):
    """Text set as code: fenced, indented or between backticks."""
    text = (ROOT / page).read_text()
    return re.findall(r"```.*?```|`[^`\n]+`|^ {4}.*$", text, flags=re.DOTALL | re.MULTILINE)


def test_links_between_pages_lead_somewhere():
    targets = [(page, t) for page in PAGES for t in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())]
    local = [(page, target) for page, target in targets if not target.startswith("http")]
    assert len(local) > 5
    assert [(p, t) for p, t in local if not (ROOT / p).parent.joinpath(t).exists()] == []


def test_every_law_named_in_the_derivation_exists():
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (ROOT / "docs/derivation.md").read_text()))
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "src/maclaurin/testing").glob("*.py")]
    defined = {n for p in sources for n in re.findall(r"def (test_[a-z0-9_]+)", p.read_text())}
    assert len(named) > 10
    assert named - defined == set()


#: folder of docs/figures → what writes it
FIGURES_BY = {
    "bench": "-m maclaurin bench --table benchmarks/results/gpu_bench.json --plots",
    "conversion": "benchmarks/draw_conversion.py",
}


@pytest.mark.parametrize("name", FIGURES_BY)
def test_tables_of_figures_are_what_was_measured(name, tmp_path):
    subprocess.run([sys.executable, *FIGURES_BY[name].split(), str(tmp_path)], cwd=ROOT, check=True)
    shown = ROOT / "docs" / "figures" / name
    assert (tmp_path / "table.md").read_text() == (shown / "table.md").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in shown.iterdir()}
