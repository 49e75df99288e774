"""Config, schedule, losses, checkpoints, records and the loop itself, in one process."""

import copy
import dataclasses
import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import maclaurin
from maclaurin import InputError, catalogue
from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.data.tasks import TaskSource
from maclaurin.models import SIZES, MaclaurinConfig, MaclaurinForCausalLM, Size, size_named
from maclaurin.training import compiling, losses
from maclaurin.training.batches import Prefetch, StepBatch
from maclaurin.training.checkpoint import CheckpointError, CheckpointStore, Progress, _IndexUnpickler
from maclaurin.training.config import TrainConfig, config_from, load_config
from maclaurin.training.estimate import estimate, flops_per_token
from maclaurin.training.losses import evaluate, summed_cross_entropy, summed_divergence
from maclaurin.training.model import model_config
from maclaurin.training.optimizer_step import Diverged, OptimizerStep, learning_rate
from maclaurin.training.processes import Processes
from maclaurin.training.rate_sweep import Sweep, sweep
from maclaurin.training.run_folder import Records, read_records
from maclaurin.training.trainer import Trainer

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = Size("tiny", 32, 48, 2, 1, 16)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", TINY)


RECALL = TrainConfig(
    size="tiny", data="mqar:pairs=2,vocab=16,length=16", batch_size=4, steps=6, warmup=0,
    log_every=2, checkpoint_every=2, eval_every=0, eval_rows=4,
)  # fmt: skip


def trainer(tmp_path, config=RECALL):
    data = DataConfig(config.data, length=config.length or 16, seed=config.seed)
    return Trainer(config, open_source(data), tmp_path / "run", ALONE)


def run(tmp_path, config, **options):
    return trainer(tmp_path, config).run(**options)


def test_options_come_before_the_file_and_the_file_before_the_preset(tmp_path):
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


def test_a_file_that_is_missing_or_not_toml(tmp_path):
    with pytest.raises(InputError, match="no config file"):
        load_config(tmp_path / "none.toml", None, {})
    (tmp_path / "bad.toml").write_text("lr = = 3")
    with pytest.raises(InputError, match="not TOML"):
        load_config(tmp_path / "bad.toml", None, {})
    with pytest.raises(InputError, match="no preset"):
        load_config(None, "papers", {})


def test_every_key_has_a_help_text_and_survives_json():
    assert all(f.metadata["help"].endswith((".", "cuda.")) for f in dataclasses.fields(TrainConfig))
    config = config_from({"attention": ("exp/sum", "exp/l2")})
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


def test_records_after_a_checkpoint_are_removed(tmp_path):
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
    objective = Trainer(config, source, tmp_path / "run", ALONE).objective
    whole = evaluate(objective, source.held_out_batches("test", 64, 48), ALONE, 16)
    parts = evaluate(objective, source.held_out_batches("test", 5, 48), ALONE, 16)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.tokens == whole.tokens
    assert whole.perplexity == pytest.approx(math.exp(whole.loss))
    scored = [x for x in whole.loss_by_position if x is not None]
    assert min(scored) <= whole.loss <= max(scored)


