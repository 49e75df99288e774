"""The explorer's modules under node: a job as JSON in, an answer as JSON out."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from maclaurin.explorer.explorer_page import WEB

NODE = shutil.which("node") or shutil.which("nodejs")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")


def run_in_node(folder: Path, script: str, job: object) -> object:
    """What `answer(job)` of the script returns; it may import "./maths.js" and "./notation.js"."""
    for name in ("maths.js", "notation.js"):
        shutil.copy(WEB / name, folder / name)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "job.json").write_text(json.dumps(job))
    main = 'import fs from "node:fs";\nconst job = JSON.parse(fs.readFileSync("job.json", "utf8"));\n'
    (folder / "main.js").write_text(main + script + "\nconsole.log(JSON.stringify(answer(job)));\n")
    assert NODE is not None
    result = subprocess.run(
        [NODE, "main.js"], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
