"""The same on a GPU: events, memory, graphs, and peers that exist only there."""

import pytest
import torch
from tests.unit.bench.tiny import ROOFS

from maclaurin.bench.bench_record import Size, read_bench
from maclaurin.bench.bench_run import BenchRun
from maclaurin.bench.clock import peak_bytes_beyond, timings
from maclaurin.bench.measure_case import measure_call, measure_step
from maclaurin.bench.setting import make_setting
from maclaurin.bench.workloads import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def setting():
    return make_setting("cuda", quick=True)


def test_a_run_from_beginning_to_end(setting, tmp_path):
    case = Case(group="tests", spec="exp/l2", size=Size.of(1, 2, 256, 64))
    run = BenchRun([case], setting, tmp_path / "bench.json", resume=False)
    run.run(None)
    (found,) = read_bench(tmp_path / "bench.json").cases
    assert found.status == "measured", found.own.note


def test_events_agree_with_one_another(setting):
    a = torch.randn(2048, 2048, device="cuda")
    found = timings({"one": lambda: a @ a, "two": lambda: (a @ a, a @ a)}, setting.device, 20)
    assert 1.5 < found["two"].median / found["one"].median < 2.6


def test_memory_counts_what_is_neither_input_nor_output(setting):
    a = torch.ones(1 << 20, device="cuda")

    def call():
        between = [a + 1, a + 2]
        return [between[0] + between[1]]

    peak = peak_bytes_beyond(call, setting.device)
    assert peak == pytest.approx(2 * 4 * 2**20, rel=0.01)


def test_the_exp_family_beside_cudnn(setting):
    case = Case(group="tests", spec="exp/l2", size=Size.of(2, 4, 512, 64), peers=("sdpa",))
    record = measure_call(case, setting)
    assert record.status == "measured", record.own.note
    assert record.own.peak_bytes is not None
    assert record.peers["sdpa"].forward_backward_ms > 0, record.peers["sdpa"].note


@pytest.mark.parametrize(
    "spec", ["exp(clamp=5)/len", "exp*forget/sum", "poly(0)+window(64)/sum", "sigmoid(-6.93)"]
)
def test_flex_attention_is_compiled_and_right(setting, spec):
    case = Case(group="tests", spec=spec, size=Size.of(2, 2, 512, 64), peers=("flex",))
    record = measure_call(case, setting)
    assert record.status == "measured", record.own.note
    assert record.peers["flex"].forward_backward_ms > 0, record.peers["flex"].note


def test_a_step_runs_called_and_leaves_the_process_sound(setting):
    case = Case(group="tests", spec="taylor(2)/sum", size=Size.of(2, 4, 1, 16), kind="step")
    record = measure_step(case, setting, ROOFS)
    assert record.status == "measured", record.own.note
    assert record.own.graph_ms is not None or record.own.note.startswith("no CUDA graph")
    torch.randn(3, device="cuda")