def test_paper_presets_groups_decay_matrices_only(tiny, tmp_path):
    config = TrainConfig(size="tiny", attention=("2mamba",), data="mqar:pairs=2,vocab=16,length=16")
    made = trainer(tmp_path, config)
    decayed, kept = made.step.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decayed["params"])
    names = {id(p): n for n, p in made.plain_model.named_parameters()}
    assert any("convolution" in names[id(p)] for p in kept["params"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(entry.name, marks=[] if number % 3 == 0 else [pytest.mark.exhaustive])
        for number, entry in enumerate(catalogue)
    ],
)
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
    asked, original = [], TaskSource.held_out_batches

    def remembered(self, split, *arguments, **named):
        asked.append(split)
        return original(self, split, *arguments, **named)

    monkeypatch.setattr(TaskSource, "held_out_batches", remembered)
    outcome = run(tmp_path, RECALL.replace(eval_every=2, eval_rows=8, final_rows=0))
    assert asked == ["validation"] * 4 + ["test"]  # steps 2, 4 and 6, then all rows
    lines = read_records(tmp_path / "run" / "records.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "validation"] == [2, 4, 6]
    final = next(line for line in lines if line["kind"] == "final")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test_loss"] == outcome.test.loss == final["loss"]
    assert summary["validation_loss"] == outcome.validation.loss != outcome.test.loss
    assert outcome.test.tokens == outcome.validation.tokens


def test_without_test_the_test_data_are_not_looked_at(tiny, tmp_path, monkeypatch):
    asked, original = [], TaskSource.held_out_batches

    def remembered(self, split, *arguments, **named):
        asked.append(split)
        return original(self, split, *arguments, **named)

    monkeypatch.setattr(TaskSource, "held_out_batches", remembered)
    outcome = run(tmp_path, RECALL.replace(eval_every=2, eval_rows=8, test=False))
    assert asked == ["validation"] * 3
    assert (outcome.finished, outcome.test) == (True, None)
    assert outcome.validation.loss > 0
    lines = read_records(tmp_path / "run" / "records.jsonl")
    assert [line["kind"] for line in lines if line["kind"].startswith("final")] == ["final-validation"]
    again = run(tmp_path, RECALL.replace(eval_every=2, eval_rows=8, test=False), resume=True)
    assert again.validation.loss == outcome.validation.loss
    assert asked == ["validation"] * 3


def test_a_run_older_than_a_key_of_the_config_continues(tiny, tmp_path):
    run(tmp_path, RECALL)
    file = tmp_path / "run" / "config.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({k: v for k, v in before.items() if k not in ("test", "equal_start")}))
    assert run(tmp_path, RECALL, resume=True).finished


def test_an_empty_split_has_no_loss(tiny, tmp_path):
    made = trainer(tmp_path)
    assert evaluate(made.objective, [], ALONE, 16) is None


def test_a_batch_that_cannot_be_split_is_refused(tiny, tmp_path):
    config = TrainConfig(size="tiny", batch_size=6, accumulate=2, data="mqar:pairs=2,vocab=16,length=16")
    source = open_source(DataConfig(config.data, length=16))
    with pytest.raises(InputError, match="cannot be split over 4 processes"):
        Trainer(config, source, tmp_path / "run", Processes(0, 4, torch.device("cpu")))


def test_flops_and_parameters_of_a_dry_run():
    config = TrainConfig(size="small", steps=10, batch_size=2)
    source = open_source(DataConfig("mqar:pairs=2,vocab=16,length=16", length=16))
    found = estimate(config, model_config(config, source), 1024, torch.device("cpu"))
    assert found.tokens == 10 * 2 * 1024
    matrices = found.parameters - 16 * 1024 - 41 * 1024  # without the embedding and the norms
    assert found.flops > 6 * matrices * found.tokens
    assert "parameters" in str(found)


def test_a_tied_head_takes_the_flops_of_a_head():
    config = MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 512)
    tied = MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 512, tie_word_embeddings=True)
    found = [flops_per_token(MaclaurinForCausalLM(c), c, 128) for c in (config, tied)]
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1 << 26, 64 * 40])
def test_the_chunked_cross_entropy_is_the_plain_one(monkeypatch, dtype, at_once):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", at_once)
    hidden = torch.randn(150, 24, requires_grad=True)
    weight = torch.randn(40, 24, requires_grad=True)
    targets = torch.randint(0, 40, (150,))
    targets[::7] = -100
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = summed_cross_entropy(hidden, weight, targets)
        plain = nn.functional.cross_entropy(
            nn.functional.linear(hidden, weight).float(), targets, reduction="sum"
        )
    assert found.item() == pytest.approx(plain.item(), rel=1e-6)
    ours = torch.autograd.grad(3 * found, (hidden, weight))
    theirs = torch.autograd.grad(3 * plain, (hidden, weight))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("at_once", [1 << 20, 2600])
