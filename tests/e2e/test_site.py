"""The site as `make site` builds it: complete, without a dead link, read in a real browser."""

import functools
import http.server
import importlib.util
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="no zensical here: pip install 'maclaurin[site]'"
)


@pytest.fixture(scope="module")
def builder():
    name = "build_site"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(builder, tmp_path_factory):
    return builder.build(tmp_path_factory.mktemp("site"))


def page(site, name):
    return (site / name / "index.html").read_text("utf-8")


def test_no_link_is_dead(builder, site):
    assert len(list(site.rglob("*.html"))) > 40
    assert list(builder.dead_links(site)) == []


def test_a_dead_link_is_found(builder, tmp_path):
    (tmp_path / "index.html").write_text('<a href="a/">a</a>')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text(
        '<h2 id="here"></h2><a href="#here"></a><a href="../b/"></a><a href="#there"></a><a href="https://x.y"></a>'
    )
    assert list(builder.dead_links(tmp_path)) == [
        "a/index.html: ../b/",
        "a/index.html: #there (no such heading)",
    ]


def test_every_page_of_docs_is_in_the_navigation(site):
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")]
    assert [p.name for p in pages if str(p.relative_to(ROOT / "docs")) not in listed] == []


def test_the_front_page_is_the_explorer(site):
    text = (site / "index.html").read_text("utf-8")
    assert "Softmax attention is a sum of recurrent networks" in text
    assert '"docs": ""' in text


def test_the_catalogue_has_every_variant(site):
    from maclaurin import catalogue

    text = page(site, "catalogue")
    assert [e.name for e in catalogue if f">{e.name}" not in text] == []
    assert text.count("<math") >= 2 * len(catalogue), "a formula, and what the score in it is"
    for alias in ("softmax_divS_gate", "gated_softmax_no_gate_L2norm_nodivS_noclamp"):
        assert alias in text


def test_references_have_every_command_name_and_law(site):
    import maclaurin

    commands = page(site, "reference/commands")
    golden = (ROOT / "tests" / "golden").glob("help_*.txt")
    names = [p.stem.removeprefix("help_").replace("_", " ") for p in golden]
    assert [n for n in names if n != "maclaurin" and f"maclaurin {n}<" not in commands] == []
    assert "--sample-tokens" in commands
    api = page(site, "reference/api")
    assert [n for n in maclaurin.__all__ if n not in api] == []
    assert "test_forms_agree_in_values_and_gradients" in page(site, "reference/laws")
    parts = page(site, "reference/parts")
    assert [
        n for n in ("Taylor", "Elu1", "SlidingWindow", "ForgetGate", "RowSum", "RMS") if n not in parts
    ] == []


def test_formulas_are_typeset(site):
    assert page(site, "derivation").count("<math") > 15
    for file in site.rglob("*.html"):
        assert "xFORMULAx" not in file.read_text("utf-8"), file
    assert "xFORMULAx" not in (site / "search.json").read_text("utf-8")


@needs_browser
def test_it_is_read_and_searched_in_a_browser(site):
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}/"
    complaints, elsewhere = [], []
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=arguments)
        for width, scheme in ((390, "dark"), (1280, "light")):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab = context.new_page()
            tab.on("console", lambda message: complaints.append(message.text))
            tab.on("pageerror", lambda problem: complaints.append(str(problem)))
            tab.on(
                "request",
                lambda r: elsewhere.append(r.url) if not r.url.startswith((home, "data:", "blob:")) else 0,
            )
            for name in ("", "start/", "derivation/", "catalogue/", "reference/commands/"):
                tab.goto(home + name)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
            colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
            assert (brightness > 128) == (scheme == "light")
        tab.goto(home + "start/")
        box = tab.get_by_role("combobox", name="Search")
        for _ in range(40):  # until the page's script listens
            tab.keyboard.press("Control+k")
            tab.wait_for_timeout(250)
            if box.is_visible():
                break
        box.fill("forget gate")
        found = tab.get_by_role("option")
        found.first.wait_for()
        assert found.count() > 5
        browser.close()
    server.shutdown()
    assert complaints == []
    assert elsewhere == []
