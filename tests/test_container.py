"""The images and Compose files of docs/deploy: hadolint's main rules, and commands that `serve` accepts."""

import json
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sidestream.tools.cli import build_parser

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
IMAGES = sorted(DEPLOY.glob("Dockerfile*"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a Dockerfile, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


def problems(text: str) -> list[str]:
    """Return the rules that a Dockerfile breaks, as hadolint numbers them."""
    found, given = [], instructions(text)
    for name, rest in given:
        match name:
            case "FROM":
                image = rest.split()[0]
                found += ["DL3006 pin the base"] if ":" not in image and "@" not in image else []
                found += ["DL3007 latest"] if image.endswith(":latest") else []
                found += ["DL3006 name a patch release"] if not re.search(r":\d+\.\d+\.\d+|@sha256:", image) else []
            case "RUN":
                words = shlex.split(rest)
                found += ["DL3004 sudo"] if "sudo" in words else []
                found += ["DL3027 apt"] if "apt" in words else []
                if "apt-get install" in rest:
                    found += ["DL3015 recommends"] if "--no-install-recommends" not in words else []
                    found += ["DL3014 -y"] if not {"-y", "--yes"} & set(words) else []
                    found += ["DL3009 lists"] if "rm -rf /var/lib/apt/lists/*" not in rest else []
                    found += ["DL3059 update apart"] if "apt-get update" not in rest else []
                found += ["DL3042 pip's cache"] if "pip install" in rest and "--no-cache-dir" not in words else []
                found += ["DL4006 pipefail"] if "|" in re.sub(r"\|\|", "", rest) else []
                found += ["DL3003 cd"] if words[0] == "cd" else []
            case "CMD" | "ENTRYPOINT":
                found += ["DL3025 JSON form"] if not is_exec_form(rest) else []
            case "HEALTHCHECK":
                found += ["DL3025 JSON form"] if not is_exec_form(rest.partition("CMD ")[2]) else []
            case "ADD":
                found.append("DL3020 COPY")
            case "MAINTAINER":
                found.append("DL4000 MAINTAINER")
            case "WORKDIR":
                found += ["DL3000 absolute path"] if not rest.startswith("/") else []
    users = [rest for name, rest in given if name == "USER"]
    found += ["DL3002 the last user is root"] if not users or users[-1] in ("root", "0") else []
    names = [name for name, _ in given]
    found += ["no HEALTHCHECK"] if names.count("HEALTHCHECK") != 1 else []
    return found + ([f"DL4003 several {name}" for name in ("CMD", "ENTRYPOINT") if names.count(name) > 1])


def is_exec_form(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except ValueError:
        return False


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_follows_the_rules(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (":3.12.11-slim-bookworm", "", "DL3006"),
        ("3.12.11-slim-bookworm", "latest", "DL3007"),
        ("3.12.11-slim", "3-slim", "DL3006"),
        ("RUN useradd", "RUN sudo useradd", "DL3004"),
        ("rm -rf /var/lib/apt/lists/*", "true", "DL3009"),
        ("--no-install-recommends ", "", "DL3015"),
        ("apt-get install -y", "apt-get install", "DL3014"),
        ("--no-cache-dir ", "", "DL3042"),
        ("USER sidestream\n", "", "DL3002"),
        ("USER sidestream", "USER root", "DL3002"),
        ('CMD ["/model"]', "CMD /model", "DL3025"),
        ("COPY", "ADD", "DL3020"),
        ("HEALTHCHECK", "LABEL", "HEALTHCHECK"),
        ("WORKDIR /", "WORKDIR ", "DL3000"),
    ],
)
def test_the_rules_find_what_breaks_them(old: str, new: str, rule: str) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert old in text and any(rule in problem for problem in problems(text.replace(old, new)))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the command of each image and of each service."""
    entry: dict[str, list[str]] = {}
    for path in IMAGES:
        given = dict(instructions(path.read_text()))
        entry[path.name] = json.loads(given["ENTRYPOINT"])
        yield path.name, entry[path.name] + json.loads(given["CMD"])
    for path in COMPOSE:
        for service in services(path):
            if "command" in service:
                yield path.name, entry[Path(service["build"]["dockerfile"]).name] + service["command"]


def services(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text())["services"].values())


@pytest.mark.parametrize(("name", "command"), list(commands()))
def test_commands_are_commands_of_serve(name: str, command: list[str]) -> None:
    assert command[0] == "sidestream"
    options = build_parser().parse_args(command[1:])
    assert options.host == "0.0.0.0"
    assert (options.device, options.insecure) == (("cpu", True) if name == "Dockerfile.cpu" else (None, False))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_a_service_has_an_image_of_the_checkout_and_a_limited_reach(path: Path) -> None:
    for service in services(path):
        assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert not service["image"].endswith(":latest") and ":" in service["image"]
        keys = "SIDESTREAM_API_KEY" in service.get("environment", {})
        assert keys or all(port.startswith("127.0.0.1:") for port in service["ports"]), "without a key: this machine"
        mounted = [volume.split(":")[1] for volume in service["volumes"]]
        given = [word for word in service.get("command", []) if word.startswith("/")]
        assert set(given) <= set(mounted), "what the command names is mounted"
        assert not service.get("privileged") and "no-new-privileges:true" in service["security_opt"]
    gpus = [service for service in services(path) if "deploy" in service]
    assert bool(gpus) == (path.name == "compose.yaml")


def test_the_gpu_image_has_a_compiler_and_the_page_names_the_files() -> None:
    assert " gcc " in (DEPLOY / "Dockerfile").read_text()
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert all(f"deploy/{path.name}" in page for path in IMAGES + COMPOSE)
    (line,) = re.findall(r"docker run --gpus .*", page)
    arguments = line.partition(" sidestream ")[2].split()
    options = build_parser().parse_args(["serve", "--host", "0.0.0.0", *arguments])
    mounted = re.findall(r"-v \S+:(/\w+)", line)
    assert options.model in mounted and options.lora_modules_from in mounted


def has_docker() -> bool:
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False).returncode == 0
    )


def test_the_cpu_image_is_built_and_answers(request: pytest.FixtureRequest) -> None:
    """The build downloads gigabytes, so it is one of the long tests."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("runs with --exhaustive")
    if not has_docker():
        pytest.skip("`docker info` finds no daemon")
    tag = "sidestream-cpu:test"
    build = ["docker", "build", "-t", tag, "-f", str(DEPLOY / "Dockerfile.cpu"), str(ROOT)]
    subprocess.run(build, check=True, timeout=3600)
    start = ["docker", "run", "--rm", "-d", "-p", "127.0.0.1::8000", tag]
    container = subprocess.run(start, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    try:
        port = subprocess.run(
            ["docker", "port", container, "8000"], capture_output=True, text=True, check=True, timeout=60
        )
        url = f"http://{port.stdout.split()[0]}"
        deadline = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(f"{url}/ready", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < deadline, "the server is not ready"
                time.sleep(1)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            assert "pirate" in answer.read().decode()
    finally:
        subprocess.run(["docker", "stop", "-t", "60", container], check=False, timeout=120)
