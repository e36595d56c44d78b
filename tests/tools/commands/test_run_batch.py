"""`sidestream run-batch` over a gateway that listens: every request once, also after an interruption."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidestream.runtime.api.errors import OverloadedError
from sidestream.tools.cli import main
from support.gateway import Books, FakeEngines, listening

KEY = "secret"


def write(path: Path, count: int) -> None:
    kind = {"method": "POST", "url": "/v1/completions"}
    lines = [
        kind | {"custom_id": f"c{number}", "body": {"prompt": f"p{number}", "max_tokens": 2}} for number in range(count)
    ]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    lines[1] |= {"url": "/v1/chat/completions", "body": chat}
    lines[2]["body"] = {"prompt": "x", "temperature": -1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def url(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("SIDESTREAM_API_KEY", KEY)
    with listening(engines, Books(KEY)) as (host, port):
        yield f"http://{host}:{port}"


def run(folder: Path, url: str, *more: str) -> int:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return main(["run-batch", *files, "--url", url, "--concurrency", "4", *more])


def read(path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "every request has one answer"
    return found


def test_every_request_is_answered_and_busy_times_are_waited_out(
    engines: FakeEngines, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", 20)
    engines.problem = lambda request: OverloadedError("busy", "overloaded", 0.1) if len(engines.asked) == 3 else None
    assert run(tmp_path, url) == 0
    found = read(tmp_path / "out.jsonl")
    assert set(found) == {f"c{number}" for number in range(20)}
    assert found["c1"]["response"]["body"]["choices"][0]["message"]["content"] == "a b c "
    assert found["c2"]["response"]["status_code"] == 400
    assert found["c2"]["response"]["body"]["error"]["param"] == "temperature"
    good = [line for line in found.values() if line["response"]["status_code"] == 200]
    assert len(good) == 19 and all(line["error"] is None and line["response"]["request_id"] for line in good)
    assert "20 requests" in capsys.readouterr().out


def test_it_goes_on_after_an_interruption(engines: FakeEngines, url: str, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", 12)
    assert run(tmp_path, url) == 0
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    asked = len(engines.asked)
    assert run(tmp_path, url) == 0
    assert set(read(tmp_path / "out.jsonl")) == {f"c{number}" for number in range(12)}
    assert len(engines.asked) - asked <= 7
    asked = len(engines.asked)
    assert run(tmp_path, url) == 0 and len(engines.asked) == asked, "nothing is left to do"


def test_a_server_that_is_not_there_leaves_the_rest_for_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl", 3)
    assert run(tmp_path, "http://127.0.0.1:9", "--retries", "0") == 1
    assert "run the same command again" in capsys.readouterr().err and (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ('{"custom_id": "c0", "url": "/v1/completions", "body": {}}', "twice"),
        ('{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "/v1/embeddings"),
        ('{"custom_id": "x", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_is_sent(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = '{"custom_id": "c0", "url": "/v1/completions", "body": {}}\n'
    (tmp_path / "in.jsonl").write_text(first + line + "\n")
    assert run(tmp_path, "http://127.0.0.1:9") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()