def test_the_chunked_divergence_is_the_plain_one(monkeypatch, at_once):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", at_once)
    hidden, weight = torch.randn(150, 24, requires_grad=True), torch.randn(40, 24, requires_grad=True)
    known, known_weight = torch.randn(150, 24), torch.randn(40, 24)
    scored = torch.arange(150) % 7 != 0
    found = summed_divergence(hidden, weight, known, known_weight, scored)
    wanted = (known @ known_weight.t()).log_softmax(-1)[scored]
    own = (hidden @ weight.t()).log_softmax(-1)[scored]
    plain = nn.functional.kl_div(own, wanted, reduction="sum", log_target=True)
    assert found.item() == pytest.approx(plain.item(), rel=1e-5)
    ours = torch.autograd.grad(3 * found, (hidden, weight))
    for one, other in zip(ours, torch.autograd.grad(3 * plain, (hidden, weight)), strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_no_logits_are_kept_for_the_backward_pass():
    hidden, weight = torch.randn(600, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    kept = []

    def remember(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        summed_cross_entropy(hidden, weight, torch.randint(0, 500, (600,)))
    assert kept
    assert max(kept) <= 600 * 8  # the logits would be 600 · 500


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8)
    summed_cross_entropy(hidden, weight, torch.randint(0, 30, (20,))).backward()
    assert hidden.grad is not None


# --------------------------------------------------------------------------------- steps and divergence


class NotFiniteAt(nn.Module):
    """The objective, with an infinite gradient under a finite loss in its nth forward pass."""

    def __init__(self, objective, n):
        super().__init__()
        self.objective, self.model, self.n, self.calls = objective, objective.model, n, 0

    def forward(self, *arguments):
        loss = self.objective(*arguments)
        weight = self.model.lm_head.weight
        self.calls += 1
        if self.calls >= self.n:  # 0 · √0 has the value 0 and the slope 0 · ∞
            loss = loss + 0.0 * (weight - weight.detach()).sum().sqrt()
        return loss

    def by_token(self, batch):
        return self.objective.by_token(batch)


@pytest.mark.parametrize("log_every", [1, 2, 5])
def test_a_gradient_that_is_not_finite_is_never_applied_or_saved(tiny, tmp_path, log_every):
    made = trainer(tmp_path, RECALL.replace(log_every=log_every))
    made.step = OptimizerStep(NotFiniteAt(made.objective, 3), made.config, ALONE)
    with pytest.raises(Diverged, match=r"step 3: the gradient is not finite, at a loss of \d") as caught:
        made.run()
    assert "step-00000002" in str(caught.value)
    assert "lm_head.weight: |weight|" in str(caught.value).splitlines()[2]  # what is not finite comes first
    assert made.store.steps() == [2]
    assert all(p.isfinite().all() for p in made.plain_model.parameters())
    kept = trainer(tmp_path)
    kept.store.load(made.store.latest(), kept.plain_model, kept.step.optimizer)
    for now, saved in zip(made.plain_model.parameters(), kept.plain_model.parameters(), strict=True):
        assert torch.equal(now, saved)
    assert [r["step"] for r in read_records(tmp_path / "run" / "records.jsonl")] == [1, 2]


def test_a_loss_above_the_bound_reports_the_gradients_of_that_step(tiny, tmp_path):
    with pytest.raises(Diverged, match=r"above largest_loss=0\.5") as caught:
        run(tmp_path, RECALL.replace(largest_loss=0.5))
    norms = [float(line.split()[-1]) for line in str(caught.value).splitlines() if "|gradient|" in line]
    assert norms
    assert norms == sorted(norms, reverse=True)
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)


def test_the_loop_reads_losses_from_the_device_at_the_log_interval_only(tiny, tmp_path):
    """On a GPU each reading waits until all work is done."""
    made, calls = trainer(tmp_path, RECALL.replace(log_every=3, checkpoint_every=0)), []
    made._record_losses = _counted(made._record_losses, calls)
    made.run()
    assert calls == [3, 3]


def test_one_process_asks_no_device_whether_to_stop():
    """A tensor on the meta device has no value: reading one would raise."""
    alone = Processes(0, 1, torch.device("meta"))
    assert alone.any(True)
    assert not alone.any(False)


def _counted(function, calls):
    def call(unread, *others):
        calls.append(len(unread))
        return function(unread, *others)

    return call


# ------------------------------------------------------------------------------------------- batches


def test_batches_are_made_ahead_in_order_by_a_thread_that_ends(tiny, tmp_path):
    makers = set()
    source = trainer(tmp_path).source

    def make(step):
        makers.add(threading.current_thread())
        return StepBatch.of(source, step, RECALL, ALONE)

    with Prefetch(make, 3, 9) as ahead:
        for step in range(3, 9):
            expected = source.train_batch(step, 4)
            assert torch.equal(ahead.take().parts[0].tokens, expected.tokens)
    assert threading.main_thread() not in makers
    with Prefetch(make, 0, 10**6) as ahead:
        ahead.take()
    assert not any(thread.is_alive() for thread in makers)


def test_an_error_in_the_data_reaches_the_loop():
    def make(step):
        raise InputError(f"no batch {step}")

    with Prefetch(make, 0, 3) as ahead, pytest.raises(InputError, match="no batch 0"):
        ahead.take()


def test_a_step_batch_knows_its_scored_tokens(tiny, tmp_path):
    source = trainer(tmp_path).source
    found = StepBatch.of(source, 0, RECALL.replace(accumulate=2), ALONE)
    assert len(found.parts) == 2
    assert found.scored == sum(int((part.targets != -100).sum()) for part in found.parts)


# --------------------------------------------------------------------------------------- checkpoints


def test_the_best_checkpoint_is_one_that_was_evaluated_itself(tiny, tmp_path):
    """Evaluations at 3 and 6, checkpoints at 2, 4, 6: the loss of step 3 belongs to no checkpoint."""
    made = trainer(tmp_path, RECALL.replace(eval_every=3, keep=5))
    made.run()
    losses_ = {
        s: json.loads((made.store._path(s) / "progress.json").read_text())["validation_loss"]
        for s in (2, 4, 6)
    }
    assert losses_[2] is None
    assert losses_[4] is None
    assert losses_[6] is not None
    assert made.store.best() == 6


def test_the_best_checkpoint_is_kept(tiny, tmp_path):
    store = CheckpointStore(tmp_path, ALONE, keep=1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step, loss in ((2, 1.0), (4, None), (6, 3.0), (8, None)):
        store.save(Progress(step, loss, "data"), model, optimizer)
    assert store.best() == 2
    assert store.steps() == [2, 8]


class Harm:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code from a checkpoint')",))


def test_loading_a_checkpoint_runs_no_code_from_it(tiny, tmp_path):
    made = trainer(tmp_path)
    made.run()
    last = made.store.latest()
    with (last / ".metadata").open("wb") as file:
        pickle.dump(Harm(), file)
    with pytest.raises(CheckpointError, match=r"builtins\.exec"):
        made.store.load(last, made.plain_model, made.step.optimizer)
    made.step.optimizer.zero_grad()
    torch.save(Harm(), last / "random-0.pt")
    shutil.copy(made.store._path(4) / ".metadata", last / ".metadata")
    with pytest.raises(pickle.UnpicklingError):
        made.store.load(last, made.plain_model, made.step.optimizer)


class Reached:
    """Pickled as Python 3.11.2 pickles members of enums."""

    def __init__(self, owner, name):
        self.call = getattr, (owner, name)

    def __reduce__(self):
        return self.call


def test_members_of_enums_are_loaded_and_nothing_else_by_their_name():
    def read(owner, name):
        return _IndexUnpickler(io.BytesIO(pickle.dumps(Reached(owner, name)))).load()

    strided = next(iter(_MEM_FORMAT_ENCODING))
    assert read(_MEM_FORMAT_ENCODING, strided.name) is strided
    for name in ("__class__", "mro"):
        with pytest.raises(CheckpointError, match="is not loaded"):
            read(_MEM_FORMAT_ENCODING, name)


# ------------------------------------------------------------------------------------------- compile


def test_a_gpu_is_what_compiles_by_default(tiny, tmp_path):
    objective, gpu = trainer(tmp_path).objective, Processes(0, 1, torch.device("cuda"))
    assert not compiling.is_compiled(RECALL, objective, ALONE)
    assert compiling.is_compiled(RECALL, objective, gpu)
    assert not compiling.is_compiled(RECALL.replace(compile=False), objective, gpu)
    assert compiling.is_compiled(RECALL.replace(compile=True), objective, ALONE)
    model, teacher = objective.model, copy.deepcopy(objective.model)
    teacher.model.layers[0].self_attn.spec = maclaurin.parse("exp/l2")
    assert compiling.is_compiled(RECALL, losses.MatchLogits(model, teacher), gpu)
    assert not compiling.is_compiled(RECALL, losses.MatchAttention(model, teacher), gpu)


def test_a_run_goes_on_where_compilation_fails(tiny, tmp_path, monkeypatch):
    made, said = trainer(tmp_path), []

    def refuse(module):
        def call(*arguments):
            raise torch._dynamo.exc.Unsupported("an operation of tomorrow")

        return call

    monkeypatch.setattr(torch, "compile", refuse)
    result = compiling.first_compiled_step(made.step, made.batch(0), 1e-3, required=False, say=said.append)
    assert result.loss.isfinite()
    assert not made.step.is_compiled
    assert any("an operation of tomorrow" in line for line in said)
    with pytest.raises(compiling.CompileError, match="compile=False"):
        compiling.first_compiled_step(made.step, made.batch(0), 1e-3, required=True, say=said.append)


@pytest.mark.exhaustive  # a compiled run that ends is among the commands
def test_compile_workers_that_are_busy_are_ended(tmp_path):
    """torch before 2.13 waits for them, five minutes, when the process ends (pytorch/pytorch#162199)."""
    script = tmp_path / "busy.py"
    script.write_text(
        "import time\n"
        "from torch._inductor.async_compile import AsyncCompile\n"
        "from maclaurin.training.compiling import end_compile_workers\n"
        "pool = AsyncCompile.process_pool()\n"
        "for _ in range(2): pool.submit(time.sleep, 100)\n"
        "time.sleep(8)\n"
        "began = time.monotonic()\n"
        "end_compile_workers()\n"
        "assert pool.process.poll() is not None\n"
        "print(time.monotonic() - began)\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
        env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )
    assert float(result.stdout.splitlines()[-1]) < 20


# -------------------------------------------------------------------------------------------- commit


def test_the_commit_of_another_project_is_not_recorded(tmp_path):
    """Of a package that lies, ignored by git, in somebody's repository: as in a virtual environment there."""
    package = tmp_path / ".venv" / "maclaurin"
    package.mkdir(parents=True)
    shutil.copy(Path(maclaurin.__file__).with_name("code_version.py"), package)
    (tmp_path / ".gitignore").write_text(".venv\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "theirs"]):
        subprocess.run([*git, *arguments], check=True)
    assert commit_of(package) == "None"
    (tmp_path / ".gitignore").unlink()
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "with the package"], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    assert commit_of(package) == head.stdout.strip()


def commit_of(package):
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('v', sys.argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.commit())"
    )
    command = [sys.executable, "-c", code, str(package / "code_version.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_output_projections_can_have_another_rate(tiny, tmp_path):
    factors = {}
    for factor in (1.0, 0.25):
        made = trainer(tmp_path, RECALL.replace(output_lr=factor, weight_decay=0.0, clip=None))
        before = {name: p.detach().clone() for name, p in made.plain_model.named_parameters()}
        made.step(made.batch(0), 1e-3)
        factors[factor] = {
            name: float((p.detach() - before[name]).abs().max())
            for name, p in made.plain_model.named_parameters()
        }
    for name, moved in factors[1.0].items():
        expected = 0.25 * moved if ".o_proj." in name else moved
        assert factors[0.25][name] == pytest.approx(expected, rel=1e-3), name
    assert len(trainer(tmp_path, RECALL).step.optimizer.param_groups) == 2


def test_a_sweep_knows_its_best_rate_and_whether_to_look_further():
    assert Sweep(5, {1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0}).best == 2e-3
    assert Sweep(5, {1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0}).next_rate is None
    assert Sweep(5, {1e-3: 2.0, 2e-3: 1.0}).next_rate == 4e-3
    assert Sweep(5, {1e-3: 1.0, 2e-3: "diverged at step 3"}).next_rate == 5e-4
    assert Sweep(5, {1e-3: "diverged at step 3"}).best is None
    assert Sweep(5, {1e-3: 1.0}).next_rate is None


def test_a_sweep_refuses_rates_that_cannot_be(tmp_path):
    with pytest.raises(InputError, match="must be positive, got -1"):
        sweep({}, [1e-3, -1.0], tmp_path)
    with pytest.raises(InputError, match="from `rates`, not from `lr`"):
        sweep({"lr": 1e-3}, [1e-3], tmp_path)
