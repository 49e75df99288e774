"""Run studies on a rented machine with little installed, and bring the results back.

    python benchmarks/remote_studies.py carry carry orders parts                   # here: text, tokenizers
    python benchmarks/remote_studies.py run orders parts --carry carry --out OUT   # there
    python benchmarks/remote_studies.py run ladder --carry carry --out OUT --device cuda --workers 6
    python benchmarks/remote_studies.py merge OUT/studies.jsonl.xz                 # here
    maclaurin study orders --torch 2.11                                            # here: records and page

That machine needs torch, numpy and transformers; not typer, rich or anything a page is made with. `stdlib`
is the library of the Python that runs, so `carry` copies this one's (`MACLAURIN_STDLIB`): fingerprints are
then the same there. Of a study on a file, such as prose.jsonl.xz, it copies the file and the trained
tokenizer; the text is tokenized there, once per machine.

A study is named NAME, or NAME:EXPERIMENT for one experiment of it. All are trained as one study, so that
cores are busy while one of them waits for its last runs. No run is started that would not end in time,
except one with checkpoints, which the next call with the same --work continues. Finished runs, those of
searches too, are in one file, which `--resume` takes again: benchmarks/results/h200/runs.jsonl.xz has those
of an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maclaurin.study import Experiment, Study
    from maclaurin.study.run_record import RunRecord
    from maclaurin.training.config import TrainConfig

SOURCE = str(Path(__file__).parents[1] / "src")
sys.path.insert(0, SOURCE)

FILE = "studies.jsonl.xz"
SECONDS_BETWEEN_LINES = 20.0
SECONDS_BETWEEN_FILES = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """One of carry, run, merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    carry = commands.add_parser("carry", help="copy text, tokens and tokenizers to a folder to take along")
    carry.add_argument("folder", type=Path)
    carry.add_argument("studies", nargs="+")
    run = commands.add_parser("run", help="train runs until the time is up")
    run.add_argument("studies", nargs="+")
    run.add_argument("--carry", type=Path, required=True, help="the folder that `carry` made")
    run.add_argument("--out", type=Path, required=True, help="folder for the file of results")
    run.add_argument("--tune", action="store_true", help="search for learning rates again")
    run.add_argument("--seeds", type=int, help="seeds per cell; by default those of each study")
    run.add_argument("--workers", type=int, help="runs at once; by default one per core, or per GPU")
    run.add_argument("--seconds", type=float, default=540.0, help="time from the start of the program")
    run.add_argument("--scale", type=float, default=1.0, help="factor on the steps of every run, for a test")
    run.add_argument("--only", nargs="+", default=[], help="cells by name or notation")
    run.add_argument("--work", type=Path, help="folder for everything else; OUT/../studies by default")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
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


def chosen_studies(names: Sequence[str], only: Sequence[str] = ()) -> list[Study]:
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


def together(studies: Sequence[Study]) -> Study:
    """One study of all their experiments; experiments that share runs train them once."""
    from maclaurin.study import Study

    experiments = tuple(_renamed(e, f"{study.name}: ") for study in studies for e in study.experiments)
    names = ", ".join(study.name for study in studies)
    return Study("together", f"Together: {names}", "", "", experiments)


def _renamed(experiment: Experiment, prefix: str) -> Experiment:
    from maclaurin.study import Carried

    tune = experiment.tune
    if isinstance(tune, Carried):
        tune = dataclasses.replace(tune, tuned=tuple(prefix + name for name in tune.tuned))
    return dataclasses.replace(experiment, name=prefix + experiment.name, tune=tune)


def known_tuning(studies: Sequence[Study], folder: Path) -> None:
    """Give the study of all of them the learning rates that are stored with each."""
    from maclaurin.study.tuned_rates import FILE as TUNED
    from maclaurin.study.tuned_rates import TunedFile

    files = [(s.name, TunedFile.read(s.file.parent / TUNED)) for s in studies if s.file is not None]
    experiments = {
        f"{name}: {experiment}": tuning
        for name, file in files
        if file is not None
        for experiment, tuning in file.experiments.items()
    }
    runs = {key: record for _, file in files if file is not None for key, record in file.runs.items()}
    TunedFile(study="together", experiments=experiments, runs=runs).write(folder / TUNED)


