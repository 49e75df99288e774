"""Without the libraries of the extra: everything else works, and each error names the extra."""

import gzip
import subprocess
import sys

import pytest

from maclaurin.errors import MissingExtraError

OPTIONAL = ["tokenizers", "datasets", "pyarrow", "zstandard", "transformers", "huggingface_hub"]


@pytest.fixture(autouse=True)
def _no_optional_libraries(monkeypatch):
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("data", "tokenizer", "message"),
    [
        ("a.txt", "bpe:4096", "bpe tokenizer needs tokenizers.*or use tokenizer=bytes"),
        ("a.txt", "hf:gpt2", "needs transformers.*or use tokenizer=bytes"),
        ("a.txt.zst", "bytes", r"reading \.zst files needs zstandard.*or use \.gz"),
        ("a.parquet", "bytes", r"reading \.parquet files needs pyarrow.*or use \.jsonl"),
        ("hf:", "bytes", "needs datasets"),
        ("fineweb", "bytes", "needs huggingface_hub"),
    ],
)
def test_each_missing_library_is_named_with_its_extra(open_data, tmp_path, data, tokenizer, message):
    (tmp_path / data).write_bytes(b"text")
    where = {"hf:": f"hf:{tmp_path}", "fineweb": "fineweb"}.get(data, str(tmp_path / data))
    with pytest.raises(MissingExtraError, match=message) as caught:
        open_data(data=where, tokenizer=tokenizer)
    extra = "models" if tokenizer == "hf:gpt2" else "data"
    assert f"pip install 'maclaurin[{extra}]'" in str(caught.value)


def test_what_needs_no_extra_works_without(open_data, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("".join(f"line {i}\n" for i in range(60_000)).encode()))
    assert open_data(data=str(tmp_path / "a.txt.gz")).train_batch(0, 2).scored > 0
    assert open_data().train_batch(0, 2).scored > 0
    assert open_data(data="mqar:pairs=2").train_batch(0, 2).scored > 0


def test_importing_the_package_imports_nothing_heavy():
    heavy = [*OPTIONAL, "torch", "rich"]
    code = f"import sys, maclaurin.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
