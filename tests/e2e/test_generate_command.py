"""`maclaurin generate` as a user types it: text as it comes, figures beside it, a state that lasts."""

import json
import shutil
import signal
import time

import pytest
import torch
from typer.testing import CliRunner

from maclaurin import InputError, NoFiniteStateError
from maclaurin.cli.main import app
from tests.e2e import command
from tests.e2e.training import environment, train_here, wait_for

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on text with a finite state."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text").mkdir()
    for number in range(200):
        (folder / "text" / f"{number}.txt").write_text(f"{number}. {TEXT}")
    shape = {"size": "pico", "data": folder / "text", "tokenizer": "bytes", "length": 64}
    train_here(folder / "run", attention="taylor(2)/sum", steps=4, eval_every=4, checkpoint_every=4, **shape)
    return folder / "run"


def generate(*arguments, stdin=None):
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)
    if result.exception is not None:
        raise result.exception
    return result


def test_a_run_is_an_ordinary_model_folder(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import maclaurin.models  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    separator, *tokens = tokenizer("Größe").input_ids
    assert bytes(tokens).decode() == "Größe"
    assert separator == tokenizer.eos_token_id == model.generation_config.eos_token_id == 256
    batch = tokenizer(["It was", "the best of times"], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    assert out.shape[1] == batch.input_ids.shape[1] + 3


def test_text_goes_to_stdout_and_figures_to_stderr(run):
    options = ["--max-new-tokens", 12, "--ignore-end", "--seed", 1, "--constant-memory", "--stats"]
    found = generate(run, "--prompt", "It was", *options)
    assert found.stdout
    assert "12 tokens at" in found.stderr
    assert "the same however long the text" in found.stderr
    assert "of which 0 keep keys and values" in found.stderr
    assert generate(run, "--prompt", "It was", *options, "--prefill-chunk", 2).stdout == found.stdout
    assert generate(run / "model", "--prompt", "-", *options, stdin="It was").stdout == found.stdout


def test_several_prompts_are_continued_in_turn(run):
    options = ["--max-new-tokens", 6, "--ignore-end", "--temperature", 0]
    alone = [generate(run, "--prompt", text, *options).stdout for text in ("It was", "the age")]
    together = generate(run, "-p", "It was", "-p", "the age", *options).stdout
    assert together == f"[1] It was{alone[0]}[2] the age{alone[1]}"
    with pytest.raises(InputError, match="saves one text"):
        generate(run, "-p", "a", "-p", "b", "--save-state", run / "state")


def test_long_lines_are_streamed_in_pieces_without_broken_letters():
    from maclaurin.models.generating import PieceStreamer
    from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer

    text = "Grüße,你好🎈" * 80
    pieces = []
    streamer = PieceStreamer(as_fast_tokenizer(byte_tokenizer()), pieces.append)
    for byte in text.encode():
        streamer.put(torch.tensor([byte]))
        assert len(streamer.token_cache) < 300
    streamer.end()
    assert "".join(pieces) == text


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_reads_each_turn_once_in_the_models_template(run, tmp_path, monkeypatch):
    from maclaurin.models.generating import Generation

    model = tmp_path / "instruct"
    shutil.copytree(run / "model", model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    read = []
    add = Generation.add
    monkeypatch.setattr(Generation, "add", lambda self, ids: (read.append(ids), add(self, ids))[1])
    options = ["--chat", "--max-new-tokens", 3, "--ignore-end", "--seed", 0]
    found = generate(model, *options, "--system", "S", stdin="one\ntwo\n")
    told = [bytes(ids[0].tolist()).decode() for ids in read]
    assert told == ["<system>S</><user>one</><assistant>", "</><user>two</><assistant>"]
    assert "6 tokens at" in found.stderr
    assert generate(model, *options, "--system", "S", "-p", "one", "-p", "two").stdout == found.stdout
    state = tmp_path / "talk"
    first = generate(model, *options, "--system", "S", "-p", "one", "--save-state", state).stdout
    assert found.stdout.startswith(first)
    generate(model, *options, "--system", "S", "-p", "two", "--load-state", state)
    assert bytes(read[-1][0].tolist()).decode() == told[1]
    with pytest.raises(InputError, match="no chat template"):
        generate(run, *options, "-p", "x")
    with pytest.raises(InputError, match="--system sets the system message"):
        generate(run, "-p", "x", "--system", "S")


def test_a_misspelled_run_is_named_at_once(run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setattr("maclaurin.models.model_folder.load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match=r"there is no folder .*/runn\. Did you mean .*/run\?"):
        generate(f"{run.parent.name}/runn", "--prompt", "x")


def test_a_prompt_that_is_not_utf8_is_one_error(run):
    with pytest.raises(InputError, match="not UTF-8"):
        generate(run, "--prompt", "-", stdin=b"caf\xe9 au lait")


def test_a_conversation_is_saved_and_goes_on(run, tmp_path):
    state, options = tmp_path / "talk.safetensors", ["--ignore-end", "--temperature", 0]
    whole = generate(run, "--prompt", TEXT, *options, "--max-new-tokens", 9).stdout
    first = generate(run, "--prompt", TEXT, *options, "--max-new-tokens", 4, "--save-state", state)
    assert str(state) in first.stderr.replace("\n", "")
    size = state.stat().st_size
    second = generate(
        run, "--load-state", state, *options, "--max-new-tokens", 5, "--save-state", state
    ).stdout
    assert first.stdout.removesuffix("\n") + second == whole
    assert state.stat().st_size == pytest.approx(size, rel=0.01)


def test_other_attention_on_the_same_weights(run):
    options = ["--prompt", "It was", "--max-new-tokens", 3, "--ignore-end"]
    assert "growing with the text" in generate(run, *options, "--attention", "exp/sum").stderr
    hybrid = generate(run, *options, "--attention", "exp/sum", "--attention", "taylor(2)/sum", "--stats")
    assert "of which 1 keep" in hybrid.stderr
    with pytest.raises(InputError, match=r"forget_gate.*which exp\*forget/sum needs"):
        generate(run, *options, "--attention", "exp*forget/sum")


def test_invalid_options_are_reported(run, tmp_path):
    with pytest.raises(NoFiniteStateError, match=r"(?s)so 2 of 2 layers .*taylor\(2\)/sum"):
        generate(run, "--prompt", "x", "--attention", "exp/sum", "--constant-memory")
    with pytest.raises(InputError, match="`save_state`: there is no folder"):
        generate(run, "--prompt", "x", "--save-state", tmp_path / "no" / "talk")
    with pytest.raises(InputError, match="no file"):
        generate(run, "--prompt", "x", "--load-state", tmp_path / "talk")
    with pytest.raises(InputError, match="temperature"):
        generate(run, "--prompt", "x", "--temperature", -1)
    with pytest.raises(InputError, match="top-p"):
        generate(run, "--prompt", "x", "--top-p", 0)
    with pytest.raises(InputError, match="top-k"):
        generate(run, "--prompt", "x", "--top-k", 0)
    with pytest.raises(
        InputError, match="the device tpu9 cannot be used here: torch knows no device of that name"
    ):
        generate(run, "--prompt", "x", "--device", "tpu9")
    bare = tmp_path / "bare"
    shutil.copytree(run / "model", bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        generate(bare, "--prompt", "x")
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "format_version": 99}))
    with pytest.raises(InputError, match="upgrade maclaurin"):
        generate(bare, "--prompt", "x")


def test_ctrl_c_ends_it_and_still_saves(run, tmp_path):
    state = tmp_path / "talk.safetensors"
    process = command.start(
        "generate", run, "--prompt=It was", "--ignore-end", "--max-new-tokens=10000000",
        f"--save-state={state}", env=environment(),
    )  # fmt: skip
    assert wait_for(lambda: len(process.printed()) >= 20, process)  # it has begun
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "stopped by Ctrl-C" in told
    assert generate(run, "--load-state", state, "--max-new-tokens", 2, "--ignore-end").stdout
