"""A rank that can't open its peers' memory raises an error with a remedy at the start."""

import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from sidestream import LLM
from sidestream.ops.collectives.exchange import open_exchange
from sidestream.ops.collectives.tensor_parallel_group import GroupError, RankGroup, group_named
from sidestream.runtime.worker.tensor_parallel import parallel_model, peers, process_group
from sidestream.runtime.worker.tensor_parallel.peers import Peers, RankError
from sidestream.runtime.worker.tensor_parallel.process_group import create_store_file, join_group
from support.ipc import FakeDriver, install
from support.tiny import tiny_llama
from torch import distributed

REMEDY = r"can't share memory with its peers: the CUDA driver's cuMemAlloc_v2 failed with error 2.*"
REMEDY += r"NVLink \(`nvidia-smi topo -m`\).*--ipc=host"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.fixture
def no_shared_memory(driver: FakeDriver) -> None:
    """No memory is left."""
    driver.fails["cuMemAlloc_v2"] = 2


@pytest.mark.usefixtures("no_shared_memory")
def test_a_rank_that_has_failed_so_is_in_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(backend: str, **where: Any) -> None:
        begin("gloo", **where)

    begin = distributed.init_process_group
    monkeypatch.setattr(distributed, "init_process_group", start)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(process_group, "open_exchange", lambda group, device: open_exchange(group, device, 256))
    with pytest.raises(GroupError, match="rank 0 of 1 on cuda:0 " + REMEDY):
        join_group(0, 1, create_store_file(), torch.device("cuda", 0))
    assert not distributed.is_initialized()
    with pytest.raises(GroupError, match="belongs to no group"):
        group_named("tp1")


@pytest.mark.parametrize("joins", [False, True], ids=["while it loads its modules", "before it joins"])
def test_a_rank_that_dies_before_it_joins_ends_the_start(
    joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error has its last output; torch's rendezvous, which would wait for it, does not start."""

    def meet(*arguments: Any, **where: Any) -> None:
        pytest.fail("rank 0 waits for a dead rank")

    script = f"""
        import sys
        from sidestream.runtime.processes.channel import Channel
        channel = Channel.from_fd(int(sys.argv[1]))
        if {joins}: channel.send({{"event": "started"}})
        print("it began well", file=sys.stderr)
        sys.exit("no memory is left for rank 1")
    """
    (tmp_path / "dying_rank.py").write_text(dedent(script))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(peers, "COMMAND", "dying_rank")
    monkeypatch.setattr(distributed, "init_process_group", meet)
    base = tiny_llama(tmp_path, num_hidden_layers=1)
    with pytest.raises(
        RankError, match=r"^rank 1 of 2 died \(exit code 1\).*; its last output: no memory is left for rank 1$"
    ):
        LLM(base.path, tensor_parallel_size=2, device="cpu", precision="fp32", max_model_len=128, show_progress=False)
    assert "it began well" in capfd.readouterr().err
    assert not distributed.is_initialized()


def test_the_start_of_a_group_fails_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 raises the error; its peers end."""
    started: list[Peers] = []

    def join(tp_rank: int, tp_size: int, store_fd: int, device: torch.device, check: Any) -> RankGroup:
        assert os.fstat(store_fd).st_nlink == 0, "a file without a name"
        raise GroupError("rank 0 of 2 on cuda:0 can't share memory with its peers: the GPUs must reach each other")

    class Watched(Peers):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            started.append(self)

    monkeypatch.setattr(parallel_model, "join_group", join)
    monkeypatch.setattr(parallel_model, "Peers", Watched)
    base = tiny_llama(tmp_path, num_hidden_layers=1, tokenizer=True)
    with pytest.raises(
        RankError, match="GroupError: rank 0 of 2 on cuda:0 can't share memory with its peers: the GPUs"
    ):
        LLM(base.path, tensor_parallel_size=2, device="cpu", precision="fp32", max_model_len=128, show_progress=False)
    assert all(child.process.poll() is not None for child in started[0]._children.values())
