"""What importing us brings: models known to transformers, names that load their packages when first used."""

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


def test_studies_are_there_without_an_import_of_their_own():
    code = (
        "import sys, maclaurin; before = 'maclaurin.study' in sys.modules; maclaurin.study.Study;"
        "print(before, 'torch' in sys.modules, maclaurin.study.run.__module__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False", "maclaurin.study.runner"]
