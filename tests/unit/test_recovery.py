"""Training that starts from a model: LoRA adapters, matching a teacher, settings that contradict."""

import json
import shutil
import sys
import warnings

import pytest
import torch

from maclaurin.conversion.conversion_record import Recovery
from maclaurin.conversion.recover import stages_of
from maclaurin.errors import DataError, InputError, MissingExtraError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, save_quietly, size_named
from maclaurin.training.config import config_from
from maclaurin.training.model import ADAPTED, with_adapters
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
    "eval_rows": 8,
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
    pytest.importorskip("peft")
    model = MaclaurinForCausalLM(MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 32)).eval()
    tokens = torch.randint(0, 32, (2, 9))
    plain = model(input_ids=tokens).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters = with_adapters(model, 4, "somewhere")
    assert adapters.peft_config["default"].base_model_name_or_path == "somewhere"
    torch.testing.assert_close(model(input_ids=tokens).logits, plain)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    for name, parameter in trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    changed = model(input_ids=tokens).logits
    adapters.merge_and_unload()
    torch.testing.assert_close(model(input_ids=tokens).logits, changed, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", ["2mamba", "mamba-2", "exp*in*forget/len*out", "linear-cosine"])
def test_what_attention_has_beside_its_projections_is_trained_with_the_adapters(name):
    """Gates, step sizes, norms of queries and keys, convolutions."""
    pytest.importorskip("peft")
    model = MaclaurinForCausalLM(MaclaurinConfig.of_size(size_named("pico"), name, 32, query_key_norm=True))
    own = {
        f"layers.{n}.self_attn.{child}"
        for n, block in enumerate(model.model.layers)
        for child, module in block.self_attn.named_children()
        if child not in ADAPTED and list(module.parameters())
    }
    assert any("norm" in module for module in own)
    with_adapters(model, 2)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and "lora" not in n]
    for module in own:
        assert any(module in name for name in trained), module
    assert all("self_attn" in name for name in trained)


