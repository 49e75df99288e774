"""One clear error for a command that needs an extra."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from maclaurin.errors import MaclaurinError


@contextlib.contextmanager
def requires_extra(extra: str, *modules: str) -> Iterator[None]:
    """Turn a missing optional module into the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] not in modules:
            raise
        raise MaclaurinError(
            f"this command needs {problem.name}: pip install 'maclaurin[{extra}]'."
        ) from None
