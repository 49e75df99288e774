"""What differs from machine to machine: proxies, signals, repositories around the installation."""

import signal
import socket
import subprocess

import pytest

from maclaurin import code_version
from maclaurin.model_names import hub_is_reachable
from maclaurin.stop_request import StopRequest


@pytest.fixture
def _no_network(monkeypatch):
    def unknown(*arguments, **options):
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_a_proxy_may_be_written_in_lower_case(monkeypatch, name):
    assert not hub_is_reachable()
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert hub_is_reachable()


def test_a_system_without_sighup_runs_studies(monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")
    with StopRequest("SIGINT", "SIGTERM", "SIGHUP") as stop:
        assert not stop.is_set
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == signal.SIGTERM


def test_a_second_ctrl_c_stops_at_once(capfd):
    with StopRequest("SIGINT", message="stopping") as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nstopping\n"


def test_the_commit_of_somebody_elses_repository_is_not_ours(monkeypatch, tmp_path):
    installed = tmp_path / "theirs" / "site-packages" / "maclaurin"
    installed.mkdir(parents=True)
    (installed / "code_version.py").write_text("")
    subprocess.run(["git", "init", "-q", tmp_path / "theirs"], check=True)
    monkeypatch.setattr(code_version, "__file__", str(installed / "code_version.py"))
    assert code_version.commit() is None
