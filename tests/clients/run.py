"""Run the clients of this folder against a server with the demo model, each in an environment of its own.

    make test-clients                               # all of them
    make test-clients CLIENTS='openai langchain'
    make test-clients CLIENTS='--some 12 --turn 7'  # twelve of them, others in another turn: as CI does

A client is a script, with_NAME.py or .mjs, that exits with 0 if the client works. requirements.txt (Python) and
package.json (Node) pin its release. Environments are in .venv-clients; Python's see the packages of the environment
that runs this file, so that torch and transformers are not installed again. Only the installation needs a network:
clients whose packages cannot be fetched are skipped, and scripts reach nothing but the server.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.live_server import serving

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".venv-clients"
KEY = "key-of-the-clients"
TIMEOUT = 1800  # seconds for one client, which may hang
UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|ReadTimeout|Max retries exceeded"
    r"|ENOTFOUND|ECONNREFUSED|ECONNRESET|EAI_AGAIN|ETIMEDOUT"
)
# no client reports home or looks for files elsewhere: what tries it anyway meets a proxy that does not exist
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}


def pinned() -> dict[str, list[str]]:
    """Return the requirements of each client by its name, for pip or, with an @ in them, for npm."""
    clients: dict[str, list[str]] = {}
    for line in (FOLDER / "requirements.txt").read_text().splitlines():
        if found := re.fullmatch(r"(\S+==\S+)  # (\w+)", line):
            clients.setdefault(found[2], []).append(found[1])
    for name, packages in json.loads((FOLDER / "package.json").read_text())["clients"].items():
        clients[name] = [f"{package}@{version}" for package, version in packages.items()]
    return clients


def in_turn(names: list[str], some: int, turn: int) -> list[str]:
    """Return `some` of the names, others in the next turn, so that consecutive turns run all of them."""
    start = turn * some % len(names)
    return (names + names)[start : start + min(some, len(names))]


def install(name: str, requirements: list[str], unreachable: set[str]) -> str:
    """Install a client unless it is installed; return why that is impossible here, or an empty string.

    unreachable   installers without a network; a failed one is added and not tried again

    Raises RuntimeError if the packages can be fetched, but not installed.
    """
    installer = "npm" if "@" in requirements[0][1:] else "pip"
    if installer == "npm" and shutil.which("npm") is None:
        return "npm is not installed"
    home = ENVIRONMENTS / name
    wanted = json.dumps([sys.prefix, *requirements])
    stamp = home / "installed.json"
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    if installer in unreachable:
        return f"{installer} cannot reach its index"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if installer == "npm":
        command = ["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", "--omit=optional"]
        command += ["--fetch-retries=1"]
    else:
        venv.create(home, with_pip=False)
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "checkout.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
        command += ["--disable-pip-version-check", "--no-compile", "--retries=1"]
    done = subprocess.run([*command, *requirements], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stdout + done.stderr
        if UNREACHABLE.search(said):
            unreachable.add(installer)
            return f"{installer} cannot reach its index"
        raise RuntimeError(f"{' '.join(requirements)} cannot be installed:\n{said}")
    stamp.write_text(wanted)
    return ""


def run(name: str, url: str) -> None:
    """Run a client's script; raise CalledProcessError or TimeoutExpired if it fails."""
    home = ENVIRONMENTS / name
    (script,) = FOLDER.glob(f"with_{name}.*")
    python = home / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="sst-") as directory:
        if script.suffix == ".mjs":  # Node looks for packages next to the script only
            script = Path(shutil.copy(script, home))
        variables = QUIET | {
            "PATH": os.pathsep.join([str(home / "bin"), str(home / "node_modules" / ".bin"), os.environ["PATH"]]),
            "HOME": directory,
            "TMPDIR": directory,
            "SIDESTREAM_URL": url,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
        }
        interpreter = "node" if script.suffix == ".mjs" else str(python) if python.exists() else sys.executable
        subprocess.run(
            [interpreter, str(script)],
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )


def main() -> int:
    """Install and run the clients of the command line; return 1 if one of them fails."""
    clients = pinned()
    parser = argparse.ArgumentParser(description="Run clients against a server with the demo model.")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"default: all of {', '.join(clients)}")
    parser.add_argument("--some", type=int, metavar="N", help="run only N of the clients")
    parser.add_argument("--turn", type=int, default=0, metavar="T", help="which of them --some runs")
    parser.add_argument("--minutes", type=float, metavar="M", help="skip clients that could only start later than that")
    options = parser.parse_args()
    end = time.monotonic() + (options.minutes or math.inf) * 60
    chosen = options.clients or list(clients)
    if unknown := sorted(set(chosen) - set(clients)):
        parser.error(f"unknown clients: {', '.join(unknown)}; there are {', '.join(clients)}")
    if options.some is not None:
        chosen = in_turn(chosen, options.some, options.turn)
    failed, unreachable = [], set[str]()
    flags = ["--api-key", KEY, "--max-model-len", "2048", "--store-responses", "100"]
    with serving(*flags) as server, ThreadPoolExecutor(1) as installer:
        # the next clients are installed while one runs
        waiting = [installer.submit(install, name, clients[name], unreachable) for name in chosen]
        for name, installed in zip(chosen, waiting, strict=True):
            if time.monotonic() > end:
                installed.cancel()
                print(f"skipped  {name}: the {options.minutes:g} minutes are over", flush=True)
                continue
            try:
                if reason := installed.result():
                    print(f"skipped  {name}: {reason}", flush=True)
                    continue
                since = time.monotonic()
                run(name, server.url)
            except (RuntimeError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as problem:
                failed.append(name)
                said = getattr(problem, "output", None) or ""
                said = said.decode(errors="replace") if isinstance(said, bytes) else said
                print(f"FAILED   {name}: {problem}\n{said[-4000:]}", flush=True)
                continue
            print(f"passed   {name} ({', '.join(clients[name])}) in {time.monotonic() - since:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; again: make test-clients CLIENTS='{' '.join(failed)}'")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
