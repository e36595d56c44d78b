"""Adapters from addresses that fsspec reads: which ones are allowed, and their copies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sidestream.runtime.adapters import remote_adapter
from sidestream.runtime.adapters.remote_adapter import copy_adapter, remote_address
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.demo_model import DEMO_MODEL
from support.live_server import serving

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
ROOTS = ["/adapters", "s3://bucket/adapters", "hf://org"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("s3://bucket/adapters/sql", "s3://bucket/adapters/sql"),
        ("s3://bucket/adapters/team-a/sql.v2/", "s3://bucket/adapters/team-a/sql.v2/"),
        ("hf://org/sql", "hf://org/sql"),
        ("org/sql", "hf://org/sql"),
        ("other/sql", None),
        ("s3://bucket/adapters", None),
        ("s3://bucket/adapters-of-others/sql", None),
        ("s3://bucket/adapters/../secrets", None),
        ("s3://bucket/adapters/a/..", None),
        ("s3://bucket/adapters/.git", None),
        ("s3://bucket/adapters//etc", None),
        ("s3://bucket/adapters/x::file:///etc", None),
        ("simplecache::s3://bucket/adapters/sql", None),
        ("file:///adapters/sql", None),
        ("http://169.254.169.254/latest", None),
        ("/adapters/sql", None),
    ],
)
def test_only_addresses_below_a_root_are_read(path: str, address: str | None) -> None:
    assert remote_address(path, ROOTS) == address
    assert remote_address(path, ["/adapters"]) is None


def test_a_root_may_allow_a_whole_hub_but_a_directory_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert remote_address("anyone/sql", ["hf://"]) == "hf://anyone/sql"
    (tmp_path / "anyone" / "sql").mkdir(parents=True)
    assert remote_address("anyone/sql", ["hf://"]) is None


@pytest.fixture
def store() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.pipe({f"/bucket/sql/{CONFIG}": b"{}", f"/bucket/sql/{WEIGHTS}": b"one", "/bucket/sql/README.md": b"x"})
    yield files
    files.rm("/bucket", recursive=True)


def test_a_version_is_copied_once(store: Any, tmp_path: Path) -> None:
    first = copy_adapter("sql", "memory://bucket/sql", tmp_path)
    assert {each.name: each.read_bytes() for each in first.iterdir()} == {CONFIG: b"{}", WEIGHTS: b"one"}
    (first / "mark").touch()
    assert copy_adapter("sql", "memory://bucket/sql", tmp_path) == first and (first / "mark").exists()
    store.pipe({f"/bucket/sql/{WEIGHTS}": b"two", "/bucket/sql/chat_template.jinja": b"hi"})
    second = copy_adapter("sql", "memory://bucket/sql", tmp_path)
    assert second != first and (second / WEIGHTS).read_bytes() == b"two" and (first / WEIGHTS).read_bytes() == b"one"
    assert (second / "chat_template.jinja").read_text() == "hi"
    assert {each.name for each in tmp_path.iterdir()} == {first.name, second.name}, "nothing half copied is left"


def test_what_cannot_be_read_is_said_without_a_copy(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match=r"adapter 'sql'.*FileNotFoundError.*check it"):
        copy_adapter("sql", "memory://bucket/none", tmp_path)
    with pytest.raises(RequestError, match="nosuch"):
        copy_adapter("sql", "nosuch://bucket/sql", tmp_path)
    monkeypatch.setitem(remote_adapter.MAX_FILE_BYTES, WEIGHTS, 2)
    with pytest.raises(RequestError, match=f"{WEIGHTS} has more than 2 bytes"):
        copy_adapter("sql", "memory://bucket/sql", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_loads_an_adapter_from_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path))
    adapters = DEMO_MODEL / "adapters"
    with (
        serving("--adapter-root", f"file://{adapters}") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def load(path: str) -> Any:
            return http.post("/v1/load_lora_adapter", json={"lora_name": "hearty", "lora_path": path})

        for path in (f"file://{adapters.parent}/adapters2/pirate", "s3://bucket/pirate", str(adapters / "pirate")):
            refused = load(path)
            assert refused.status_code == 403 and "--adapter-root" in refused.json()["error"]["message"]
        missing = load(f"file://{adapters}/nobody")
        assert missing.status_code == 400 and "check it" in missing.json()["error"]["message"]
        assert load(f"file://{adapters}/pirate").status_code == 200
        (card,) = [each for each in http.get("/v1/models").json()["data"] if each["id"] == "hearty"]
        assert card["root"] == f"file://{adapters}/pirate"
        body = {"prompt": "What is the capital of Italy?", "temperature": 0, "max_tokens": 20}
        texts = [
            http.post("/v1/completions", json=body | {"model": model}).json()["choices"][0]["text"]
            for model in ("hearty", "pirate", "demo_model")
        ]
        assert texts[0] == texts[1] != texts[2]