@pytest.mark.slow
def test_adapters_are_saved_as_peft_reads_them(tmp_path):
    peft = pytest.importorskip("peft")
    start = saved(tmp_path / "start", "exp*in*forget/len*out")
    train(config_from({**SETTINGS, "start": start, "lora": 2}), tmp_path / "run")
    base = MaclaurinForCausalLM.from_pretrained(start)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    merged = MaclaurinForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    tokens = torch.randint(0, 32, (2, 20))
    expected = merged(input_ids=tokens).logits
    torch.testing.assert_close(adapted(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    untrained = MaclaurinForCausalLM.from_pretrained(start).eval()
    assert (untrained(input_ids=tokens).logits - expected).abs().max() > 1e-3
    described = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == start


def test_lora_without_peft_names_the_extra(tmp_path, monkeypatch):
    start = saved(tmp_path / "start", "exp/sum")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"maclaurin\[lora\]"):
        train(config_from({**SETTINGS, "start": start, "lora": 2}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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


@pytest.mark.slow
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


def test_settings_that_contradict_each_other_are_errors(tmp_path, teacher):
    with pytest.raises(InputError, match="takes its attention from there"):
        config_from({**SETTINGS, "start": teacher, "attention": "exp/l2"})
    with pytest.raises(InputError, match="set start to its folder"):
        config_from({**SETTINGS, "lora": 4})
    with pytest.raises(InputError, match="needs a teacher"):
        train(config_from({**SETTINGS, "start": teacher, "objective": "match-attention"}), tmp_path / "a")
    itself = {**SETTINGS, "start": teacher, "objective": "match-attention", "teacher": teacher}
    with pytest.raises(InputError, match="nothing to match"):
        train(config_from(itself), tmp_path / "b")
    with pytest.raises(InputError, match="there is no folder"):
        train(config_from({**SETTINGS, "start": str(tmp_path / "nothing")}), tmp_path / "c")


@pytest.mark.parametrize("objective", ["match-attention", "match-logits"])
@pytest.mark.slow
def test_a_hybrid_learns_from_its_teacher(teacher, tmp_path, objective):
    """Heads that differ, trained towards the original's attention or predictions."""
    hybrid = "0: exp/sum; *: poly(0)+window(2,sinks=1,kept=2)/sum"
    student = saved(tmp_path / "student", hybrid)
    keys = {**SETTINGS, "objective": objective, "teacher": teacher, "start": student, "lr": 3e-4, "steps": 40}
    train(config_from(keys), tmp_path / "run", resume=False)
    found = losses(tmp_path / "run")
    assert found[0] > 0
    assert sum(found[-3:]) < sum(found[:3])


def test_equal_predictions_do_not_diverge(teacher):
    from maclaurin.training.losses import MatchLogits

    model = MaclaurinForCausalLM.from_pretrained(teacher)
    tokens = torch.randint(0, 32, (2, 9))
    same = MatchLogits(model, MaclaurinForCausalLM.from_pretrained(teacher))
    assert float(same(tokens, tokens, None)) == pytest.approx(0.0, abs=1e-4)
    other = MaclaurinForCausalLM(model.config)
    found = MatchLogits(other, model)(tokens, tokens, None)
    p, q = (m(input_ids=tokens).logits.double().log_softmax(-1) for m in (model, other))
    assert float(found) == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-4)


def test_answers_have_their_own_loss(teacher):
    """The divergence at other targets, and the weighted cross-entropy of answers."""
    from maclaurin.training.losses import MatchLogits

    model = MaclaurinForCausalLM.from_pretrained(teacher)
    other = MaclaurinForCausalLM(model.config)
    tokens, targets = torch.randint(0, 32, (2, 9)), torch.randint(0, 32, (2, 9))
    targets[0, :2] = -100
    answers = torch.zeros(2, 9)
    answers[0, 4] = answers[1, 7] = 2.5
    objective = MatchLogits(other, model)
    found = objective(tokens, targets, None, answers, answers.flatten().nonzero()[:, 0])
    p, q = (m(input_ids=tokens).logits.double().log_softmax(-1) for m in (model, other))
    divergence = (p.exp() * (p - q)).sum(-1)
    wanted = divergence[(targets != -100) & (answers == 0)].sum()
    wanted = wanted - 2.5 * (q[0, 4, targets[0, 4]] + q[1, 7, targets[1, 7]])
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)
    none = objective(tokens, targets, None, torch.zeros(2, 9), torch.zeros(0, dtype=torch.long))
    assert float(none) == pytest.approx(float(objective(tokens, targets, None)), rel=1e-6)


def test_the_mean_loss_of_answers_counts_by_its_weight(tmp_path):
    from maclaurin.training.batches import StepBatch, open_data
    from maclaurin.training.processes import Processes

    config = config_from({**SETTINGS, **mixed_data(tmp_path), "answer_weight": 0.3, "accumulate": 2})
    processes = Processes(0, 1, torch.device("cpu"))
    batch = StepBatch.of(open_data(config, processes), 0, config, processes)
    weights = torch.cat([part.answers for part in batch.parts])
    assert len(batch.parts) == 2
    assert weights.amax() > 1
    assert float(weights.sum()) == pytest.approx(0.3 * batch.scored, rel=1e-5)
    for part in batch.parts:
        assert torch.equal(part.answers_at, part.answers.flatten().nonzero()[:, 0])


@pytest.mark.slow
def test_predictions_are_matched_the_same_when_compiled(teacher):
    """With any number of answers, after compiling once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from maclaurin.training.losses import MatchLogits
    from maclaurin.training.optimizer_step import any_number

    model = MaclaurinForCausalLM.from_pretrained(teacher)
    objective = MatchLogits(MaclaurinForCausalLM(model.config), model)
    torch._dynamo.reset()
    counting, found = CompileCounterWithBackend("aot_eager"), {}
    ways = {"eager": objective, "compiled": torch.compile(objective, backend=counting)}
    for way, run in ways.items():
        torch.manual_seed(0)
        for answers in (5, 3, 8):
            tokens, targets = torch.randint(0, 32, (2, 9)), torch.randint(0, 32, (2, 9))
            at = torch.randperm(18)[:answers]
            weights = torch.zeros(18).index_fill(0, at, 0.5).view(2, 9)
            any_number(at)
            loss = run(tokens, targets, None, weights, at)
            objective.zero_grad()
            loss.backward()
            gradients = [p.grad.clone() for p in objective.parameters()]
            found.setdefault(way, []).append([loss.detach(), *gradients])
    for eager, compiled in zip(found["eager"], found["compiled"], strict=True):
        for one, other in zip(eager, compiled, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert counting.frame_count == 1


def mixed_data(folder):
    text = folder / "text.jsonl"
    documents = [f"Document {n} says much about many things, and then some more. " * 100 for n in range(60)]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return {"data": str(text), "tokenizer": "bytes", "length": 512, "mix": 0.5, "batch_size": 6}


@pytest.mark.parametrize("lora", [0, 4])
def test_a_hybrid_learns_answers_and_goes_on_where_it_was_cut_off(tmp_path, lora):
    """KL, recall rows and copies, through a recovery with checkpoints."""
    if lora:
        pytest.importorskip("peft")
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 257)
    save_quietly(MaclaurinForCausalLM(config), tmp_path / "teacher", None)
    config.attention = "0: exp/sum; *: poly(0)+window(16,sinks=1,kept=8)/sum"
    start = MaclaurinForCausalLM.from_pretrained(tmp_path / "teacher", config=config)
    save_quietly(start, tmp_path / "student", None)
    recovery = Recovery(
        kl_steps=4, lora=lora, mix=0.5, reach=400, answer_weight=0.2, length=512, batch_size=6, text_lr=3e-3,
        device="cpu",
    )  # fmt: skip
    ((name, config),) = stages_of(recovery, tmp_path / "student", str(tmp_path / "teacher"))
    assert name == "match-logits"
    assert (config.mix, config.reach, config.answer_weight) == (0.5, 400, 0.2)
    config = config.replace(**mixed_data(tmp_path), checkpoint_every=2, keep=5, eval_rows=4)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "cut")
    for folder in sorted((tmp_path / "cut" / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    train(config, tmp_path / "cut", resume=True)
    found = losses(tmp_path / "whole")
    assert losses(tmp_path / "cut") == found
    assert found[-1] < found[0]


def test_a_recovery_without_answers_in_its_data_is_as_before(tmp_path):
    recovery = Recovery(0, 3, "somewhere", length=64, kl_steps=2, batch_size=2)
    stages = stages_of(recovery, tmp_path, "teacher")
    assert [name for name, _ in stages] == ["match-logits", "next-token"]
    assert {(config.data, config.mix) for _, config in stages} == {("somewhere", 0.0)}


def test_rows_that_cannot_be_mixed_are_errors_before_any_work(tmp_path):
    for change in ({"length": 64}, {"mix": 1.5}, {"reach": 10}):
        recovery = Recovery(**{"kl_steps": 2, "mix": 0.2, "length": 1024, **change})
        with pytest.raises(DataError, match=r"mix|reach"):
            stages_of(recovery, tmp_path, "teacher")
