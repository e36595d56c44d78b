"""`LLM.sleep` gives the memory back, and after `wake_up` the answers are what they were."""

import ctypes
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream import LLM, CapacityError, LoRARequest, RequestError, SamplingParams
from sidestream.graphs.checkpoint import CheckpointError
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.api.request import Request
from sidestream.runtime.worker import sleep_memory
from sidestream.runtime.worker.sleep_memory import CudaMemory, ReleasableTensors
from support.tiny import AdapterSpec, TinyBase, oracle_greedy, tiny_adapters, tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [list(range(length)) for length in (5, 70, 130, 20)]
CHOSEN = ["first", None, "second", "first"]
PAGES = 900  # 115 MB
SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "show_progress": False, "enable_sleep_mode": True}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(base: TinyBase) -> dict[str, Path]:
    return dict(zip(("first", "second"), tiny_adapters(base, [AdapterSpec(rank=4), AdapterSpec(rank=16)]), strict=True))


@pytest.fixture(scope="module")
def llm(base: TinyBase, adapters: dict[str, Path]) -> LLM:
    """With fewer slots than adapters, and many more KV pages than requests need."""
    return LLM(base.path, adapters, device="cpu", precision="fp32", max_loras=1, num_kv_pages=PAGES, **SMALL)


@pytest.fixture
def awake(llm: LLM) -> Iterator[LLM]:
    yield llm
    llm.wake_up()


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, CHOSEN, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_those_from_before(awake: LLM, level: int) -> None:
    before = answers(awake)
    cached = awake.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].num_cached_tokens
    addresses = {name: tensor.data_ptr() for name, tensor in awake.model.runner.tensors.items()}
    awake.sleep(level)
    assert awake.is_sleeping()
    with pytest.raises(RequestError, match=r"is asleep; call wake_up\(\) first"):
        answers(awake)
    with pytest.raises(RequestError, match="asleep"):
        awake.stream(PROMPTS, GREEDY)
    awake.wake_up(tags=["weights"])
    assert awake.is_sleeping()
    with pytest.raises(RequestError, match="asleep"):
        answers(awake)
    awake.wake_up(tags=["kv_cache"])
    assert not awake.is_sleeping()
    assert {name: tensor.data_ptr() for name, tensor in awake.model.runner.tensors.items()} == addresses
    again = awake.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0]
    assert (cached, again.num_cached_tokens) == (PAGE_SIZE, 0), "the prefix cache starts from nothing"
    assert answers(awake) == before


def test_the_memory_goes_back_to_the_system(awake: LLM) -> None:
    answers(awake)
    before = resident_bytes()
    awake.sleep()
    cache = sum(tensor.nbytes for name, tensor in awake.model.runner.tensors.items() if name.startswith("kv_caches"))
    assert cache > 100e6 and before - resident_bytes() > 0.95 * cache


