"""Adapters on disk, in host memory and in slots: names, roots, replacement, files that change or vanish, and the
copies while steps run.
"""

import gc
import os
import random
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sidestream.compiler.graph.materialize import quantize_weight
from sidestream.compiler.graph.recipe import cat, item, param, quantize
from sidestream.compiler.options import OptionError
from sidestream.graphs.adapter import AdapterError, load_adapter
from sidestream.graphs.config import LlamaConfig
from sidestream.graphs.files.adapter_file import AdapterFile
from sidestream.graphs.lora import LoraShape
from sidestream.graphs.lora_stacks import slot_tensors
from sidestream.runtime.adapters import host_memory
from sidestream.runtime.adapters import registry as adapter_registry
from sidestream.runtime.adapters.host_store import Block
from sidestream.runtime.adapters.registry import AdapterRegistry
from sidestream.runtime.adapters.slot_loader import LEAD_SECONDS, InFlightCopy, SlotLoader
from sidestream.runtime.api.errors import RequestError
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

SMALL = {
    "device": "cpu",
    "show_progress": False,
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "precision": "fp32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.fixture(scope="module")
def paths(base):
    return tiny_adapters(base, [AdapterSpec(rank=4 + index % 5, alpha=24) for index in range(60)])


@pytest.fixture(scope="module")
def config(base):
    return LlamaConfig.from_directory(base.path)


def make_stacks(config, registry, keep=2, slots=3):
    prefix = "model.layers.0.self_attn."
    recipes = {
        "qkv_a": cat(1, [param(f"{prefix}{name}_proj.lora_a") for name in "qkv"]),
        "o_b": param(f"{prefix}o_proj.lora_b"),
    }
    stacks = {"qkv_a": torch.zeros(slots, 48, 64), "o_b": torch.zeros(slots, 64, 16)}
    return SlotLoader(recipes, stacks, registry, LoraShape(slots, 16), keep)


def holds(stacks, slot, path, config):
    """Whether a slot holds the adapter of a directory."""
    tensors = slot_tensors(load_adapter(path, config, 16), config, stacks.lora, torch.float32)
    wanted = torch.cat([tensors[f"model.layers.0.self_attn.{name}_proj.lora_a"] for name in "qkv"])
    return torch.equal(stacks.stacks["qkv_a"][slot], wanted) and torch.equal(
        stacks.stacks["o_b"][slot], tensors["model.layers.0.self_attn.o_proj.lora_b"]
    )


def wait_for(stacks, count):
    reports, until = [], time.monotonic() + 60
    while len(reports) < count:
        assert time.monotonic() < until
        reports += stacks.finished_loads(0.05)
    return sorted(reports)


def test_copies_next_to_the_steps(config, paths):
    registry = AdapterRegistry(config, 16, keep=1)
    numbers = [registry.add(f"a{index}", path).number for index, path in enumerate(paths[:4])]
    stacks = make_stacks(config, registry)
    for slot, number in ((2, 0), (0, 1), (-1, 1), (1, 3)):
        stacks.start_load(slot, number)
    assert wait_for(stacks, 4) == [(-1, 1, None), (0, 1, None), (1, 3, None), (2, 0, None)]
    for slot, number in ((2, 0), (0, 1), (1, 3)):
        assert holds(stacks, slot, paths[number], config)
    assert len(stacks.store.numbers) == 2, "no more than `keep` in host memory"
    stacks.start_load(0, numbers[2])
    assert wait_for(stacks, 1) == [(0, 2, None)] and holds(stacks, 0, paths[2], config)


def test_the_next_block_is_locked_in_advance(config, paths, monkeypatch):
    """On a GPU, up to the limit; a load then locks no memory itself."""
    locked, threads = [], []

    def lock(block, *_):
        locked.append(block)
        threads.append(threading.current_thread().name)
        block.locked = True

    monkeypatch.setattr(host_memory.Block, "page_lock", lock)
    registry = AdapterRegistry(config, 16)
    numbers = [registry.add(f"a{index}", path).number for index, path in enumerate(paths[:4])]
    store = make_stacks(config, registry, keep=3).store
    store._page_locks = True
    for number in numbers:
        block = store.prepare(number)
        assert block.locked and len(set(map(id, locked))) == len(locked) <= 3
        store.release(block)
        assert store._jobs.flush(60)
    assert threads == [threading.current_thread().name, "adapter-blocks", "adapter-blocks"]
    assert len(store.numbers) == 3


def test_a_block_is_filled_across_the_chunks_that_are_locked(monkeypatch):
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 8192)
    numbers = torch.arange(18000, dtype=torch.int32).view(2, 90, 100).mT
    values = [numbers[0], torch.tensor([1.0, 2.0]), numbers[1], torch.ones(70, 60)]
    block = host_memory.Block([(tuple(each.shape), each.dtype) for each in values])
    block.fill([0, 2], numbers)
    for index in (1, 3):
        block.fill([index], values[index].unsqueeze(0))
    assert all(torch.equal(*pair) for pair in zip(block.tensors, values, strict=True))


