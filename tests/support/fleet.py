"""A fleet of demo engines on a local Ray, and HTTP clients of it."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

GUARD = 300.0
"""Seconds after which a wait fails."""


@contextmanager
def local_ray(folder: Path) -> Iterator[None]:
    """A Ray of this process that asks for a token. It may place more than this machine has processors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "ray_token"))
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        from sidestream.runtime.fleet.cluster import secure

        secure()
        import ray
        from ray import serve

        ray.init("local", num_cpus=16, include_dashboard=False, logging_level="error", log_to_driver=False)
        try:
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], Any], what: str) -> Any:
    """What `true` returns, as soon as it is true."""
    end = time.monotonic() + GUARD
    while not (found := true()):
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {GUARD:g} s")
        time.sleep(0.1)
    return found


class Door:
    """The fleet's HTTP."""

    def __init__(self, port: int) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD)

    def health(self) -> dict[str, Any]:
        return self.client.get("/health").raise_for_status().json()

    def models(self) -> list[str]:
        return [model["id"] for model in self.client.get("/v1/models").raise_for_status().json()["data"]]

    def ask(self, model: str, prompt: str, tokens: int) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def stream(self, model: str, prompt: str, tokens: int, begun: Callable[[], Any] = lambda: None) -> str:
        """The text of a streamed answer; `begun` is called with its first piece. No error and no gap is forgiven."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text, ended = "", False
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    piece = json.loads(line.removeprefix("data: "))
                    assert "error" not in piece, piece
                    if not text:
                        begun()
                    text += piece["choices"][0]["text"]
        assert ended, f"the stream of {model} was cut after {text!r}"
        return text


def engines(replica: str) -> list[int]:
    """Process ids of the Ray replicas of a deployment, such as `engine`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                owner = entry.stat().st_uid
            except OSError:
                continue
            if owner == os.getuid() and words.startswith(f"ray::ServeReplica:{replica}"):
                found.append(int(entry.name))
    return found
