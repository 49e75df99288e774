"""The site: docs/ and pages made from the code, built with Zensical, with the explorer as front page.

    python docs/build_site.py            writes build/site
    python docs/build_site.py --serve    and shows it at http://127.0.0.1:8000

1. docs/ is copied to build/sources; catalogue, API, commands, laws and decisions are written next to it.
2. Formulas between $ or $$ become MathML, which browsers draw themselves: nothing is loaded from elsewhere.
3. Files outside docs/ that a page links to are copied along, so that no link leaves the site.
4. Zensical builds; the reports of the studies are added; the explorer takes the place of the front page.
5. Every link is followed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import html
import http.server
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from build_reports import build_reports

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HEAD_SIZES = (16, 32, 64, 128)


def main() -> None:
    """Build, check, and serve if asked to."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--serve", action="store_true", help="show the site when it is built")
    options.add_argument("--port", type=int, default=8000)
    chosen = options.parse_args()
    site = build(ROOT / "build")
    pages = len(list(site.rglob("*.html")))
    if dead := list(dead_links(site)):
        sys.exit("\n".join(["dead links:", *dead]))
    print(f"{site.relative_to(ROOT)}: {pages} pages, no dead link")
    if chosen.serve:
        serve(site, chosen.port)


def build(folder: Path) -> Path:
    """Sources, Zensical, formulas, explorer; returns the folder of the site."""
    from maclaurin.explorer.explorer_page import explorer_page

    sources, site = folder / "sources", folder / "site"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(DOCS, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name, text in generated_pages():
        page = sources / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, "utf-8")
    formulas = Formulas()
    for page in sorted(sources.rglob("*.md")):
        name = page.relative_to(sources)
        text = linked_reports(page.read_text("utf-8"))
        text = linked_laws(name, linked_files(name, text, sources))
        page.write_text(formulas.taken_out(text), "utf-8")
    zensical(folder)
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        if formulas.mark in text:
            page.write_text(formulas.put_back(text), "utf-8")
    for index in site.glob("search*.json"):
        index.write_text(formulas.as_text(index.read_text("utf-8")), "utf-8")
    for report in build_reports():
        shutil.copytree(report, site / "reports" / report.name, dirs_exist_ok=True)
    (site / "index.html").write_text(explorer_page(docs=""), "utf-8")
    return site


