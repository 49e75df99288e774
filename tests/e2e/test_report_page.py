"""The page of a report in a real browser, opened from disk, and the command that writes it."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from maclaurin.study.run_record import write_study
from tests.e2e import command
from tests.unit.report import synthetic

COMMAND = Path(sys.executable).with_name("maclaurin")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def report(*arguments, expect=0, **options):
    return command.run("report", *arguments, expect=expect, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The page of a made-up study and what the command said."""
    folder = tmp_path_factory.mktemp("mini")
    write_study(synthetic.realistic(), folder / "records.json")
    said = report(str(folder)).stdout
    return folder / "report" / "index.html", said


# ------------------------------------------------------------------------------------ the command


def test_the_command_says_where_the_page_is_and_what_was_found(written):
    page, said = written
    assert said.splitlines() == [
        "mini: 114 of 117 runs finished; 1 diverged, 1 crashed, 1 without a result yet. Of 8 claims: "
        "4 agree, 1 disagrees, 2 undecided, 1 not run.",
        str(page),
    ]


def test_the_help_has_examples():
    text = re.sub(r"\s+", " ", report("--help", env={"COLUMNS": "100", "PATH": ""}).stdout)
    assert "maclaurin report runs/mini --open" in text


def test_bad_input_is_one_error_and_nothing_is_written(tmp_path):
    for arguments, words in (
        (["nothing"], "there is no folder or file nothing"),
        (["."], "holds no records of a study"),
    ):
        error = report(*arguments, expect=2, cwd=tmp_path).stderr
        assert words in error
        assert "Traceback" not in error
    (tmp_path / "records.json").write_text('{"schema": 7}')
    assert "reads schema 2" in report(".", expect=2, cwd=tmp_path).stderr
    assert [p.name for p in tmp_path.iterdir()] == ["records.json"]


def test_open_shows_the_page(tmp_path, monkeypatch):
    from maclaurin.cli.report import report as command

    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    study = synthetic.study(synthetic.experiment({"a": [1.0, 1.1], "b": [2.0, 2.1]}))
    write_study(study, tmp_path / "records.json")
    command([tmp_path], None, pdf=False, open_page=True)
    assert shown == [(tmp_path / "report" / "index.html").as_uri()]
    assert not list((tmp_path / "report" / "figures").glob("*.pdf"))


# ------------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def visit(browser, written):
    """Opens the page at a width; fails on console errors or network requests."""
    contexts, complaints, requests = [], [], []

    def open_page(width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(written[0].as_uri())
        page.wait_for_selector("html[data-drawn=true]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {written[0].as_uri()}


def curves(page):
    return page.locator("figure.drawn", has_text="Learning curves").first


def lines(figure):
    """Names of the lines that are drawn in full, in the first panel."""
    paths = figure.locator('g.mark-line path[stroke-width="2"]').evaluate_all(
        "nodes => nodes.filter((n) => Number(getComputedStyle(n).opacity) === 1)"
        ".map((n) => n.getAttribute('stroke') + n.getAttribute('stroke-dasharray'))"
    )
    return len(set(paths))


@needs_browser
def test_every_chart_is_drawn(visit):
    page = visit()
    charts = page.locator("figure.drawn")
    assert charts.count() == 17
    for place in range(charts.count()):
        assert charts.nth(place).locator("svg.marks").count() == 1
        assert (
            charts.nth(place).locator("g.mark-line path, g.mark-symbol path, g.mark-rect path").count() >= 1
        )


@needs_browser
def test_a_name_in_the_legend_shows_its_curve_alone(visit):
    figure = curves(visit())
    figure.scroll_into_view_if_needed()
    everything = lines(figure)
    assert everything == 12
    figure.locator("g.role-legend-label text", has_text="rms").first.click()
    assert lines(figure) == 1
    figure.locator("g.role-legend-label text", has_text="elu").first.click(modifiers=["Shift"])
    assert lines(figure) == 2


@needs_browser
def test_pointing_at_a_chart_shows_the_values_there(visit):
    page = visit()
    figure = curves(page)
    figure.scroll_into_view_if_needed()
    point = figure.locator("g.mark-symbol path[aria-hidden], g.mark-symbol path").nth(5)
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    assert re.search(r"validation loss", tip.inner_text())


@needs_browser
def test_a_mean_tells_its_seeds(visit):
    page = visit()
    figure = page.locator("figure.drawn", has_text="Test loss by cell").first
    figure.scroll_into_view_if_needed()
    box = figure.locator("g.mark-symbol path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    assert "seeds" in tip.inner_text()


@needs_browser
def test_headings_sort_and_sort_back(visit):
    page = visit()
    table = page.locator("table.sortable", has_text="exp(clamp=5)").first

    def column():
        return [
            row.split("\n")[0].split("\t")[0].strip() for row in table.locator("tbody th").all_inner_texts()
        ]

    names = column()
    assert names[0] == "softmax"
    head = table.locator("thead th").nth(1)
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    ascending = column()
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert column() == ascending[::-1]
    by_name = table.locator("thead th").nth(0)
    by_name.locator("button").click()
    assert head.get_attribute("aria-sort") == "none"
    assert column() == sorted(column(), key=str.lower)
    difference = table.locator("thead th").nth(2).locator("button")
    for _ in range(2):
        difference.click()
        assert column()[-1] == "softmax", "what has no number stays last"
    assert column()[0] == "gate", "what diverged is worst"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(visit, scheme):
    page = visit(scheme=scheme)

    def brightness():
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    first = brightness()
    assert (first > 128) == (scheme == "light")
    ink = "getComputedStyle(document.querySelector('g.role-axis-label text')).fill"
    before = page.evaluate(ink)
    page.locator("#theme").click()
    assert page.evaluate(ink) != before, "charts follow the theme"
    assert (brightness() > 128) == (scheme == "dark")
    page.reload()
    assert (brightness() > 128) == (scheme == "dark"), "the choice is remembered"
    page.locator("#theme").click()
    assert brightness() == first


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_body_never_scrolls_sideways(visit, width):
    page = visit(width)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figure = curves(page)
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg.marks").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.97, box["y"] + box["height"] * 0.5)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
def test_tables_are_not_clipped_on_a_laptop(visit):
    """Table 2 was cut off at 1280 pixels."""
    page = visit(1280)
    wide = page.evaluate(
        "[...document.querySelectorAll('section:not([id$=provenance]) .tabled .scroll')]"
        ".filter((node) => node.scrollWidth > node.clientWidth + 1).map((node) => node.ariaLabel)"
    )
    assert wide == []


@needs_browser
def test_it_prints(visit, tmp_path):
    page = visit(scheme="dark")
    file = tmp_path / "page.pdf"
    page.pdf(path=str(file), format="A4")
    assert file.read_bytes().startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()


@needs_browser
def test_it_is_readable_without_scripts(browser, written):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(written[0].as_uri())
    text = page.inner_text("main")
    assert "What was found" in text
    images = page.locator("noscript img")
    assert images.count() == 17
    assert images.evaluate_all("nodes => nodes.every((node) => node.naturalWidth > 0)")
    context.close()
