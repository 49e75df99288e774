"""Training that starts from a model: adapters, following a teacher, and what may not be mixed."""

import json
import shutil

import pytest
import torch

from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, save_quietly, size_named
from maclaurin.training.config import config_from
from maclaurin.training.lora import AdaptedLinear, merge_adapters, with_adapters
from maclaurin.training.trainer import train

TASK = "mqar:pairs=3,vocab=32,length=24"
SETTINGS = {
    "data": TASK,
    "length": 24,
    "steps": 12,
    "batch_size": 8,
    "lr": 3e-3,
    "device": "cpu",
    "warmup": 2,
}


@pytest.fixture
def teacher(tmp_path):
    return saved(tmp_path / "teacher", "exp/sum")


def saved(folder, attention):
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), attention, 32, initialization="torch")
    model = MaclaurinForCausalLM(config)
    for block in model.model.layers:
        block.self_attn.q_proj.weight.data *= 8  # sharp attention
    save_quietly(model, folder, None)
    return str(folder)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_adapters_change_nothing_at_first_and_merge_into_what_they_did():
    torch.manual_seed(0)
    model = MaclaurinForCausalLM(MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 32)).eval()
    tokens = torch.randint(0, 32, (2, 9))
    plain = model(input_ids=tokens).logits
    with_adapters(model, 4)
    torch.testing.assert_close(model(input_ids=tokens).logits, plain)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.lora_b)
    changed = model(input_ids=tokens).logits
    merge_adapters(model)
    torch.testing.assert_close(model(input_ids=tokens).logits, changed, rtol=1e-4, atol=1e-4)
    assert not any(isinstance(m, AdaptedLinear) for m in model.modules())


@pytest.mark.parametrize("lora", [0, 4])
def test_a_student_comes_closer_to_its_teachers_attention(tmp_path, teacher, lora):
    student = saved(tmp_path / "student", "taylor(2)/sum")
    settings = {
        **SETTINGS,
        "start": student,
        "objective": "match-attention",
        "teacher": teacher,
        "lora": lora,
    }
    train(config_from(settings), tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[-1] < 0.9 * found[0]
    reloaded = MaclaurinForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert reloaded.config.attention == "taylor(2)/sum"


def test_a_recovery_that_was_cut_off_goes_on(tmp_path):
    student = saved(tmp_path / "student", "taylor(2)/sum")
    config = config_from({**SETTINGS, "start": student, "lora": 2, "checkpoint_every": 4, "keep": 5})
    train(config, tmp_path / "whole")
    train(config, tmp_path / "cut")
    for folder in sorted((tmp_path / "cut" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    train(config, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    weights = [MaclaurinForCausalLM.from_pretrained(tmp_path / run / "model") for run in ("cut", "whole")]
    for one, other in zip(*(w.state_dict().values() for w in weights), strict=True):
        assert torch.equal(one, other)


def test_what_does_not_go_together_is_told(tmp_path, teacher):
    with pytest.raises(InputError, match="has its attention from there"):
        config_from({**SETTINGS, "start": teacher, "attention": "exp/l2"})
    with pytest.raises(InputError, match="name it with start"):
        config_from({**SETTINGS, "lora": 4})
    with pytest.raises(InputError, match="needs a teacher"):
        train(config_from({**SETTINGS, "start": teacher, "objective": "match-attention"}), tmp_path / "a")
    itself = {**SETTINGS, "start": teacher, "objective": "match-attention", "teacher": teacher}
    with pytest.raises(InputError, match="nothing to match"):
        train(config_from(itself), tmp_path / "b")
    with pytest.raises(InputError, match="there is no folder"):
        train(config_from({**SETTINGS, "start": str(tmp_path / "nothing")}), tmp_path / "c")
