"""Run CPU studies on a rented machine with many cores, and bring the results back.

    python benchmarks/host_studies.py carry carry orders parts                     # here: text and tokens
    python benchmarks/host_studies.py run orders parts --carry carry --out OUT --seconds 540      # there
    python benchmarks/host_studies.py merge OUT/host_studies.jsonl.xz               # here
    maclaurin study orders --tune --torch 2.11                                      # here: records and page

That machine needs torch, numpy and transformers; not typer, rich or anything a page is made with. `stdlib` is
the library of the Python that runs, so `carry` copies this one's (`MACLAURIN_STDLIB`): fingerprints are then
the same there. A study is named NAME, or NAME:EXPERIMENT for one experiment of it. All are trained as one
study, so that cores are busy while one of them waits for its last runs. When the time is up, the runs in
progress are given up; finished runs, those of searches too, are in one file, which `--resume` takes again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src")
sys.path.insert(0, SOURCE)

FILE = "host_studies.jsonl.xz"
SECONDS_BETWEEN_LINES = 20.0
SECONDS_BETWEEN_FILES = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """One of carry, run, merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    carry = commands.add_parser("carry", help="copy the text and its tokens to a folder to take along")
    carry.add_argument("folder", type=Path)
    carry.add_argument("studies", nargs="+")
    run = commands.add_parser("run", help="train runs until the time is up")
    run.add_argument("studies", nargs="+")
    run.add_argument("--carry", type=Path, required=True, help="the folder that `carry` made")
    run.add_argument("--out", type=Path, required=True, help="folder for the file of results")
    run.add_argument("--tune", action="store_true", help="search for learning rates again")
    run.add_argument("--seeds", type=int, help="seeds per cell; by default those of each study")
    run.add_argument("--workers", type=int, help="runs at once; by default one per core")
    run.add_argument("--seconds", type=float, default=540.0, help="time from the start of the program")
    run.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every run, for a test")
    run.add_argument("--only", nargs="+", default=[], help="cells by name or notation")
    run.add_argument("--work", type=Path, help="folder for everything else; OUT/../host_studies by default")
    run.add_argument("--commit", help="commit to record where the copy of the source is no git repository")
    run.add_argument("--resume", type=Path, nargs="+", default=[], help="files of earlier results")
    merge = commands.add_parser("merge", help="put results into a pool")
    merge.add_argument("files", type=Path, nargs="+")
    merge.add_argument("--pool", type=Path, default=Path("runs/pool"))
    given = parser.parse_args(arguments)
    if given.command == "carry":
        carry_to(given.folder, given.studies)
    elif given.command == "merge":
        print(merged(given.files, given.pool))
    else:
        run_studies(given)
    return 0


# ------------------------------------------------------------------------------------- the studies


def chosen_studies(names: Sequence[str], only: Sequence[str] = ()) -> list:
    """The studies of these names, each with the named experiment alone if a name has one."""
    from maclaurin.errors import InputError
    from maclaurin.study.find import load_study
    from maclaurin.study.plan_runs import select

    found = []
    for name in names:
        study, _, wanted = name.partition(":")
        loaded = load_study(study)
        kept = tuple(e for e in loaded.experiments if wanted in ("", e.name))
        if not kept:
            known = ", ".join(e.name for e in loaded.experiments)
            raise InputError(f"study {study!r} has no experiment {wanted!r}; it has {known}.")
        part = dataclasses.replace(loaded, experiments=kept, claims=(), ladder=())
        found.append(select(part, list(only)))
    return found


def together(studies: Sequence) -> object:
    """One study of all their experiments; experiments that share runs train them once."""
    from maclaurin.study import Study

    experiments = tuple(
        dataclasses.replace(e, name=f"{study.name}: {e.name}") for study in studies for e in study.experiments
    )
    names = ", ".join(study.name for study in studies)
    return Study("host", f"Together: {names}", "", "", experiments)


def known_tuning(studies: Sequence, folder: Path) -> None:
    """Give the study of all of them the learning rates that are stored with each."""
    from maclaurin.study.tuned_rates import FILE as TUNED
    from maclaurin.study.tuned_rates import TunedFile

    files = [(study.name, TunedFile.read(study.file.parent / TUNED)) for study in studies]
    experiments = {
        f"{name}: {experiment}": tuning
        for name, file in files
        if file is not None
        for experiment, tuning in file.experiments.items()
    }
    runs = {key: record for _, file in files if file is not None for key, record in file.runs.items()}
    TunedFile(study="host", experiments=experiments, runs=runs).write(folder / TUNED)


# -------------------------------------------------------------------------------------- here: carry


