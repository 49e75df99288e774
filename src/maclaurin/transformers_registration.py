"""Register our models in transformers' Auto classes once both libraries are imported, in either order."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register_with_transformers() -> None:
    """Register now if transformers is already imported, else as soon as it is."""
    if "transformers" in sys.modules:
        importlib.import_module("maclaurin.models")
    else:
        sys.meta_path.insert(0, _Watcher())


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds transformers through the other finders, and registers our models after it is loaded.

    It stays until transformers is loaded: a search (`importlib.util.find_spec`) does not load it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers":
            return None
        for finder in sys.meta_path:
            found = None if finder is self else finder.find_spec(fullname, path, target)
            if found is not None:
                if found.loader is not None:
                    self._register_after(found.loader)
                return found
        return None

    def _register_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                importlib.import_module("maclaurin.models")

        loader.exec_module = exec_module
