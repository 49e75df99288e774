"""`maclaurin inspect` as a user types it, and its page in a real browser."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.e2e import command
from tests.e2e.in_process import maclaurin

TEXT = Path(__file__).parents[1] / "data" / "moby-dick-excerpt.txt"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
QUICK = ["--tokens", "96", "--context", "48", "--orders", "1,2,4,10", "--windows", "4,16"]


def inspect(*arguments, expect=0, **options):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return command.run("inspect", *arguments, env=env, expect=expect, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama with grouped heads, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written(llama, tmp_path_factory):
    """The folder of an inspection and what the command said."""
    out = tmp_path_factory.mktemp("inspected") / "out"
    said = inspect(llama, "--text", TEXT, *QUICK, "--out", out)
    return out, said


# ------------------------------------------------------------------------------------ the command


def test_it_says_what_it_found_and_where_the_page_is(written):
    out, said = written
    lines = said.stdout.splitlines()
    assert lines[-1] == str(out / "index.html")
    assert any(line.startswith("Of 16 heads, within 1 % of softmax") for line in lines)
    assert any(line.startswith("Perplexity with the model's own attention: ") for line in lines)
    assert any(line.startswith("Layers to keep exact in a conversion") for line in lines)
    names = sorted(file.name for file in out.iterdir())
    assert names == ["heads.svg", "index.html", "inspection.json", "orders.svg"]


def test_it_says_at_once_what_it_waits_for(written, llama):
    """Before the model is loaded, which can take half a minute."""
    assert written[1].stderr.startswith(f"loading {llama} …\n")


def test_the_json_holds_everything(written):
    data = json.loads((written[0] / "inspection.json").read_text())
    assert data["schema"] == 1
    assert data["made"]["versions"]["maclaurin"]
    assert len(data["model"]["fingerprint"]) == 64
    assert len(data["heads"]) == 16
    assert len(data["heads"][0]["error_about_mean"]) == 11
    assert len(data["perplexity"]) == 1 + 2 * 4 + 2 * 4
    assert data["text"]["tokens"] == 96
    assert data["text"]["contexts"] == 2


def test_a_killed_inspection_continues_to_the_same_numbers(llama, written, tmp_path, monkeypatch, capfd):
    out = tmp_path / "out"
    arguments = ["inspect", llama, "--text", TEXT, *QUICK, "--out", out]
    process = command.start(*arguments)
    deadline = time.monotonic() + 200
    while not (out / "unfinished" / "losses.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "inspection.json").exists(), "it was to be killed before its end"
    maclaurin(monkeypatch, capfd, *arguments)
    first, second = (json.loads((folder / "inspection.json").read_text()) for folder in (written[0], out))
    assert first["heads"] == second["heads"]
    assert first["perplexity"] == second["perplexity"]
    assert not (out / "unfinished").exists()


def small_run(folder, attention="exp/l2"):
    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

    config = MaclaurinConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        attention=attention,
    )  # fmt: skip
    torch.manual_seed(len(str(folder)))
    MaclaurinForCausalLM(config).save_pretrained(folder / "model")
    return folder


FEW = ["--text", TEXT, "--tokens", "16", "--orders", "2", "--windows", "none"]


def test_a_run_of_ours_with_the_tokenizer_it_was_trained_with(tmp_path, monkeypatch, capfd):
    run, out = small_run(tmp_path / "run"), tmp_path / "out"
    few = ["inspect", run, *FEW, "--windows", "4", "--out", out]
    assert "--tokenizer" in maclaurin(monkeypatch, capfd, *few, expect=2).stderr
    assert not out.exists()
    (run / "config.json").write_text(json.dumps({"tokenizer": "bytes", "data": "stdlib"}))
    maclaurin(monkeypatch, capfd, *few)
    data = json.loads((out / "inspection.json").read_text())
    assert [row["attention"] for row in data["perplexity"]][:2] == ["exp/l2", "taylor(2)/l2"]


def test_json_is_all_that_is_printed(tmp_path, monkeypatch, capfd):
    run = small_run(tmp_path / "run")
    said = maclaurin(
        monkeypatch, capfd, "inspect", run, *FEW, "--tokenizer", "bytes", "--json", "--out", tmp_path / "out"
    )
    data = json.loads(said.stdout)
    assert set(data) == {"findings", "sharp_heads", "layers_by_error", "perplexity", "page"}
    assert data["layers_by_error"] == [0]
    assert "loading" not in said.stderr


def test_another_models_inspection_is_not_overwritten(tmp_path, monkeypatch, capfd):
    first, second, out = small_run(tmp_path / "one"), small_run(tmp_path / "other"), tmp_path / "out"
    few = [*FEW, "--tokenizer", "bytes", "--out", out]
    maclaurin(monkeypatch, capfd, "inspect", first, *few)
    before = (out / "inspection.json").read_bytes()
    error = maclaurin(monkeypatch, capfd, "inspect", second, *few, expect=2).stderr
    assert str(first) in error
    assert str(second) in error
    assert "--out" in error
    assert (out / "inspection.json").read_bytes() == before
    maclaurin(monkeypatch, capfd, "inspect", first, *few, "--sinks", "2")  # its own may be made again


def test_an_unwritable_folder_is_an_error_before_the_model_is_loaded(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("maclaurin.models.model_folder.load_model", None)
    for out in ("/proc/nothing/here", TEXT / "folder"):
        error = maclaurin(monkeypatch, capfd, "inspect", tmp_path, *FEW, "--out", out, expect=2).stderr
        assert f"--out: {out} cannot be written" in " ".join(error.split())


def test_a_model_that_does_not_exist_is_named_with_what_is_close(tmp_path, monkeypatch, capfd):
    """Without asking a hub: `runs` is a folder here."""
    small_run(tmp_path / "runs" / "softmax")
    monkeypatch.chdir(tmp_path)
    start = time.monotonic()
    error = maclaurin(monkeypatch, capfd, "inspect", "runs/softmaxx", *FEW, expect=2).stderr
    assert "there is no folder runs/softmaxx. Did you mean runs/softmax?" in error
    assert time.monotonic() - start < 5
    assert not (tmp_path / "inspections").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--text": "nothing.txt"}, "there is no file nothing.txt"),
        ({"--text": "short.txt"}, "has 1 tokens"),
        ({"--text": "latin1.txt"}, "latin1.txt is not UTF-8 text (byte 3"),
        ({"--orders": "1,zwei"}, "'zwei' in '1,zwei' is not a whole number"),
        ({"--windows": "0"}, "at least 1 token"),
        ({"--tokenizer": "no/such/folder"}, "cannot be opened"),
        ({"--device": "cuda:77"}, "cannot be used here"),
        ({"--weights": "int4"}, "float32, bfloat16 or float16"),
        ({"--out": "short.txt"}, "is a file"),
        ({"MODEL": "./nowhere"}, "there is no folder ./nowhere"),
        ({"MODEL": "gpt"}, "model of type 'gpt2'"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(llama, tmp_path, monkeypatch, capfd, changed, words):
    from transformers import GPT2Config, GPT2LMHeadModel

    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin1") * 20)
    if changed.get("MODEL") == "gpt":
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=300)).save_pretrained(
            tmp_path / "gpt"
        )
    before = sorted(tmp_path.rglob("*"))
    options = {"--text": str(TEXT), "--out": "out", **changed}
    model = options.pop("MODEL", llama)
    monkeypatch.chdir(tmp_path)
    pairs = [word for pair in options.items() for word in pair]
    error = maclaurin(monkeypatch, capfd, "inspect", model, *pairs, expect=2).stderr
    assert words in error
    assert error.count("error:") == 1
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------------------ the browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        found = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=arguments)
        yield found
        found.close()


@pytest.fixture
def visit(browser, written):
    """Opens the page at a width; fails on console errors or network requests."""
    contexts, complaints, requests = [], [], []
    address = (written[0] / "index.html").as_uri()

    def open_page(width=1280, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert set(requests) == {address}


def drawn(page):
    """Wait until all charts are there."""
    page.wait_for_selector("html[data-drawn=true]", state="attached")
    return page


def cell(page, layer, head):
    return page.locator(f"#heads-figure path[aria-label^='head: {head}; layer: {layer};']")


def chosen(page):
    """The title above the measures of one head."""
    return page.locator("#heads-figure text", has_text=re.compile(r"^layer \d+, head \d+$"))


@needs_browser
def test_a_click_on_a_square_shows_the_head(visit):
    page = drawn(visit())
    assert page.locator("#heads-figure path[aria-label^='head: ']").count() == 16
    cell(page, 2, 3).click()
    assert chosen(page).inner_html() == "layer 2, head 3"
    texts = page.locator("#heads-figure text").all_text_contents()
    assert "sink mass" in texts
    assert any(re.fullmatch(r"[\d.]+ %", text) for text in texts)


@needs_browser
def test_sliders_choose_a_head_from_the_keyboard(visit):
    page = drawn(visit())
    cell(page, 2, 1).click()
    slider = page.locator("#heads-figure input[name='chosen_layer']")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(200)
    assert chosen(page).inner_html() == "layer 1, head 1"


@needs_browser
def test_the_colours_show_the_measure_chosen(visit):
    page = drawn(visit())
    page.get_by_label("Colours show").select_option(label="sink mass")
    page.wait_for_timeout(200)
    colours = {cell(page, 3, head).get_attribute("fill") for head in range(4)}
    assert len(colours) > 1
    cell(page, 3, 0).hover()
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for(state="visible")
    assert re.search(r"value\s*[\d.]+ %", tip.inner_text())


@needs_browser
def test_curves_and_tables_are_there(visit):
    page = drawn(visit())
    assert "about the row mean" in page.locator("#orders-figure").inner_text()
    windows = page.locator("#windows table")
    assert windows.locator("tbody tr").count() == 2
    assert windows.locator("thead th").all_inner_texts() == [
        "window",
        "no tail",
        "order 1",
        "order 2",
        "order 4",
    ]
    page.locator("summary", has_text="Every head as a table").click()
    rows = page.locator("#heads tbody tr")
    assert rows.count() == 16
    page.locator("#heads thead button", has_text="sink mass").click()
    masses = [float(rows.nth(n).locator("td").nth(8).get_attribute("data-value")) for n in range(16)]
    assert masses == sorted(masses)


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_body_never_scrolls_sideways(visit, width, scheme):
    page = drawn(visit(width, scheme))
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 > 128
    assert bright == (scheme == "light")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != colour
    drawn(page)


@needs_browser
def test_it_is_readable_without_scripts(browser, written):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((written[0] / "index.html").as_uri())
    assert "What was found" in page.inner_text("main")
    assert page.locator("noscript svg").count() == 2
    context.close()
