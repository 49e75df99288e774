"""Tables and figures from records alone."""

import dataclasses

import pytest
from tests.unit.bench.tiny import bench_of, record_of

from maclaurin.bench.bench_record import Figures, Verdict
from maclaurin.bench.figures import CHUNKED, PARALLEL, _crossover, crossing, curves_of, draw_figures
from maclaurin.bench.table import heading, line_of, list_rows, markdown_of, milliseconds, summary, tables_of
from maclaurin.bench.workloads import all_cases

LENGTHS = [2**n for n in range(10, 17)]


def figures(ms, peak=None, name="maclaurin"):
    return Figures(name, 1e-3, "output", 0.1, ms / 3, ms, 0.01, 20, peak)


def swept():
    """Quadratic T²/10⁶, linear 8 ms, softmax T²/4·10⁶."""
    cases = []
    for t in LENGTHS:
        quadratic, softmax = t * t / 1e6, t * t / 4e6
        order_2 = {"spec": "taylor(2)/sum", "tokens": t}
        cases += [
            record_of(f"parallel {t}", asked_form="parallel", own=figures(quadratic, t * 1000), **order_2),
            record_of(f"chunked {t}", asked_form="chunked", own=figures(8.0, 10**6), **order_2),
            record_of(
                f"exp {t}",
                tokens=t,
                own=figures(softmax, 2000 * t),
                peers={"sdpa": figures(softmax, 1500 * t, "cuDNN SDPA")},
            ),
        ]
    return bench_of(*cases, record_of("no part of it", in_sweep=False))


def test_curves_against_length():
    curves = curves_of(swept(), lambda f: f.forward_backward_ms)
    assert set(curves) == {PARALLEL, CHUNKED, "exp/sum", "cuDNN SDPA"}
    assert list(curves[PARALLEL]) == LENGTHS
    assert set(curves[CHUNKED].values()) == {8.0}


def test_curves_cross_where_powers_do():
    curves = curves_of(swept(), lambda f: f.forward_backward_ms)
    assert crossing(curves[PARALLEL], curves[CHUNKED]) == pytest.approx((8e6) ** 0.5)
    assert crossing(curves["exp/sum"], curves[CHUNKED]) == pytest.approx((32e6) ** 0.5)


def test_the_crossings_are_written_into_their_figure():
    notes = [text.get_text() for text in _crossover(swept()).legends[0].get_texts()]
    assert [note.partition(": ")[2] for note in notes] == [
        f"even at T = {t}" for t in ("2,828", "5,657", "5,657")
    ]


@pytest.mark.parametrize(
    ("quadratic", "linear"),
    [
        ({1: 1.0, 2: 1.0}, {1: 2.0, 2: 2.0}),  # never ahead
        ({1: 3.0, 2: 3.0}, {1: 2.0, 2: 2.0}),  # ahead from the start: not between the lengths measured
        ({1: 3.0, 2: 1.0}, {1: 2.0, 2: 2.0}),  # ahead, but it does not stay so
        ({1: 1.0}, {2: 2.0}),
        ({}, {}),
    ],
)
def test_no_crossover_outside_the_measured_range(quadratic, linear):
    assert crossing(quadratic, linear) is None


@pytest.mark.slow
def test_all_figures_are_drawn_and_the_same_again(tmp_path):
    written, missing = draw_figures(swept(), tmp_path / "a")
    assert sorted(path.name for path in written) == [
        "crossover.svg",
        "memory.svg",
        "roofline.svg",
        "time.svg",
    ]
    assert missing == []
    draw_figures(swept(), tmp_path / "b")
    for path in written:
        assert path.read_text() == (tmp_path / "b" / path.name).read_text()


def test_what_was_not_measured_is_not_drawn(tmp_path):
    written, missing = draw_figures(bench_of(roofs=None), tmp_path)
    assert written == []
    assert len(missing) == 4
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------- tables


REACHED = Verdict("forward ≤ 1.15 × cuDNN SDPA", 1.06, 1.15, True)
MISSED = Verdict("memory ≤ 1.5 × cuDNN SDPA", 2.0, 1.5, False)
OPEN = Verdict("forward ≤ 1 × FlexAttention", None, 1.0, None, "fused on GPUs only")
FIRST = Verdict("first call ≤ 10 s", 2.0, 10.0, True)


