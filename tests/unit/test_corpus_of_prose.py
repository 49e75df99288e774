"""The corpus of prose and documentation (benchmarks/corpus.py): what becomes of its files."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "corpus.py"
spec = importlib.util.spec_from_file_location("benchmarks_corpus", PATH)
corpus = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = corpus  # dataclasses look it up there
spec.loader.exec_module(corpus)


def test_html_becomes_its_text_without_navigation():
    html = (
        b"<html class='sidebar-visible'><nav>Menu</nav><p>One\n two</p>"
        b"<div class='footer'>Foot</div><pre>a\n  b</pre>"
    )
    text = "".join(corpus.from_html(html))
    assert "One two" in text
    assert "a\n  b" in text
    assert "Menu" not in text
    assert "Foot" not in text


def test_paragraphs_are_kept_once():
    paragraphs = corpus.Paragraphs()
    sentence = "A sentence that is long enough to be counted as a paragraph of its own."
    assert paragraphs.clean(f"{sentence}\n\nShort.\n\n1 2 3 4 5 6 7 8") == f"{sentence}\n\nShort.\n"
    assert paragraphs.clean(f"**{sentence}**\n\nShort.") == "Short.\n"


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("usr/share/doc/x/html/intro.html", True),
        ("usr/share/doc/x/html/fr/intro.html", False),
        ("usr/share/doc/x/html/de-DE/intro.html", False),
        ("usr/share/doc/x/changelog.html", False),
        ("usr/share/doc/x/copyright.txt", False),
        ("usr/share/info/x.info.gz", True),
        ("usr/lib/x.so", False),
    ],
)
def test_translations_change_logs_and_licences_are_left_out(path, kept):
    assert (corpus.reader_of(path) is not None) == kept
