"""The explorer in a real browser, opened from disk: each control changes what it should."""

import json
import re
import shutil

import pytest

from maclaurin.errors import MaclaurinError
from maclaurin.explorer import explorer_page as pages
from maclaurin.explorer.explorer_page import explorer_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


# ------------------------------------------------------------------------------------ the file


def test_it_is_one_small_file_that_loads_nothing():
    html = explorer_page()
    assert len(html.encode()) < 1_000_000
    assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
    assert "/*" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"^\s*(?:import|export) ", html, flags=re.MULTILINE)


def test_it_says_which_model_the_scores_are_of():
    assert "SmolLM2-135M-Instruct (Q4_1)" in explorer_page()


def test_laws_and_code_that_it_shows_exist():
    data = json.loads(re.search(r'id="data">(.*?)</script>', explorer_page(), flags=re.DOTALL)[1])
    shown = [source for sources in data["sources"].values() for source in sources]
    assert len(shown) >= 9
    assert all(source["name"] in source["text"] for source in shown)


def test_two_modules_may_not_define_the_same_name(tmp_path, monkeypatch):
    (tmp_path / "main.js").write_text('import { a } from "./other.js";\nconst b = a;\n')
    (tmp_path / "other.js").write_text("export const a = 1;\nfunction b() {}\n")
    monkeypatch.setattr(pages, "WEB", tmp_path)
    with pytest.raises(MaclaurinError, match=r"b is defined in other\.js and in main\.js"):
        pages.bundled("main.js")


# ------------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer_page(), encoding="utf-8")
    return path


@pytest.fixture
def visit(browser, file):
    """Opens the page; fails on console errors or network requests."""
    contexts, complaints, requests = [], [], []

    def open_page(address="", width=1280, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("request", lambda request: requests.append(request.url.split("#")[0]))
        page.goto(file.as_uri() + address)
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith(("data:", "blob:"))} == {file.as_uri()}


def address_of(page):
    """The address as the page has it; `page.url` may still be the one before."""
    return page.evaluate("location.href")


def text(page, place):
    return page.locator(place).inner_text()


def drawn(page, place):
    return page.locator(f"{place} svg").evaluate("node => node.outerHTML")


def heights(page):
    return page.locator("#output rect title").all_text_contents()


def choose(page, name, value):
    page.locator(f'input[name="{name}"][value="{value}"]').check(force=True)


def slide(page, place, value):
    page.locator(place).evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input', {bubbles: true})); }",
        value,
    )


@needs_browser
def test_the_row_follows_head_token_kernel_and_order(visit):
    page = visit()
    seen = {place: drawn(page, place) for place in ("#ladder", "#weights", "#terms", "#errors")}

    def all_changed(*places):
        now = {place: drawn(page, place) for place in places}
        assert [place for place in places if now[place] == seen[place]] == []
        seen.update(now)

    page.locator("#heads button").nth(0).click()
    all_changed("#ladder", "#weights", "#terms", "#errors")
    page.locator("#tokens button").nth(20).click()
    all_changed("#ladder", "#weights", "#terms", "#errors")
    choose(page, "kernel", "zero")
    all_changed("#ladder", "#weights", "#terms", "#errors")
    slide(page, "#order", 2)
    all_changed("#weights", "#terms", "#errors")
    assert "Order 2 about zero." in text(page, "#row-says")
    slide(page, "#order", 3)
    assert "is odd" in text(page, "#row-says")
    page.locator("#ladder .rung").nth(4).click(position={"x": 8, "y": 8})
    assert "Order 6" in text(page, "#row-says")
    choose(page, "kernel", "exp")
    assert page.locator("#order").is_disabled()
    assert "exp, exactly" in text(page, "#row-says")
    assert "SmolLM2-135M-Instruct (Q4_1)" in text(page, "#model")


@needs_browser
def test_the_picture_at_the_top_adds_up(visit):
    page = visit()
    assert page.locator("#sum .summand").count() == 6
    assert page.locator("#sum .summand rect").count() == 6 * 12
    assert "SmolLM2-135M-Instruct (Q4_1)" in text(page, "#sum-says")


@needs_browser
def test_a_higher_order_is_nearer_to_softmax(visit):
    page = visit("#head=2&kernel=mean")
    errors = []
    for order in (2, 8, 16):
        slide(page, "#order", order)
        errors.append(float(re.search(r"off by ([\d.]+) %", text(page, "#row-says"))[1]))
    assert errors[0] > errors[1] > errors[2]


@needs_browser
def test_own_scores(visit):
    page = visit()
    page.locator("#heads button", has_text="my own scores").click()
    before = drawn(page, "#weights")
    page.locator("#sliders input").nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert drawn(page, "#weights") != before
    page.locator("[data-preset=far]").click()
    assert "from the centre −8" in text(page, "#row-says") or "from the centre −7" in text(page, "#row-says")
    page.fill("#words", "red green blue")
    page.keyboard.press("Tab")
    assert page.locator("#sliders .slider").count() == 3
    assert page.locator("#tokens .token").count() == 3


