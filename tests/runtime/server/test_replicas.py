"""Several engines on one host: one command, one HTTP gateway, and each engine restarted alone."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from sidestream.runtime.server import replica_supervisor
from sidestream.runtime.server.replica_supervisor import addresses_of, devices_of
from support.fake_runner import continuation
from support.serving import serve_fake


def test_addresses_in_a_row():
    assert addresses_of("ipc:///run/me/engine.sock", 3) == [f"ipc:///run/me/engine-{index}.sock" for index in range(3)]
    assert addresses_of("tcp://127.0.0.1:5757", 2) == ["tcp://127.0.0.1:5757", "tcp://127.0.0.1:5758"]
    assert addresses_of("tcp://[::1]:70", 2) == ["tcp://[::1]:70", "tcp://[::1]:71"]
    for bind in ("tcp://127.0.0.1:65535", "tcp://127.0.0.1:0"):
        with pytest.raises(ValueError, match="needs a port from 1 to 65534"):
            addresses_of(bind, 2)


def test_each_engine_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_supervisor, "GPUS", tmp_path / "none")
    assert devices_of(2, None, {}) == [{}, {}], "no GPU: all share the CPU"
    monkeypatch.setattr(replica_supervisor, "GPUS", tmp_path)
    for index in range(3):
        (tmp_path / str(index)).mkdir()
    assert devices_of(2, "cpu", {}) == [{}, {}]
    assert devices_of(2, None, {}) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    chosen = {"CUDA_VISIBLE_DEVICES": "2,GPU-ab"}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in devices_of(2, "cuda", chosen)] == ["2", "GPU-ab"]
    assert devices_of(1, None, {}, ranks=2) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    four = {"CUDA_VISIBLE_DEVICES": "5,3,1,0"}
    assert [each["CUDA_VISIBLE_DEVICES"] for each in devices_of(2, None, four, ranks=2)] == ["5,3", "1,0"]
    with pytest.raises(ValueError, match="2 engines of 2 ranks each need 4 GPUs, and there are 3"):
        devices_of(2, None, {}, ranks=2)
    with pytest.raises(ValueError, match="4 engines need 4 GPUs, and there are 3; lower --data-parallel-size"):
        devices_of(4, None, {})
    with pytest.raises(ValueError, match=r"there are 1; .* or name more in CUDA_VISIBLE_DEVICES"):
        devices_of(2, None, {"CUDA_VISIBLE_DEVICES": "1"})
    for hidden in ("", "-1", "-1,0"):
        assert devices_of(2, None, {"CUDA_VISIBLE_DEVICES": hidden}) == [{}, {}], "all GPUs are hidden"
        with pytest.raises(ValueError, match=r"2 engines need 2 GPUs, and there are 0; .* CUDA_VISIBLE_DEVICES"):
            devices_of(2, "cuda", {"CUDA_VISIBLE_DEVICES": hidden})


def children_of(pid: int) -> dict[int, str]:
    """Process id -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid and fields[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_text()
            except OSError:
                continue
    return found


def line_of(server, text: str, times: int = 1, seconds: float = 90.0) -> str:
    """Wait until the log has this text `times` times and return the last line."""
    end = time.monotonic() + seconds
    while True:
        lines = [line for line in server.log.read_text().splitlines() if text in line]
        if len(lines) >= times:
            return lines[-1]
        assert time.monotonic() < end and server.process.poll() is None, server.log.read_text()
        time.sleep(0.05)


def ask(url: str, prompt: list[int]) -> list[int]:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["text"].encode())


def test_engines_behind_one_front_die_and_come_back_alone_and_end_together(tmp_path):
    with serve_fake(tmp_path, engines=2, vocabulary=120, step_seconds=0.002) as server:
        url = line_of(server, "answering HTTP at").split()[-1]
        for index in range(2):
            line_of(server, f"engine {index}: serving at")
        running = children_of(server.process.pid)
        engines = [pid for pid, command in running.items() if "replica_process" in command]
        (gateway,) = [pid for pid, command in running.items() if "gateway.server_process" in command]
        assert len(running) == 3 and len(engines) == 2
        grandchildren = [pid for engine in engines for pid in children_of(engine)]
        assert len(grandchildren) == 4, "each has a batcher and a GPU process"

        os.kill(engines[0], signal.SIGKILL)
        for index in range(12):
            assert ask(url, [index]) == continuation([index], -1, 20, 120)
        line_of(server, "starting engine")
        line_of(server, ": serving at", times=3)
        assert engines[1] in children_of(server.process.pid), "the other one went on"

        os.kill(gateway, signal.SIGKILL)
        line_of(server, "answering HTTP at", times=2)
        assert ask(url, [77]) == continuation([77], -1, 20, 120)

        grandchildren = [pid for engine in children_of(server.process.pid) for pid in (engine, *children_of(engine))]
        assert server.stop() == 0
        for pid in grandchildren:
            assert not Path(f"/proc/{pid}").exists()


def test_nothing_outlives_the_first_process(tmp_path):
    with serve_fake(tmp_path, engines=2) as server:
        line_of(server, "engine 1: serving at")
        running = [pid for child in children_of(server.process.pid) for pid in (child, *children_of(child))]
        server.process.kill()
        end = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in running):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_start_that_fails_ends_all(tmp_path):
    with serve_fake(tmp_path, engines=2, fail_start="no such weights") as server:
        assert server.process.wait(60) == 2
        assert "engine" in server.log.read_text() and "no such weights" in server.log.read_text()
