"""The folder of an inspection: OUT/inspection.json and index.html; OUT/unfinished until it is complete."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.files import require_writable_folder, write_file
from maclaurin.inspection.heads import Tally
from maclaurin.inspection.inspection_record import FILE_NAME, Inspection, read_inspection, write_inspection
from maclaurin.plain_data import read_json, write_json

UNFINISHED = "unfinished"
PAGE = "index.html"


@final
class InspectionFolder:
    """Holds one inspection and, while it is unfinished, the sums over the contexts read so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path / UNFINISHED

    def require_same_model(self, name: str, fingerprint: str) -> None:
        """Raise if the folder cannot be written or holds the inspection of another model."""
        require_writable_folder(self.path)
        held = self._held_model()
        if held is not None and (held[1] != fingerprint if held[1] else held[0] != name):
            other = f"{held[0]}, with other weights" if held[0] == name else held[0]
            raise InputError(
                f"{self.path} holds the inspection of {other}; this one is of {name}. Choose another `out`, "
                "or remove the folder."
            )

    def _held_model(self) -> tuple[str, str] | None:
        """Name and fingerprint of the model whose inspection is here, finished or not."""
        if (self.path / FILE_NAME).is_file():
            model = read_inspection(self.path).model
            return model.name, model.fingerprint
        plan = self._plan()
        return None if plan is None else (str(plan.get("model")), str(plan.get("fingerprint", "")))

    def _plan(self) -> dict[str, Any] | None:
        plan = read_json(self._unfinished / "plan.json")
        return plan if isinstance(plan, dict) else None

    # ------------------------------------------------------------------------------ while unfinished

    def begin(self, plan: dict[str, Any]) -> bool:
        """Whether the folder holds an interrupted inspection of this plan; one of another plan is removed."""
        if self._plan() == plan:
            return True
        shutil.rmtree(self._unfinished, ignore_errors=True)
        write_json(self._unfinished / "plan.json", plan)
        return False

    def heads(self) -> tuple[int, list[Tally], Tensor | None]:
        """Contexts read, the tally of each layer, and the ranks [layers, 2, Hkv] summed over contexts."""
        file = self._unfinished / "heads.pt"
        if not file.is_file():
            return 0, [], None
        data = torch.load(file, weights_only=True)
        return data["contexts"], [Tally.from_tensors(layer) for layer in data["layers"]], data["ranks"]

    def save_heads(self, contexts: int, layers: list[Tally], ranks: Tensor) -> None:
        """Replace the saved tallies."""
        content = io.BytesIO()
        tensors = [layer.to_tensors() for layer in layers]
        torch.save({"contexts": contexts, "layers": tensors, "ranks": ranks}, content)
        write_file(self._unfinished / "heads.pt", content.getvalue())

    def losses(self) -> dict[str, tuple[int, float]]:
        """Trial → contexts read and their summed loss."""
        found = read_json(self._unfinished / "losses.json") or {}
        return {name: (contexts, loss) for name, (contexts, loss) in found.items()}

    def save_losses(self, losses: dict[str, tuple[int, float]]) -> None:
        """Replace the saved losses."""
        write_json(self._unfinished / "losses.json", losses, indent=None)

    # ---------------------------------------------------------------------------------- when complete

    def write(self, inspection: Inspection, pages: Mapping[str, str]) -> Path:
        """Write the records and the pages by name, then remove unfinished files; returns the page's path."""
        write_inspection(inspection, self.path / FILE_NAME)
        for name, text in pages.items():
            write_file(self.path / name, text)
        shutil.rmtree(self._unfinished, ignore_errors=True)
        return self.path / PAGE
