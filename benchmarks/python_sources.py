"""The Python sources of the packages installed on this machine as one JSON-lines corpus.

    python benchmarks/python_sources.py sources.jsonl --megabytes 120

It is real text, large enough that short GPU runs do not memorise it; the standard library alone has 10 MB.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def sources() -> Iterator[tuple[str, str]]:
    """(path, text) of every file, in a fixed order, the standard library first."""
    for key in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(key))
        for path in sorted(root.rglob("*.py")):
            try:
                yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=120)
    options = parser.parse_args()
    seen: set[int] = set()
    size = 0
    with options.out.open("w", encoding="utf-8") as file:
        for path, text in sources():
            if hash(text) in seen or not text.strip():
                continue
            seen.add(hash(text))
            file.write(json.dumps({"text": text, "path": path}) + "\n")
            size += len(text)
            if size > options.megabytes << 20:
                break
    print(f"{len(seen)} files, {size >> 20} MB in {options.out}")


if __name__ == "__main__":
    main()
