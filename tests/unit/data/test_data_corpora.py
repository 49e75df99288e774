"""Texts from files and from the standard library."""

import gzip
import json
import lzma
import platform
import random
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from maclaurin.data import DataError, cache_folder, token_shards
from maclaurin.data.cache_folder import Cache
from maclaurin.data.corpus import FirstDocuments, StandardLibrary
from maclaurin.data.data_config import open_corpus
from maclaurin.data.splits import CorpusSplitter, Fractions
from maclaurin.data.text_files import PIECE, Files
from maclaurin.data.text_tokenizers import Bytes

TEXTS = ["one\ntwo\n", "drei und vier", "pięć 六"]


def read(corpus):
    return [document.text for document in corpus.documents()]


@pytest.fixture
def files(tmp_path):
    def named(written):
        return Files.named(str(written), tmp_path / "notes", progress=False)

    return named


def write_jsonl(path, texts, field="text"):
    content = "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()
    packed = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(packed.get(path.suffix, bytes)(content))
    return path


def write_parquet(path, texts, field="text"):
    columns = {field: texts, "id": [str(i) for i in range(len(texts))]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst"])
def test_lines_of_json_are_documents(tmp_path, files, name):
    path = write_jsonl(tmp_path / name, TEXTS)
    assert read(files(path)) == TEXTS
    renamed = write_jsonl(tmp_path / f"b{name}", TEXTS, field="body")
    assert read(files(f"{renamed}:body")) == TEXTS


def test_rows_of_parquet_are_documents(tmp_path, files):
    assert read(files(write_parquet(tmp_path / "a.parquet", TEXTS))) == TEXTS
    assert read(files(f"{write_parquet(tmp_path / 'b.parquet', TEXTS, 'body')}:body")) == TEXTS


@pytest.mark.parametrize("end", ["", ".gz", ".xz", ".zst"])
def test_a_short_text_file_is_one_document(tmp_path, files, end):
    packed = {
        "": bytes,
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }[end]
    path = tmp_path / f"a.txt{end}"
    path.write_bytes(packed(TEXTS[2].encode()))
    assert read(files(path)) == [TEXTS[2]]


@pytest.mark.parametrize("line", ["a line of some words\n", "x" * 50_000, "\n"])
def test_a_long_text_file_is_cut_into_pieces_that_make_it_up(tmp_path, files, line):
    whole = ("start\n" + line) * (200_000 // len(line))
    path = tmp_path / "a.txt"
    path.write_text(whole)
    pieces = read(files(path))
    assert "".join(pieces) == whole
    assert all(len(piece) <= 2 * PIECE for piece in pieces)
    assert len(pieces) > 5


def test_several_zst_frames_are_one_stream(tmp_path, files):
    compress = zstandard.ZstdCompressor().compress
    path = tmp_path / "a.txt.zst"
    path.write_bytes(compress(b"one ") + compress(b"two"))
    assert read(files(path)) == ["one two"]


def test_folders_are_read_recursively_in_the_order_of_paths(tmp_path, files):
    folder = tmp_path / "folder"
    (folder / "b").mkdir(parents=True)
    (folder / "c.txt").write_text("third")
    (folder / "a.txt").write_text("first")
    write_jsonl(folder / "b" / "x.jsonl", ["second", " ", ""])
    (folder / "notes.pdf").write_bytes(b"\x00")
    assert read(files(folder)) == ["first", "second", "third"]


def test_progress_rises_to_the_end(tmp_path, files):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", TEXTS * 50)
    write_parquet(folder / "b.parquet", TEXTS * 50)
    progress = [document.progress for document in files(folder).documents()]
    assert progress == sorted(progress)
    assert progress[-1] == pytest.approx(1.0)


def test_halves_of_surrogate_pairs_do_not_stop_anything(tmp_path, files):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud800 b"}\n')
    assert read(files(path)) == ["a ? b"]


def test_the_fingerprint_is_of_the_content(tmp_path, files):
    one, same = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", TEXTS)
    other = write_jsonl(tmp_path / "c.jsonl", [*TEXTS, "more"])
    assert files(one).fingerprint == files(same).fingerprint == GOLDEN
    assert files(other).fingerprint != GOLDEN
    assert files(f"{one}:id").fingerprint != GOLDEN
    assert FirstDocuments(files(one), 2).fingerprint != GOLDEN


def test_large_files_are_not_hashed_again_until_they_change(tmp_path, files, monkeypatch):
    monkeypatch.setattr(cache_folder, "HASH_CACHE_MIN_BYTES", 1)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    reads = []
    hash_file = cache_folder.sha256
    monkeypatch.setattr(cache_folder, "sha256", lambda p: reads.append(p) or hash_file(p))
    assert files(path).fingerprint == files(path).fingerprint == GOLDEN
    assert reads == [path]
    write_jsonl(path, [*TEXTS, "more"])
    assert files(path).fingerprint != GOLDEN
    assert reads == [path, path]


def test_limit_takes_the_first_documents(tmp_path, jsonl, texts):
    corpus = open_corpus(str(jsonl), limit=3, notes=tmp_path)
    assert read(corpus) == texts[:3]
    assert [document.progress for document in corpus.documents()][-1] == 1.0


@pytest.mark.slow
def test_a_large_corpus_is_never_in_memory_at_once(tmp_path, files, monkeypatch):
    monkeypatch.setattr(token_shards, "_TEXT_AT_ONCE", 1 << 15)
    words = random.Random(0).choices(["alpha", "beta", "gamma\n"], k=800_000)
    path = tmp_path / "a.txt"
    path.write_text(" ".join(words))
    del words
    tracemalloc.start()
    try:
        corpus = files(path)
        splitter = CorpusSplitter(corpus, Fractions(0.1, 0.1))
        token_shards.prepare_tokens(corpus, Bytes(), splitter, Cache.at(str(tmp_path)), progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 2


# ------------------------------------------------------------------------------- the standard library


@pytest.mark.slow
def test_the_standard_library_is_there_and_its_tests_are_not():
    texts = read(FirstDocuments(StandardLibrary(), 400))
    assert len(texts) == len(set(texts)) == 400
    assert sum(map(len, texts)) > 1_000_000
    assert not any("site-packages" in str(path) for path in StandardLibrary()._paths())
    assert not any(path.parent.name in ("test", "tests") for path in StandardLibrary()._paths())


def test_a_library_is_read_in_order_without_copies_and_foreign_folders(tmp_path, monkeypatch):
    for name, content in {
        "b.py": b"b = 1\n",
        "a/copy.py": b"b = 1\n",
        "a/latin.py": b"# coding: latin-1\n# \xe9\n",
        "a/broken.py": b"# coding: utf-8\n# \xe9\n",
        "test/t.py": b"t = 1\n",
        "site-packages/s.py": b"s = 1\n",
        "empty.py": b"",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    library = StandardLibrary(folder=tmp_path)
    assert read(library) == ["b = 1\n", "# coding: latin-1\n# é\n"]
    assert "t = 1\n" in read(StandardLibrary(with_tests=True, folder=tmp_path))
    before = library.fingerprint
    assert StandardLibrary(folder=tmp_path).fingerprint == before
    monkeypatch.setattr(platform, "python_version", lambda: "4.0.0")
    assert StandardLibrary(folder=tmp_path).fingerprint != before


def test_code_pages_and_tables_are_not_text_to_learn_from(tmp_path):
    table = "names = {\n" + "".join(f"    'name {n}': 0x{n:x}, # a letter\n" for n in range(9)) + "}\n"
    code = '"""A docstring."""\n\nfor n in range(3):\n    print("a", n)\n'
    for name, text in {"table.py": table, "code.py": code, "encodings/cp1.py": code + "#\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read(StandardLibrary(folder=tmp_path)) == [code]


def test_a_library_without_files_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"has no \.py files"):
        read(StandardLibrary(folder=tmp_path))


# -------------------------------------------------------------------------------------- bad input


def broken(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line 2 holds list"),
        ("a.jsonl", b'{"body": "x", "id": 3}\n', r"no field 'text'; there are body, id.*data=path:body"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: the field 'text' holds int '3', not text"),
        ("a.jsonl", b'{"text": null}\n', "holds null"),
        ("a.txt", b"good\n\xff\xfe bad", "not UTF-8 text"),
        ("a.txt.gz", gzip.compress(b"some text" * 99, mtime=0)[:-9], "not a complete compressed file"),
        ("a.txt.xz", lzma.compress(b"some text" * 99)[:-9], "not a complete compressed file"),
        ("a.txt.xz", b"not compressed", "not a complete compressed file"),
        ("a.txt.gz", b"not compressed", "not a complete compressed file"),
        ("a.txt.zst", zstandard.ZstdCompressor().compress(b"some text" * 99)[:-9], "has no end"),
        ("a.jsonl.zst", b"not compressed", "not a complete compressed file"),
        ("a.parquet", b"PAR1 not really", "not a complete parquet file"),
        ("a.docx", b"?", r"must end in one of \.txt, \.jsonl, \.parquet"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, files, name, content, message):
    path = broken(tmp_path, name, content)
    with pytest.raises(DataError, match=message) as caught:
        read(files(path))
    assert str(path) in str(caught.value)


def test_a_missing_column_is_an_error_with_the_known_ones(tmp_path, files):
    path = write_parquet(tmp_path / "a.parquet", TEXTS, field="texts")
    with pytest.raises(DataError, match=r"no field 'text'; there are texts, id\. Did you mean texts"):
        read(files(path))


def test_a_folder_without_texts_is_an_error_with_what_is_in_it(tmp_path, files):
    (tmp_path / "folder").mkdir()
    broken(tmp_path / "folder", "a.pdf", b"?")
    with pytest.raises(DataError, match=r"none of the 1 files.*found \.pdf.*readable are"):
        read(files(tmp_path / "folder"))


def test_an_unknown_name_is_an_error_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"no data called 'stdlbi'.*Did you mean stdlib"):
        open_corpus("stdlbi", limit=None, notes=tmp_path)
    with pytest.raises(DataError, match="Did you mean fineweb"):
        open_corpus("finweb", limit=None, notes=tmp_path)


GOLDEN = "2b5a55f74484c43f10267a5961af3e697fdb4730e30232fd0aea6a43facfc05e"


def test_a_copied_library_is_the_same_text_on_another_python(tmp_path, monkeypatch):
    """The fingerprint had the version of the running Python, so the same files were other data elsewhere."""
    library = tmp_path / "lib"
    (library / "test").mkdir(parents=True)
    for name in ("a.py", "b.py", "test/c.py"):
        (library / name).write_text(f"name = {name!r}\n")
    here = StandardLibrary(folder=library)
    here.copy_to(tmp_path / "copy")
    monkeypatch.setattr("platform.python_version", lambda: "9.9.9")
    monkeypatch.setenv("MACLAURIN_STDLIB", str(tmp_path / "copy"))
    there = StandardLibrary()
    assert read(there) == read(here) == ["name = 'a.py'\n", "name = 'b.py'\n"]
    assert there.fingerprint == here.fingerprint
    assert there.description == here.description != "stdlib of Python 9.9.9"
    assert FirstDocuments(there, 1).description == f"first 1 documents of {here.description}"
    with pytest.raises(DataError, match="is not empty"):
        here.copy_to(tmp_path / "copy")


def test_a_folder_that_is_no_copy_of_a_library_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setenv("MACLAURIN_STDLIB", str(tmp_path))
    with pytest.raises(DataError, match="no file PYTHON_VERSION"):
        _ = StandardLibrary().fingerprint
