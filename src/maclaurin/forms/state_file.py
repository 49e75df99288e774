"""States on disk, as safetensors files that are written atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from maclaurin.errors import InputError, MaclaurinError


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MaclaurinError(
            "saving and loading states needs safetensors: pip install 'maclaurin[state]'."
        ) from None
    return safetensors


def write_state(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file, or leave what was there."""
    path = Path(path)
    contiguous = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    data = _safetensors().torch.save(contiguous, metadata)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_state_file(path: str | Path, device: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that write_state wrote."""
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="pt", device=device) as file:
            stored = (file.metadata() or {}).get("maclaurin")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except library.SafetensorError as problem:
        raise InputError(f"{path} is not a complete safetensors file: {problem}.") from None
    if stored is None:
        raise InputError(f"{path} is a safetensors file, but not a saved maclaurin state.")
    metadata = json.loads(stored)
    if metadata["version"] > version:
        raise InputError(
            f"{path} has state format {metadata['version']}, and this maclaurin reads up to {version}: "
            "upgrade maclaurin."
        )
    return tensors, metadata
