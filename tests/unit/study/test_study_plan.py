"""From a study to runs: budgets, choices of cells and seeds, spellings, facts, data."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.study.making import make_study

from maclaurin import InputError
from maclaurin.study import Behind, Cell, Experiment, Study, Tasks, Tune, cells_of
from maclaurin.study.cost import attention_facts, cost_of
from maclaurin.study.plan_runs import (
    INSTALLED_TORCH,
    Sources,
    canonical_attention,
    plan_study,
    read_scale,
    resolved,
    scaled,
    select,
    waiting,
    with_seeds,
)
from maclaurin.study.run_record import write_study
from maclaurin.study.runner import Planner, prepare, run, study_record
from maclaurin.training.config import TrainConfig

KEYS = {"data": "mqar:pairs=3,vocab=32,length=24", "device": "cpu"}

# ------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(("text", "scale"), [("0.5x", 0.5), ("2x", 2.0), ("0.1", 0.1), (" 1x ", 1.0)])
def test_a_budget_is_a_factor(text, scale):
    assert read_scale(text) == scale


@pytest.mark.parametrize("text", ["", "x", "0x", "-1x", "nan", "inf", "half", "2xx"])
def test_invalid_scale_is_rejected(text):
    with pytest.raises(InputError, match=r"0\.5x or 2x"):
        read_scale(text)


@given(st.integers(1, 10**6), st.integers(0, 10**4), st.floats(1e-6, 100))
def test_a_scaled_run_keeps_its_shape(steps, warmup, scale):
    config = scaled(TrainConfig(steps=steps, warmup=warmup), scale)
    assert config.steps == max(1, round(steps * scale))
    assert (config.warmup == 0) == (warmup == 0)


# ----------------------------------------------------------------------------- cells and seeds


def two_experiments():
    cells = cells_of({"softmax": "exp/sum", "norm": "exp/l2", "second": "taylor(2)/sum"})
    return Study(
        "s", "S", "?", "none",
        (
            Experiment("text", "Text", "loss", {}, cells, (0,), "softmax"),
            Experiment("recall", "Recall", "accuracy", {}, cells[:2], (0,), "softmax"),
        ),
        (
            Behind(says="?", experiment="text", cells=("softmax", "norm")),
            Behind(says="?", experiment="text", cells=("softmax", "second")),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("wanted", ["second", "taylor(2)/sum"])
def test_cells_are_chosen_by_name_or_notation_with_their_baseline(wanted):
    chosen = select(two_experiments(), [wanted])
    assert [e.name for e in chosen.experiments] == ["text"]
    assert [cell.name for cell in chosen.experiments[0].cells] == ["softmax", "second"]
    assert [claim.cells for claim in chosen.claims] == [("softmax", "second")]


def test_a_run_of_another_torch_has_another_key():
    config = resolved({"device": "cpu"})
    here, there = waiting(config), waiting(config, torch_version="2.0")
    assert (here.run.torch, there.run.torch) == (INSTALLED_TORCH, "2.0")
    assert (
        here.key != there.key == dataclasses.replace(here, run=dataclasses.replace(here.run, torch="2.0")).key
    )


def test_a_catalogue_name_chooses_its_notation():
    study = two_experiments()
    assert select(study, ["softmax"]).experiments == select(study, ["exp/sum"]).experiments
    assert select(study, []) == study


def test_a_choice_that_meets_nothing_is_an_error_with_suggestions():
    with pytest.raises(InputError, match=r"it has softmax, norm, second\. Did you mean"):
        select(two_experiments(), ["norm", "secnd"])


def test_seeds_are_added_and_never_taken_away():
    study = make_study(seeds=(0, 5))
    assert with_seeds(study, 4).experiments[0].seeds == (0, 5, 1, 2)
    with pytest.raises(InputError, match="added, not removed"):
        with_seeds(study, 1)


def test_a_study_becomes_runs_seed_by_seed():
    plan = plan_study(make_study(seeds=(0, 1)), scale=0.5)
    assert [(label.cell, label.seed) for label in plan] == [
        ("softmax", 0), ("norm", 0), ("softmax", 1), ("norm", 1),
    ]  # fmt: skip
    assert {record.run.steps for record in plan.values()} == {200}
    assert {record.status for record in plan.values()} == {"waiting"}


def test_at_equal_flops_a_dearer_cell_takes_fewer_steps():
    cells = (*cells_of({"softmax": "exp/sum"}), Cell("wide", {"attention": ("exp/sum",), "size": "micro"}))
    study = Study(
        "s", "S", "?", "b", (Experiment("e", "E", "loss", dict(KEYS), cells, (0,), "softmax", equal="flops"),)
    )
    costs = {
        label.cell: (record.run.steps, cost_of(record.run)) for label, record in plan_study(study).items()
    }
    assert costs["wide"][0] < costs["softmax"][0] == 400
    assert costs["wide"][1].flops == pytest.approx(costs["softmax"][1].flops, rel=0.02)


def test_at_equal_flops_rates_are_tuned_at_the_steps_that_are_trained():
    """Tuning runs took the steps of the config, and the final runs those of equal FLOPs."""
    cells = (*cells_of({"softmax": "exp/sum"}), Cell("wide", {"attention": ("exp/sum",), "size": "micro"}))
    experiment = Experiment("e", "E", "loss", dict(KEYS), cells, (0,), "softmax", equal="flops")
    study = Study("s", "S", "?", "b", (experiment,))
    planner = Planner(study, scale=0.5, device=None, smoke=None, torchrun="")
    final = {label.cell: record.run.config for label, record in planner.plan(study).items()}
    for cell in cells:
        trial = planner.one(experiment, cell, {"lr": 1e-3, "seed": 1000, "test": False}).run.config
        for key in ("steps", "warmup", "decay_steps"):
            assert trial[key] == final[cell.name][key], (cell.name, key)


def at_equal_state(window):
    cells = cells_of({"order 2": "taylor(2)/sum", "window": f"poly(0)+window({window})/sum"})
    common = {"data": "stdlib", "device": "cpu", "size": "pico", "length": 512}
    experiment = Experiment("e", "E", "loss", common, cells, (0,), "order 2", equal="state")
    return plan_study(Study("s", "S", "?", "b", (experiment,)))


def test_at_equal_state_every_cell_keeps_the_same_bytes():
    kept = [record.memory_bytes for record in at_equal_state(289).values()]
    assert kept == [296_208, 295_936]
    with pytest.raises(
        InputError, match=r"keeps 65,536 bytes .* 'order 2' keeps 296,208.*window\(289\) would"
    ):
        at_equal_state(64)


def test_keys_and_values_count_at_the_trained_length():
    softmax = waiting(resolved({"data": "stdlib", "size": "pico", "length": 40}))
    assert (softmax.state_bytes, softmax.memory_bytes) == (None, 2 * 2 * 2 * 32 * 40 * 4)
    assert softmax.value("memory_bytes") == 40_960


def test_a_metric_that_no_run_can_have_is_an_error_before_anything_trains():
    for metric, words in (("peak_gpu_bytes", "memory of a GPU"), ("state_bytes", "use memory_bytes")):
        cells = cells_of({"softmax": "exp/sum"})
        experiment = Experiment("e", "E", metric, {**KEYS, "device": "cpu"}, cells, (0,), "softmax")
        with pytest.raises(InputError, match=words):
            plan_study(Study("s", "S", "?", "b", (experiment,)))


def test_a_mistyped_tracker_is_an_error_before_anything_trains():
    cells = cells_of({"softmax": "exp/sum"})
    experiment = Experiment("e", "E", "loss", {**KEYS, "trackers": ("tensorbord",)}, cells, (0,), "softmax")
    with pytest.raises(InputError, match=r"cell 'softmax': there is no tracker 'tensorbord'; trackers are"):
        plan_study(Study("s", "S", "?", "b", (experiment,)))


def test_fewer_seeds_than_before_remove_none(tmp_path):
    """--seeds 3 after --seeds 4 dropped the fourth seed from the records."""
    study = make_study(seeds=(0, 1))
    before = prepare(study, out=tmp_path, seeds=4)
    assert before.added_seeds == {"text": (2, 3)}
    record = study_record(
        before.study, before.plan, {}, scale=1.0, added=before.added_seeds, tunings={}, forms=None
    )
    write_study(record, tmp_path / "records.json")
    for seeds in (3, None):
        again = prepare(study, out=tmp_path, seeds=seeds)
        assert again.study.experiments[0].seeds == (0, 1, 2, 3)
        assert again.added_seeds == {"text": (2, 3)}
    assert prepare(study, out=tmp_path, seeds=5).study.experiments[0].seeds == (0, 1, 2, 3, 4)


def test_added_seeds_are_not_those_of_tuning_runs():
    tune = Tune(rates=(1e-3, 2e-3), seeds=(0,), confirm=(5,))
    experiment = Experiment("e", "E", "loss", KEYS, cells_of({"a": "exp/sum"}), (1, 2, 3), "a", tune=tune)
    added = with_seeds(Study("s", "S", "?", "b", (experiment,)), 6).experiments[0].seeds
    assert added == (1, 2, 3, 4, 6, 7)


# ------------------------------------------------------------------------------------ spellings


def key(**changes):
    return waiting(resolved({**KEYS, **changes})).run.key


def test_spellings_of_one_run_are_one():
    spelled = [
        {"attention": "softmax"},
        {"attention": ("exp/sum",) * 4},
        {"length": 256},  # a task's own length goes before it
        {"decay_steps": 400},
        {"clip": 1.0},
    ]
    assert {key(**changes) for changes in spelled} == {key()}
    assert key(attention="exp/l2") != key()


def test_a_catalogue_name_that_stands_for_more_than_a_notation_stays():
    assert canonical_attention("mamba-2") == "mamba-2"
    assert canonical_attention("softmax") == "exp/sum"
    assert canonical_attention("no such thing", strict=False) == "no such thing"


def test_tokens_are_those_of_the_tasks_own_rows():
    assert waiting(resolved({**KEYS, "steps": 10, "batch_size": 2})).run.tokens == 10 * 2 * 24


def test_data_are_opened_once_for_all_seeds_and_each_seed_has_its_fingerprint():
    from maclaurin.data.data_config import open_source
    from maclaurin.training.batches import data_config

    sources = Sources()
    for seed in (0, 3):
        config = resolved({**KEYS, "seed": seed})
        completed = sources.complete(waiting(config))
        assert completed.run.data == open_source(data_config(config)).fingerprint
        assert completed.provenance["data"].startswith("mqar")
    assert len(sources._opened) == 1


# ------------------------------------------------------------------------------------------ facts


@pytest.mark.parametrize(
    ("attention", "order"),
    [("exp/sum", None), ("taylor(4)/sum", 4), ("linear(elu1)/sum", 1), ("taylor(0)/sum", 0), ("based", 2)],
)
def test_order_and_state_are_those_of_the_spec(attention, order):
    import torch

    from maclaurin.models import MaclaurinConfig, size_named
    from maclaurin.training.estimate import estimate

    config = TrainConfig(attention=(attention,))
    found = attention_facts(config)
    model = MaclaurinConfig.of_size(size_named("nano"), attention, 64)
    assert found == (order, estimate(config, model, 8, torch.device("cpu")).state_bytes)


def test_one_layer_without_a_finite_state_leaves_none():
    assert attention_facts(TrainConfig(attention=("exp/sum", *("taylor(2)/sum",) * 3))) == (None, None)


# --------------------------------------------------------------------------------------- tasks

TEXT = {"data": "stdlib", "tokenizer": "bytes", "limit_documents": 40, "size": "pico", "device": "cpu"}


def asking(*names, metric="loss", items=4, **common):
    cells = cells_of({"softmax": "exp/sum"})
    tasks = Tasks(names, items=items) if names else None
    experiment = Experiment("text", "Text", metric, {**TEXT, **common}, cells, (0,), "softmax", tasks=tasks)
    return Study("s", "S", "?", "none", (experiment,))


def planned(study):
    (record,) = plan_study(study).values()
    return record.run


@pytest.mark.slow
def test_tasks_are_part_of_the_key_only_where_they_change_numbers():
    plain, asked = planned(asking()), planned(asking("induction_8", "perplexity"))
    assert plain.tasks == ()
    assert [task.name for task in asked.tasks] == ["induction_8", "perplexity"]
    assert plain.key != asked.key
    assert planned(asking("perplexity", "induction_8")).key == asked.key, "their order says nothing"
    assert planned(asking("induction_8", "perplexity", items=5)).key != asked.key
    assert planned(asking("induction_8", "perplexity", metric="task:induction_8")).key == asked.key
    many, more = (planned(asking("cloze", items=n)) for n in (1000, 2000))
    assert many.key == more.key, "the task has fewer items than either"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: asking("inductoin_8"), r"line \d+: experiment 'text': there is no task.*induction_16"),
        (
            lambda: asking("cloze", metric="task:cloze:log_odds_gain"),
            "they have task:cloze, task:cloze:log_odds",
        ),
        (lambda: asking("perplexity", metric="task:perplexity"), "they have task:perplexity:bits_per_byte"),
        (lambda: asking("cloze", data="mqar:pairs=3,vocab=32,length=24"), "cannot read text"),
    ],
)
@pytest.mark.slow
def test_tasks_that_cannot_be_asked_are_one_error(make, words):
    with pytest.raises(InputError, match=words):
        plan_study(make())


@pytest.mark.slow
def test_a_task_that_does_not_fit_is_one_error_before_anything_is_trained():
    Sources().require_tasks_fit(plan_study(asking("induction_8", "perplexity")))
    with pytest.raises(InputError, match=r"experiment 'text': the task recall_64 has .* the model reads 128"):
        Sources().require_tasks_fit(plan_study(asking("recall_64")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_study_that_cannot_start_leaves_no_folder(tmp_path):
    with pytest.raises(InputError, match="finds no CUDA device"):
        run(make_study(), out=tmp_path / "runs" / "s", device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_names_with_commas_are_quoted_in_lists():
    cells = cells_of({"softmax": "exp/sum", "order 2, row sum": "taylor(2)/sum"})
    study = Study("s", "S", "?", "b", (Experiment("e", "E", "loss", KEYS, cells, (0,), "softmax"),))
    with pytest.raises(InputError, match="it has softmax, “order 2, row sum”"):
        select(study, ["x"])
