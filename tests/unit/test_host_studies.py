"""Studies on a rented machine (benchmarks/host_studies.py): which runs, and their way back into a pool."""

import importlib.util
from pathlib import Path

import pytest
from tests.unit.study.making import make_record

from maclaurin import InputError
from maclaurin.study.pool import Pool
from maclaurin.study.tuned_rates import TunedFile

PATH = Path(__file__).parents[2] / "benchmarks" / "host_studies.py"
spec = importlib.util.spec_from_file_location("benchmarks_host_studies", PATH)
host = importlib.util.module_from_spec(spec)
spec.loader.exec_module(host)


def test_results_come_back_into_a_pool_and_what_is_there_stays(tmp_path):
    there, here = Pool(tmp_path / "there"), Pool(tmp_path / "here")
    for seed, status in enumerate(("finished", "diverged", "finished")):
        record = make_record(status, seed=seed, metrics={"loss": 1.0 + seed})
        there.entry(record.key).path.mkdir(parents=True)
        there.entry(record.key).write(record)
    own = make_record("finished", seed=2, metrics={"loss": 9.0})
    here.entry(own.key).path.mkdir(parents=True)
    here.entry(own.key).write(own)
    assert host.pack(there.root, tmp_path / host.FILE, "abc").startswith("3 results in")
    words = host.merged([tmp_path / host.FILE], here.root)
    assert words.endswith("1 diverged, torch 2.13; 1 finished, torch 2.13")
    assert here.entry(own.key).record().metrics == {"loss": 9.0}
    assert len(here.entries()) == 3
    assert sorted(str(e.record().provenance.get("commit")) for e in here.entries()) == ["None", "abc", "abc"]
    assert host.merged([tmp_path / host.FILE], here.root).endswith("none")


def test_studies_are_trained_as_one_and_share_what_they_have_in_common(tmp_path):
    studies = host.chosen_studies(["gap:language", "interactions", "recall:8 pairs"])
    names = [e.name for e in host.together(studies).experiments]
    assert names == ["gap: language", "interactions: language", "recall: 8 pairs"]
    host.known_tuning(studies, tmp_path)
    assert "recall: recall" in TunedFile.read(tmp_path / "tuned.json").experiments
    with pytest.raises(InputError, match="no experiment 'nine'; it has recall, 8 pairs"):
        host.chosen_studies(["recall:nine"])


def test_wrong_arguments_end_with_a_message(capsys):
    with pytest.raises(SystemExit):
        host.main(["run", "orders"])
    assert "--carry" in capsys.readouterr().err