def test_fp8_stacks_hold_the_adapters_quantized_rows(config, paths):
    name = "model.layers.0.self_attn.o_proj.lora_b"
    recipe = quantize(param(name))
    stacks = {"o_b": torch.zeros(3, 64, 16).to(torch.float8_e4m3fn), "o_b_scale": torch.zeros(3, 64)}
    registry = AdapterRegistry(config, 16)
    number = registry.add("a", paths[0]).number
    made = SlotLoader({"o_b": item(recipe, 0), "o_b_scale": item(recipe, 1)}, stacks, registry, LoraShape(3, 16), 2)
    made.start_load(1, number)
    assert wait_for(made, 1) == [(1, number, None)]
    expected, scale = quantize_weight(
        slot_tensors(load_adapter(paths[0], config, 16), config, made.lora, torch.bfloat16)[name]
    )
    assert (
        torch.equal(stacks["o_b"][1].float(), expected.float())
        and torch.equal(stacks["o_b_scale"][1], scale)
        and scale.min() > 1e-6
    )
    assert not stacks["o_b"][0].float().any() and not stacks["o_b_scale"][2].any()


def test_a_slow_disk_does_not_hold_up_what_is_in_memory(config, paths, monkeypatch):
    registry = AdapterRegistry(config, 16)
    registry.add("here", paths[0])
    registry.add("slow", paths[1])
    stacks = make_stacks(config, registry)
    stacks.start_load(-1, 0)
    wait_for(stacks, 1)
    gate, read = threading.Event(), registry.read
    monkeypatch.setattr(registry, "read", lambda number: gate.wait(10) and read(number))
    stacks.start_load(1, 1)
    assert stacks.finished_loads() == []
    stacks.start_load(0, 0)
    assert wait_for(stacks, 1) == [(0, 0, None)]
    gate.set()
    assert wait_for(stacks, 1) == [(1, 1, None)]


