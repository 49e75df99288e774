"""The device that a user names: auto is a GPU if there is one."""

from __future__ import annotations

from maclaurin.errors import InputError
from maclaurin.wording import first_line


def resolve_device(name: str) -> str:
    """cpu or cuda for auto, any other name unchanged."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_device(name: str) -> str:
    """cpu or cuda for auto; raises if the device cannot be used here."""
    import torch

    if name != "auto":
        try:
            known = torch.device(name)
        except RuntimeError:  # torch's own message lists every kind of device it was ever built for
            raise InputError(
                f"the device {name} cannot be used here: torch knows no device of that name. "
                "Use cpu, cuda or auto."
            ) from None
        try:
            torch.empty(0, device=known)
        except (RuntimeError, AssertionError) as problem:
            first = first_line(problem).rstrip(".")
            raise InputError(f"the device {name} cannot be used here: {first}. Use cpu or auto.") from None
    return resolve_device(name)
