"""Studies on a rented machine (benchmarks/remote_studies.py): text there, results back into a pool."""

import importlib.util
from pathlib import Path

import pytest
from tests.unit.study.making import make_record

from maclaurin import InputError
from maclaurin.code_version import NUMERICS_VERSION
from maclaurin.study.find import load_study
from maclaurin.study.plan_runs import resolved
from maclaurin.study.pool import Pool
from maclaurin.study.run_record import Run
from maclaurin.study.tuned_rates import TunedFile

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PATH = BENCHMARKS / "remote_studies.py"
spec = importlib.util.spec_from_file_location("benchmarks_remote_studies", PATH)
remote = importlib.util.module_from_spec(spec)
spec.loader.exec_module(remote)


def test_results_come_back_into_a_pool_and_what_is_there_stays(tmp_path):
    there, here = Pool(tmp_path / "there"), Pool(tmp_path / "here")
    for seed, status in enumerate(("finished", "diverged", "finished")):
        record = make_record(status, seed=seed, metrics={"loss": 1.0 + seed})
        there.entry(record.key).path.mkdir(parents=True)
        there.entry(record.key).write(record)
    own = make_record("finished", seed=2, metrics={"loss": 9.0})
    here.entry(own.key).path.mkdir(parents=True)
    here.entry(own.key).write(own)
    assert remote.pack(there.root, tmp_path / remote.FILE, "abc").startswith("3 results in")
    words = remote.merged([tmp_path / remote.FILE], here.root)
    assert words.endswith("1 diverged, torch 2.13; 1 finished, torch 2.13")
    assert here.entry(own.key).record().metrics == {"loss": 9.0}
    assert len(here.entries()) == 3
    assert sorted(str(e.record().provenance.get("commit")) for e in here.entries()) == ["None", "abc", "abc"]
    assert remote.merged([tmp_path / remote.FILE], here.root).endswith("none")


def test_studies_are_trained_as_one_and_share_what_they_have_in_common(tmp_path):
    studies = remote.chosen_studies(["gap:language", "interactions", "recall:8 pairs"])
    names = [e.name for e in remote.together(studies).experiments]
    assert names == ["gap: language", "interactions: language", "recall: 8 pairs"]
    remote.known_tuning(studies, tmp_path)
    assert "recall: recall" in TunedFile.read(tmp_path / "tuned.json").experiments
    with pytest.raises(InputError, match="no experiment 'nine'; it has recall, 8 pairs"):
        remote.chosen_studies(["recall:nine"])


def test_the_rule_of_a_ladder_keeps_the_names_of_its_experiments():
    (large,) = [
        e for e in remote.together(remote.chosen_studies(["ladder"])).experiments if e.name == "ladder: 60m"
    ]
    assert large.tune.tuned == ("ladder: 5m", "ladder: 17m")


def test_the_runs_that_an_h200_made_are_those_that_the_ladder_asks_for():
    """Their keys follow from config, data, torch and numerics. First rates at 17M were not compiled then."""
    file = BENCHMARKS / "results" / "h200" / "runs.jsonl.xz"
    known = {record.key: record for record in remote.results(file)}
    data = {record.run.seed: record.run.data for record in known.values()}
    ladder = {e.name: e for e in load_study("ladder").experiments}

    def found(name, cell, **keys):
        e = ladder[name]
        config = resolved({**e.settings(cell), **keys, "device": "cuda"}).to_dict()
        run = Run(config=config, data=data[keys["seed"]], torch="2.11", numerics=NUMERICS_VERSION)
        return known.get(run.key)

    for cell in ladder["17m"].cells:
        spec = cell.settings["attention"]
        finals = [r.run.config for r in known.values() if r.run.attention == spec and "loss" in r.metrics]
        ((rate, factor),) = {
            (c["lr"], c["output_lr"]) for c in finals if c["size"] == "mini" and "output_lr" in c
        }
        assert all(found("17m", cell, lr=rate, output_lr=factor, seed=seed) for seed in (1, 2, 3)), cell.name
        assert found("17m", cell, lr=rate, output_lr=factor, seed=0, test=False), cell.name
    norm = next(cell for cell in ladder["275m"].cells if cell.name == "norm l2")
    assert found("275m", norm, lr=1e-3, output_lr=0.25, seed=1).status == "finished"


def test_wrong_arguments_end_with_a_message(capsys):
    with pytest.raises(SystemExit):
        remote.main(["run", "orders"])
    assert "--carry" in capsys.readouterr().err