# -------------------------------------------------------------------------------------- here: carry


def carry_to(folder: Path, names: Sequence[str]) -> None:
    """The text of every experiment: the standard library with its tokens, files with their tokenizers."""
    from maclaurin.data.corpus import StandardLibrary
    from maclaurin.data.data_config import is_task
    from maclaurin.study.plan_runs import Sources, resolved

    os.environ["MACLAURIN_CACHE"] = str(folder / "cache")
    sources, seen = Sources(), set()
    for study in chosen_studies(names):
        for experiment in study.experiments:
            config = resolved(experiment.settings(experiment.cells[0]), device="cpu")
            if is_task(config.data):
                continue
            if config.data == "stdlib":
                library = folder / "stdlib"
                os.environ["MACLAURIN_STDLIB"] = str(library)
                if not library.exists():
                    StandardLibrary().copy_to(library)
                source = sources.source(config)
                seen.add((source.facts["data"], config.tokenizer, config.length, source.fingerprint))
            else:
                seen.add(_carry_file(config, folder))
    for line in sorted(seen, key=str):
        print(*line)


def _carry_file(config: TrainConfig, folder: Path) -> tuple[str, ...]:
    """A file of text, under its name, and the tokenizer that is trained on it."""
    from maclaurin.data.cache_folder import Cache
    from maclaurin.data.data_config import open_corpus, open_tokenizer
    from maclaurin.data.splits import CorpusSplitter
    from maclaurin.training.batches import data_config

    cache, data = Cache.at(None), data_config(config)
    corpus = open_corpus(data.data, limit=data.limit_documents, notes=cache.notes)
    splitter = CorpusSplitter(corpus, data.fractions)
    tokenizer = open_tokenizer(data.tokenizer, corpus, splitter, cache.tokenizers)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config.data, folder / Path(config.data).name)
    return config.data, config.tokenizer, tokenizer.fingerprint


# --------------------------------------------------------------------------------------- there: run


def run_studies(given: argparse.Namespace) -> None:
    """Train until everything has a result or the time is up; write the file of results."""
    end = time.monotonic() + given.seconds
    file = given.out.absolute() / FILE
    work = (given.work or given.out.absolute().parent / "studies").absolute()
    resumed = [path.absolute() for path in given.resume]
    _prepare_environment(given.carry.absolute(), given.device)

    from maclaurin.study import run
    from maclaurin.study.live_table import Overview, View

    pool, out = work / "pool", work / "together"
    file.parent.mkdir(parents=True, exist_ok=True)
    print(merged(resumed, pool), flush=True)
    studies = chosen_studies(given.studies, given.only)
    os.chdir(given.carry)  # studies name their files relative to the folder they are run in
    if not given.tune:
        known_tuning(studies, out)

    class Lines(View):
        """A line with the totals from time to time, and the file of results."""

        line = file_time = time.monotonic()

        def show(self, overview: Overview) -> None:
            now = time.monotonic()
            if now - self.line > SECONDS_BETWEEN_LINES:
                self.line = now
                print(overview, flush=True)
            if now - self.file_time > SECONDS_BETWEEN_FILES:
                self.file_time = now
                pack(pool, file, given.commit)

    try:
        ending = run(
            together(studies),
            out=out,
            pool=pool,
            scale=given.scale,
            seeds=given.seeds,
            tune=given.tune,
            device=given.device,
            workers=given.workers,
            time=False,
            minutes=max(0.0, end - time.monotonic()) / 60,
            view=Lines(),
        )
        counts = Counter(record.status for _, record in ending.record.labelled())
        print("time is up" if ending.interrupted else "complete", dict(counts), flush=True)
    finally:
        print(pack(pool, file, given.commit), flush=True)


def _prepare_environment(carry: Path, device: str) -> None:
    os.environ["MACLAURIN_STDLIB"] = str(carry / "stdlib")
    os.environ["MACLAURIN_CACHE"] = str(carry / "cache")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
    before = os.environ.get("PYTHONPATH")  # for the server that loads torch once for all runs
    os.environ["PYTHONPATH"] = SOURCE if not before else f"{SOURCE}{os.pathsep}{before}"


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


def results(file: Path) -> Iterator[RunRecord]:
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
