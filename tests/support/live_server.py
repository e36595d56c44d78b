"""A server with its HTTP front, started as people start it: a process of the `sidestream` command."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Served:
    """`url`: of its HTTP; `address`: of its engine; `process`: the supervisor's; `directory`: where it leaves files."""

    url: str
    address: str
    process: "subprocess.Popen[str]"
    directory: Path

    @property
    def log(self) -> str:
        """What it has said."""
        return (self.directory / "log").read_text()


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """A server on the CPU: of the demo model, unless `arguments` of the command name another."""
    with tempfile.TemporaryDirectory(prefix="sst-") as directory:
        os.chmod(directory, 0o700)
        address = f"ipc://{directory}/e.sock"
        places = ["--bind", address, "--port", "0", "--usage-log", f"{directory}/usage.db", "--device", "cpu"]
        sizes = ["--precision", "fp32", "--max-model-len", "256", "--max-num-seqs", "16"]
        log = Path(directory) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "sidestream.tools.cli", "serve", *places, *sizes, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": directory, "TMPDIR": directory},
            )
        try:
            yield Served(_wait(log, process), address, process, Path(directory))
        finally:
            before = len(log.read_text())
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
        said = log.read_text()[before:]
        assert "is gone" not in said and "is lost" not in said, f"of a stop nobody has to hear that:\n{said}"


def _wait(log: Path, process: "subprocess.Popen[str]") -> str:
    """The URL, once the model is loaded too."""
    while True:
        said = log.read_text()
        url = next((line.split()[-1] for line in said.splitlines() if "answering HTTP at" in line), None)
        if url is not None and "serving at" in said:
            return url
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the server did not start:\n{said}")
