"""The explorer as one page, with modules, styles, scores, catalogue, laws and code inlined.

The modules are plain ES modules. `bundled` joins them in the order of their imports into one script; there
is no build step and nothing to install (docs/adr/0015-the-explorer.md).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import maclaurin
from maclaurin.errors import MaclaurinError
from maclaurin.spec.catalogue import catalogue

WEB = Path(__file__).parent / "web"
PACKAGE = Path(__file__).parents[1]

#: panel → what tests it and what computes it: (file, function or class)
SOURCES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "row": (
        ("tests/laws/test_identities.py", "test_the_truncated_series_is_within_its_certificate"),
        ("tests/laws/test_identities.py", "test_a_constant_added_to_every_key_is_not_seen"),
        ("maclaurin/forms/certificate.py", "weight_error"),
        ("maclaurin/spec/kernel.py", "Taylor"),
    ),
    "network": (
        ("maclaurin/testing/laws.py", "test_forms_agree_in_values_and_gradients"),
        ("maclaurin/testing/laws.py", "test_kernel_is_an_inner_product_of_features"),
        ("maclaurin/forms/recurrent.py", "recurrent_rows"),
        ("maclaurin/forms/features.py", "symmetric_powers"),
    ),
    "parts": (
        ("tests/laws/test_identities.py", "test_a_norm_ignores_every_positive_factor_of_its_row"),
        ("maclaurin/testing/laws.py", "test_simplified_spec_is_equal"),
        ("maclaurin/forms/output.py", "divided"),
        ("maclaurin/spec/notation.py", "parse"),
    ),
}

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([a-z]+\.js)";\n', re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:const|let|function|class) ([A-Za-z_]\w*)", re.MULTILINE)


def explorer_page(captured: Mapping[str, Any] | None = None, docs: str | None = None) -> str:
    """The page as HTML.

    captured   scores to show first (`capture`), before those of SmolLM2, which the page always has
    docs       address of the documentation relative to the page; without it the page has no outside links
    """
    shipped = json.loads((WEB / "smollm2.json").read_text("utf-8"))
    data = {
        "version": maclaurin.__version__,
        "captures": [*([] if captured is None else [captured]), shipped],
        "catalogue": [
            {"name": e.name, "aliases": e.aliases, "notation": e.notation, "source": e.source}
            for e in catalogue
        ],
        "sources": {panel: [_source(*place) for place in places] for panel, places in SOURCES.items()},
        "docs": docs,
    }
    page = (WEB / "page.html").read_text("utf-8")
    page = page.replace("/*style*/", (WEB / "page.css").read_text("utf-8"))
    page = page.replace("/*data*/", json.dumps(data, ensure_ascii=False).replace("</", "<\\/"))
    return page.replace("/*script*/", bundled("main.js").replace("</script", "<\\/script"))


def bundled(first: str) -> str:
    """The module `first` and all it imports as one script, each after the modules it imports."""
    modules: dict[str, str] = {}
    _collect(first, modules)
    owner: dict[str, str] = {}
    for name, text in modules.items():
        for defined in _TOP_LEVEL.findall(text):
            if defined in owner:
                raise MaclaurinError(f"{defined} is defined in {owner[defined]} and in {name}: rename one.")
            owner[defined] = name
    parts = [f"// {name}\n" + re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)
             for name, text in modules.items()]  # fmt: skip
    return "\n".join(parts)


def _collect(name: str, modules: dict[str, str]) -> None:
    text = (WEB / name).read_text("utf-8")
    for needed in _IMPORT.findall(text):
        if needed not in modules:
            _collect(needed, modules)
    modules[name] = text


def _source(file: str, name: str) -> dict[str, str | None]:
    """A law or a function with its source; laws under tests/ are not installed and then have no source."""
    path = PACKAGE.parent / file if file.startswith("maclaurin/") else PACKAGE.parents[1] / file
    shown = f"src/{file}" if file.startswith("maclaurin/") else file
    text = _definition(path.read_text("utf-8"), name) if path.is_file() else None
    return {"name": name, "file": shown, "text": text}


def _definition(module: str, name: str) -> str:
    """The source of the function or class of this name, with decorators, dedented."""
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = module.splitlines()[first - 1 : node.end_lineno]
            return "\n".join(line[node.col_offset :] for line in lines)
    raise MaclaurinError(f"there is no {name} in the module that the explorer shows it from.")