def test_an_adapter_that_is_on_its_way_is_waited_for(
    awake: LLM, base: TinyBase, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = awake.model.runner.slot_loader
    assert stacks is not None
    prepare, prepared = stacks.store.prepare, []

    def slowly(number: int) -> object:
        time.sleep(0.3)
        prepared.append(number)
        return prepare(number)

    monkeypatch.setattr(stacks.store, "prepare", slowly)
    awake.add_adapter("later", adapters["second"])
    awake.engine.add(Request("left", None, PROMPTS[0], GREEDY, "later"))
    awake.engine.abort("left")
    assert awake.engine.scheduler.stats().adapters_loading == 1
    awake.sleep()
    assert prepared and awake.engine.scheduler.stats().adapters_loading == 0
    awake.wake_up()
    (output,) = awake.generate(PROMPTS[0], GREEDY, "later", use_tqdm=False)
    assert output.outputs[0].token_ids == oracle_greedy(base, adapters["second"], PROMPTS[0], 10)


def test_adapters_may_come_while_it_sleeps(awake: LLM, base: TinyBase, adapters: dict[str, Path]) -> None:
    awake.sleep()
    awake.add_adapter("meanwhile", adapters["second"])
    awake.wake_up()
    (output,) = awake.generate(
        PROMPTS[0], GREEDY, lora_request=LoRARequest("meanwhile", 1, str(adapters["second"])), use_tqdm=False
    )
    assert output.outputs[0].token_ids == oracle_greedy(base, adapters["second"], PROMPTS[0], 10)


def test_level_2_serves_what_the_directory_holds_at_wake_up(tmp_path: Path, base: TinyBase) -> None:
    served, other = tmp_path / "served", tiny_llama(tmp_path / "other", seed=5)
    shutil.copytree(base.path, served)
    with LLM(served, device="cpu", precision="fp32", num_kv_pages=8, **SMALL) as llm:
        want = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert want == oracle_greedy(base, None, PROMPTS[0], 10)
        llm.sleep(level=2)
        (served / "model.safetensors").unlink()
        with pytest.raises(CheckpointError):
            llm.wake_up()
        assert llm.is_sleeping()
        with pytest.raises(RequestError, match="asleep"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        shutil.copy(other.path / "model.safetensors", served)
        llm.wake_up()
        new = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert new == oracle_greedy(other, None, PROMPTS[0], 10) != want


def test_what_cannot_be_asked(awake: LLM, base: TinyBase) -> None:
    with pytest.raises(RequestError, match="level=3 must be 1"):
        awake.sleep(3)
    with pytest.raises(RequestError, match="tags names 'cache'; choose from 'weights' and 'kv_cache'"):
        awake.wake_up(["cache"])
    chunks = awake.stream(PROMPTS, GREEDY)
    next(chunks)
    with pytest.raises(RequestError, match="stream of this LLM is still open"):
        awake.sleep()
    chunks.close()  # type: ignore[attr-defined]
    awake.wake_up()
    assert not awake.is_sleeping(), "to wake what is awake changes nothing"
    awake.sleep()
    awake.sleep(2)
    awake.wake_up(tags=["kv_cache"])
    assert awake.model.sleeper is not None and awake.model.sleeper.asleep == {"weights"}
    with LLM(base.path, device="cpu", **{**SMALL, "enable_sleep_mode": False, "num_kv_pages": 8}) as plain:
        assert not plain.is_sleeping()
        for call in (plain.sleep, plain.wake_up):
            with pytest.raises(RequestError, match="make it with enable_sleep_mode=True"):
                call()


def test_a_region_keeps_what_it_is_told_to_keep() -> None:
    specs = {"a": ((3, 5), torch.bfloat16), "b": ((7,), torch.int8), "none": ((0, 4), torch.float32)}
    region = ReleasableTensors(specs, CPU)
    assert not any(tensor.any() for tensor in region.tensors.values())
    a, b = region.tensors["a"].normal_(), region.tensors["b"].fill_(-3)
    want = a.clone()
    region.release(keep=True)
    assert not a.any() and not b.any(), "the system took the memory"
    region.restore()
    assert torch.equal(a, want) and (b == -3).all() and region.tensors["none"].shape == (0, 4)
    region.release(keep=False)
    region.restore()
    assert not a.any() and not b.any()


class FakeDriver:
    """The driver's virtual memory calls over an array of this process; `fails` names a call and its error code."""

    GRANULARITY = 1 << 16

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(4 * self.GRANULARITY)
        self.address = ctypes.addressof(self.memory)
        self.calls: list[str] = []
        self.created: list[int] = []
        self.mapped: list[tuple[int, int]] = []
        self.freed = False
        self.fails: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            getattr(self, f"_{name}")(*arguments)
            return 0

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def _cuMemGetAllocationGranularity(self, out: Any, properties: Any, option: Any) -> None:
        assert (properties._obj.type, properties._obj.location.type, properties._obj.location.id) == (1, 1, 3)
        out._obj.value = self.GRANULARITY

    def _cuMemAddressReserve(self, out: Any, size: Any, alignment: Any, address: Any, flags: Any) -> None:
        out._obj.value = self.address

    def _cuMemCreate(self, out: Any, size: Any, properties: Any, flags: Any) -> None:
        assert size.value % self.GRANULARITY == 0
        out._obj.value = len(self.calls)
        self.created.append(out._obj.value)

    def _cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> None:
        assert not self.mapped and handle.value in self.created
        self.mapped.append((address.value, size.value))

    def _cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> None:
        assert (address.value, size.value) in self.mapped and (access._obj.flags, count.value) == (3, 1)

    def _cuMemUnmap(self, address: Any, size: Any) -> None:
        self.mapped = [mapped for mapped in self.mapped if mapped != (address.value, size.value)]

    def _cuMemRelease(self, handle: Any) -> None:
        self.created.remove(handle.value)

    def _cuCtxSynchronize(self) -> None:
        pass

    def _cuMemAddressFree(self, address: Any, size: Any) -> None:
        assert not self.mapped and not self.created
        self.freed = True


class Device:
    """cuda:3, on a machine that has none."""

    type, index = "fake", 3


def test_memory_on_a_gpu_comes_and_goes_under_one_address() -> None:
    driver = FakeDriver()
    pages = CudaMemory(3 * driver.GRANULARITY - 5, Device(), driver)  # type: ignore[arg-type]
    interface = pages.__cuda_array_interface__
    assert interface["data"] == (driver.address, False) and interface["shape"] == (3 * driver.GRANULARITY - 5,)
    whole = [(driver.address, 3 * driver.GRANULARITY)]
    for _ in range(2):
        assert driver.mapped == whole and len(driver.created) == 1
        pages.release()
        assert not driver.mapped and not driver.created
        pages.release()  # nothing is there any more
        pages.restore()
    del pages
    assert driver.freed and not driver.mapped and not driver.created


def test_what_the_driver_refuses_leaves_nothing_behind() -> None:
    driver = FakeDriver()
    pages = CudaMemory(5, Device(), driver)  # type: ignore[arg-type]
    pages.release()
    driver.fails = {"cuMemCreate": sleep_memory.OUT_OF_MEMORY}
    with pytest.raises(CapacityError, match="GiB of device memory are needed and not free"):
        pages.restore()
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        driver.fails = {call: 999}
        with pytest.raises(RuntimeError, match=f"{call} failed with error 999"):
            pages.restore()
        assert not driver.created and not driver.mapped
    driver.fails = {}
    pages.restore()
    assert len(driver.mapped) == len(driver.created) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_gpu_gets_its_memory_back(base: TinyBase, adapters: dict[str, Path], level: int, precision: str) -> None:
    """With replayed graphs: they hold the addresses. Another takes the memory meanwhile, and fills it."""
    with LLM(base.path, adapters, precision=precision, num_kv_pages=20_000, **SMALL) as llm:
        before = answers(llm)
        held = sum(tensor.nbytes for tensor in llm.model.runner.tensors.values())
        free = torch.cuda.mem_get_info(llm.device)[0]
        llm.sleep(level)
        gained = torch.cuda.mem_get_info(llm.device)[0] - free
        assert gained > 0.9 * held
        other = torch.full((gained // 2,), 0xFF, dtype=torch.uint8, device=llm.device)
        del other
        torch.cuda.empty_cache()
        llm.wake_up()
        assert answers(llm) == before
        if precision == "fp32":
            paths = [None if name is None else adapters[name] for name in CHOSEN]
            assert before == [oracle_greedy(base, path, ids, 10) for path, ids in zip(paths, PROMPTS, strict=True)]
