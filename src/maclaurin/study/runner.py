"""`run`: a study from its file to its records. Runs with a result in the pool are not trained again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from maclaurin.errors import InputError, MaclaurinError
from maclaurin.extensions import Extension, extensions_of
from maclaurin.files import require_writable_folder
from maclaurin.plain_data import digest
from maclaurin.spec.head_groups import specs_in
from maclaurin.study.carried_rates import require_rules
from maclaurin.study.choose_rates import learning_rates, metric_of, provisional
from maclaurin.study.design import Cell, Experiment, Study
from maclaurin.study.executors import check_executor, choose_executor, processes_of, warm_up
from maclaurin.study.find import imports_of, load_study, source_file, source_name
from maclaurin.study.forms_check import FormsCheck
from maclaurin.study.live_table import View
from maclaurin.study.plan_runs import (
    INSTALLED_TORCH,
    Sources,
    equal_steps,
    plan_study,
    resolved,
    select,
    waiting,
    with_seeds,
)
from maclaurin.study.pool import Pool, RunPlace, study_lock
from maclaurin.study.run_record import (
    FILE,
    CellRecord,
    ExperimentRecord,
    FormsRecord,
    Label,
    NextRuns,
    Plan,
    RunRecord,
    Speed,
    StudyRecord,
    Tuning,
    read_study,
    write_study,
)
from maclaurin.study.session import Interrupted, Session
from maclaurin.study.smoke import smoke_config
from maclaurin.study.timing import is_cheap, measure, require_local, subject_of, to_measure
from maclaurin.study.tuned_rates import known_rates, missing_tests
from maclaurin.wording import listed_names

SECONDS_FOR_FORMS = 120.0


@final
@dataclass(frozen=True)
class Ending:
    """How a study ended: its record, its folder, and whether a signal interrupted it."""

    record: StudyRecord
    out: Path
    interrupted: bool = False


def run(
    study: Study | str | Path,
    *,
    out: Path | None = None,
    pool: Path | None = None,
    only: Sequence[str] = (),
    scale: float = 1.0,
    seeds: int | None = None,
    tune: bool = False,
    smoke: bool = False,
    device: str | None = None,
    executor: str = "local",
    workers: int | None = None,
    torchrun: str | None = None,
    ray_address: str | None = None,
    slurm: str | None = None,
    retry: bool = False,
    keep_models: bool = False,
    time: bool | None = None,
    torch_version: str | None = None,
    minutes: float | None = None,
    view: View | None = None,
) -> Ending:
    """Train the runs of a study that have no result yet, and write OUT/records.json.

    study        a Study, the name of one, or the path of a study.py
    out          folder of the study; runs/NAME by default, another for a part of a study
    pool         folder of runs shared between studies; OUT/../pool by default
    only         cells by name or notation; their baselines are included
    scale        factor on the steps of every run
    seeds        number of seeds per cell: the study's own, then more
    tune         choose the learning rates again, and store them next to study.py
    smoke        train every run for 5 steps at tiny width, in OUT/smoke
    executor     local, ray or slurm
    torchrun     arguments of torchrun, such as "--nproc-per-node 8": each run over several processes
    slurm        options of submitit, such as "partition=gpu,timeout_min=600"
    retry        run diverged and crashed runs again
    keep_models  keep weights and checkpoints of the runs
    time         measure the training speed of each cell alone, after the runs; by default where the speed is
                 not known and that takes less than 5 % of the time of the study
    torch_version  take results of this version of torch, such as "2.11", from the pool; runs without one are
                   an error unless it is the installed version
    minutes      stop after this time, as at a signal; runs that would not end by then are not started
    view         displays the runs while they are trained; none by default
    """
    check_executor(executor, torchrun)
    require_local(executor=executor, torchrun=torchrun, wanted=time)
    elsewhere = None if torch_version in (None, INSTALLED_TORCH) else torch_version
    if retry and elsewhere is not None:
        raise InputError(
            f"retry trains with the installed torch, {INSTALLED_TORCH}, so it cannot repeat runs of torch "
            f"{elsewhere}."
        )
    loaded = study if isinstance(study, Study) else load_study(study)
    require_writable_folder(study_folder(loaded, out, only=only, scale=scale, smoke=smoke))
    prepared = prepare(
        loaded,
        out=out,
        pool=pool,
        only=only,
        scale=scale,
        seeds=seeds,
        smoke=smoke,
        device=device,
        torchrun=torchrun,
        torch_version=torch_version,
    )
    folder = prepared.out
    with _leaving_nothing(folder, prepared.pool), study_lock(folder / "lock"):
        if executor == "local" and torchrun is None:
            warm_up()
        trainer = choose_executor(
            executor,
            list(prepared.plan.values()),
            out=folder,
            workers=workers,
            ray_address=ray_address,
            torchrun=torchrun,
            slurm=slurm,
        )
        shared = Pool(prepared.pool)
        place = RunPlace(
            pool=str(shared.root),
            marker=shared.marker(),
            study_lock=str((folder / "lock").absolute()),
            threads=trainer.threads,
            runs_at_once=trainer.workers,
            group=prepared.study.name,
            code=prepared.planner.code,
            keep_models=keep_models,
        )
        limit = None if minutes is None else 60.0 * minutes
        with Session(
            trainer,
            place,
            view or View(),
            retry=retry,
            elsewhere=elsewhere,
            seconds=limit,
            at_once={e.name: e.at_once for e in prepared.study.experiments if e.at_once is not None},
        ) as session:
            is_local = executor == "local" and torchrun is None and not smoke
            return _Running(prepared, session).run(retune=tune, time=time if is_local else False)


@contextlib.contextmanager
def _leaving_nothing(out: Path, pool: Path) -> Iterator[None]:
    """After an error, remove empty folders that this study made."""
    made = [path for folder in (out, pool) for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except MaclaurinError:
        for folder in (out, pool):
            if folder in made and {path.name for path in folder.glob("*")} <= {"lock"}:
                (folder / "lock").unlink(missing_ok=True)
        for path in sorted(set(made), key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


@final
@dataclass(frozen=True)
class Prepared:
    """A checked study, before anything is started.

    plan          every run, its data not opened yet; cells still to be tuned have the first rate of the grid
    tuning_runs   least number of runs to choose the learning rates that are still missing
    added_seeds   experiment → seeds in addition to those of the study
    """

    study: Study
    plan: Plan
    planner: Planner
    out: Path
    pool: Path
    scale: float
    tuning_runs: int
    added_seeds: Mapping[str, tuple[int, ...]]


def prepare(
    study: Study | str | Path,
    *,
    out: Path | None = None,
    pool: Path | None = None,
    only: Sequence[str] = (),
    scale: float = 1.0,
    seeds: int | None = None,
    smoke: bool = False,
    device: str | None = None,
    torchrun: str | None = None,
    torch_version: str | None = None,
) -> Prepared:
    """Check a study and plan its runs; see `run` for the arguments."""
    whole = study if isinstance(study, Study) else load_study(study)
    folder = study_folder(whole, out, only=only, scale=scale, smoke=smoke)
    chosen, added = _with_added_seeds(select(whole, only), seeds, folder)
    require_rules(chosen)
    chosen = _with_few_items(provisional(chosen, {})) if smoke else chosen
    _refuse_to_replace(whole, chosen, scale, folder)
    planner = Planner(
        chosen,
        scale=scale,
        device=device,
        smoke=folder if smoke else None,
        torchrun=torchrun or "",
        torch_version=_checked_version(torch_version),
    )
    rates = known_rates(chosen, folder)
    trials = {e.name: e.tune.least_trials for e in chosen.experiments if e.tune is not None}
    missing = {**rates.missing, **missing_tests(chosen, folder)}
    searches = {subject: trials[name] for name, cells in missing.items() for subject in cells.values()}
    return Prepared(
        study=chosen,
        plan=planner.plan(provisional(chosen, rates.cells)),
        planner=planner,
        out=folder,
        pool=folder / "pool" if smoke else pool or folder.parent / "pool",
        scale=scale,
        tuning_runs=sum(searches.values()),
        added_seeds=added,
    )


def study_folder(study: Study, out: Path | None, *, only: Sequence[str], scale: float, smoke: bool) -> Path:
    """Where the records go. A part of a study, or one with other steps, must not replace the full records."""
    parts = [study.name]
    if scale != 1.0:
        parts.append(f"{scale:g}x")
    if only:
        words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-") for text in only)
        parts.append(words if len(words) <= 40 else f"{words[:32].strip('-')}-{digest(list(only))[:6]}")
    folder = out or Path("runs") / "-".join(parts)
    return folder / "smoke" if smoke else folder


def _checked_version(version: str | None) -> str | None:
    if version is not None and not re.fullmatch(r"\d+\.\d+", version):
        raise InputError(f"a version of torch is written like {INSTALLED_TORCH}, got {version!r}.")
    return version


def _with_few_items(study: Study) -> Study:
    """The study with two items per task."""
    experiments = tuple(
        e if e.tasks is None else dataclasses.replace(e, tasks=dataclasses.replace(e.tasks, items=2))
        for e in study.experiments
    )
    return dataclasses.replace(study, experiments=experiments)


def _with_added_seeds(
    study: Study, count: int | None, folder: Path
) -> tuple[Study, dict[str, tuple[int, ...]]]:
    """The study with the seeds of --seeds, and those that --seeds added to this folder before."""
    own = {e.name: e.seeds for e in study.experiments}
    if count is not None:
        study = with_seeds(study, count)
    if (folder / FILE).is_file():
        before = {e.name: e.added_seeds for e in read_study(folder / FILE).experiments}
        experiments = tuple(
            dataclasses.replace(e, seeds=tuple(dict.fromkeys((*e.seeds, *before.get(e.name, ())))))
            for e in study.experiments
        )
        study = dataclasses.replace(study, experiments=experiments)
    added = {e.name: tuple(s for s in e.seeds if s not in own[e.name]) for e in study.experiments}
    return study, added


def _refuse_to_replace(whole: Study, chosen: Study, scale: float, folder: Path) -> None:
    """Raise if the folder holds records of another study, or of cells that are not run now."""
    if not (folder / FILE).is_file():
        return
    before = read_study(folder / FILE)
    other = source_file(before.source)
    same_file = whole.file is None or other is None or other.resolve() == whole.file.resolve()
    if before.name != whole.name or not same_file:
        raise InputError(
            f"{folder} holds the records of {before.source or 'another study'} (name={before.name!r}), which "
            f"{whole.file or whole.name} would replace: give it another name=, or choose another --out."
        )
    if before.scale != scale:
        raise InputError(
            f"{folder} holds this study with {before.scale:g} times its steps, not {scale:g} times: "
            "choose another --out."
        )
    defined = {(e.name, cell.name) for e in whole.experiments for cell in e.cells}
    now = {(e.name, cell.name) for e in chosen.experiments for cell in e.cells}
    there = {(e.name, cell.name) for e in before.experiments for cell in e.cells}
    lost = sorted((there & defined) - now)
    if lost:
        raise InputError(
            f"{folder} also holds {listed_names(cell for _, cell in lost[:3])}"
            f"{' …' if len(lost) > 3 else ''}, which --only leaves out and would delete: choose another "
            "--out."
        )


# ------------------------------------------------------------------------------------- planning


@final
class Planner:
    """Turns a study, or one cell of it, into runs with keys."""

    def __init__(
        self,
        study: Study,
        *,
        scale: float,
        device: str | None,
        smoke: Path | None,
        torchrun: str,
        torch_version: str | None = None,
    ) -> None:
        self._scale, self._device, self._smoke = scale, device, smoke
        self._torch_version = torch_version
        self._world = processes_of(torchrun)
        self._sources = Sources()
        self._imports = imports_of(study)
        self._extensions: tuple[Extension, ...] = ()

    @property
    def code(self) -> tuple[Extension, ...]:
        """Modules that workers load first: the study's imports, and others that define parts of its specs."""
        named = {extension.name for extension in self._imports}
        return (*self._imports, *(found for found in self._extensions if found.name not in named))

    def plan(self, study: Study) -> Plan:
        """Every run of the study, its data not opened yet."""
        plan = plan_study(
            study,
            scale=self._scale,
            device=self._device,
            adapt=self._adapt,
            torch_version=self._torch_version,
        )
        specs = {text for record in plan.values() for text in record.run.config["attention"]}
        self._extensions = extensions_of(spec for text in specs for spec in specs_in(text))
        if any(found.name == "__main__" for found in self._extensions):
            raise InputError(
                "this script defines parts that the study uses, but the processes that train its runs cannot "
                "import the script: move the parts to a separate module and import it."
            )
        return plan

    def with_keys(self, plan: Plan) -> Plan:
        """The same runs after opening their data."""
        return {label: self._sources.complete(record) for label, record in plan.items()}

    def require_tasks_fit(self, plan: Plan) -> None:
        """Raise if a task does not fit a model; a smoke test truncates long texts instead."""
        if self._smoke is None:
            self._sources.require_tasks_fit(plan)

    def one(self, experiment: Experiment, cell: Cell, keys: Mapping[str, Any]) -> RunRecord:
        """A run of one cell with some keys set, as long as its final runs, after opening its data."""
        steps = equal_steps(experiment).get(cell.name, {})
        settings = {**experiment.settings(cell), **steps, **keys}
        config = self._adapt(resolved(settings, scale=self._scale, device=self._device))
        return self._sources.complete(waiting(config, torch_version=self._torch_version))

    def _adapt(self, config: Any) -> Any:
        return config if self._smoke is None else smoke_config(config, self._smoke / "data", self._world)


