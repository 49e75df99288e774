"""The first losses of short runs: a change in any package that affects numbers shows here."""

import json
from pathlib import Path

import pytest
import torch

from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.training.config import TrainConfig
from maclaurin.training.processes import Processes
from maclaurin.training.trainer import Trainer

GOLDEN = Path(__file__).parent / "losses.json"
SPECS = ["exp/sum", "exp/l2", "exp/len*out", "taylor(2)/sum", "linear-cosine", "2mamba", "mamba-2"]


def first_losses(attention, folder):
    task = "mqar:pairs=3,vocab=32,length=24"
    config = TrainConfig(attention=(attention,), size="pico", data=task, batch_size=8, lr=4e-3, warmup=2)
    source = open_source(DataConfig(task, length=24))
    trainer = Trainer(config, source, folder, Processes(0, 1, torch.device("cpu")))
    return [float(trainer.step(trainer.batch(step), config.lr).loss) for step in range(6)]


def test_losses_are_the_golden_ones(request, tmp_path):
    found = {spec: first_losses(spec, tmp_path / str(n)) for n, spec in enumerate(SPECS)}
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(GOLDEN.read_text())
    assert found.keys() == known.keys()
    for spec, losses in known.items():
        assert found[spec] == pytest.approx(losses, rel=2e-4), spec