def zensical(folder: Path) -> None:
    """Run Zensical with mkdocs.yml for this folder; its output is printed only if it fails."""
    if importlib.util.find_spec("zensical") is None:
        sys.exit("the site needs zensical: pip install -c constraints.txt '.[site]', or run make site.")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    settings = settings.replace("_dir: build/", "_dir: ")  # from the folder where it is run
    settings = settings.replace("paths: [src]", f"paths: [{ROOT / 'src'}]")
    (folder / "mkdocs.yml").write_text(settings, "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--config-file", "mkdocs.yml"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode or "Traceback" in result.stderr:
        sys.exit(f"zensical failed:\n{result.stdout}\n{result.stderr}")


def serve(site: Path, port: int) -> None:
    """The built site on this machine, until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{port}/  (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


# ------------------------------------------------------------------------------------------ formulas


class Formulas:
    """Removes LaTeX before Markdown is parsed, and inserts it as MathML afterwards."""

    mark = "xFORMULAx"
    _written = re.compile(
        r"\$\$(?P<display>.+?)\$\$|(?<![\w$\\])\$(?P<inline>[^$\n]+?)\$(?![\w$])", re.DOTALL
    )
    _code = re.compile(r"```.*?```|~~~.*?~~~|`[^`\n]+`", re.DOTALL)

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def taken_out(self, text: str) -> str:
        """Replace formulas by marks; code is unchanged."""
        pieces, at = [], 0
        for code in self._code.finditer(text):
            pieces += [self._written.sub(self._take, text[at : code.start()]), code[0]]
            at = code.end()
        return "".join([*pieces, self._written.sub(self._take, text[at:])])

    def put_back(self, page: str) -> str:
        """The page with marks replaced by MathML."""
        return re.sub(rf"{self.mark}(\d+)x", lambda m: self._mathml(int(m[1])), page)

    def as_text(self, index: str) -> str:
        """A search index with marks replaced by LaTeX."""
        return re.sub(rf"{self.mark}(\d+)x", lambda m: json.dumps(self.found[int(m[1])][0])[1:-1], index)

    def _take(self, match: re.Match[str]) -> str:
        kind = "block" if match["display"] else "inline"
        self.found.append(((match["display"] or match["inline"]).strip(), kind))
        return f"{self.mark}{len(self.found) - 1}x"

    def _mathml(self, number: int) -> str:
        from latex2mathml.converter import convert

        latex, kind = self.found[number]
        mathml = convert(latex, display=kind)
        return f'<span class="formula">{mathml}</span>' if kind == "block" else mathml


# ------------------------------------------------------------------------------------------ links


def linked_files(page: Path, text: str, sources: Path) -> str:
    """Copy files outside docs/ that the page links to, and point the links to the copies."""

    def moved(match: re.Match[str]) -> str:
        target = ((DOCS / page).parent / match[1]).resolve()
        if not target.is_relative_to(ROOT) or target.is_relative_to(DOCS) or not target.is_file():
            return match[0]
        copy = Path("files") / target.relative_to(ROOT)
        copy = copy.with_name(f"{copy.name}.txt") if copy.suffix in (".py", ".md") else copy
        (sources / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, sources / copy)
        return f"]({to_top(page)}{copy})"

    return re.sub(r"\]\((\.\./[^)#\s]+)\)", moved, text)


def linked_reports(text: str) -> str:
    """A link to the page of a report before every link to its tables; only the site has the pages."""
    return re.sub(r"\[tables\]\((reports/\w+)/tables\.md\)", r"[page](\1/index.html), \g<0>", text)


def linked_laws(page: Path, text: str) -> str:
    """Link the names of laws to their text."""
    if page == Path("reference/laws.md"):
        return text

    def linked(match: re.Match[str]) -> str:
        known = match[1] in law_names()
        return f"[`{match[1]}`]({to_top(page)}reference/laws.md#{match[1]})" if known else match[0]

    return re.sub(r"(?<!\[)`(test_[a-z0-9_]+)`", linked, text)


def to_top(page: Path) -> str:
    """The relative path from a page to the top of the sources."""
    return "../" * len(page.parent.parts)


@functools.cache
def law_names() -> frozenset[str]:
    """Every law that has a heading on the page of laws."""
    return frozenset(re.findall(r"\{#(test_\w+)\}", laws_page()))


class _Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect href, src, id and name."""
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value is not None:
                self.links.append(value)


def dead_links(site: Path) -> Iterator[str]:
    """Links of the pages to missing files or anchors; links to other sites are not checked."""
    pages: dict[Path, _Links] = {}
    for page in sorted(site.rglob("*.html")):
        pages[page] = _Links()
        pages[page].feed(page.read_text("utf-8"))
    for page, found in pages.items():
        for link in dict.fromkeys(found.links):
            target = urlsplit(link)
            if target.scheme or target.netloc or (not target.path and not target.fragment):
                continue
            if page == site / "404.html":
                continue
            path = page if not target.path else (page.parent / unquote(target.path)).resolve()
            path = path / "index.html" if path.is_dir() else path
            anchor = unquote(target.fragment)
            if not path.is_file():
                yield f"{page.relative_to(site)}: {link}"
            elif (
                anchor and path in pages and path != site / "index.html" and anchor not in pages[path].anchors
            ):
                yield f"{page.relative_to(site)}: {link} (no such heading)"


# -------------------------------------------------------------------------------- pages from the code


def generated_pages() -> Iterator[tuple[str, str]]:
    """(name, Markdown) of every page that is made from the code."""
    yield "site.css", _STYLE
    yield "catalogue.md", catalogue_page()
    yield "reference/commands.md", commands_page()
    yield "reference/laws.md", laws_page()
    yield "reference/api.md", _API
    yield "reference/parts.md", _PARTS
    yield "adr/index.md", decisions_page()
    yield "changelog.md", (ROOT / "CHANGELOG.md").read_text("utf-8")


def catalogue_page() -> str:
    """One section per published variant: formula, recurrent form, state, source, notation."""
    from maclaurin import catalogue

    lines = [
        "# The catalogue",
        "",
        "Every published variant as data, made from `maclaurin.catalogue`. x = q·k/√d after rotary",
        f"embedding, t = number of visible keys. {len(catalogue)} entries; each name and alias works where",
        "a notation does.",
        "",
        "| name | notation | source |",
        "|---|---|---|",
        *(f"| [{e.name}](#{_anchor(e.name)}) | `{e.notation}` | {e.source} |" for e in catalogue),
    ]
    for entry in catalogue:
        spec = entry.spec
        lines += [
            "",
            f"## {entry.name} {{#{_anchor(entry.name)}}}",
            "",
            f"`{entry.notation}` · {entry.source}",
            "",
        ]
        if entry.aliases:
            lines += [f"Also called {', '.join(f'`{alias}`' for alias in entry.aliases)}.", ""]
        lines += _lines(spec.latex)
        lines += ["**As a recurrent network**", "", "```text", spec.recurrence, "```", ""]
        if spec.has_finite_state:
            numbers = [spec.state_size(d, d) for d in HEAD_SIZES]
            sizes = [f"{number:,}" if number < 10**12 else f"{number:.1e}" for number in numbers]
            lines += [
                "| head size | " + " | ".join(map(str, HEAD_SIZES)) + " |",
                "|---|" + "---:|" * len(HEAD_SIZES),
                "| numbers in the state, per head | " + " | ".join(sizes) + " |",
                "",
            ]
        notes = [f"Gates: {', '.join(spec.gates)}." if spec.gates else ""]
        if spec.cancelled_parts:
            notes.append(
                f"The norm divides out {', '.join(f'`{p}`' for p in spec.cancelled_parts)}: "
                f"equal to `{spec.simplified()}`."
            )
        notes.append(f"Note: {entry.note}." if entry.note else "")
        lines.append(" ".join(note for note in notes if note))
    return "\n".join(lines) + "\n"


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9-]", "-", name.lower())