# ------------------------------------------------------------------------------------- the study


@final
class _Running:
    """A running study: it first chooses learning rates if needed, then trains its runs."""

    def __init__(self, prepared: Prepared, session: Session) -> None:
        self._prepared, self._session = prepared, session
        self._study, self._out, self._planner = prepared.study, prepared.out, prepared.planner
        self._forms = FormsCheck(prepared.pool / "forms.json")  # measured once for all studies
        self._tunings: dict[str, Tuning] = {}
        self._speeds = _known_speeds(self._out)

    def run(self, *, retune: bool, time: bool | None) -> Ending:
        """Train until every run has a result, or a signal interrupts; then measure speeds."""
        plan: Plan = {}
        self._planner.require_tasks_fit(self._prepared.plan)
        self._forms.start()
        try:
            study, self._tunings = learning_rates(
                self._study, self._out, self._planner.one, self._train_trials, retune=retune
            )
            plan = self._planner.with_keys(self._planner.plan(study))
            metrics = {e.name: e.measure.name for e in study.experiments}
            runs = self._session.train(plan, metrics, lambda runs: self._save(plan, runs))
            if not self._session.interrupted:
                self._forms.wait(SECONDS_FOR_FORMS)
                self._measure_speeds(plan, runs, time)
            record = self._save(plan, runs)
        except Interrupted:  # while tuning: there are no runs to record yet
            record = self._record(plan, {})
        finally:
            self._forms.close()
        return Ending(record, self._out, self._session.interrupted)

    def _train_trials(self, next_runs: NextRuns) -> dict[str, RunRecord]:
        metrics = {e.name: metric_of(self._study, e) for e in self._study.experiments if e.tune is not None}
        found = self._session.train({}, metrics, lambda runs: None, next_runs)
        if self._session.interrupted:
            raise Interrupted
        return found

    def _measure_speeds(self, plan: Plan, runs: Mapping[str, RunRecord], time: bool | None) -> None:
        """Measure if asked to (`time`), or where it is cheap after runs that were trained now."""
        wanted = to_measure(plan, runs, () if time else self._speeds)
        if time is None:
            time = self._session.has_trained and is_cheap(
                wanted.values(), runs.values(), self._session.workers
            )
        if time and wanted:
            found = measure(wanted, self._planner.code, lambda: self._session.interrupted)
            self._speeds |= found

    def _save(self, plan: Plan, runs: Mapping[str, RunRecord]) -> StudyRecord:
        record = self._record(plan, runs)
        write_study(record, self._out / FILE)
        self._link_tensorboard(plan)
        return record

    def _record(self, plan: Plan, runs: Mapping[str, RunRecord]) -> StudyRecord:
        forms = self._forms.result()
        return study_record(
            self._study,
            plan,
            runs,
            scale=self._prepared.scale,
            added=self._prepared.added_seeds,
            tunings=self._tunings,
            forms=forms,
            speeds=self._speeds,
        )

    def _link_tensorboard(self, plan: Plan) -> None:
        """Link OUT/tensorboard/EXPERIMENT/CELL-seed-N to each run: one --logdir shows the whole study."""
        for label, record in plan.items():
            target = self._session.pool.entry(record.key).path / "tensorboard"
            name = f"{label.cell}-seed-{label.seed}".replace("/", "-")
            link = self._out / "tensorboard" / label.experiment / name
            if target.is_dir() and not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(target, link.parent))


