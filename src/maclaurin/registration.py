"""Our models in transformers' Auto classes as soon as both libraries are imported, whichever comes first."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_with_transformers() -> None:
    """Now if transformers is there, else when it comes."""
    if "transformers" in sys.modules:
        importlib.import_module("maclaurin.models")
    else:
        sys.meta_path.insert(0, _WhenItComes())


class _WhenItComes(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != "transformers" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is not None and found.loader is not None:
            _then_register(found.loader)
        return found


def _then_register(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        importlib.import_module("maclaurin.models")

    loader.exec_module = exec_module
