"""What was measured so far, in a file beside the folder to come: a stopped conversion goes on from there."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.files import write_json


@final
@dataclass
class MeasureFile:
    """Results by name; each is written down as it comes. Without a path they are only remembered."""

    path: Path | None
    #: model, questions and text: what was measured with another is not used
    identity: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def beside(out: Path) -> Path:
        """Where the file of a folder that is to be written lies."""
        return out.with_name(f".{out.name}.measured.json")

    @staticmethod
    def open(path: Path | None, identity: dict[str, Any], *, resume: bool) -> MeasureFile:
        """What the file holds; without `resume` it begins anew."""
        if path is None or not resume:
            return MeasureFile(path, identity)
        if not path.is_file():
            raise InputError(f"there is no {path} to go on from: leave --resume out to begin.")
        try:
            data = json.loads(path.read_text("utf-8"))
        except ValueError as problem:
            raise InputError(f"{path} is not JSON ({problem}): remove it, or leave --resume out.") from None
        for name, mine in identity.items():
            theirs = data.get("identity", {}).get(name)
            if theirs != mine:
                raise InputError(
                    f"{path} was measured with {name} {theirs}, and now it is {mine}: give what was given "
                    "then, or leave --resume out to begin anew."
                )
        return MeasureFile(path, identity, data["found"])

    def keep(self, name: str, value: Any) -> None:
        """Remember a result, and write it down."""
        self.found[name] = value
        if self.path is not None:
            write_json(self.path, {"identity": self.identity, "found": self.found}, indent=None)

    def remove(self) -> None:
        """The folder is written: nothing is left to go on from."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
