"""The walk of one prompt: the files whose functions run between a call and its result, for docs/internals.md.

    python -m sidestream.tools.pages.walk MODULE ARGUMENTS...    runs a process of the server, and records it

`sys.setprofile` sees every call. The demo model answers two prompts and the last is recorded, so what runs only at the
start is left out; ops are left out too. In a server each process is wrapped by this module, which records from SIGUSR1
to SIGUSR2.
"""

import ast
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ...compiler.options import DEFAULT_PRECISION

ROOT = Path(__file__).parents[2]
FOLDERS = ("compiler", "graphs", "runtime")
PROMPT, ADAPTER = "What is the capital of France?", "pirate"
OUTPUT = "SIDESTREAM_WALK"  # environment: the folder that the wrapped processes write to
WRAPPER = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
PROCESSES = ("batcher", "gpu_process")
IDLE_SECONDS = 1.5  # recorded after the answer, so that what comes in beats is always seen


class Recorder:
    """Notes the files of the package whose functions are called while `on` is set, in the order of their first call."""

    def __init__(self) -> None:
        self.on = False
        self._paths: dict[str, str | None] = {}
        self._found: dict[str, None] = {}

    def install(self) -> None:
        """Watch this thread, and those that start later."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def files(self) -> list[str]:
        """What was noted."""
        return list(self._found)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.on or event != "call":
            return
        name = frame.f_code.co_filename
        if name not in self._paths:
            self._paths[name] = _of_package(name)
        path = self._paths[name]
        if path is not None and frame.f_code.co_name != "<module>":
            self._found.setdefault(path)


def _of_package(name: str) -> str | None:
    try:
        path = Path(name).resolve().relative_to(ROOT)
    except ValueError:
        return None
    return path.as_posix() if path.parts[0] in FOLDERS else None


@cache
def generate_walk() -> list[str]:
    """The files of `LLM.generate`."""
    recorder = Recorder()
    from ...runtime.llm import LLM
    from ...runtime.requests.sampling_params import SamplingParams

    llm = LLM(device="cpu", precision=DEFAULT_PRECISION, show_progress=False, max_num_seqs=2)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    for last in (False, True):
        recorder.on = last
        former = sys.getprofile()
        recorder.install()
        try:
            llm.generate([PROMPT], params, adapter=ADAPTER, use_tqdm=False)
        finally:
            sys.setprofile(former)
            threading.setprofile(None)
    return recorder.files()


@cache
def stream_walk() -> dict[str, list[str]]:
    """The files of `Client.stream`, by process."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="sidestream-walk-") as directory:
        os.chmod(directory, 0o700)
        address = f"ipc://{directory}/e.sock"
        recorder.install()  # before the client's thread starts
        try:
            with _server(address, Path(directory)) as signalled:
                _stream(address, recorder, signalled)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        walks = {"client": recorder.files()}
        for name in PROCESSES:
            walks[name] = (Path(directory) / name).read_text().split()
    return walks


def _stream(address: str, recorder: Recorder, signalled: Callable[[int], None]) -> None:
    from ...runtime.client.client import Client
    from ...runtime.requests.sampling_params import SamplingParams

    with Client(address, connect_timeout=120) as client:
        for last in (False, True):
            if last:
                signalled(signal.SIGUSR1)
            recorder.on = last
            for _chunk in client.stream(PROMPT, SamplingParams(max_tokens=8, temperature=0.0), adapter=ADAPTER):
                pass
            recorder.on = False
        time.sleep(IDLE_SECONDS)
        signalled(signal.SIGUSR2)


@contextmanager
def _server(address: str, directory: Path) -> Iterator[Callable[[int], None]]:
    """A server of the demo model whose processes record; yields what sends them a signal and waits for its effect."""
    environment = {**os.environ, OUTPUT: str(directory)}
    process = subprocess.Popen([*WRAPPER, "supervisor", address], env=environment, stderr=subprocess.DEVNULL)

    def send(number: int) -> None:
        for name in PROCESSES:
            os.kill(int((directory / f"{name}.pid").read_text()), number)
        suffix = ".on" if number == signal.SIGUSR1 else ""
        while not all((directory / f"{name}{suffix}").exists() for name in PROCESSES):
            if process.poll() is not None:
                raise RuntimeError("the recorded server died")
            time.sleep(0.02)

    try:
        while not all((directory / f"{name}.pid").exists() for name in PROCESSES):
            if process.poll() is not None:
                raise RuntimeError("the recorded server did not start")
            time.sleep(0.05)
        yield send
    finally:
        process.terminate()
        process.wait()


def _supervise(address: str) -> int:
    """A server whose processes are wrapped."""
    from ...runtime.demo_model import DEMO_MODEL, demo_adapters
    from ...runtime.server import supervisor
    from ...runtime.server.settings import ServeSettings

    class Recorded(supervisor.Supervisor):
        def _start_batcher(self) -> supervisor.Child:
            return supervisor.Child.start("batcher", [*WRAPPER, "batcher"], self._settings, self._clock.seconds)

    settings = ServeSettings(
        model=str(DEMO_MODEL),
        llm={"device": "cpu", "precision": DEFAULT_PRECISION, "show_progress": False, "max_num_seqs": 2},
        adapters={name: str(path) for name, path in demo_adapters().items()},
        bind=address,
        gpu_command=[*WRAPPER, "gpu_process"],
    )
    return Recorded(settings, lambda line: None).run()


def _process(name: str, arguments: list[str]) -> None:
    """One of the server's processes, which says its number, records between the two signals, and writes its files."""
    recorder, directory = Recorder(), Path(os.environ[OUTPUT])

    def begin(*_: object) -> None:
        recorder.on = True
        (directory / f"{name}.on").touch()

    def end(*_: object) -> None:
        recorder.on = False
        unfinished = directory / f"{name}.part"
        unfinished.write_text("\n".join(recorder.files()))
        unfinished.rename(directory / name)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    (directory / f"{name}.pid").write_text(str(os.getpid()))
    sys.argv = [name, *arguments]
    recorder.install()
    runpy.run_module(f"sidestream.runtime.server.{name}", run_name="__main__", alter_sys=True)


def generate_table() -> str:
    """The table of `LLM.generate`."""
    return table({"": generate_walk()})


def stream_table() -> str:
    """The table of `Client.stream`; a file that several processes run is in each one's part."""
    return table(stream_walk())


def table(walks: dict[str, list[str]]) -> str:
    """Rows of files, each with the first sentence of its docstring; and how many there are."""
    parts = any(walks)
    rows = (
        ["| process | file | what it is |", "| --- | --- | --- |"]
        if parts
        else ["| file | what it is |", "| --- | --- |"]
    )
    for process, files in walks.items():
        for file in files:
            rows.append(f"{f'| {process} ' if parts else ''}| [{file}](../{file}) | {_says(ROOT / file)} |")
    count = len({file for files in walks.values() for file in files})
    return "\n".join([*rows, "", f"{count} files.", ""])


def _says(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1] == "supervisor":
        raise SystemExit(_supervise(sys.argv[2]))
    _process(sys.argv[1], sys.argv[2:])
