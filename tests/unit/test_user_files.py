"""Files that a user names, and model names: one clear error for each that cannot be."""

import os
import socket
from pathlib import Path

import pytest

from maclaurin.cli.main import with_options
from maclaurin.errors import InputError
from maclaurin.files import read_text, require_file, require_writable_file, require_writable_folder
from maclaurin.model_names import hub_is_reachable, require_model

needs_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def test_text_is_read_as_utf8(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("naïve", encoding="utf-8")
    assert read_text(file, "text") == "naïve"
    file.write_bytes("naïve".encode("latin1"))
    with pytest.raises(InputError, match=r"`text`: .*text.txt is not UTF-8 text \(byte 2"):
        read_text(file, "text")


def test_a_missing_file_is_named_with_what_is_close(tmp_path):
    (tmp_path / "novel.txt").write_text("")
    with pytest.raises(InputError, match=r"`text`: there is no file .*novel.tx. Did you mean .*novel.txt\?"):
        require_file(tmp_path / "novel.tx", "text")
    with pytest.raises(InputError, match=r"there is no file .*zzz\.$"):
        require_file(tmp_path / "zzz", "text")
    with pytest.raises(InputError, match="is a folder; name a file"):
        require_file(tmp_path, "text")
    with pytest.raises(InputError, match="there is no file"):
        require_file(tmp_path / "no" / "folder", "text")


def test_a_folder_that_can_be_written_is_not_left_behind(tmp_path):
    require_writable_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    require_writable_folder(tmp_path / "there")
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]
    require_writable_file(tmp_path / "there" / "results.json")


@pytest.mark.parametrize("place", [Path("/proc/nothing"), Path("/dev/null/x")])
def test_places_that_cannot_be_written(place):
    with pytest.raises(InputError, match=f"`out`: {place} cannot be written"):
        require_writable_folder(place)
    with pytest.raises(InputError, match="`out`: "):
        require_writable_file(place / "file.json")


@needs_user
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="Permission denied"):
            require_writable_folder(tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_files_and_folders_are_told_apart(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; name a folder"):
        require_writable_folder(tmp_path / "file")
    with pytest.raises(InputError, match=r"is a folder; name a file, such as .*results.json"):
        require_writable_file(tmp_path)
    with pytest.raises(InputError, match=r"there is no folder .*fil\. Did you mean .*file"):
        require_writable_file(tmp_path / "fil" / "x.json")


# ------------------------------------------------------------------------------------- model names


@pytest.fixture
def no_network(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in ("HF_HUB_OFFLINE", "HF_ENDPOINT"):
            monkeypatch.delenv(name)

    looked_up = []

    def resolve(host, *_):
        looked_up.append(host)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return looked_up


def test_local_models_and_packages_are_not_looked_up(tmp_path, monkeypatch, no_network):
    (tmp_path / "runs" / "softmax").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("runs/softmax", "./runs/softmax", str(tmp_path / "runs"), "pypi:anything"):
        require_model(name)
    assert no_network == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs/softmaxx", r"there is no folder runs/softmaxx\. Did you mean runs/softmax\?"),
        ("./runs/softmaxx", r"Did you mean runs/softmax\?"),
        (
            "rums",
            r"there is no folder rums \(a name on the Hugging Face hub is OWNER/NAME\)\. Did you mean runs",
        ),
        ("~/no-such-model", "there is no folder ~/no-such-model"),
        ("runs/model.gguf", r"there is no file runs/model\.gguf"),
        ("a/b/c", "there is no folder a/b/c, and it is not a name on the Hugging Face hub"),
        ("owner/name", "there is no folder owner/name, and the Hugging Face hub cannot be reached"),
    ],
)
def test_models_that_do_not_exist(tmp_path, monkeypatch, no_network, name, words):
    (tmp_path / "runs" / "softmax").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        require_model(name)


def test_a_file_that_is_no_gguf_file_is_not_looked_up(tmp_path, no_network):
    file = tmp_path / "novel.txt"
    file.write_text("Call me Ishmael.")
    with pytest.raises(InputError, match=r"novel\.txt is a file, but not a \.gguf file"):
        require_model(str(file))
    assert no_network == []


def test_a_name_on_the_hub_is_left_to_the_hub(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: looked_up.append(host) or [])
    require_model("owner/name")
    assert looked_up == ["huggingface.co"]


def test_a_cached_model_needs_no_network(tmp_path, monkeypatch, no_network):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        require_model("owner/name")
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    require_model("owner/name")


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy", "all_proxy"])
def test_a_proxy_reaches_the_hub_however_it_is_spelled(monkeypatch, no_network, name):
    assert not hub_is_reachable()
    monkeypatch.setenv(name, "http://proxy:3128")
    assert hub_is_reachable()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub_is_reachable()


# ---------------------------------------------------------------------- parameters in messages of commands


@pytest.mark.parametrize(
    ("message", "printed"),
    [
        ("choose another `out`.", "choose another --out."),
        ("continue with `resume=True`.", "continue with --resume."),
        ("use `compile=False`.", "use --no-compile."),
        ("`keep_sharp`: other weights.", "--keep-sharp: other weights."),
        ("declare `argument`.", "declare `argument`."),
    ],
)
def test_a_command_prints_parameters_as_options(message, printed):
    assert with_options(message) == printed
