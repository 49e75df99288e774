"""The same study on a Ray cluster of two nodes, one of which dies in the middle."""

from types import SimpleNamespace

import pytest

from maclaurin.study.design import Cell
from maclaurin.study.plan import plan_runs
from maclaurin.study.pool import Pool
from tests.e2e.studies import COMMON, finish, runs, stamps, start, steps_trained, wait_for, write_study

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
    found = runs(tmp_path, "far")
    assert {run.cell: run.status for run in found} == dict.fromkeys(cells, "finished")
    assert len(stamps(tmp_path)) == len(cells)
    assert stamps(tmp_path).items() >= before.items()
    for run in found:
        assert steps_trained(tmp_path, run.key) == list(range(1, run.steps + 1))


def test_a_node_without_the_disk_trains_in_a_folder_of_its_own(tmp_path, monkeypatch):
    from maclaurin.study.design import Experiment, Study
    from maclaurin.study.prepare import make_tasks
    from maclaurin.study.ray_executor import train_task

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    cell = Cell("softmax", {"attention": "exp/sum", "steps": 3})
    study = Study(
        "s", "S", "?", "none", (Experiment("e", "E", "accuracy", COMMON, (cell,), (0,), "softmax"),)
    )
    pool = Pool(tmp_path / "driver" / "pool")
    (task,) = make_tasks(
        study, plan_runs(study), pool, study_lock=tmp_path / "lock", threads=1, keep_models=False
    )
    told = []
    board = SimpleNamespace(tell=SimpleNamespace(remote=lambda key, news: told.append((key, news["step"]))))
    values = {**task.job.to_json(), "marker": "of another disk"}
    answer = train_task(values, board)
    assert answer["record"]["status"] == "finished"
    assert pool.entry(task.key).record() is None
    assert (tmp_path / "node" / "maclaurin-pool" / task.key / "record.json").exists()
    assert told[-1] == (task.key, 3)
    other = train_task({**values, "code": "another version"}, board)
    assert "install the same maclaurin" in other["problem"]


def test_without_a_cluster_there_is_one_clear_error(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'maclaurin[ray]'")
    write_study(tmp_path, "far", {"softmax": {"attention": "exp/sum"}})
    process = start(tmp_path, "far", "--executor", "ray", "--ray-address", "127.0.0.1:1", "--no-report")
    told = finish(process, expect=2, seconds=100)
    assert "no Ray cluster answers at 127.0.0.1:1" in told
