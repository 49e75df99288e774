"""Our models are known to transformers as soon as both libraries are imported, whichever comes first."""

import subprocess
import sys

import pytest

from tests.e2e.command import run_code

ASK = "from transformers import AutoConfig; print(type(AutoConfig.for_model('maclaurin')).__name__)"


@pytest.mark.parametrize(
    "first",
    [
        "import maclaurin",
        "import transformers; import maclaurin",
        "import maclaurin, importlib.util; importlib.util.find_spec('transformers')",
    ],
)
def test_auto_classes_know_us(first):
    result = run_code(f"{first}; {ASK}")
    assert result.stdout.strip() == "MaclaurinConfig", result.stderr


def test_importing_us_alone_imports_neither_torch_nor_transformers():
    code = "import sys, maclaurin; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