@needs_browser
def test_the_network_steps_and_its_forms_agree(visit):
    page = visit()
    state = page.locator("#orders").evaluate("node => node.innerHTML")
    page.locator("#next").click()
    assert "token 6 of 13" in text(page, "#step-says")
    assert page.locator("#orders").evaluate("node => node.innerHTML") != state
    page.locator("#back").click()
    assert page.locator("#orders").evaluate("node => node.innerHTML") == state
    page.locator("#net-tokens button").nth(9).click()
    assert "token 10 of 13" in text(page, "#step-says")
    slide(page, "#net", 3)
    assert page.locator("#orders .order").count() == 4
    assert text(page, "#net-notation") == "taylor(3)/l2"
    slide(page, "#size", 3)
    assert "10 rows" in text(page, "#orders .order:nth-child(4)")
    choose(page, "about", "mean")
    assert "about=mean" in text(page, "#net-notation")
    for form, words in (("parallel", "all at once"), ("recurrent", "Constant memory"), ("chunked", "Linear")):
        choose(page, "form", form)
        assert words in text(page, "#how")
        assert page.locator("#agreement tr.chosen th").inner_text() == form
    blocks = drawn(page, "#matrix")
    slide(page, "#chunk", 2)
    assert drawn(page, "#matrix") != blocks
    differences = page.locator("[data-difference]").all_inner_texts()[1:]
    assert all(d == "0" or re.fullmatch(r"[\d.]+·10⁻¹[²³⁴⁵⁶⁷]", d) for d in differences), differences
    numbers = text(page, "#agreement")
    page.locator("#draw-again").click()
    assert text(page, "#agreement") != numbers
    assert "state" in text(page, "#memory-says")
    page.locator("#play").click()
    assert text(page, "#play") == "Stop"
    page.locator("#play").click()


@needs_browser
def test_switches_and_notation_say_the_same(visit):
    page = visit()

    def notation():
        return page.input_value("#notation")

    assert notation() == "exp/len*out/l2"
    assert "does nothing" in text(page, "#changes")
    assert "exp/l2" in text(page, "#simpler")
    bars = heights(page)
    slide(page, "#gate-out", 0.9)
    assert heights(page) == bars, "a gate before a norm does nothing"
    choose(page, "part-norm", "none")
    assert notation() == "exp/len*out"
    bars = heights(page)
    slide(page, "#gate-out", 0.2)
    assert heights(page) != bars
    for place, written in (
        ("#part-in", "exp*in/len*out"),
        ("#part-forget", "exp*in*forget/len*out"),
        ("#part-out", "exp*in*forget/len"),
    ):
        page.locator(place).click()
        assert notation() == written
    for gate in ("in", "forget"):
        bars = heights(page)
        slide(page, f"#gate-{gate}", 0.55)
        assert heights(page) != bars
    choose(page, "part-denominator", "running")
    choose(page, "part-norm", "rms")
    page.locator("#part-after").check()
    assert notation() == "exp*in*forget/running/rms*out"
    page.select_option("#part-kernel", "mean")
    page.fill("#part-order", "4")
    choose(page, "part-denominator", "sum")
    page.locator("#part-window").check()
    page.fill("#part-size", "2")
    assert notation() == "taylor(4,about=mean)+window(2,sinks=1)*in*forget/sum/rms*out"
    bars = heights(page)
    page.fill("#part-kept", "3")
    assert notation() == "taylor(4,about=mean)+window(2,sinks=1,kept=3)*in*forget/sum/rms*out"
    assert heights(page) != bars
    assert "when k" in text(page, "#recurrence")
    assert "kB" in text(page, "#state-sizes")


@needs_browser
def test_the_notation_box_takes_names_and_marks_mistakes(visit):
    page = visit()
    page.fill("#notation", "based")
    assert text(page, "#spec-name") == "taylor(2)/sum"
    assert page.locator("#part-kernel").input_value() == "taylor"
    assert "based" in text(page, "#known")
    page.fill("#notation", "taylor(2)/sun")
    problem = page.locator("#notation-problem pre").inner_text().split("\n")
    assert problem == ["taylor(2)/sun", " " * 10 + "^"]
    assert "Did you mean sum?" in text(page, "#notation-problem")
    assert text(page, "#spec-name") == "taylor(2)/sum", "what was there stays"
    page.fill("#notation", "taylor(3)/sum")
    assert "an even order (taylor(2)/sum, taylor(4)/sum)" in text(page, "#notation-problem")
    page.fill("#notation", "power(2)*forget/sum")
    assert text(page, "#notation-problem") == ""


@needs_browser
def test_the_whole_setting_is_in_the_address(visit, browser):
    page = visit()
    page.locator("#heads button").nth(5).click()
    choose(page, "kernel", "zero")
    slide(page, "#order", 12)
    slide(page, "#net", 1)
    choose(page, "form", "parallel")
    page.fill("#notation", "hermite(2)/len")
    page.fill("#sentence", "a rose is a rose")
    page.keyboard.press("Tab")
    address = address_of(page)
    again = visit("#" + address.split("#")[1])
    for place in ("#row-says", "#agreement", "#spec-name", "#formula"):
        assert text(again, place) == text(page, place)
    assert address_of(again) == address
    again.locator("#reset").click()
    assert "#" not in address_of(again)
    again.evaluate("location.hash = 'order=2&kernel=zero'")
    again.wait_for_function("document.getElementById('row-says').innerText.includes('Order 2 about zero')")