def test_files_that_vanish_change_or_break(config, paths, tmp_path):
    copies = [shutil.copytree(path, tmp_path / f"copy{index}") for index, path in enumerate(paths[:4])]
    registry = AdapterRegistry(config, 16, keep=0)
    for index, path in enumerate(copies):
        registry.add(f"a{index}", path)
    stacks = make_stacks(config, registry)
    shutil.rmtree(copies[0])
    shutil.copy(paths[5] / "adapter_model.safetensors", copies[1] / "adapter_model.safetensors")
    shutil.copy(paths[5] / "adapter_config.json", copies[1] / "adapter_config.json")
    (copies[2] / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    for number in range(4):
        stacks.start_load(number % 3, number) if number < 3 else stacks.start_load(-1, number)
    reports = {number: problem for _, number, problem in wait_for(stacks, 4)}
    assert reports[3] is None
    assert (
        "does not exist" in reports[0]
        and "have changed since it was registered" in reports[1]
        and "damaged" in reports[2]
    )
    for number in range(3):
        assert f"'a{number}'" in reports[number] and str(tmp_path) not in reports[number]
    stacks.start_load(0, 3)
    assert wait_for(stacks, 1) == [(0, 3, None)] and holds(stacks, 0, paths[3], config)
    stacks.start_load(0, 99)
    assert wait_for(stacks, 1)[0][2] == "the adapter was removed"


def test_threads_end_with_their_stacks(config, paths):
    registry = AdapterRegistry(config, 16)
    registry.add("a", paths[0])
    stacks = make_stacks(config, registry)
    stacks.start_load(0, 0)
    wait_for(stacks, 1)
    gone, before = weakref.ref(stacks), threading.active_count()
    del stacks
    gc.collect()
    until = time.monotonic() + 60
    while threading.active_count() > before - 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None and threading.active_count() <= before - 2


def test_roots_names_and_counts(config, paths, tmp_path):
    root = tmp_path / "allowed"
    root.mkdir()
    shutil.copytree(paths[0], root / "inside")
    os.symlink(paths[1], root / "link")
    registry = AdapterRegistry(config, 16, allowed_roots=[root], max_adapters=2)
    registry.add("inside", root / "inside")
    for path in (
        paths[1],
        root / "link",
        root / ".." / "x",
        tmp_path / "allowed-not",
        "/",
        root / "inside" / ".." / "..",
    ):
        with pytest.raises(RequestError, match="is not under a directory") as caught:
            registry.add("other", path)
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(AdapterError, match="does not exist"):
        registry.add("other", root / "nothing")
    for name in ("", "a/b", "a" * 129, "ü", "a\n"):
        with pytest.raises(RequestError, match="letters, digits"):
            registry.add(name, root / "inside")
    registry.add("second", root / "inside")
    with pytest.raises(RequestError, match="maximum of 2 adapters"):
        registry.add("third", root / "inside")
    with pytest.raises(RequestError, match="already been loaded"):
        registry.add("second", root / "inside")
    with pytest.raises(RequestError, match="max_lora_rank"):
        registry.lora = LoraShape(2, 16, ("q_proj", "k_proj", "v_proj"))
        registry.add("second", root / "inside", replace_name=True)
    registry.lora = None
    assert registry.numbers == {"inside": 0, "second": 1} and registry.hashes[0] == registry.hashes[1]
    assert registry.add("second", root / "inside", replace_name=True).number == 2
    registry.drop(0)
    assert registry.by_number(0).name == "inside", "a name that is still there stays"
    registry.drop(1)
    with pytest.raises(KeyError):
        registry.by_number(1)


def test_the_chat_templates_of_all_adapters_are_bounded(config, paths, tmp_path, monkeypatch):
    """Copies of one template count once."""
    monkeypatch.setattr("sidestream.runtime.adapters.registry.MAX_TEMPLATE_BYTES", 250)
    registry = AdapterRegistry(config, 16)
    for name, template in (("a", "x" * 100), ("b", "x" * 100), ("c", "y" * 100)):
        (shutil.copytree(paths[0], tmp_path / name) / "chat_template.jinja").write_text(template)
        registry.add(name, tmp_path / name)
    (tmp_path / "c" / "chat_template.jinja").write_text("z" * 100)
    with pytest.raises(RequestError, match=r"adapter 'd': the chat templates of all adapters need more than"):
        registry.add("d", tmp_path / "c")
    registry.drop(registry.remove("c"))
    assert registry.add("d", tmp_path / "c").chat.digest


def test_a_name_that_is_removed_while_it_is_replaced_stays_removed(config, paths, monkeypatch):
    registry = AdapterRegistry(config, 16)
    registry.add("a", paths[0])
    load = adapter_registry.load_adapter

    def meanwhile(change):
        def slow(*args, **more):
            change()
            return load(*args, **more)

        monkeypatch.setattr(adapter_registry, "load_adapter", slow)

    meanwhile(lambda: registry.remove("a"))
    with pytest.raises(RequestError, match="removed or replaced meanwhile"):
        registry.add("a", paths[1], replace_name=True)
    assert not registry.numbers
    monkeypatch.undo()
    registry.add("a", paths[0])
    meanwhile(lambda: (monkeypatch.undo(), registry.add("a", paths[2], replace_name=True)))
    with pytest.raises(RequestError, match="removed or replaced meanwhile"):
        registry.add("a", paths[1], replace_name=True)
    assert registry.adapters[0].rank == 6


@pytest.mark.parametrize("order", ["unused, then removed", "removed, then unused", "unused while it is read"])
def test_nothing_stays_of_an_adapter_that_came_and_went(config, paths, monkeypatch, order):
    """In a server the end of an adapter's use, the removal of its name and its read come in any order."""
    registry = AdapterRegistry(config, 16)
    stacks = make_stacks(config, registry, keep=8)
    numbers, read = [], registry.read

    def read_and_forget(number):
        adapter = read(number)
        stacks.drop(number)
        return adapter

    for _ in range(6):
        number = registry.add("a", paths[0]).number
        numbers.append(number)
        if order == "unused while it is read":
            monkeypatch.setattr(registry, "read", read_and_forget)
            stacks.prefetch([number])
            registry.remove("a")
        elif order == "unused, then removed":
            stacks.drop(number)
            stacks.prefetch([number])
            registry.remove("a")
        else:
            stacks.prefetch([number])
            registry.remove("a")
            stacks.drop(number)
    gc.collect()
    assert stacks.store.numbers == [] and registry.hashes == {}
    for number in numbers:
        with pytest.raises(KeyError):
            registry.by_number(number)
    assert sum(isinstance(each, Block) for each in gc.get_objects()) <= 1, "one to be used again"


def test_an_adapter_too_large_for_the_stacks_is_not_read(config, base, monkeypatch):
    (large,) = tiny_adapters(base, [AdapterSpec(rank=24)])
    registry = AdapterRegistry(config, 64)
    registry.lora = LoraShape(2, 16)
    monkeypatch.setattr(AdapterFile, "read", lambda self: pytest.fail("it was read"))
    with pytest.raises(AdapterError, match=r"rank 24, above the limit of 16: start with max_lora_rank=24"):
        registry.add("large", large)


def test_files_that_lead_out_of_the_roots(config, paths, tmp_path):
    """At once, and when an adapter is read again; one that was there before the roots may lie anywhere."""
    root = tmp_path / "allowed"
    root.mkdir()
    registry = AdapterRegistry(config, 16, keep=0)
    early = registry.add("early", paths[0]).number
    registry.restrict([root])
    copy = shutil.copytree(paths[1], root / "copy")
    number = registry.add("copy", copy).number
    assert registry.read(number).rank == 5 and registry.read(early).rank == 4
    (copy / "adapter_config.json").unlink()
    (copy / "adapter_config.json").symlink_to(paths[1] / "adapter_config.json")
    with pytest.raises(AdapterError, match=r"adapter_config\.json is outside"):
        registry.read(number)
    with pytest.raises(AdapterError, match=r"adapter_config\.json is outside"):
        registry.add("again", copy)
    assert registry.read(early).rank == 4 and set(registry.numbers) == {"early", "copy"}


def ids_of(index):
    source = random.Random(index)
    return [source.randrange(256) for _ in range(source.randrange(3, 90))]


def test_sixty_adapters_over_three_slots(base, paths):
    """Zipf traffic with shared beginnings; each answer is that of the request alone, on an engine that knows one
    adapter only.
    """
    names = [f"a{index}" for index in range(60)]
    llm = LLM(base.path, dict(zip(names, paths, strict=True)), max_loras=3, max_cpu_loras=8, num_kv_pages=24, **SMALL)
    source = random.Random(7)
    chosen = [*source.choices([*names, None], weights=[1 / rank for rank in range(1, 62)], k=90), *names[::-1]]
    beginning = ids_of(1000)[:70] + [5] * 10
    prompts = [(beginning if index % 3 == 0 else []) + ids_of(index) for index in range(len(chosen))]
    outputs = llm.generate(prompts, GREEDY, adapter=chosen, use_tqdm=False)
    stats = llm.engine.scheduler.stats()
    assert (
        stats.adapter_loads >= 60 and stats.adapters_resident == 3 and stats.prefix_hits > 0 and stats.pages_used == 0
    )
    answers = {
        (tuple(prompt), name): output.outputs[0].token_ids
        for prompt, name, output in zip(prompts, chosen, outputs, strict=True)
    }
    alone = LLM(base.path, {"x": paths[0]}, max_loras=1, max_lora_rank=16, enable_prefix_caching=False, **SMALL)
    for index in random.Random(3).sample(range(len(chosen)), 45):
        name = chosen[index]
        if name is not None:
            alone.add_adapter("x", paths[names.index(name)], replace=True)
        (output,) = alone.generate([prompts[index]], GREEDY, adapter=None if name is None else "x", use_tqdm=False)
        assert output.outputs[0].token_ids == answers[tuple(prompts[index]), name]
    assert len({tuple(tokens) for tokens in answers.values()}) > 50, "the adapters differ in what they say"
    assert len(alone.engine.scheduler.states.slots.resident) == 1 and len(alone.registry._by_number) <= 2


def test_a_name_is_replaced_while_its_requests_run(base, paths):
    llm = LLM(base.path, {"x": paths[0], "y": paths[1]}, max_loras=1, max_lora_rank=16, **SMALL)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = (ids_of(3) * 4)[:100]
    wanted = {
        name: llm.generate([prompt], long, adapter=name, use_tqdm=False)[0].outputs[0].token_ids for name in ("x", "y")
    }
    assert wanted["x"] != wanted["y"]
    chunks = llm.stream([prompt], long, adapter="x")
    tokens = [token for _ in range(5) for token in next(chunks).token_ids]
    llm.add_adapter("x", paths[1], replace=True)
    tokens += [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == wanted["x"], "those that were under way finish on the former content"
    assert llm.generate([prompt], long, adapter="x", use_tqdm=False)[0].outputs[0].token_ids == wanted["y"]
    assert llm.engine.scheduler.stats().prefix_hits > 0, "y's pages serve x now: equal contents share"
    llm.remove_adapter("x")
    with pytest.raises(RequestError, match="'x' is not known"):
        llm.generate([prompt], long, adapter="x", use_tqdm=False)


def test_an_engine_can_start_without_adapters(base, paths):
    llm = LLM(base.path, {}, max_loras=2, max_lora_rank=12, **SMALL)
    llm.add_adapter("late", paths[2])
    known = LLM(base.path, {"late": paths[2]}, **SMALL)
    answers = [
        engine.generate([ids_of(4)], GREEDY, adapter="late", use_tqdm=False)[0].outputs[0].token_ids
        for engine in (llm, known)
    ]
    assert answers[0] == answers[1]
    with pytest.raises(AdapterError, match="above the limit of 12"):
        llm.add_adapter("large", tiny_adapters(base, [AdapterSpec(rank=20)])[0])


def test_lora_target_modules_make_room_for_other_projections(base, paths):
    narrow, wide = tiny_adapters(base, [AdapterSpec(rank=4, targets=("q_proj",)), AdapterSpec(rank=4)])
    llm = LLM(base.path, {"narrow": narrow}, max_loras=2, **SMALL)
    with pytest.raises(RequestError, match="to lora_target_modules"):
        llm.add_adapter("wide", wide)
    for names in ("all", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]):
        llm = LLM(base.path, {"narrow": narrow}, max_loras=2, lora_target_modules=names, **SMALL)
        llm.add_adapter("wide", wide)
        answer = llm.generate([ids_of(4)], GREEDY, adapter="wide", use_tqdm=False)
        known = LLM(base.path, {"wide": wide}, **SMALL)
        assert answer[0].outputs[0].token_ids == (
            known.generate([ids_of(4)], GREEDY, adapter="wide", use_tqdm=False)[0].outputs[0].token_ids
        )
    with pytest.raises(OptionError, match=r"adapter 'narrow': .* on q_proj .* stacks of rank 16 on o_proj: "):
        LLM(base.path, {"narrow": narrow}, lora_target_modules=["o_proj"], **SMALL)
    for wrong in ("embedding", [], ["q_proj", 3], 3):
        with pytest.raises(OptionError, match=r"lora_target_modules=.* must be 'all' or some of q_proj"):
            LLM(base.path, {"narrow": narrow}, lora_target_modules=wrong, **SMALL)


def test_max_lora_rank_makes_room_next_to_smaller_adapters(base, paths):
    large = tiny_adapters(base, [AdapterSpec(rank=40)])[0]
    llm = LLM(base.path, {"small": paths[0]}, max_loras=2, max_lora_rank=40, **SMALL)
    llm.add_adapter("large", large)
    answer = llm.generate([ids_of(4)], GREEDY, adapter="large", use_tqdm=False)
    known = LLM(base.path, {"large": large}, **SMALL)
    assert answer[0].outputs[0].token_ids == (
        known.generate([ids_of(4)], GREEDY, adapter="large", use_tqdm=False)[0].outputs[0].token_ids
    )


def test_a_broken_file_ends_one_request_of_many(base, paths, tmp_path):
    copy = shutil.copytree(paths[0], tmp_path / "copy")
    llm = LLM(base.path, {"good": paths[1], "bad": copy}, max_loras=1, max_cpu_loras=1, **SMALL)
    llm.generate([[1, 2]], GREEDY, adapter="good", use_tqdm=False)
    llm.generate([[1, 2]], GREEDY, adapter="bad", use_tqdm=False)
    llm.generate([[1, 2]], GREEDY, adapter="good", use_tqdm=False)  # `bad` is in memory nowhere now
    (copy / "adapter_model.safetensors").unlink()
    outputs = llm.generate([[3, 4]] * 3, GREEDY, adapter=["good", "bad", None], use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"] and "'bad' could not be loaded" in outputs[1].outputs[0].stop_reason
    shutil.copy(paths[0] / "adapter_model.safetensors", copy / "adapter_model.safetensors")
    assert llm.generate([[3, 4]], GREEDY, adapter="bad", use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_copy_is_reported_ahead_by_less_than_a_step(config, paths):
    registry = AdapterRegistry(config, 16)
    registry.add("a", paths[0])
    stacks = make_stacks(config, registry)
    for step in range(20):
        stacks.record_step_end(step * 0.004)
    assert stacks.lead_seconds == pytest.approx(0.003)
    stacks.record_step_end(19 * 0.004 + 0.0001)
    assert stacks.lead_seconds == LEAD_SECONDS
    over, waited = [False], []
    last = SimpleNamespace(query=lambda: over[0])
    block = SimpleNamespace(num_users=1)
    flight = InFlightCopy(1, 7, block, SimpleNamespace(elapsed_time=lambda last: 3.0), last, time.monotonic() + 60.0)
    stacks._in_flight.append(flight)
    assert stacks.finished_loads() == [] and not flight.reported, "it takes a while yet"
    flight.due = time.monotonic() + LEAD_SECONDS / 2
    assert stacks.finished_loads() == [(1, 7, None)] and flight.reported and block.num_users == 1, (
        "reported, and its memory is still being read"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
        stacks.before_step(np.asarray([0, -1], np.int32))
        stacks.before_step(np.asarray([0, 1], np.int32))
    assert waited == [last], "only a step that uses the slot has to wait"
    over[0] = True
    assert (
        stacks.finished_loads() == []
        and not stacks._in_flight
        and block.num_users == 0
        and stacks._copy_seconds == pytest.approx(0.003)
    )


def test_a_step_whose_slot_holds_another_adapter_is_refused(base, paths):
    """The scheduler never plans such a step; a fault in it must fail the request and nothing else."""
    with LLM(base.path, adapters={"a": paths[0], "b": paths[1]}, max_loras=2, **SMALL) as llm:
        before = {name: llm.generate([[5, 6, 7]], GREEDY, name, use_tqdm=False) for name in ("a", "b")}
        loader = llm.model.runner.slot_loader
        wrong = llm.registry.numbers["b"]
        loader._numbers[loader._numbers == llm.registry.numbers["a"]] = wrong
        with pytest.raises(RuntimeError, match=f"holds adapter {wrong}, but the step needs"):
            llm.generate([[5, 6, 7]], GREEDY, "a", use_tqdm=False)
        again = llm.generate([[5, 6, 7]], GREEDY, "b", use_tqdm=False)
        assert again[0].outputs[0].token_ids == before["b"][0].outputs[0].token_ids