def _lines(latex: str) -> list[str]:
    """A formula and its conditions, each on a line of its own."""
    return [line for formula in latex.split(r",\quad ") for line in (f"$${formula}$$", "")]


def commands_page() -> str:
    """Every command with its arguments and options, from the commands themselves."""
    import typer

    from maclaurin.cli.main import app

    lines = [
        "# Commands",
        "",
        "Made from the commands themselves; `maclaurin COMMAND --help` prints the same.",
        "",
    ]
    for name, command in _commands(typer.main.get_command(app), "maclaurin"):
        lines += [f"## {name}", ""]
        for paragraph in _help(command).split("\n\n"):
            heading, *examples = paragraph.splitlines()
            lines += [heading, ""]
            if examples:
                lines += ["```text", *(line.removeprefix("  ") for line in examples), "```", ""]
        rows = [row for parameter in command.params if (row := _option(parameter))]
        if rows:
            lines += ["| option | | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"


def _commands(command: object, name: str) -> Iterator[tuple[str, object]]:
    """The command and those below it."""
    if name != "maclaurin":
        yield name, command
    for below, child in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(child, f"{name} {below}")


def _help(command: object) -> str:
    text = inspect.cleandoc(command.help or "")
    return _plain(text.replace("[bold]Examples[/]", "Examples:"))


def _plain(text: str) -> str:
    """Help text without terminal markup."""
    text = re.sub(r"(?<!\\)\[/?(?:dim|bold|italic|cyan)?\]", "", text)
    return text.replace("\\[", "[").replace("\b", "")


def _option(parameter: object) -> str:
    if parameter.name in ("help", "install_completion", "show_completion"):
        return ""
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default in (None, (), "") or callable(default) else f"`{default}`"
    words = _plain(getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
    return f"| {names} | {html.escape(words, quote=False)} | {shown} |"


def laws_page() -> str:
    """Every law with its text: what is tested for every spec, and the identities."""
    lines = [
        "# Laws",
        "",
        "What must hold for every spec, and the identities of the algebra; `make test` runs them in float64.",
        "The first group is a class that every new part inherits: `maclaurin.testing.SpecLaws`.",
        "",
    ]
    groups = (
        ("For every spec", ROOT / "src/maclaurin/testing/laws.py"),
        ("Identities", ROOT / "tests/laws/test_identities.py"),
    )
    for title, path in groups:
        lines += [f"## {title}", "", f"`{path.relative_to(ROOT)}`", ""]
        module = path.read_text("utf-8")
        for node in ast.walk(ast.parse(module)):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = [line[node.col_offset :] for line in module.splitlines()[first - 1 : node.end_lineno]]
            said = ast.get_docstring(node)
            lines += [f"### {node.name.removeprefix('test_').replace('_', ' ')} {{#{node.name}}}", ""]
            lines += [said, ""] if said else []
            lines += ["```python", *source, "```", ""]
    return "\n".join(lines) + "\n"


def decisions_page() -> str:
    """The decision records, oldest first."""
    rows = []
    for page in sorted((DOCS / "adr").glob("[0-9]*.md")):
        title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
        rows.append(f"- [{title}]({page.name})")
    return "# Decisions\n\nShort records of what a reader would question.\n\n" + "\n".join(rows) + "\n"


_STYLE = """.formula { display: block; overflow: auto hidden; padding: 0.4em 0; font-size: 1.08em; }
"""

_API = """# Python

The public names of `maclaurin`, made from their docstrings.

::: maclaurin.programs.dispatch.attention
::: maclaurin.programs.dispatch.plan
::: maclaurin.spec.notation.parse
::: maclaurin.spec.catalogue.resolve
::: maclaurin.spec.attention_spec.AttentionSpec
::: maclaurin.forms.state.State
::: maclaurin.forms.certificate.Certificate
::: maclaurin.programs.plan.Plan
::: maclaurin.conversion.convert_model.convert
::: maclaurin.conversion.convert_model.ConversionResult
::: maclaurin.conversion.recover.Recovery
::: maclaurin.conversion.press.press
::: maclaurin.programs.series.SeriesNotice
::: maclaurin.spec.catalogue.Catalogue
::: maclaurin.spec.catalogue.Entry
::: maclaurin.errors
    options:
      show_root_heading: false
      show_root_toc_entry: false
      show_docstring_description: false
"""

_PARTS = """# Parts

The interface of every part, and the parts of the library. [How to write one](../extending.md).

::: maclaurin.spec.part.Part
::: maclaurin.spec.kernel
::: maclaurin.spec.feature_map
::: maclaurin.spec.window
::: maclaurin.spec.gate
::: maclaurin.spec.denominator
::: maclaurin.spec.norm
"""


if __name__ == "__main__":
    main()