@needs_browser
def test_links_to_panels_keep_the_setting(visit):
    page = visit("#order=9&head=1")
    said = text(page, "#row-says")
    page.locator("nav a", has_text="Parts").click()
    page.wait_for_function("!location.hash.includes('parts')")
    page.wait_for_function("scrollY > 1000")
    assert text(page, "#row-says") == said
    assert address_of(page).endswith("#head=1&order=9")
    assert page.locator("#message").is_hidden()
    visit("#network").wait_for_function("scrollY > 500")


@needs_browser
def test_bad_input_says_what_is_possible_and_keeps_what_was_there(visit, tmp_path):
    page = visit("#order=40&colour=red&step=three")
    for words in ("a whole number from 0 to 16", "“colour”, which is not a setting", "“three” is not"):
        assert words in text(page, "#message")
    page.fill("#order-number", "17")
    page.keyboard.press("Tab")
    assert "from 0 to 16" in text(page, "#message")
    assert page.input_value("#order-number") == "6"
    sentence = page.input_value("#sentence")
    page.fill("#sentence", "word " * 30)
    page.keyboard.press("Tab")
    assert "1 to 16 words" in text(page, "#message")
    assert page.input_value("#sentence") == sentence
    tokens = text(page, "#tokens")
    for name, content, words in (
        ("a.json", "not json", "is not JSON"),
        ("b.json", "{}", "not a capture"),
        ("c.json", '{"kind":"maclaurin-capture","version":7,"tokens":[],"heads":[]}', "version 7"),
        ("d.json", '{"kind":"maclaurin-capture","version":1,"tokens":["a","b"],"heads":[{}]}', "damaged"),
    ):
        (tmp_path / name).write_text(content)
        page.set_input_files("#load", tmp_path / name)
        page.wait_for_function(
            "words => document.getElementById('message').innerText.includes(words)", arg=words
        )
        assert text(page, "#tokens") == tokens
    capture = {
        "kind": "maclaurin-capture",
        "version": 1,
        "model": "mine",
        "text": "t",
        "tokens": ["one", " two"],
        "heads": [
            {"layer": 0, "head": 1, "title": "only", "scores": [[0.5], [1.0, 2.0]], "values": [[1], [2]]}
        ],
    }
    (tmp_path / "good.json").write_text(json.dumps(capture))
    page.set_input_files("#load", tmp_path / "good.json")
    page.wait_for_function("document.getElementById('model').innerText.includes('mine')")
    assert page.locator("#message").is_hidden()
    assert page.locator("#tokens .token").all_inner_texts() == ["one", "two"]


@needs_browser
def test_figures_are_saved_and_laws_are_shown(visit):
    page = visit()
    for place in ("ladder", "errors", "matrix", "output"):
        with page.expect_download() as saved:
            page.locator(f"[data-save={place}]").click()
        content = saved.value.path().read_text("utf-8")
        assert saved.value.suggested_filename == f"maclaurin-{place}.svg"
        assert content.startswith("<?xml")
        assert "var(--" not in content
        assert "fill:rgb" in content
    page.locator("#network-sources a", has_text="test_forms_agree").click()
    assert "def test_forms_agree_in_values_and_gradients" in text(page, "#source-text")
    page.keyboard.press("Escape")
    assert page.locator("#source").is_hidden()


@needs_browser
def test_it_is_used_by_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator("#heads button").nth(2).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator('#heads [aria-pressed="true"]').get_attribute("data-head") == "3"
    assert page.evaluate("document.activeElement.getAttribute('data-head')") == "3", "the focus stays"
    page.locator('input[name="kernel"][value="mean"]').focus()
    page.keyboard.press("ArrowLeft")
    assert "about zero" in text(page, "#row-says")
    page.locator("#order").focus()
    page.keyboard.press("ArrowRight")
    assert "Order 7" in text(page, "#row-says")
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    assert "token 6" in text(page, "#step-says")
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select')]"
        ".filter((node) => !(node.innerText || node.ariaLabel || node.labels?.length))"
        ".map((node) => node.outerHTML)"
    )
    assert unnamed == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(visit, scheme):
    page = visit(scheme=scheme)

    def wait_until(bright):
        page.wait_for_function(
            "(bright) => { const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);"
            " return (Number(r) + Number(g) + Number(b) > 384) === bright; }",
            arg=bright,
            timeout=10_000,
        )

    wait_until(bright=scheme == "light")
    page.locator("#theme").click()
    wait_until(bright=scheme == "dark")
    page.reload()
    wait_until(bright=scheme == "dark")  # the choice is remembered


@needs_browser
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(visit, width):
    page = visit("#source=own&net=4&size=3&spec=taylor(2)/sun", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#orders .order").count() == 5
