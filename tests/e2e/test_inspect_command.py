"""`maclaurin inspect` as a user types it, and its page in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

COMMAND = Path(sys.executable).with_name("maclaurin")
TEXT = Path(__file__).parents[1] / "data" / "moby-dick-excerpt.txt"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
QUICK = ["--tokens", "96", "--context", "48", "--orders", "1,2,4,10", "--windows", "4,16"]


def inspect(*arguments, expect=0, **options):
    result = subprocess.run(
        [COMMAND, "inspect", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        **options,
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


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
    assert any(line.startswith("Perplexity as it came: ") for line in lines)
    assert any(line.startswith("To keep exact in a conversion") for line in lines)
    assert re.search(r"heads, context 1, layer 1: \d+ %, \d+ s left", said.stderr)
    assert sorted(file.name for file in out.iterdir()) == ["index.html", "inspection.json"]


def test_the_json_holds_everything(written):
    data = json.loads((written[0] / "inspection.json").read_text())
    assert data["schema"] == 1
    assert data["made"]["versions"]["maclaurin"]
    assert len(data["heads"]) == 16
    assert len(data["heads"][0]["error_about_mean"]) == 11
    assert len(data["perplexity"]) == 1 + 2 * 4 + 2 * 4
    assert data["text"]["tokens"] == 96
    assert data["text"]["contexts"] == 2


def test_json_is_all_that_is_printed(llama, tmp_path):
    said = inspect(llama, "--text", TEXT, "--tokens", "20", "--orders", "2", "--windows", "none", "--json",
                   "--out", tmp_path / "out")  # fmt: skip
    data = json.loads(said.stdout)
    assert set(data) == {"findings", "sharp_heads", "layers_by_error", "perplexity", "page"}
    assert sorted(data["layers_by_error"]) == [0, 1, 2, 3]
    assert "%" not in said.stderr


def test_a_killed_inspection_goes_on_to_the_same_numbers(llama, written, tmp_path):
    out = tmp_path / "out"
    arguments = [COMMAND, "inspect", llama, "--text", TEXT, *QUICK, "--out", out]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "unfinished" / "losses.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "inspection.json").exists(), "it was to be killed before its end"
    again = inspect(*arguments[2:])
    assert "going on where the last inspection stopped" in again.stderr
    first, second = (json.loads((folder / "inspection.json").read_text()) for folder in (written[0], out))
    assert first["heads"] == second["heads"]
    assert first["perplexity"] == second["perplexity"]
    assert not (out / "unfinished").exists()


def test_a_run_of_ours(tmp_path):
    from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

    folder = tmp_path / "run" / "model"
    config = MaclaurinConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        attention="exp/l2",
    )  # fmt: skip
    MaclaurinForCausalLM(config).save_pretrained(folder)
    few = ["--text", TEXT, "--tokens", "16", "--orders", "2", "--windows", "4", "--out", tmp_path / "out"]
    assert "--tokenizer" in inspect(tmp_path / "run", *few, expect=2).stderr
    assert not (tmp_path / "out").exists()
    inspect(tmp_path / "run", *few, "--tokenizer", "bytes")
    data = json.loads((tmp_path / "out" / "inspection.json").read_text())
    assert [row["attention"] for row in data["perplexity"]][:2] == ["exp/l2", "taylor(2)/l2"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--text": "nothing.txt"}, "there is no text file nothing.txt"),
        ({"--text": "short.txt"}, "holds 1 tokens"),
        ({"--orders": "1,zwei"}, "'zwei' in '1,zwei' is no whole number"),
        ({"--windows": "0"}, "at least 1 token"),
        ({"--tokenizer": "no/such/folder"}, "cannot be opened"),
        ({"--device": "cuda:77"}, "cannot be used here"),
        ({"--weights": "int4"}, "float32, bfloat16 or float16"),
        ({"--out": "short.txt"}, "is a file"),
        ({"MODEL": "./nowhere"}, "there is no folder ./nowhere"),
        ({"MODEL": "gpt"}, "model of type 'gpt2'"),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(llama, tmp_path, changed, words):
    from transformers import GPT2Config, GPT2LMHeadModel

    (tmp_path / "short.txt").write_text("a")
    if changed.get("MODEL") == "gpt":
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=300)).save_pretrained(
            tmp_path / "gpt"
        )
    before = sorted(tmp_path.rglob("*"))
    options = {"--text": str(TEXT), "--out": "out", **changed}
    model = options.pop("MODEL", llama)
    error = inspect(
        model, *(word for pair in options.items() for word in pair), expect=2, cwd=tmp_path
    ).stderr
    assert words in error
    assert "Traceback" not in error
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
    """Opens the page at a width; afterwards nothing may have been complained of or loaded."""
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


@needs_browser
def test_a_press_on_a_square_shows_the_head(visit):
    page = visit()
    assert page.locator("#heat .cell").count() == 16
    detail = page.locator(".detail")
    page.locator('.cell[data-head="2.3"]').click()
    assert detail.locator("h3").inner_text() == "Layer 2, head 3"
    assert detail.locator("svg").count() == 3
    assert "Keys and values: head 1." in detail.inner_text()
    assert re.search(r"sink mass\s+[\d.]+ %", detail.inner_text())
    page.keyboard.press("ArrowUp")
    assert detail.locator("h3").inner_text() == "Layer 1, head 3"
    page.keyboard.press("ArrowRight")
    assert detail.locator("h3").inner_text() == "Layer 1, head 3", "there is nothing beyond the edge"


@needs_browser
def test_pointing_at_a_square_tells_its_value_in_the_measure_chosen(visit):
    page = visit()
    tip = page.locator("#heat .tip")
    page.locator('.cell[data-head="0.1"]').hover()
    assert tip.inner_text().startswith("layer 0, head 1")
    assert "order for 1 % error, about the row mean" in tip.inner_text()
    page.get_by_label("What the colours show").select_option(label="sink mass")
    page.locator('.cell[data-head="3.0"]').hover()
    assert re.search(r"sink mass: [\d.]+ %", tip.inner_text())
    page.mouse.move(2, 2)
    assert not tip.is_visible()


@needs_browser
def test_curves_and_tables_are_there(visit):
    page = visit()
    chart = page.locator("figure.drawn")
    assert chart.locator(".series").count() == 2
    assert "as it came" in chart.inner_text()
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
    assert page.locator("#heads tbody tr").count() == 16


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (390, "light"), (1280, "dark")])
def test_the_body_never_scrolls_sideways(visit, width, scheme):
    page = visit(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 > 128
    assert bright == (scheme == "light")


@needs_browser
def test_it_is_readable_without_scripts(browser, written):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((written[0] / "index.html").as_uri())
    text = page.inner_text("main")
    assert "What was found" in text
    assert "the table below holds its numbers" in text
    context.close()
