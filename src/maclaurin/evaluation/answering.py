"""Our model as the harness asks it: with one progress bar, and a count of texts that were too long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

_Harness: Any = HFLM  # a decorator hides its type


class AnsweringModel(_Harness):
    """HFLM of a model that is already there.

    cut      requests since `begin` that did not fit and lost their beginning
    broken   texts since `begin` with logits that are no numbers
    """

    def __init__(
        self, model: Any, tokenizer: Any, batch_size: int, max_length: int | None, bars: bool = True
    ) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
        self.cut = self.broken = 0
        self._bars = bars
        self._longest: int | None = None
        self._is_rolling = False
        self._title = ""

    def begin(self, title: str) -> None:
        """What follows belongs to this task."""
        self._title = title
        self.cut = self.broken = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Each request is told of when it is answered."""
        with self._bar(len(requests)) as told:
            self.set_cache_hook(told)
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """A few texts at a time, as the harness itself tells only at the end."""
        answers: list[float] = []
        with self._bar(len(requests)) as told, self._rolling():
            self.set_cache_hook(told)
            for first in range(0, len(requests), self.batch_size_per_gpu):
                part = requests[first : first + self.batch_size_per_gpu]
                answers += super().loglikelihood_rolling(part, disable_tqdm=True)
        return answers

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Each request is told of when it is answered."""
        for request in requests:
            text, settings = request.args
            room = self.max_length - settings.get("max_gen_toks", self.max_gen_toks)
            self.cut += len(self.tok_encode(text)) > room
        with self._bar(len(requests)) as told:
            self.set_cache_hook(told)
            return super().generate_until(requests, disable_tqdm=True)

    def tok_encode(self, string: str, *arguments: Any, **options: Any) -> list[int]:
        """Rolling, the harness puts the beginning before a text itself: a second one is not to be guessed."""
        tokens = super().tok_encode(string, *arguments, **options)
        return tokens[1:] if self._is_rolling and tokens[:1] == [self.prefix_token_id] else tokens

    @contextlib.contextmanager
    def _rolling(self) -> Iterator[None]:
        self._is_rolling = True
        try:
            yield
        finally:
            self._is_rolling = False

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None, **more: Any
    ) -> list[tuple[float, bool]]:
        """Tokens of (text, continuation); one more than fits is fine, as the last one is not read."""
        if override_bs is None:  # rolling windows are cut to fit on purpose
            self.cut += sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
        rolling = override_bs is not None
        self._longest = None if rolling else max((len(after) for _, _, after in requests), default=1)
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs, **more)

    def _model_call(self, inps: Tensor, **more: Any) -> Tensor:
        """Logits of tokens [batch, tokens]: of the last positions only, if only those are asked for.

        The harness counts positions from the end, so that it finds them all the same.
        """
        with torch.no_grad():
            logits = self.model(inps, logits_to_keep=self._positions_asked(inps)).logits
        self.broken += int((~torch.isfinite(logits.sum(dim=(1, 2), dtype=torch.float32))).sum())
        return logits

    def _positions_asked(self, inps: Tensor) -> int:
        """At most: the longest continuation, after the most padding (zeros) that a text may have."""
        if self._longest is None:
            return 0
        tokens = inps.shape[1]
        ends = torch.where(inps != 0, torch.arange(1, tokens + 1, device=inps.device), 1).amax(dim=1)
        return min(tokens, tokens - int(ends.min()) + self._longest)

    def _bar(self, total: int) -> _Told:
        return _Told(self._title, total, self._bars)


@final
class _Told(CacheHook):
    """The harness tells its cache of each answer: a bar moves instead."""

    def __init__(self, title: str, total: int, shown: bool) -> None:
        super().__init__(None)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._progress.add_task(title, total=total)

    def __enter__(self) -> _Told:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        """One more."""
        self._progress.advance(self._task)
