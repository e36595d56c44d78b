"""`LLM(tensor_parallel_size=2, enable_sleep_mode=True)`: both ranks sleep, wake up, and answer as one process does."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from sidestream import LLM, CapacityError, RequestError, SamplingParams
from sidestream.graphs.checkpoint import CheckpointError
from sidestream.runtime.worker.sleep import TAGS
from sidestream.runtime.worker.tensor_parallel.parallel_model import ParallelModel, ParallelSleeper
from sidestream.runtime.worker.tensor_parallel.peer_messages import Sleep, WakeUp
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [list(range(length)) for length in (5, 70, 20)]
CHOSEN = ["first", None, "second"]
PAGES = 1800  # 115 MB on each of two ranks
SIZES: dict[str, Any] = {
    "precision": "fp32",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_loras": 1,
    "num_kv_pages": PAGES,
    "show_progress": False,
}


def answers(llm: LLM) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY, CHOSEN, use_tqdm=False)]


def resident_bytes(process: int | str) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


@pytest.mark.first
def test_two_ranks_sleep_and_answer_as_one_process_does(tmp_path: Path) -> None:
    base, other = (tiny_llama(tmp_path / str(seed), num_hidden_layers=1, seed=seed) for seed in (1, 2))
    adapters = dict(zip(CHOSEN[::2], tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=7)]), strict=True))
    served, wanted = tmp_path / "served", []
    for model in (base, other):
        with LLM(model.path, adapters, **SIZES) as llm:
            wanted.append(answers(llm))
    assert wanted[0] != wanted[1]
    shutil.copytree(base.path, served)
    with LLM(served, adapters, tensor_parallel_size=2, enable_sleep_mode=True, **SIZES) as llm:
        assert isinstance(llm.model, ParallelModel)
        processes = ["self", *(child.process.pid for child in llm.model.peers._children.values())]
        assert answers(llm) == wanted[0]
        before = [resident_bytes(each) for each in processes]
        llm.sleep()
        assert llm.is_sleeping()
        cache = sum(each.nbytes for name, each in llm.model.runner.tensors.items() if name.startswith("kv_caches"))
        freed = [had - resident_bytes(each) for had, each in zip(before, processes, strict=True)]
        assert cache > 50e6 and min(freed) > 0.95 * cache, (freed, cache)
        with pytest.raises(RequestError, match="asleep"):
            answers(llm)
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up()
        assert answers(llm) == wanted[0]
        llm.sleep(level=2)
        (served / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"safetensors"):
            llm.wake_up()
        assert llm.is_sleeping()
        shutil.copy(other.path / "model.safetensors", served)
        llm.wake_up()
        assert answers(llm) == wanted[1]


class OneRank:
    """A rank's sleeper, with the errors of `fails`."""

    def __init__(self) -> None:
        self.asleep: frozenset[str] = frozenset()
        self.fails: dict[type, Exception] = {}

    def sleep(self, level: int) -> None:
        if Sleep in self.fails:
            raise self.fails[Sleep]
        self.asleep = frozenset(TAGS)

    def wake_up(self, tags: Iterable[str]) -> None:
        if WakeUp in self.fails:
            raise self.fails[WakeUp]
        self.asleep -= frozenset(tags)


class Others:
    """The peers of a group of three; ranks 1 and 2 are `ranks`."""

    def __init__(self) -> None:
        self.tp_size, self.ranks = 3, [OneRank(), OneRank()]

    def send_order(self, order: Sleep | WakeUp) -> None:
        self.answers = []
        for rank in self.ranks:
            kind = text = ""
            try:
                rank.sleep(order.level) if isinstance(order, Sleep) else rank.wake_up(order.tags)
            except (MemoryError, CapacityError) as error:
                kind, text = type(error).__name__, str(error)
            self.answers.append({"kind": kind, "error": text, "asleep": sorted(rank.asleep)})

    def wait_for(self, event: str) -> list[dict[str, Any]]:
        return self.answers


@pytest.fixture
def group() -> tuple[ParallelSleeper, list[OneRank]]:
    own, others = OneRank(), Others()
    return ParallelSleeper(own, others), [own, *others.ranks]  # type: ignore[arg-type]


@pytest.mark.parametrize("short", [0, 2])
def test_where_a_rank_has_too_little_host_memory_none_sleeps(
    group: tuple[ParallelSleeper, list[OneRank]], short: int
) -> None:
    sleeper, ranks = group
    ranks[short].fails[Sleep] = MemoryError("free host memory")
    with pytest.raises(MemoryError, match=r"^(rank 2 of 3: )?free host memory$"):
        sleeper.sleep(1)
    assert not sleeper.asleep and not any(rank.asleep for rank in ranks)


@pytest.mark.parametrize("short", [0, 2])
def test_a_rank_that_cannot_wake_up_is_named_and_tries_again(
    group: tuple[ParallelSleeper, list[OneRank]], short: int
) -> None:
    sleeper, ranks = group
    sleeper.sleep(1)
    ranks[short].fails[WakeUp] = CapacityError("free what others hold")
    with pytest.raises(CapacityError, match=r"^(rank 2 of 3: )?free what others hold$"):
        sleeper.wake_up(None)
    assert sleeper.asleep == set(TAGS) and [bool(rank.asleep) for rank in ranks] == [n == short for n in range(3)]
    ranks[short].fails.clear()
    sleeper.wake_up(None)
    assert not sleeper.asleep and not any(rank.asleep for rank in ranks)


def test_nothing_is_told_of_what_cannot_be_asked(group: tuple[ParallelSleeper, list[OneRank]]) -> None:
    sleeper, ranks = group
    with pytest.raises(RequestError, match="level=3 must be 1"):
        sleeper.sleep(3)
    with pytest.raises(RequestError, match="tags names 'cache'"):
        sleeper.wake_up(["cache"])
    assert not any(rank.asleep for rank in ranks)