def carry_to(folder: Path, names: Sequence[str]) -> None:
    """The standard library of this Python, and the prepared tokens of every experiment on text."""
    from maclaurin.data.corpus import StandardLibrary
    from maclaurin.data.data_config import is_task
    from maclaurin.study.plan_runs import Sources, resolved

    library = folder / "stdlib"
    if not library.exists():
        StandardLibrary().copy_to(library)
    os.environ["MACLAURIN_STDLIB"] = str(library)
    os.environ["MACLAURIN_CACHE"] = str(folder / "cache")
    sources, seen = Sources(), set()
    for study in chosen_studies(names):
        for experiment in study.experiments:
            config = resolved(experiment.settings(experiment.cells[0]), device="cpu")
            if not is_task(config.data):
                source = sources.source(config)
                seen.add((source.facts["data"], config.tokenizer, config.length, source.fingerprint))
    for line in sorted(seen):
        print(*line)


# --------------------------------------------------------------------------------------- there: run


def run_studies(given: argparse.Namespace) -> None:
    """Train until everything has a result or the time is up; write the file of results."""
    end = time.monotonic() + given.seconds
    os.environ["MACLAURIN_STDLIB"] = str((given.carry / "stdlib").absolute())
    os.environ["MACLAURIN_CACHE"] = str((given.carry / "cache").absolute())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    before = os.environ.get("PYTHONPATH")  # for the server that loads torch once for all runs
    os.environ["PYTHONPATH"] = SOURCE if not before else f"{SOURCE}{os.pathsep}{before}"

    from maclaurin.study import run
    from maclaurin.study.live_table import Overview, View

    work = given.work or given.out.absolute().parent / "host_studies"
    pool, out = work / "pool", work / "host"
    given.out.mkdir(parents=True, exist_ok=True)
    print(merged(given.resume, pool), flush=True)
    studies = chosen_studies(given.studies, given.only)
    if not given.tune:
        known_tuning(studies, out)

    class Lines(View):
        """A line with the totals from time to time, and the file of results."""

        line = file = time.monotonic()

        def show(self, overview: Overview) -> None:
            now = time.monotonic()
            if now - self.line > SECONDS_BETWEEN_LINES:
                self.line = now
                print(overview, flush=True)
            if now - self.file > SECONDS_BETWEEN_FILES:
                self.file = now
                pack(pool, given.out / FILE, given.commit)

    timer = threading.Timer(max(0.0, end - time.monotonic()), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        ending = run(
            together(studies),  # pyright: ignore[reportArgumentType]
            out=out,
            pool=pool,
            scale=given.scale,
            seeds=given.seeds,
            tune=given.tune,
            device="cpu",
            workers=given.workers,
            time=False,
            view=Lines(),
        )
        counts = Counter(record.status for _, record in ending.record.labelled())
        print("time is up" if ending.interrupted else "complete", dict(counts), flush=True)
    finally:
        timer.cancel()
        print(pack(pool, given.out / FILE, given.commit), flush=True)


# ------------------------------------------------------------------------------------- the results


def pack(pool: Path, file: Path, commit: str | None = None) -> str:
    """Every result of the pool as one line of a compressed file, written atomically.

    `commit` is recorded in results without one.
    """
    found = sorted(pool.glob("*/record.json"))
    temporary = file.with_name(f".{file.name}.part")
    with lzma.open(temporary, "wt", encoding="utf-8", preset=1) as stream:
        for path in found:
            record = json.loads(path.read_text(encoding="utf-8"))
            record["provenance"]["commit"] = record["provenance"].get("commit") or commit
            stream.write(f"{json.dumps(record)}\n")
    temporary.replace(file)
    return f"{len(found)} results in {file} ({file.stat().st_size:,} bytes)"


def results(file: Path) -> Iterator:
    """The results of such a file."""
    from maclaurin.plain_data import from_plain
    from maclaurin.study.run_record import RunRecord

    with lzma.open(file, "rt", encoding="utf-8") as stream:
        yield from (from_plain(RunRecord, json.loads(line)) for line in stream)


def merged(files: Sequence[Path], folder: Path) -> str:
    """Put the results into a pool; results that it has already stay."""
    from maclaurin.study.pool import Pool

    pool, new = Pool(folder), Counter()
    for file in files:
        for record in results(file):
            entry = pool.entry(record.key)
            if entry.record() is None:
                entry.path.mkdir(parents=True, exist_ok=True)
                entry.write(record)
                new[f"{record.status}, torch {record.run.torch}"] += 1
    words = "; ".join(f"{count} {what}" for what, count in sorted(new.items()))
    return f"new results in {pool.root}: {words or 'none'}"


if __name__ == "__main__":
    sys.exit(main())
