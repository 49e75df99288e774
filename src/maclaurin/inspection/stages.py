"""What an interrupted inspection has found so far: OUT/unfinished, gone once it is finished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.inspection.tally import Tally, from_plain, to_plain

FOLDER = "unfinished"


@final
class Stages:
    """Sums over the contexts read so far, for the heads and for each trial."""

    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        require_folder(out)
        self._folder, self._plan = out / FOLDER, plan

    def begin(self) -> bool:
        """Whether there is something of this very plan to go on from; what is left of another is dropped."""
        known = self._folder / "plan.json"
        if known.is_file() and known.read_text() == self._written:
            return True
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        except OSError as problem:
            raise InputError(f"{self._folder.parent} cannot be written: {problem.strerror}.") from None
        known.write_text(self._written)
        return False

    @property
    def _written(self) -> str:
        return json.dumps(self._plan, sort_keys=True)

    def heads(self) -> tuple[int, list[Tally], Tensor | None]:
        """Contexts read, the tally of each layer, and the ranks [layers, 2, Hkv] summed over contexts."""
        file = self._folder / "heads.pt"
        if not file.is_file():
            return 0, [], None
        data = torch.load(file, weights_only=True)
        return data["contexts"], [from_plain(layer) for layer in data["layers"]], data["ranks"]

    def save_heads(self, contexts: int, layers: list[Tally], ranks: Tensor) -> None:
        """Replace what was there at once."""
        part = self._folder / "heads.part"
        plain = [to_plain(layer) for layer in layers]
        torch.save({"contexts": contexts, "layers": plain, "ranks": ranks}, part)
        part.replace(self._folder / "heads.pt")

    def losses(self) -> dict[str, tuple[int, float]]:
        """Trial → contexts read and the summed loss."""
        file = self._folder / "losses.json"
        if not file.is_file():
            return {}
        return {name: (contexts, loss) for name, (contexts, loss) in json.loads(file.read_text()).items()}

    def save_losses(self, losses: dict[str, tuple[int, float]]) -> None:
        """Replace what was there at once."""
        part = self._folder / "losses.part"
        part.write_text(json.dumps(losses))
        part.replace(self._folder / "losses.json")


def require_folder(out: Path) -> None:
    """Raise if nothing can be put there."""
    if out.exists() and not out.is_dir():
        raise InputError(f"an inspection is a folder, and {out} is a file: name another with --out.")


def forget(out: Path) -> None:
    """Everything is in its place: what was kept on the way can go."""
    shutil.rmtree(out / FOLDER, ignore_errors=True)
