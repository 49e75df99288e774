"""Studies on a Ray cluster of two nodes, one of which dies in the middle, and through submitit."""

from types import SimpleNamespace

import pytest

from maclaurin.plain_data import to_plain
from maclaurin.study.plan_runs import Sources, resolved, waiting
from maclaurin.study.pool import Pool, RunPlace
from maclaurin.study.worker import Job
from tests.e2e.studies import (
    COMMON,
    by_cell,
    finish,
    stamps,
    start,
    steps_trained,
    study,
    wait_for,
    write_study,
)

STORE = 80 * 1024 * 1024


@pytest.fixture
def cluster(monkeypatch):
    """Two raylets of one core each; the study itself connects from outside."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'maclaurin[ray]'")
    for name, value in (("RAY_USAGE_STATS_ENABLED", "0"), ("RAY_DISABLE_IMPORT_WARNING", "1")):
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    second = made.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
    made.wait_for_nodes()
    yield SimpleNamespace(
        address=made.address, kill_second=lambda: made.remove_node(second, allow_graceful=False)
    )
    made.shutdown()


@pytest.mark.exhaustive
def test_a_node_dies_and_nothing_is_lost(cluster, tmp_path):
    # a long run takes about twice as long as a process of Ray takes to start, so that two of them meet
    short, long = {"steps": 5}, {"steps": 300}
    cells = {
        "one": {"attention": "exp/sum", **short},
        "two": {"attention": "exp/sum", **long},
        "three": {"attention": "exp/l2", **long},
        "four": {"attention": "exp/l2", **short},
    }
    write_study(tmp_path, "far", cells, eval_every=0, checkpoint_every=10)
    pool = tmp_path / "runs" / "pool"
    process = start(tmp_path, "far", "--executor", "ray", "--ray-address", cluster.address, "--no-report")
    entries = lambda: [Pool(pool).entry(path.name) for path in pool.glob("?" * 32)]  # noqa: E731
    both_at_work = lambda: sum(entry.is_busy() for entry in entries()) == 2  # noqa: E731
    wait_for(lambda: stamps(tmp_path) and list(pool.glob("*/checkpoints/step-*")) and both_at_work(), process)
    before = stamps(tmp_path)
    cluster.kill_second()
    finish(process, seconds=400)
    found = by_cell(tmp_path, "far")
    assert {cell: run.status for cell, run in found.items()} == dict.fromkeys(cells, "finished")
    assert len(stamps(tmp_path)) == len(cells)
    assert stamps(tmp_path).items() >= before.items()
    for run in found.values():
        assert steps_trained(tmp_path, run.key) == list(range(1, run.run.steps + 1))


def test_a_node_without_the_disk_trains_in_a_folder_of_its_own(tmp_path, monkeypatch):
    from maclaurin.study.ray_executor import train_task

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    record = Sources().complete(waiting(resolved({**COMMON, "attention": "exp/sum", "steps": 3})))
    pool = Pool(tmp_path / "driver" / "pool")
    reports = []
    board = SimpleNamespace(
        report=SimpleNamespace(remote=lambda key, progress: reports.append((key, progress["step"])))
    )
    job = Job(record=record, place=RunPlace(pool=str(pool.root), marker="of another disk", threads=1))
    answer = train_task(to_plain(job), board)
    assert answer["record"]["status"] == "finished"
    assert pool.entry(record.key).record() is None
    assert (tmp_path / "node" / "maclaurin-pool" / record.key / "record.json").exists()
    assert reports[-1] == (record.key, 3)
    values = to_plain(job)
    values["record"]["run"]["torch"] = "1.0"
    assert "install the same versions" in train_task(values, board)["problem"]


def test_without_a_cluster_there_is_one_clear_error(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'maclaurin[ray]'")
    write_study(tmp_path, "far", {"softmax": {"attention": "exp/sum"}})
    process = start(tmp_path, "far", "--executor", "ray", "--ray-address", "127.0.0.1:1", "--no-report")
    told = finish(process, expect=2, seconds=100)
    assert "no Ray cluster answers at 127.0.0.1:1" in told


# ------------------------------------------------------------------------------------------ Slurm


def test_runs_go_through_submitit(tmp_path):
    """With its local executor, which starts jobs as Slurm would, on this machine."""
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'maclaurin[slurm]'")
    cells = {"softmax": {"attention": "exp/sum"}, "impossible": {"attention": "exp/sum", "kv_heads": 3}}
    write_study(tmp_path, "queued", cells, steps=5)
    options = (
        "--executor",
        "slurm",
        "--slurm",
        "cluster=local,timeout_min=10",
        "--workers",
        "2",
        "--no-report",
    )
    told = study(tmp_path, "queued", *options, expect=1)
    found = by_cell(tmp_path, "queued")
    assert {cell: run.status for cell, run in found.items()} == {
        "softmax": "finished",
        "impossible": "crashed",
    }
    assert found["softmax"].provenance["runs_at_once"] is None  # the queue decides
    assert "1 finished, 1 crashed" in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (None, {})),
        ("partition=gpu,timeout_min=600", (None, {"slurm_partition": "gpu", "timeout_min": 600})),
        ("cluster=local, gpus_per_node=2", ("local", {"gpus_per_node": 2})),
    ],
)
def test_options_of_slurm_are_read(text, expected):
    from maclaurin.study.slurm_executor import read_options

    assert read_options(text) == expected


def test_options_without_a_value_are_refused():
    from maclaurin import InputError
    from maclaurin.study.slurm_executor import read_options

    with pytest.raises(InputError, match="name=value"):
        read_options("gpu")
