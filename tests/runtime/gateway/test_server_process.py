"""The gateway process exits silently with its supervisor."""

import sys
import time
from pathlib import Path

import pytest
from sidestream.runtime.gateway.server_process import listen
from sidestream.runtime.gateway.settings import GatewaySettings
from sidestream.runtime.processes.child import Child
from support.serving import GUARD

COMMAND = [sys.executable, "-m", "sidestream.runtime.gateway.server_process"]


@pytest.mark.parametrize("after", ["its settings", "its first words"])
def test_a_supervisor_that_ends_meanwhile(after: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = GatewaySettings(engines=[f"ipc://{tmp_path}/engine.sock"])
    with listen("127.0.0.1", 0) as listener:
        gateway = Child.start("gateway", COMMAND, settings, 0.0, [listener.fileno()])
    said: list[str] = []
    limit = time.monotonic() + GUARD
    while after == "its first words" and "ready" not in said and time.monotonic() < limit:
        said += [message["event"] for message in gateway.channel.receive(block=True)]
    gateway.channel.close()
    assert gateway.process.wait(GUARD) in (0, 1) and capfd.readouterr().err == ""
