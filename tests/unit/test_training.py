"""Config, schedule, records, evaluation and the loop itself, in one process."""

import dataclasses
import json
import math

import pytest
import torch

from maclaurin import InputError, catalogue
from maclaurin.data.config import DataConfig, open_source
from maclaurin.data.task_source import TaskSource
from maclaurin.models import SIZES, Size
from maclaurin.training import trainer as trainer_module
from maclaurin.training.config import TrainConfig, config_from, load_config
from maclaurin.training.evaluation import evaluate
from maclaurin.training.processes import Processes
from maclaurin.training.records import Records, read_records
from maclaurin.training.schedule import learning_rate
from maclaurin.training.trainer import Trainer

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = Size("tiny", 32, 48, 2, 1, 16)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", TINY)


def run(tmp_path, config):
    data = DataConfig(config.data, length=config.length or 16, seed=config.seed)
    return Trainer(config, open_source(data), tmp_path / "run", ALONE).run()


def test_file_preset_and_options_speak_in_that_order(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('lr = 0.5\nsteps = 7\nattention = "exp/l2"\n')
    config = load_config(file, "paper", {"steps": 9})
    assert (config.lr, config.steps, config.attention) == (0.5, 9, ("exp/l2",))
    assert (config.beta2, config.weight_decay, config.clip) == (0.999, 0.01, None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"learning_rate": 1.0}, "no key 'learning_rate'"),
        ({"step": 3}, "Did you mean steps"),
        ({"steps": "many"}, "steps must be int"),
        ({"steps": True}, "steps must be int"),
        ({"steps": 0}, "at least 1"),
        ({"schedule": "square"}, "cosine, linear, constant"),
        ({"batch_size": 5, "accumulate": 2}, "equal parts"),
        ({"lr": None}, "got nothing"),
    ],
)
def test_a_wrong_key_or_value_is_one_clear_error(values, words):
    with pytest.raises(InputError, match=words):
        config_from(values)


def test_a_file_that_is_missing_or_no_toml(tmp_path):
    with pytest.raises(InputError, match="no config file"):
        load_config(tmp_path / "none.toml", None, {})
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(InputError, match="not TOML"):
        load_config(tmp_path / "bad.toml", None, {})
    with pytest.raises(InputError, match="no preset"):
        load_config(None, "papers", {})


def test_every_key_has_a_help_text_and_survives_json():
    assert all(f.metadata["help"].endswith((".", "cuda.")) for f in dataclasses.fields(TrainConfig))
    config = TrainConfig(attention=("exp/sum", "exp/l2"))
    assert config_from(json.loads(json.dumps(config.to_dict()))) == config


def test_schedules():
    base = TrainConfig(lr=1.0, warmup=4, steps=14, final_lr=0.1)
    assert [learning_rate(base, s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    linear = base.replace(schedule="linear")
    assert learning_rate(linear, 9) == pytest.approx(0.55)
    assert learning_rate(base, 9) == pytest.approx(0.55)  # the cosine's middle is the line's
    assert learning_rate(base, 14) == pytest.approx(0.1)
    assert learning_rate(base.replace(schedule="constant"), 13) == 1.0
    assert learning_rate(linear.replace(decay_steps=1004), 504) == pytest.approx(0.55)


def test_records_behind_a_checkpoint_are_taken_back(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(
        "".join(json.dumps({"kind": "train", "step": s}) + "\n" for s in (1, 2, 3)) + '{"kind": "tr'
    )
    records = Records(path, 2, [])
    records.write({"kind": "train", "step": 3, "loss": 1.0})
    records.close()
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    assert read_records(path)[-1]["loss"] == 1.0


def test_means_are_weighted_by_tokens_and_perplexity_is_that_of_the_mean(tiny, tmp_path):
    config = TrainConfig(size="tiny", data="mqar:pairs=2,vocab=16,length=16", batch_size=4)
    source = open_source(DataConfig(config.data, length=16))
    model = Trainer(config, source, tmp_path / "run", ALONE).plain_model
    whole = evaluate(model, source.test_batches(64, 48), ALONE, 16)
    parts = evaluate(model, source.test_batches(5, 48), ALONE, 16)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.tokens == whole.tokens
    assert whole.perplexity == pytest.approx(math.exp(whole.loss))
    scored = [x for x in whole.loss_by_position if x > 0]
    assert min(scored) <= whole.loss <= max(scored)


def test_paper_presets_groups_decay_matrices_only(tiny, tmp_path):
    config = TrainConfig(size="tiny", attention=("2mamba",), data="mqar:pairs=2,vocab=16,length=16")
    made = Trainer(config, open_source(DataConfig(config.data, length=16)), tmp_path / "run", ALONE)
    decayed, kept = made.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"])
    names = {id(p): n for n, p in made.plain_model.named_parameters()}
    assert any("convolution" in names[id(p)] for p in kept["params"])


@pytest.mark.parametrize("name", [entry.name for entry in catalogue])
def test_one_batch_is_learned_by_heart_with_every_row_of_the_catalogue(tiny, tmp_path, name):
    config = TrainConfig(
        attention=(name,),
        size="tiny",
        data="induction:vocab=16,length=12",
        length=12,
        steps=60,
        batch_size=4,
        lr=1e-2,
        warmup=10,
        overfit_one_batch=True,
        eval_every=0,
        checkpoint_every=0,
    )
    outcome = run(tmp_path, config)
    assert outcome.test.loss < 0.05
    assert outcome.test.accuracy == 1.0


def test_validation_is_evaluated_during_training_and_test_once_at_the_end(tiny, tmp_path, monkeypatch):
    asked = []
    original = TaskSource.held_out_batches
    monkeypatch.setattr(
        TaskSource,
        "held_out_batches",
        lambda self, split, *a, **k: asked.append(split) or original(self, split, *a, **k),
    )
    config = TrainConfig(
        size="tiny",
        data="induction:vocab=16,length=12",
        length=12,
        steps=6,
        batch_size=4,
        eval_every=2,
        eval_rows=8,
    )
    outcome = run(tmp_path, config)
    assert asked == ["validation"] * 4 + ["test"]  # steps 2, 4 and 6, then all rows
    lines = read_records(tmp_path / "run" / "records.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [2, 4, 6]
    final = next(line for line in lines if line["kind"] == "final")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test_loss"] == outcome.test.loss == final["loss"]
    assert summary["validation_loss"] == outcome.validation.loss != outcome.test.loss
    assert outcome.test.tokens == outcome.validation.tokens


def test_a_batch_that_cannot_be_split_is_refused(tiny, tmp_path):
    config = TrainConfig(size="tiny", batch_size=6, accumulate=2, data="mqar:pairs=2,vocab=16,length=16")
    source = open_source(DataConfig(config.data, length=16))
    with pytest.raises(InputError, match="cannot be split over 4 processes"):
        Trainer(config, source, tmp_path / "run", Processes(0, 4, torch.device("cpu")))


def test_flops_and_parameters_of_a_dry_run():
    from maclaurin.training.estimate import estimate

    config = TrainConfig(size="small", steps=10, batch_size=2)
    source = open_source(DataConfig("mqar:pairs=2,vocab=16,length=16", length=16))
    found = estimate(config, trainer_module.model_config(config, source), 1024, torch.device("cpu"))
    assert found.tokens == 10 * 2 * 1024
    matrices = found.parameters - 16 * 1024 - 41 * 1024  # without the embedding and the norms
    assert found.flops > 6 * matrices * found.tokens
    assert "parameters" in str(found)
