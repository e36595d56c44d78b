"""--log-level and --log-format: what this and other processes write to stderr."""

import json
import os
import subprocess
import sys

import pytest
from sidestream.runtime.processes.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, progress_line

PROGRAM = """
import logging, warnings
from sidestream.runtime.processes.logs import configure_logging
configure_logging("batcher", "warning")
log = logging.getLogger("sidestream.test")
log.debug("one"); log.info("two"); log.warning("three\\nlines %d", 3); log.error("four")
warnings.warn("five")
raise KeyError("six")
"""


def lines_of(level: str | None, form: str | None) -> list[str]:
    """Return stderr of a process that logs at every level, warns, and ends with an error."""
    chosen = {LEVEL_VARIABLE: level, FORMAT_VARIABLE: form}
    environment = os.environ | {name: value for name, value in chosen.items() if value is not None}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    return ended.stderr.splitlines()


def test_json_has_one_object_a_line_also_for_warnings_and_errors() -> None:
    records = [json.loads(line) for line in lines_of("debug", "json")]
    assert [record["level"] for record in records] == ["debug", "info", "warning", "error", "warning", "critical"]
    assert records[2]["message"] == "three\nlines 3" and {record["process"] for record in records} == {"batcher"}
    assert "KeyError: 'six'" in records[-1]["exception"] and records[-1]["time"].endswith("+00:00")


@pytest.mark.parametrize(("level", "first"), [(None, "three"), ("info", "two"), ("error", "four"), ("wrong", "three")])
def test_the_level_of_text(level: str | None, first: str) -> None:
    assert f"batcher {first}" in lines_of(level, None)[0]


def test_progress_is_a_line_of_the_same_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    assert progress_line("serving") == "sidestream: serving"
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    fields = json.loads(progress_line("error: no port", "gpu"))
    assert (fields["level"], fields["process"], fields["message"]) == ("error", "gpu", "error: no port")
