"""Masks filled by other threads are llguidance's own, and a fault in filling them is one request's."""

import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance.numpy
import numpy as np
import pytest
from sidestream import LLM, SamplingParams, StructuredOutputsParams
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.text.generation_config import eos_token_ids
from sidestream.runtime.text.structured import grammar_compiler as compiling
from sidestream.runtime.text.structured import mask_filling
from sidestream.runtime.text.structured.grammar_compiler import GrammarCompiler
from sidestream.runtime.text.structured.mask_filling import FEW, MaskFiller, consume_outputs, empty_masks, use_threads
from sidestream.runtime.text.structured.matcher import Grammar
from sidestream.runtime.text.tokenizer import load_tokenizer
from support.tiny import tiny_llama

THREADS = 3
COUNT = 2 * FEW
LIST = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}}


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """However few cores there are."""
    use_threads(THREADS)
    yield
    use_threads(None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    base = tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=True)
    return LLM(base.path, precision="fp32", device="cpu", show_progress=False, max_model_len=128, max_num_seqs=COUNT)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "sidestream-masks"]


def test_masks_are_those_that_llguidance_makes_one_by_one() -> None:
    directory = Path(DEMO_MODEL)
    ends = eos_token_ids(directory)
    compiler, filler, chance = GrammarCompiler(load_tokenizer(directory), 512, ends), MaskFiller(), random.Random(0)
    kinds = [StructuredOutputsParams(json=LIST), StructuredOutputsParams(regex="[a-f]{1,3}(-[0-9é]+)*")]
    grammars = [compiler.compile(kinds[number % 2]) for number in range(COUNT)]
    assert len(set(grammars)) == 2 and {grammar.lexers for grammar in grammars} == {THREADS}
    matchers = [grammar.matcher() for grammar in grammars]
    assert len({matcher.lexer for matcher in matchers}) == 2 * THREADS, "completions are spread over the lexers"
    first, tokens = {id(grammar): grammar.begin()[1] for grammar in grammars}, list[list[int]]([[] for _ in matchers])
    for _ in range(30):
        outputs = [(output, 0) for output in tokens]
        masks = filler.begin(empty_masks(matchers, COUNT), matchers, outputs).wait()
        expected = np.zeros_like(masks)
        for row, output in enumerate(tokens):
            fresh = first[id(grammars[row])].deep_copy()
            assert fresh.consume_tokens(output)
            llguidance.numpy.fill_next_token_bitmask(fresh, expected, row)
            choices = np.flatnonzero(np.unpackbits(expected[row].view(np.uint8), bitorder="little"))
            output.append(int(chance.choice(sorted(set(choices.tolist()) - ends) or [min(ends)])))
        assert np.array_equal(masks, expected)
        for row, output in enumerate(tokens):
            if output[-1] in ends:
                matchers[row], tokens[row] = grammars[row].matcher(), []
    filler.close()
    compiler.close()


def requests(llm: LLM) -> tuple[list[str], list[SamplingParams]]:
    params = SamplingParams(temperature=1.5, max_tokens=12, structured_outputs={"regex": "([a-d]{3}[0-9])+"})
    prompts = [f"{number:02}" for number in range(COUNT)]
    return prompts, [SamplingParams(**{**vars(params), "seed": number}) for number in range(COUNT)]


def test_completions_are_dealt_evenly_to_lexers_while_these_become_more() -> None:
    """A step waits for the lexer that has the most of them."""
    directory = Path(DEMO_MODEL)
    compiler = GrammarCompiler(load_tokenizer(directory), 512, eos_token_ids(directory))
    lexers = [compiler.compile(StructuredOutputsParams(json=LIST)).matcher().lexer for _ in range(8 * THREADS)]
    assert set(Counter(lexers).values()) == {8}


