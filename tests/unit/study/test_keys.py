"""A run's key: the same for the same numbers, another for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maclaurin.code_version import ROOMS, code_version, digest_of_source
from maclaurin.study.attention_facts import attention_facts
from maclaurin.study.canonical import canonical, canonical_attention
from maclaurin.study.design import Experiment, Study, cells_of
from maclaurin.study.fingerprints import Fingerprints
from maclaurin.study.key import run_key
from maclaurin.study.plan import plan_runs
from maclaurin.training.config import TrainConfig

CONFIG = TrainConfig(data="mqar:pairs=3,vocab=32,length=24", device="cpu")


def key(config=CONFIG, code="c", data="d"):
    return run_key(canonical(config, 256, config.device), code, data)


@pytest.mark.parametrize(
    "free", [{"keep": 9}, {"trackers": ("tensorboard",)}, {"checkpoint_every": 7}, {"log_every": 3}]
)
def test_keys_that_decide_no_number_are_left_out(free):
    assert key(CONFIG.replace(**free)) == key()


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 2e-3},
        {"seed": 1},
        {"steps": 401},
        {"attention": ("exp/l2",)},
        {"device": "cuda"},
        {"clip": 2.0},
    ],
)
def test_keys_that_decide_a_number_change_it(change):
    assert key(CONFIG.replace(**change)) != key()


def test_code_and_data_change_it():
    assert len({key(), key(code="e"), key(data="e")}) == 3


@given(st.text(max_size=8), st.text(max_size=8))
def test_two_fingerprints_have_one_key_only_if_they_are_one(a, b):
    assert (key(data=a) == key(data=b)) == (a == b)


def test_spellings_of_one_run_are_one():
    spelled = [
        CONFIG.replace(attention=("softmax",)),
        CONFIG.replace(attention=("exp/sum",) * 4),
        CONFIG.replace(length=256),
        CONFIG.replace(decay_steps=400),
    ]
    assert {key(config) for config in spelled} == {key()}


def test_a_catalogue_name_that_stands_for_more_than_a_notation_stays():
    assert canonical_attention("mamba-2") == "mamba-2"
    assert canonical_attention("softmax") == "exp/sum"
    assert canonical_attention("no such thing", strict=False) == "no such thing"


def package(folder):
    for room in ROOMS:
        file = folder / room if room.endswith(".py") else folder / room / "deep" / "part.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    (folder / "cli").mkdir()
    (folder / "cli" / "main.py").write_text("y = 1\n")
    return folder


def test_editing_a_room_that_decides_numbers_changes_the_code_version(tmp_path):
    here = package(tmp_path)
    versions = [digest_of_source(here)]
    (here / "cli" / "main.py").write_text("y = 2\n")
    assert digest_of_source(here) == versions[0]
    for room in ROOMS:
        file = here / room if room.endswith(".py") else here / room / "deep" / "part.py"
        file.write_text("x = 2\n")
        versions.append(digest_of_source(here))
    (here / "forms" / "new.py").write_text("")
    versions.append(digest_of_source(here))
    assert len(set(versions)) == len(ROOMS) + 2
    assert len(code_version()) == 64


def test_data_are_opened_once_for_all_seeds_and_each_seed_has_its_fingerprint():
    from maclaurin.data.config import open_source
    from maclaurin.training.batches import data_config

    known = Fingerprints()
    for seed in (0, 3):
        config = CONFIG.replace(seed=seed, length=24)
        assert known.source(config).fingerprint == open_source(data_config(config)).fingerprint
    assert len(known._opened) == 1


@pytest.mark.parametrize(
    ("attention", "order"),
    [("exp/sum", None), ("taylor(4)/sum", 4), ("linear(elu1)/sum", 1), ("taylor(0)/sum", 0), ("based", 2)],
)
def test_order_and_state_are_those_of_the_spec(attention, order):
    import torch

    from maclaurin.models import MaclaurinConfig, size_named
    from maclaurin.training.estimate import estimate

    config = CONFIG.replace(attention=(attention,))
    facts = attention_facts(config)
    model = MaclaurinConfig.of_size(size_named("nano"), attention, 64)
    assert facts.order == order
    assert facts.state_bytes == estimate(config, model, 8, torch.device("cpu")).state_bytes


def test_one_layer_without_a_finite_state_leaves_none():
    facts = attention_facts(CONFIG.replace(attention=("exp/sum", *("taylor(2)/sum",) * 3)))
    assert (facts.order, facts.state_bytes) == (None, None)


def test_a_study_becomes_runs_seed_by_seed():
    cells = cells_of({"a": "softmax", "b": "exp/l2"})
    experiment = Experiment("e", "E", "test_loss", {"steps": 10, "device": "cpu"}, cells, (0, 1), "a")
    runs = plan_runs(Study("s", "S", "?", "none", (experiment,)), scale=0.5)
    assert [(run.cell.name, run.seed) for run in runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert {run.config.steps for run in runs} == {5}
    assert runs[0].config.attention == ("exp/sum",)
