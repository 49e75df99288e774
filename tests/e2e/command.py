"""`maclaurin ARGUMENTS` in a process of its own that starts in milliseconds.

Importing torch, transformers and the library takes six seconds of CPU time, and the tests start some hundred
commands. So one server for all test processes imports everything once, and forks a process for each command:
with its own folder, environment, arguments and output, and the exit code and signals of any other process.

    result = run("list", "--json", cwd=folder)              # like subprocess.run
    process = start("train", "--steps=9", cwd=folder)       # like subprocess.Popen
    result = run_script(file, "--words", cwd=folder)        # a Python file, with everything imported
    result = run_code("import maclaurin; ...")              # Python, with torch imported and nothing of ours

test_commands.py starts some commands from nothing, as a shell does.
"""

import array
import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from filelock import FileLock

PRELOADED = {
    # what every command needs, and what the processes of a study need
    "commands": [
        "maclaurin.cli.main",
        "maclaurin.models",
        "maclaurin.training.trainer",
        "maclaurin.study.runner",
        "maclaurin.study.worker",
        "maclaurin.report.write",
        "maclaurin.conversion.converted_model",
        "maclaurin.evaluation",
    ],
    # most of what importing us and transformers takes, and neither of them
    "torch": ["torch", "torch._dynamo", "torch.distributed.tensor", "huggingface_hub", "tokenizers"],
}


def run(*arguments, cwd=None, env=None, expect=0, timeout=280, input=None):
    """Wait for the command; its stdout, stderr and returncode."""
    process = start(*arguments, cwd=cwd, env=env, input=input)
    out, err = process.communicate(timeout)
    assert expect is None or process.returncode == expect, out + err
    return SimpleNamespace(stdout=out, stderr=err, returncode=process.returncode)


def start(*arguments, cwd=None, env=None, input=None):
    """The command as a process."""
    return Process([str(a) for a in arguments], str(cwd or Path.cwd()), env or dict(os.environ), input)


def run_script(file, *arguments, cwd, env=None):
    """A Python file as a program of its own, with what it imports already loaded."""
    words = [str(file), *map(str, arguments)]
    process = Process(words, str(cwd), env or dict(os.environ), None, runs="script")
    out, err = process.communicate(280)
    return SimpleNamespace(stdout=out, stderr=err, returncode=process.returncode)


def run_code(code, *, env=None):
    """Python code in a process that has imported torch, but neither us nor transformers."""
    process = Process([code], str(Path.cwd()), env or dict(os.environ), None, runs="code")
    out, err = process.communicate(280)
    return SimpleNamespace(stdout=out, stderr=err, returncode=process.returncode)


class Process:
    """The part of subprocess.Popen that tests use."""

    def __init__(self, arguments, cwd, env, text, *, runs="command"):
        self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        if text is not None:
            self._files[0].write(text.encode())
            self._files[0].seek(0)
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(_server("torch" if runs == "code" else "commands"))
        request = json.dumps({"arguments": arguments, "cwd": cwd, "env": env, "runs": runs}).encode()
        descriptors = array.array("i", [file.fileno() for file in self._files])
        header = len(request).to_bytes(8, "big")
        self._connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        self._connection.sendall(request)
        self.pid = int.from_bytes(_exactly(self._connection, 8), "big")
        self.returncode = None

    def poll(self):
        return self._ended(0.0)

    def wait(self, timeout=None):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("maclaurin", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """All it printed, when it has ended."""
        self.wait(timeout)
        for file in self._files[1:]:
            file.seek(0)
        return tuple(file.read().decode() for file in self._files[1:])

    def printed(self):
        """What it has printed so far."""
        return os.pread(self._files[1].fileno(), 1 << 20, 0).decode()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds):
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            status = int.from_bytes(_exactly(self._connection, 8), "big")
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _exactly(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the server of commands has ended"
        data += part
    return data


# ------------------------------------------------------------------------------------------ the server


@cache
def _server(kind):
    """The address of the server that all processes of one test run share; it ends with the last of them."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of-{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"maclaurin-{run}"
    folder.mkdir(exist_ok=True)
    address = str(folder / kind)
    connection = socket.socket(socket.AF_UNIX)
    with FileLock(address + ".lock"):
        try:
            connection.connect(address)
        except OSError:
            _start_server(kind, address)
            connection.connect(address)
        connection.sendall(bytes(8))  # nothing to run; it says that this process is there until it closes
    atexit.register(connection.close)
    return address


def _start_server(kind, address):
    Path(address).unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.e2e.command", kind, address]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2])
    end = time.monotonic() + 240
    while not Path(address).exists():
        assert process.poll() is None, "the server of commands did not start"
        assert time.monotonic() < end, "the server of commands takes too long to start"
        time.sleep(0.05)


def _serve(kind, address):
    import importlib
    from multiprocessing import forkserver

    missing = ModuleNotFoundError if kind == "torch" else ()  # a GPU machine may not have all of them
    for name in PRELOADED[kind]:
        with contextlib.suppress(missing):
            importlib.import_module(name)
    gc.freeze()  # pages that processes share are not written to
    if kind == "commands":
        forkserver.set_forkserver_preload(["maclaurin.study.worker"])
        forkserver.ensure_running()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address + ".new")
    listening.listen(64)
    Path(address + ".new").rename(address)
    running, tests, was_used, parent = {}, [], False, os.getppid()
    while True:
        ready, _, _ = select.select([listening, *tests], [], [], 0.02 if running else 1.0)
        if listening in ready:
            connection, _ = listening.accept()
            pid = _fork(connection, listening)
            if pid is None:
                tests.append(connection)
                was_used = True
            else:
                running[pid] = connection
                connection.sendall(pid.to_bytes(8, "big"))
        for ended in set(ready) & set(tests):
            tests.remove(ended)
        if not tests and (was_used or os.getppid() != parent):
            for file in (address, address + ".lock"):
                Path(file).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the other server still is at work
                Path(address).parent.rmdir()
            os._exit(0)
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                    connection.sendall(status.to_bytes(8, "big"))


def _fork(connection, listening):
    """The process that runs the request; None for a test process that says it is there."""
    header, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    if not any(header):
        return None
    request = json.loads(_exactly(connection, int.from_bytes(header, "big")))
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    pid = os.fork()
    if pid == 0:
        connection.close()
        listening.close()
        _become(request, list(descriptors))
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become(request, descriptors):
    """The command, from its arguments to its exit."""
    import multiprocessing.process
    from multiprocessing import forkserver

    import torch

    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # one for all commands
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    arguments = request["arguments"]
    sys.argv = ["maclaurin", *arguments] if request["runs"] == "command" else list(arguments)
    sys.modules["__main__"].__package__ = ""  # help texts name the command by it
    code = 1
    try:
        if request["runs"] == "script":
            runpy.run_path(arguments[0], run_name="__main__")
        elif request["runs"] == "code":
            exec(arguments[0], {"__name__": "__main__"})
        else:
            from maclaurin.cli.main import main

            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import threading

        sys.stdout.flush()
        sys.stderr.flush()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        os._exit(code)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
