"""The device named on the command line."""

from __future__ import annotations

from maclaurin.errors import InputError


def device_named(name: str) -> str:
    """The device, or an error that says why it cannot be used; auto is a GPU if there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        first = str(problem).strip().splitlines()[0].rstrip(".")
        raise InputError(f"--device {name} cannot be used here: {first}. Use cpu or auto.") from None
    return name
