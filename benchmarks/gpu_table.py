"""The whole table of `maclaurin bench` on a GPU in eight minutes, on a machine without typer.

    python benchmarks/gpu_table.py [--minutes 8] [--peers FOLDER] [--case WORDS] [--out FILE]

First all cases and peers are called once in as many processes as there are cores, then measured one after
the other. Results go to benchmarks/results/gpu_bench.json after every case; run it again with --resume to
continue. power_retention is left out unless --retention is given: its first call takes four minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from maclaurin.bench.bench_run import BenchRun
from maclaurin.bench.preparation import Preparation
from maclaurin.bench.setting import make_setting
from maclaurin.bench.table import markdown_of, summary
from maclaurin.bench.workloads import all_cases, chosen_cases

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no further case after this")
    parser.add_argument("--prepare", type=int, default=os.cpu_count() or 1, help="processes of first calls")
    parser.add_argument("--prepare-seconds", type=float, default=180.0)
    parser.add_argument("--peers", type=Path, default=os.environ.get("MACLAURIN_PEERS"))
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--retention", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_bench.json")
    options = parser.parse_args()
    if options.peers:
        sys.path += [str(options.peers), *map(str, Path(options.peers).glob("*.data/purelib"))]
    setting = make_setting(options.device, quick=options.quick)
    run = BenchRun(
        chosen_cases(all_cases(small=not setting.full_shapes), options.case),
        setting,
        options.out,
        resume=options.resume,
        without=() if options.retention else ("power_retention",),
        preparation=Preparation(options.prepare, options.prepare_seconds) if options.prepare else None,
    )
    ending = run.run(options.minutes)
    options.out.with_suffix(".md").write_text(markdown_of(ending.record), encoding="utf-8")
    print(*summary(ending.record), *ending.record.left_out, ending.trouble, sep="\n")


if __name__ == "__main__":
    main()
