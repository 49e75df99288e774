"""One run of a study in this process: its record, and what it does with what it finds in the pool."""

import dataclasses
import json
import math

import pytest
from tests.e2e.command import run_code, run_script

from maclaurin import InputError
from maclaurin.evaluation.evaluate import items_fingerprint
from maclaurin.extensions import Extension, load_extension
from maclaurin.models import SIZES, Size
from maclaurin.study.plan_runs import Sources, resolved, waiting
from maclaurin.study.pool import Pool, RunPlace
from maclaurin.study.run_record import TaskItems
from maclaurin.study.worker import Job, work

pytestmark = pytest.mark.slow

COMMON = {
    "attention": "exp/sum", "size": "tiny", "data": "mqar:pairs=2,vocab=16,length=12", "steps": 4,
    "batch_size": 2, "warmup": 0, "eval_every": 2, "eval_rows": 4, "checkpoint_every": 2, "log_every": 1,
    "device": "cpu",
}  # fmt: skip


@pytest.fixture
def pool(tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", Size("tiny", 16, 24, 2, 1, 12))
    return Pool(tmp_path / "pool")


def job(pool, *, code=(), keep_models=False, opened=True, **settings):
    record = waiting(resolved({**COMMON, **settings}))
    place = RunPlace(
        pool=str(pool.root), threads=1, keep_models=keep_models, code=tuple(code), group="study-s"
    )
    return Job(record=Sources().complete(record) if opened else record, place=place)


def test_a_run_leaves_its_record_and_no_weights(pool):
    asked = job(pool)
    record = work(asked)
    entry = pool.entry(asked.record.key)
    assert entry.record() == record
    assert (record.status, record.step, record.key) == ("finished", 4, asked.record.key)
    held_out = record.curves.get("validation_loss") or record.curves["loss"]
    assert [step for step, _ in held_out] == [2, 4]
    assert [step for step, _ in record.curves["train_loss"]] == [1, 2, 3, 4]
    assert len(record.loss_by_position) == 12
    assert None in dict(record.loss_by_position).values(), "keys and values of a recall task are not scored"
    assert {"loss", "accuracy", "parameters", "tokens_per_second", "training_flops", "scored_tokens"} <= set(
        record.metrics
    )
    assert {"data", "commit", "machine", "versions", "date", "runs_at_once"} <= set(record.provenance)
    assert record.provenance["machine"].keys() == {"platform", "processor", "cores", "threads", "gpu"}
    assert record.provenance["versions"].keys() >= {"python", "torch", "maclaurin"}
    assert json.loads(entry.progress.read_text())["step"] == 4
    assert not (entry.path / "checkpoints").exists()
    assert work(asked) == record  # not trained again


def test_runs_in_the_pool_have_no_labels(pool):
    work(job(pool))
    texts = [file.read_text() for file in pool.root.rglob("*.json")]
    assert texts
    assert not any("study-s" in text for text in texts)


def test_models_are_kept_where_asked_for(pool):
    asked = job(pool, keep_models=True)
    work(asked)
    assert (pool.entry(asked.record.key).path / "model" / "model.safetensors").exists()


def test_a_run_killed_before_its_record_is_not_trained_again(pool):
    asked = job(pool)
    record = work(asked)
    entry = pool.entry(asked.record.key)
    entry.record_file.unlink()
    before = (entry.path / "records.jsonl").stat().st_mtime_ns
    again = work(asked)
    assert (entry.path / "records.jsonl").stat().st_mtime_ns == before
    assert again.curves == record.curves
    assert again.metrics == record.metrics


def test_divergence_is_a_record_with_the_curve_so_far(pool):
    record = work(job(pool, lr=1e5, largest_loss=4.0, clip=None))
    assert record.status == "diverged"
    assert record.message.startswith(f"step {record.step}: ")
    assert len(record.curves["train_loss"]) == record.step - 1
    assert record.value("loss") is None


def test_a_run_that_stays_far_above_its_start_ends_early_and_counts_as_diverged(pool, monkeypatch):
    monkeypatch.setattr("maclaurin.study.run_progress.JUDGED_STEPS", 2)
    monkeypatch.setattr("maclaurin.study.run_progress.STEPS_BETWEEN_JUDGED", 1)
    monkeypatch.setattr("maclaurin.study.run_progress.NATS_ABOVE_START", -100.0)
    record = work(job(pool, steps=40))
    assert (record.status, record.step) == ("diverged", 5)
    assert "stopped early" in record.message


def test_a_job_whose_data_were_not_opened_finds_the_place_a_study_looks_at(pool):
    key = job(pool).record.key
    record = work(job(pool, opened=False))
    assert record.key == key
    assert pool.entry(key).record().status == "finished"


def test_a_job_travels_in_a_file(pool, tmp_path):
    code = Extension(name="x", source="y = 1\n")
    asked = dataclasses.replace(job(pool, code=[code]), gpu="3")
    asked.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == asked


@pytest.mark.parametrize(
    ("change", "words"), [({"torch": "1.0"}, "same versions"), ({"data": "x"}, "has the fingerprint")]
)
def test_other_versions_and_other_data_are_refused(pool, change, words):
    asked = job(pool)
    run = dataclasses.replace(asked.record.run, **change)
    with pytest.raises(InputError, match=words):
        work(dataclasses.replace(asked, record=dataclasses.replace(asked.record, run=run)))


OWN_PART = '''
import math
from dataclasses import dataclass
from typing import ClassVar
from maclaurin.spec import Polynomial, register, whole

@register
@dataclass(frozen=True, slots=True)
class {name}(Polynomial):
    """κ = Σ_(n≤N, n even) xⁿ/n!"""

    notation: ClassVar[str] = "{name}"
    order: int = whole(at_least=0)

    @property
    def series(self):
        return tuple((n % 2 == 0) * {scale} / math.factorial(n) for n in range(self.order + 1))
'''


def test_a_part_of_ones_own_reaches_the_worker_and_its_code_is_part_of_the_key(pool, tmp_path):
    """In a process that has never seen the part, as every worker is."""
    code = [Extension(name="own_cosh", source=OWN_PART.format(name="owncosh", scale=s)) for s in (1.0, 0.5)]
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from maclaurin.models import SIZES, Size\n"
        "SIZES['tiny'] = Size('tiny', 16, 24, 2, 1, 12)\n"
        "from maclaurin.study.worker import Job, main\n"
        "sys.exit(main(Job.read(Path(sys.argv[1]))))\n"
    )
    keys = []
    for own in code:
        load_extension(own)
        asked = job(pool, code=[own], attention="owncosh(4)/sum")
        keys.append(asked.record.key)
    asked.write(tmp_path / "job.json")
    assert len(set(keys)) == 2, "an edited part is another run"
    assert job(pool, code=code[:1]).record.run.parts is None, "runs without it are shared with everybody"
    result = run_script(script, tmp_path / "job.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert pool.entry(keys[1]).record().status == "finished"


def test_loading_the_worker_leaves_cuda_alone():
    """Processes are forked from one that has loaded it, and CUDA does not survive a fork."""
    code = (
        "import torch\n"
        "def refuse(*_): raise SystemExit('CUDA was asked for')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse\n"
        "import maclaurin.study.worker, maclaurin.cli.main\n"
    )
    result = run_code(code)
    assert result.returncode == 0, result.stderr


# --------------------------------------------------------------------------------------- tasks

TEXT = {
    "data": "stdlib", "tokenizer": "bytes", "limit_documents": 40, "length": 128, "eval_rows": 2,
    "test_fraction": 0.2,
}  # fmt: skip


def asking(pool, *, seed=0, number=3, keep_models=False):
    fingerprint = items_fingerprint("induction_8", number, seed)
    task = TaskItems(name="induction_8", items=number, seed=seed, fingerprint=fingerprint)
    record = Sources().complete(waiting(resolved({**COMMON, **TEXT}), (task,)))
    return Job(record=record, place=RunPlace(pool=str(pool.root), threads=1, keep_models=keep_models))


def test_the_trained_model_is_asked_tasks_before_its_weights_go(pool):
    asked = asking(pool)
    record = work(asked)
    assert 0 <= record.value("task:induction_8") <= 1
    assert math.isfinite(record.value("task:induction_8:log_odds"))
    facts = record.provenance["tasks"]["induction_8"]
    assert (facts["items"], facts["questions"], facts["chance"], facts["truncated"]) == (3, 3, 0.25, 0)
    assert "acc" in facts["errors"]
    assert not (pool.entry(record.key).path / "model").exists()


def test_the_same_training_without_tasks_has_its_result_too(pool):
    record = work(asking(pool))
    plain = work(job(pool, **TEXT))
    assert plain.key != record.key
    assert plain.metrics == {n: v for n, v in record.metrics.items() if not n.startswith("task:")}
    assert not (pool.entry(plain.key).path / "records.jsonl").exists(), "it was not trained again"


def test_a_run_killed_while_it_is_asked_is_asked_again_and_not_trained(pool, monkeypatch):
    asked = asking(pool)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maclaurin.study.worker.ask_run", killed)
        with pytest.raises(KeyboardInterrupt):
            work(asked)
    entry = pool.entry(asked.record.key)
    assert entry.record() is None
    before = (entry.path / "records.jsonl").stat().st_mtime_ns
    assert work(asked).value("task:induction_8") is not None
    assert (entry.path / "records.jsonl").stat().st_mtime_ns == before


def test_other_items_than_the_studys_are_refused(pool):
    asked = asking(pool)
    (task,) = asked.record.run.tasks
    run = dataclasses.replace(asked.record.run, tasks=(dataclasses.replace(task, fingerprint="0" * 32),))
    with pytest.raises(InputError, match="items of induction_8 are not the same as where"):
        work(dataclasses.replace(asked, record=dataclasses.replace(asked.record, run=run)))
