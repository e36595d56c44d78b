"""The reference ops leave cores to others, and a number that the user chose stays."""

import os
from collections.abc import Iterator

import pytest
import torch
from sidestream.runtime.worker import cpu_threads
from sidestream.runtime.worker.cpu_threads import free_threads, limit_cpu_threads

CPU = torch.device("cpu")


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eight cores, three of them idle, and torch's own choice of threads."""
    before = torch.get_num_threads()
    for name in cpu_threads.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cpu_threads, "SIBLINGS", "/no/such/file/{}")
    monkeypatch.setattr(os, "getloadavg", lambda: (5.2, 0.0, 0.0))
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def test_threads_are_the_cores_that_others_leave() -> None:
    assert [free_threads(2, load) for load in (0.0, 0.4, 1.1, 7.0)] == [2, 2, 1, 1]
    assert free_threads(64, 3.0) == 4


@pytest.mark.usefixtures("usual")
def test_torch_gets_the_cores_that_are_free() -> None:
    limit_cpu_threads(CPU)
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("usual")
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(6)
    limit_cpu_threads(CPU)
    assert torch.get_num_threads() == 6
    torch.set_num_threads(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    limit_cpu_threads(CPU)
    assert torch.get_num_threads() == 8


@pytest.mark.usefixtures("usual")
def test_a_gpu_s_host_threads_stay() -> None:
    limit_cpu_threads(torch.device("cuda"))
    assert torch.get_num_threads() == 8
