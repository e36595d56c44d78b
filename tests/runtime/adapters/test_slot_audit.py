"""The audit of adapter slots: a changed byte is found and mended, and answers are right afterwards."""

import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sidestream.runtime.adapters.host_memory import Block
from sidestream.runtime.adapters.slot_audit import page_sums
from sidestream.runtime.api.request import Request
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.scheduler.step_plan import SLOT_DAMAGED
from sidestream.runtime.server.stepper import published
from sidestream.runtime.worker.tensor_parallel.parallel_model import ParallelRunner
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

SMALL = {"device": "cpu", "show_progress": False, "max_model_len": 256, "max_num_seqs": 6, "precision": "fp32"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [5 + index % 40 for index in range(150)]  # two pages that the prefix cache keeps


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=1,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
    )


@pytest.fixture(scope="module")
def paths(base: Any) -> dict[str, Path]:
    specs = [AdapterSpec(rank=4, alpha=24), AdapterSpec(rank=5, alpha=24)]
    return dict(zip("ab", tiny_adapters(base, specs), strict=True))


@pytest.fixture
def llm(base: Any, paths: dict[str, Path]) -> Iterator[LLM]:
    with LLM(base.path, adapters=dict(paths), max_loras=2, enable_sleep_mode=True, **SMALL) as llm:
        yield llm


def answer(llm: LLM, adapter: str | None) -> list[int]:
    (output,) = llm.generate([PROMPT], GREEDY, adapter, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def slot_of(llm: LLM, name: str) -> int:
    return llm.engine.scheduler.states.slots.resident[llm.registry.numbers[name]]


def damage(llm: LLM, slot: int) -> None:
    """Flip the highest bit of a byte's exponent: the largest change that one bit can make."""
    stacks = llm.model.runner.slot_loader.stacks
    (name,) = (name for name in stacks if "q_k_v" in name and name.endswith("lora_b"))
    # of the last channel of V, so that cached values change too
    stacks[name][slot].view(-1, stacks[name].shape[-1])[-1, :1].view(torch.uint8)[3] ^= 0x40


def failures(llm: LLM) -> int:
    return llm.engine.scheduler.stats().slot_audit_failures


def test_a_changed_byte_is_found_and_mended(llm: LLM) -> None:
    right = {name: answer(llm, name) for name in ("a", "b", None)}
    loader, slot = llm.model.runner.slot_loader, slot_of(llm, "a")
    assert loader.audit(slot) and loader.audit(slot_of(llm, "b")) and not loader._finished
    assert llm.reset_prefix_cache()
    damage(llm, slot)
    assert answer(llm, "a") != right["a"], "the damage must change the answer, and pages that are kept"
    assert loader.audit(slot) and not loader.audit(slot), "one difference is counted once"
    assert {name: answer(llm, name) for name in ("a", "b", None)} == right
    assert failures(llm) == 1
    assert loader.audit(slot_of(llm, "a")) and not loader._finished
    assert published(asdict(llm.engine.scheduler.stats()))["slot_audit_failures_total"] == 1


def test_running_requests_of_the_adapter_end_and_others_continue(llm: LLM) -> None:
    right = {name: answer(llm, name) for name in ("a", "b")}
    slot = slot_of(llm, "a")
    for name in ("a", "b"):
        llm.engine.add(Request(f"of {name}", None, list(PROMPT), GREEDY, name))
    for _ in range(3):
        llm.engine.step()
    damage(llm, slot)
    llm.model.runner.slot_loader.audit(slot)
    llm.engine.add(Request("later", None, list(PROMPT), GREEDY, "a"))
    outputs = {}
    while llm.engine.scheduler.has_work:
        outputs |= {output.request_id: output.outputs[0] for output in llm.engine.step()[1]}
    assert outputs["of a"].finish_reason == "error" and outputs["of a"].stop_reason == SLOT_DAMAGED
    assert list(outputs["of b"].token_ids) == right["b"] and list(outputs["later"].token_ids) == right["a"]


def test_slots_without_a_block_or_memory_are_not_compared(llm: LLM) -> None:
    answer(llm, "a")
    loader, slot = llm.model.runner.slot_loader, slot_of(llm, "a")
    number = llm.registry.numbers["a"]
    llm.sleep()
    assert not loader.audit(slot), "the memory of the slot is released"
    llm.wake_up()
    with pytest.raises(RuntimeError, match="holds adapter -1"):  # a plan from before would read zeros
        loader.check_slots(np.array([slot]), np.array([number]))
    assert answer(llm, "a")
    slot = slot_of(llm, "a")
    assert loader.audit(slot)
    llm.engine.scheduler.load_done(1 - slot, number, SLOT_DAMAGED)
    assert slot_of(llm, "a") == slot, "a report of a slot that has been given away frees nothing"
    loader.store.drop(number)
    assert not loader.audit(slot)
    other = loader.store.prepare(number)  # read again, into the same memory or not
    loader._copied[slot] = number, weakref.ref(Block([]))
    assert not loader.audit(slot), "only the block that was copied tells what the slot must hold"
    loader.store.release(other)


def test_a_changed_word_changes_a_sum() -> None:
    memory = torch.randint(0, 256, (3 * 4096,), dtype=torch.uint8)
    before = page_sums(memory)
    for place, bit in ((0, 1), (4095, 0x80), (2 * 4096 + 17, 0x10)):
        memory[place] ^= bit
        assert (page_sums(memory) != before).nonzero().tolist() == [[place // 4096]]
        memory[place] ^= bit


def test_one_rank_suffices_to_report_a_damaged_slot() -> None:
    reports = [{"slot": 1, "number": 7, "error": SLOT_DAMAGED}, {"slot": 0, "number": 4, "error": None}]
    peers = SimpleNamespace(finished_loads=lambda: reports, tp_size=2)
    runner = ParallelRunner(SimpleNamespace(loaded=list, copied=list), peers)  # type: ignore[arg-type]
    assert runner.loaded() == [(1, 7, SLOT_DAMAGED)], "the load has not ended on both ranks"