def test_constraints_that_come_again_share_a_bounded_number_of_lexers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a hostile client cannot multiply their memory; one that is slow to compile is compiled once."""
    compiler = GrammarCompiler(load_tokenizer(Path(DEMO_MODEL)), 512, eos_token_ids(Path(DEMO_MODEL)))
    monkeypatch.setattr(compiling, "MAX_LEXERS", THREADS + 2)
    first, second, slow = (StructuredOutputsParams(choice=[word]) for word in ("yes", "no", "slow"))
    grammars = [compiler.compile(each) for each in (first,) * 4 + (second,) * 4]
    assert (grammars[0].lexers, grammars[-1].lexers) == (THREADS, 2)
    monkeypatch.setattr(compiling, "MAX_LEXERS", 100)
    monkeypatch.setattr(compiling, "LIGHT_SECONDS", -1.0)
    assert [compiler.compile(slow).lexers for _ in range(3)] == [1, 1, 1]
    compiler.close()


class Broken:
    """A state that raises when its mask is computed."""

    def consume_token(self, token: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, pointer: int, count: int) -> None:
        raise ValueError("no mask")


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_fault_ends_the_request_that_it_belongs_to(llm: LLM, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    prompts, params = requests(llm)
    monkeypatch.setattr(llm.engine, "_depth", ahead)
    expected = llm.generate(prompts, params, use_tqdm=False)
    begin, restarts = Grammar.begin, list[int]()

    def broken(grammar: Grammar) -> tuple[int, Any]:
        restarts.append(1)
        return (0, Broken()) if len(restarts) == 5 else begin(grammar)

    monkeypatch.setattr(Grammar, "begin", broken)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for number, (output, plain) in enumerate(zip(outputs, expected, strict=True)):
        (answer,), (wanted,) = output.outputs, plain.outputs
        if number == 4:
            assert answer.finish_reason == "error" and "caused an internal error" in str(answer.stop_reason)
        else:
            assert (answer.token_ids, answer.finish_reason) == (wanted.token_ids, wanted.finish_reason)


def test_a_token_that_does_not_fit_fails_its_completion_alone() -> None:
    """Also where many are taken in at a time."""
    compiler = GrammarCompiler(load_tokenizer(Path(DEMO_MODEL)), 512, eos_token_ids(Path(DEMO_MODEL)))
    grammar = compiler.compile(StructuredOutputsParams(regex="[a-d]{9}"))
    matchers = [grammar.matcher() for _ in range(COUNT)]
    masks = MaskFiller().begin(empty_masks(matchers, COUNT), matchers).wait()
    (right, *_), banned = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")), 0
    assert not masks[0][0] & 1
    consume_outputs(matchers, [([banned if row == 3 else int(right)], 0) for row in range(COUNT)], in_parallel=True)
    assert [matcher.failed for matcher in matchers] == [row == 3 for row in range(COUNT)]
    assert "cannot be used" in matchers[3].problem()
    compiler.close()


def test_a_fault_while_tokens_are_taken_in_together_loses_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many were taken in before it."""
    prompts, params = requests(llm)
    expected = llm.generate(prompts, params, use_tqdm=False)
    faults = list[int]()

    class Faulty:
        def __init__(self, threads: int) -> None:
            self._threads = executor(threads)
            self.unsafe_compute_mask_ptr = self._threads.unsafe_compute_mask_ptr

        def consume_token_par(self, jobs: list[tuple[Any, int]]) -> list[bool]:
            faults.append(len(jobs))
            self._threads.consume_token_par(jobs[: len(faults) % len(jobs)])
            raise ValueError("no tokens")

    executor = mask_filling.executor
    monkeypatch.setattr(mask_filling, "executor", Faulty)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert len(faults) > 5
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]


def test_masks_are_made_while_answers_are_delivered_and_the_next_step_is_planned(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of its device, an engine launches a step before it has the step's masks, and the step after it as soon as
    this one is sampled.
    """
    events: list[str] = []

    def note(owner: Any, name: str) -> None:
        do = getattr(owner, name)

        def noted(*args: Any) -> Any:
            events.append(name)
            return do(*args)

        monkeypatch.setattr(owner, name, noted)

    for name in ("plan", "deliver", "begin_masks"):
        note(llm.engine, name)
    for name in ("submit", "constrain", "collect"):
        note(llm.engine.runner, name)
    monkeypatch.setattr(llm.engine, "_depth", 1)
    prompts, params = requests(llm)
    llm.generate(prompts, params, use_tqdm=False)
    assert events[:3] == ["plan", "submit", "constrain"]
    step = ["plan", "constrain", "submit", "collect", "begin_masks", "deliver"]
    assert events[3:9] == ["plan", "submit", "collect", "begin_masks", "deliver", "plan"]
    assert events[8 : 8 + 6 * 6] == 6 * step


def test_answers_are_the_same_ahead_of_a_device_and_with_few_pages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that end while the step after is planned, and those that are put back and computed again."""
    constraints = [{"regex": "([a-d]{3}[0-9])+"}, {"choice": ["yes", "no", "noon"]}, {"json": LIST}, {}]
    others = [{}, {"ignore_eos": True}, {"min_tokens": 4}, {"stop": ["ab", "cc"]}, {"bad_words": ["a"]}, {"n": 2}]
    params = [
        SamplingParams(
            temperature=1.0, seed=number, max_tokens=40, **others[number % 6],
            structured_outputs=constraints[number % 4] or None,
        )
        for number in range(24)
    ]  # fmt: skip
    prompts = ["abcd" * (1 + number % 9) for number in range(24)]

    def answers() -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        completions = [completion for output in outputs for completion in output.outputs]
        return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in completions]

    expected = answers()
    monkeypatch.setattr(llm.engine, "_depth", 1)
    assert answers() == expected
    states = llm.engine.scheduler.states
    held, before = states.pages.allocate(states.pages.num_free - COUNT // 2), states.preemptions
    assert held is not None
    assert answers() == expected and states.preemptions > before
    states.pages.free(held)


def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    gc.collect()
    before = len(threads())
    base = tiny_llama(tmp_path, tokenizer=True)
    llm = LLM(base.path, precision="fp32", device="cpu", show_progress=False, max_model_len=128, max_num_seqs=COUNT)
    llm.generate(*requests(llm), use_tqdm=False)
    assert len(threads()) == before + 1
    llm.close()
    assert len(threads()) == before


def test_a_filler_that_is_closed_still_fills() -> None:
    compiler = GrammarCompiler(load_tokenizer(Path(DEMO_MODEL)), 512, eos_token_ids(Path(DEMO_MODEL)))
    grammar, filler = compiler.compile(StructuredOutputsParams(json=json.dumps(LIST))), MaskFiller()
    matchers = [grammar.matcher() for _ in range(COUNT)]
    during = filler.begin(empty_masks(matchers, COUNT), matchers).wait()
    filler.close()
    filler.close()
    after = filler.begin(empty_masks(matchers, COUNT), matchers).wait()
    assert during.any() and np.array_equal(during, after)
    compiler.close()
