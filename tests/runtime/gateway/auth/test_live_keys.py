"""`sidestream gateway` with keys in front of a real server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sidestream.runtime.gateway.app import make_components
from sidestream.runtime.gateway.interfaces import GatewayError
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.tools.cli import main


@pytest.fixture
def governed(served: Any, tmp_path: Path) -> Iterator[str]:
    """The URL of a gateway with all records switched on; it ends with exit code 0."""
    keys, usage, access = (str(tmp_path / name) for name in ("keys.toml", "usage.db", "access.log"))
    arguments = ["--engine", served.address, "--port", "0", "--keys", keys, "--usage-log", usage, "--log-payloads"]
    arguments += ["--access-log", access, "--metrics-compat", "vllm"]
    assert main(["keys", "http", "add", keys, "--owner", "root", "--admin"]) == 0
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidestream.tools.cli", "gateway", *arguments],
            stderr=said,
            stdout=said,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        yield url_when_ready(process, tmp_path / "said")
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0, (tmp_path / "said").read_text()


def url_when_ready(process: "subprocess.Popen[bytes]", said: Path) -> str:
    while True:
        url = next((word for word in said.read_text().split() if word.startswith("http://127.0.0.1:")), None)
        if url is not None and httpx.get(f"{url}/ready", timeout=60).status_code == 200:
            return url
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the gateway did not start:\n{said.read_text()}")


@pytest.fixture
def client(governed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., openai.OpenAI]:
    """Makes a key and a client that has it."""

    def make(name: str, *rights: str) -> openai.OpenAI:
        capsys.readouterr()
        assert main(["keys", "http", "add", str(tmp_path / "keys.toml"), "--name", name, "--owner", name, *rights]) == 0
        key = capsys.readouterr().out.strip()
        return openai.OpenAI(base_url=f"{governed}/v1", api_key=key, max_retries=0)

    return make


def test_keys_limits_and_records_of_a_running_gateway(
    client: Callable[..., openai.OpenAI], governed: str, served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = client("one", "--tokens-per-minute", "60", "--model", "demo_model", "pir*")
    two = client("two", "--tokens-per-minute", "60")
    asked: dict[str, Any] = {
        "prompt": [5, 6, 7],
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }

    raw = one.completions.with_raw_response.create(model="pirate", **asked)
    assert raw.headers["x-ratelimit-limit-tokens"] == "60" and raw.headers["x-ratelimit-remaining-tokens"] == "37"
    used = [raw.parse().usage, one.completions.create(model="demo_model", **asked).usage]
    with pytest.raises(openai.RateLimitError) as refused:
        one.completions.create(model="pirate", **asked)
    assert refused.value.code == "rate_limit_exceeded" and 1 <= int(refused.value.response.headers["retry-after"]) <= 61
    others = two.completions.create(model="pirate", **asked).usage
    # but for drafts from former answers, which the keys share
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"):
        assert getattr(others, name) == getattr(used[0], name), "others do not notice"

    with pytest.raises(openai.NotFoundError) as hidden:
        one.completions.create(model="arithmetic", **asked)
    assert hidden.value.code == "model_not_found"
    assert [card.id for card in one.models.list()] == ["demo_model", "pirate"] and len(list(two.models.list())) > 2

    assert main(["keys", "http", "revoke", str(tmp_path / "keys.toml"), "two"]) == 0
    with pytest.raises(openai.AuthenticationError):
        two.completions.create(model="pirate", **asked)

    reader = client("reader", "--metrics", "--model")
    bearer = {"Authorization": f"Bearer {reader.api_key}"}
    metrics = httpx.get(f"{governed}/metrics", headers=bearer, timeout=60).text
    for line in (
        'sidestream_owner_tokens_total{owner="one"} 46.0',
        'sidestream_owner_refused_total{owner="one"} 1.0',
        'vllm:generation_tokens_total{engine="0",model_name="demo_model"} 60.0',
        "sidestream_keys 3.0",
        "sidestream_keys_file_broken 0.0",
        "sidestream_usage_log_dropped_total 0.0",
        "sidestream_access_log_dropped_total 0.0",
    ):
        assert line in metrics.splitlines(), line

    capsys.readouterr()
    rows: list[dict[str, Any]] = []
    while len(rows) < 3:  # the log is written by a thread of its own
        assert main(["usage", str(tmp_path / "usage.db"), "--by", "key,adapter", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
    told = {(row["key"], row["adapter"]): (row["prompt_tokens"], row["output_tokens"]) for row in rows}
    assert told == {("one", "pirate"): (3, 20), ("one", None): (3, 20), ("two", "pirate"): (3, 20)}
    assert len({row["adapter_content"] for row in rows if row["adapter"]}) == 1
    lines = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    assert [line["status"] for line in lines if line["path"] == "/v1/completions"] == [200, 200, 429, 200, 404, 401]

    the_day_survives_a_restart(served.address, tmp_path, one.api_key)


def the_day_survives_a_restart(engine: str, folder: Path, key: str) -> None:
    """Another gateway with the same log knows the 46 tokens of key `one`."""
    keys, log = folder / "keys.toml", folder / "usage.db"
    keys.write_text(keys.read_text().replace("tokens_per_minute", "tokens_per_day"))
    parts = make_components(GatewaySettings(engines=[engine], keys=str(keys), usage_log=str(log)))
    caller = parts.admission.identify(f"Bearer {key}", "127.0.0.1")
    with pytest.raises(GatewayError, match="60 tokens per day"):
        parts.admission.admit(caller, "pirate", 3, 12, 1, 256)
    assert parts.admission.admit(caller, "pirate", 3, 11, 1, 256).max_tokens == 11
    parts.close()
