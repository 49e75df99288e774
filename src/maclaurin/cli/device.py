"""Where a model of a command runs."""

from __future__ import annotations

from maclaurin.errors import InputError


def device_named(name: str) -> str:
    """The device, or why there is none; auto is a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as problem:
        first = str(problem).strip().splitlines()[0].rstrip(".")
        raise InputError(f"--device {name} cannot be used here: {first}. Use cpu or auto.") from None
    return name