def _known_speeds(out: Path) -> dict[str, Speed]:
    """Subject → speed, from the records that are already there."""
    if not (out / FILE).is_file():
        return {}
    cells = [cell for e in read_study(out / FILE).experiments for cell in e.cells]
    return {cell.speed.subject: cell.speed for cell in cells if cell.speed is not None}


def study_record(
    study: Study,
    plan: Plan,
    runs: Mapping[str, RunRecord],
    *,
    scale: float,
    added: Mapping[str, tuple[int, ...]],
    tunings: Mapping[str, Tuning],
    forms: FormsRecord | None,
    speeds: Mapping[str, Speed] = MappingProxyType({}),
) -> StudyRecord:
    """The study as one record: its labels, the keys of the runs, and the runs."""
    keys = {label: record.key for label, record in plan.items()}
    measured = {label[:2]: speeds.get(subject_of(record.run)) for label, record in plan.items()}
    experiments = tuple(
        ExperimentRecord(
            name=e.name,
            title=e.title,
            metric=e.measure.name,
            metric_title=e.measure.title,
            higher_is_better=e.measure.higher_is_better,
            scale=e.measure.scale,
            baseline=e.baseline,
            seeds=e.seeds,
            added_seeds=added.get(e.name, ()),
            cells=tuple(
                CellRecord(
                    name=cell.name,
                    levels=dict(cell.levels),
                    runs={s: key for s in e.seeds if (key := keys.get(Label(e.name, cell.name, s)))},
                    speed=measured.get((e.name, cell.name)),
                )
                for cell in e.cells
            ),
            axes=e.axes,
            equal=e.equal,
            tuning=tunings.get(e.name),
            waterfalls=e.waterfalls,
        )
        for e in study.experiments
    )
    return StudyRecord(
        name=study.name,
        title=study.title,
        question=study.question,
        budget=study.budget,
        source=source_name(study.file),
        scale=scale,
        experiments=experiments,
        claims=study.claims,
        runs=dict(runs),
        forms=forms,
        ladder=study.ladder,
    )
