"""A newcomer's first hour with the wheel: every example and every command line of the README and the quickstart, in an
environment that has what `pip install sidestream` brings, from a directory that is not the repository.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.demo_model import DEMO_MODEL
from support.installed import ROOT, Installed
from support.page_commands import NEEDS, NOT_RUN, commands, make_places, name_of, smaller

PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("quickstart", "coming_from", "compiler"))]
MARK = "<!-- runnable(?P<server> next to `sidestream serve`)? -->\n```python\n(?P<code>.*?)```"
EXAMPLES = [
    (page.name, bool(found["server"]), found["code"])
    for page in PAGES
    for found in re.finditer(MARK, page.read_text(), re.DOTALL)
]
HTTP = "http://127.0.0.1:8000"  # where the pages say that a server answers; the tests take another port
LONG = {"eval", "bench latency", "bench throughput", "bench startup", "--shape"}  # with --exhaustive only
CLIENTS = ("generate --server", "chat", "bench serve")

# Runs commands and examples one after the other in one process: a JSON line with arguments, or with Python's code, in;
# [exit code, stdout, stderr] out.
DRIVER = """
import contextlib, io, json, sys, traceback
from sidestream.tools import cli
answers = sys.stdout
for line in sys.stdin:
    given = json.loads(line)
    sys.argv = ["sidestream", *given] if isinstance(given, list) else ["-c"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(given) if isinstance(given, list) else exec(given, {"__name__": "__main__"}) or 0
        except SystemExit as left:
            code = left.code
        except BaseException:
            code = traceback.print_exc()
    print(json.dumps([code, out.getvalue(), err.getvalue()]), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """What a command left: exit code (None: a traceback), stdout and stderr."""

    code: int | None
    out: str
    err: str


class Session:
    """A user's shell in `place`: commands in one process (examples that need more packages in a second one), servers in
    processes of their own.
    """

    def __init__(self, installed: Installed, place: Path) -> None:
        self.place = place
        self.installed = installed
        self.drivers: dict[bool, subprocess.Popen[str]] = {}
        self.server: subprocess.Popen[str] | None = None
        self.http = ""

    def _start(self, *command: str, more: bool = False, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.place,
            env=self.installed.variables(more) | {"XDG_RUNTIME_DIR": str(self.place)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, arguments: list[str] | str, more: bool = False) -> Answer:
        """A command of `sidestream`, or an example in Python; `more`: with every package that the tests have."""
        if more not in self.drivers:
            self.drivers[more] = self._start(str(self.installed.home / "bin" / "python"), "-c", DRIVER, more=more)
        driver = self.drivers[more]
        assert driver.stdin is not None and driver.stdout is not None
        print(json.dumps(arguments), file=driver.stdin, flush=True)
        return Answer(*json.loads(driver.stdout.readline()))

    def serve(self, arguments: list[str]) -> None:
        """Starts a server and waits until it serves."""
        self.stop()
        command = str(self.installed.home / "bin" / "sidestream")
        # any free port: another server may run on this machine
        self.server = self._start(command, *arguments, "--port", "0", "--usage-log", "none", stderr=subprocess.STDOUT)
        assert self.server.stdout is not None
        said: list[str] = []
        awaited = {"serving at"} if "--no-http" in arguments else {"serving at", "answering HTTP at"}
        for line in self.server.stdout:
            said.append(line)
            if "answering HTTP at" in line:
                self.http = line.split()[-1]
            awaited -= {text for text in awaited if text in line}
            if not awaited:  # either may come first
                return
        raise AssertionError(f"sidestream {shlex.join(arguments)}: {''.join(said)}")

    def curl(self, words: list[str]) -> str:
        """What is wrong with a server's answer to these arguments of curl: -H, -d, --json and the address."""
        headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
        headers |= {"Content-Type": "application/json"} if "--json" in words else {}
        data = next((words[at + 1] for at, word in enumerate(words) if word in ("-d", "--json")), None)
        (url,) = (word.replace(HTTP, self.http) for word in words if word.startswith("http"))
        answer = httpx.request("GET" if data is None else "POST", url, headers=headers, content=data, timeout=120)
        return "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"

    def stop(self) -> None:
        """Ends the server."""
        if self.server is not None:
            self.server.terminate()
            self.server.communicate(timeout=120)
            self.server = None

    def close(self) -> None:
        """Ends everything."""
        self.stop()
        for driver in self.drivers.values():
            driver.communicate(timeout=120)


@pytest.fixture(scope="module")
def shell(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    made = Session(installed, tmp_path_factory.mktemp("hour"))
    try:
        yield made
    finally:
        made.close()


def test_the_checkout_is_out_of_sight_and_the_version_is_said(installed: Installed, tmp_path: Path) -> None:
    where = installed.run("python", "-c", "import sidestream; print(sidestream.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(installed.home), where.stderr
    said = installed.run("sidestream", "--version", cwd=tmp_path)
    assert said.returncode == 0 and "commit" not in said.stdout and "torch" in said.stdout
    needs_more = installed.run("sidestream", "eval", "--real", cwd=tmp_path)
    assert needs_more.returncode == 2 and "pip install 'sidestream[real]'" in needs_more.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, id=f"{page}-{number}") for number, (page, server, code) in enumerate(EXAMPLES) if not server],
)
def test_an_example_runs(code: str, shell: Session) -> None:
    make_places(" ".join(re.findall(r'"((?:models|adapters)/[^"]*)"', code)), shell.place)
    answer = shell.run(code, more="import peft" in code or "from peft" in code)
    assert answer.code == 0, answer.err[-3000:]
    assert "print" not in code or answer.out.strip()


def test_every_command_line_runs(shell: Session, pytestconfig: pytest.Config) -> None:
    tried, wrong = set(), []
    shell.run(["keys", "curve", "server-keys"])
    for page in PAGES:
        for line in commands(page.read_text()):
            words = shlex.split(line)
            if words[0] in NOT_RUN or "=" in words[0]:
                continue
            if words[0] == "curl":
                tried.add(line)
                if shell.server is None:
                    shell.serve(["serve"])
                if problem := shell.curl(words):
                    wrong.append(f"{page.name}: {line}\n{problem}")
                continue
            assert words[0] == "sidestream", f"{page.name}: nobody knows how to try {line}"
            name = name_of(words[1:])
            if line in tried or name == "COMMAND":
                continue
            if LONG & {name, *words} and not pytestconfig.getoption("--exhaustive"):
                continue
            tried.add(line)
            make_places(line, shell.place)
            if name == "serve":
                shell.serve([*words[1:], "--lora-modules", f"pirate={DEMO_MODEL / 'adapters' / 'pirate'}"])
                continue
            if name in CLIENTS and shell.server is None:
                shell.serve(["serve"])
            answer = shell.run(smaller(words[1:], shell.place))
            missing = next((what for sign, what in NEEDS.items() if sign == name or sign in words), None)
            if missing is not None:
                good = answer.code == 2 and missing in answer.err and len(answer.err.splitlines()) == 1
            else:
                good = answer.code == 0 and bool(answer.out.strip()) and "error" not in answer.err
            own = (str(shell.place), str(shell.installed.home))  # lines with long paths of this run may be wide
            good = good and all(
                len(each) <= 100 or any(path in each for path in own) for each in answer.out.splitlines()
            )
            if not good:
                wrong.append(f"{page.name}: {line}\nexit code {answer.code}\n{answer.out[-1500:]}{answer.err[-2500:]}")
        for number, (name, server, code) in enumerate(EXAMPLES):
            if server and name == page.name:
                if shell.server is None:
                    shell.serve(["serve"])
                done = shell.installed.run(
                    *("python", "-c", code.replace(HTTP, shell.http)),
                    cwd=shell.place,
                    more="openai" in code,
                    XDG_RUNTIME_DIR=str(shell.place),
                )
                if done.returncode or not done.stdout.strip():
                    wrong.append(f"{page.name}: example {number}\n{done.stdout}{done.stderr[-3000:]}")
        shell.stop()
    assert len(tried) >= 10
    assert not wrong, "\n\n".join(wrong)