def test_a_case_in_one_line():
    case = record_of(
        "exp/l2 B8", peers={"sdpa": figures(3.0, None, "cuDNN SDPA")}, verdicts=(REACHED, MISSED, OPEN, FIRST)
    )
    assert line_of(case) == (
        "exp/l2 B8: 1 / 3 ms; cuDNN SDPA 1 / 3 ms; ✓ forward ≤ 1.15 × cuDNN SDPA: 1.06; "
        "✗ memory ≤ 1.5 × cuDNN SDPA: 2"
    )
    wrong = record_of("exp/l2 B8", status="wrong", own=Figures("maclaurin", note="wrong (error 2.0e-01)"))
    assert line_of(wrong) == "exp/l2 B8: wrong (error 2.0e-01)"


def test_a_step_without_a_graph_says_so():
    own = Figures("maclaurin", 1e-3, "output", 0.1, 0.5, note="no CUDA graph: it waits")
    case = record_of("a step", own=own, share_of_copy=0.25, verdicts=(REACHED,))
    assert line_of(case) == (
        "a step: 0.5 ms; 25 % of a device copy; ✓ forward ≤ 1.15 × cuDNN SDPA: 1.06; no CUDA graph: it waits"
    )
    assert "no CUDA graph: it waits" in markdown_of(bench_of(case))


def test_a_wrong_case_has_no_number_in_the_table():
    own = dataclasses.replace(record_of().own, note="wrong (error 2.0e-01)")
    table = tables_of(bench_of(record_of("a", status="wrong", own=own), record_of("b")))[0]
    assert [str(entry) for entry in table.rows[0]] == [
        "a",
        "parallel, sdpa",
        "",
        "",
        "",
        "",
        "",
        "wrong (error 2.0e-01)",
    ]


def test_columns_that_nothing_stands_in_are_left_out():
    titles = [column.title for column in tables_of(bench_of(record_of()))[0].columns]
    assert titles == ["case", "program", "error", "first call s", "forward", "forward+backward", "memory"]


def test_the_summary_counts_verdicts_and_names_what_is_missing():
    failed = record_of("b", status="failed", own=Figures("maclaurin", note="out of memory"))
    bench = bench_of(record_of("a", verdicts=(REACHED, MISSED, OPEN, FIRST)), failed, left_out=("c", "d"))
    assert summary(bench) == [
        "Of 4 targets, 2 reached, 1 missed, 1 without a verdict.",
        "A copy moves 10 GB/s, a product of matrices in float32 does 0.1 TFLOP/s.",
        "b: out of memory",
        "Left out: c; d.",
    ]


def test_the_page_has_heading_summary_and_a_table_for_each_group():
    page = markdown_of(bench_of(record_of(), record_of("z", group="decode"), device="cuda"))
    assert page.startswith("None, bfloat16, causal; torch 2, commit abc, 2026-01-01.")
    assert "### sweep\n\n| case | program |" in page
    assert "### decode" in page
    assert heading(bench_of()).startswith("a processor, nothing yet")


def test_numbers_have_three_digits():
    assert [milliseconds(x) for x in (None, 0.6494, 2.4, 35.12, 1234.4)] == [
        "–",
        "0.649",
        "2.4",
        "35.1",
        "1,234",
    ]


def test_the_list_has_every_case_and_its_targets():
    rows = list_rows(all_cases())
    assert len(rows) == len(all_cases())
    assert all(targets for _, _, targets in rows)


def test_cpu_time_stands_beside_the_peers():
    own = Figures("maclaurin", 1e-3, "output", 0.5, 1.0, 3.0, issue_us=41.2, cold_issue_us=96.4)
    peers = {"sdpa": Figures("cuDNN SDPA", forward_ms=1.0, forward_backward_ms=3.0, issue_us=30.4)}
    record = bench_of(record_of(own=own, peers=peers))
    (table,) = tables_of(record)
    row = dict(zip([column.title for column in table.columns], map(str, table.rows[0]), strict=True))
    assert row["CPU µs"] == "41; 96"
    assert "CPU 30 µs" in row["peers"]
    assert "until it returns" in heading(record)
    assert "CPU µs" not in markdown_of(bench_of(record_of()))
