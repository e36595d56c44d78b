"""Cascade attention is chosen by the plan: for decode steps in which it saves page reads, with sequences of the same
prefix next to each other, and without an effect on any answer.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sidestream.ops.attention.prefix_attention import PAGES, SHARED, prefix_plan
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.ops.core.triton_support import cdiv
from sidestream.runtime.scheduler.cascade import shared_prefixes
from sidestream.runtime.scheduler.cascade.shared_prefixes import SharedPrefixes
from sidestream.runtime.scheduler.limits import SchedulerLimits
from sidestream.runtime.scheduler.plan_builder import RowTable
from sidestream.runtime.scheduler.step_plan import CASCADE_SEQUENCES, StepPlan
from sidestream.runtime.worker.cascade_attention import LEAST_READS
from support.engines import VOCABULARY, ask, assert_idle, make_engine, random_prompt, run, tokens
from support.fake_runner import continuation

WIDTH = 40  # pages of the longest sequence
TILE = 32


def saved_reads(table: np.ndarray, contexts: np.ndarray, tile: int) -> int:
    """Page reads that a program saves: those of all sequences that share, less one per prefix."""
    plan = prefix_plan.reference(torch.from_numpy(table), torch.from_numpy(contexts), tile)
    return int(plan[SHARED].sum() - plan[PAGES].sum())


class Batch:
    """Sequences in rows of a table: (number of the group, pages of its prefix, all pages) each; -1: no group."""

    def __init__(self, sequences: list[tuple[int, int, int]], least: int = 1, tile: int = TILE) -> None:
        limits = SchedulerLimits(1000, WIDTH * PAGE_SIZE, 256, 8192, cascade_tile=tile, cascade_pages=least)
        self.rows, self.tile = RowTable(256, WIDTH), tile
        self.prefixes = SharedPrefixes(limits, self.rows)
        self.rows.pages[:] = 100 * WIDTH + np.arange(256 * WIDTH).reshape(256, WIDTH)
        self.work: list[Any] = []
        for row, (group, common, pages) in enumerate(sequences):
            if group >= 0:
                self.rows.pages[row, :common] = group * WIDTH + np.arange(common)
            self.work.append((SimpleNamespace(row=row, computed=pages * PAGE_SIZE + 5), 1))

    def order(self) -> list[int]:
        return [sequence.row for sequence, _ in self.work]

    def saved(self) -> int:
        contexts = np.array([sequence.computed + 1 for sequence, _ in self.work], np.int32)
        return saved_reads(self.rows.pages[self.order()], contexts, self.tile)


def test_sequences_of_a_group_become_neighbours() -> None:
    batch = Batch([(row % 4, 16, 20) for row in range(256)])
    assert batch.prefixes.group(batch.work)
    assert sorted(batch.order()) == list(range(256))
    assert [row % 4 for row in batch.order()] == [group for group in range(4) for _ in range(64)]
    assert batch.saved() == 8 * 31 * 16
    order = batch.order()
    assert batch.prefixes.group(batch.work) and batch.order() == order, "the order is stable"


@pytest.mark.parametrize(
    "sequences",
    [
        [(-1, 0, 20)] * 256,
        [(0, 16, 20)] * (CASCADE_SEQUENCES - 1),
        [(0, 3, 20)] * 256,
        [(0, 16, 3)] * 256,
        [(row // 3, 16, 20) for row in range(240)],
    ],
    ids=["nothing shared", "few sequences", "few pages", "short", "in threes"],
)
def test_other_steps_stay_as_they_are(sequences: list[tuple[int, int, int]]) -> None:
    batch = Batch(sequences, least=1000)
    assert not batch.prefixes.group(batch.work) and batch.order() == list(range(len(sequences)))


def test_what_is_saved_decides() -> None:
    sequences = [(row % 3 - 1, 12, 16) for row in range(256)]
    for least, chosen in ((1800, True), (2100, False)):
        batch = Batch(sequences, least)
        assert batch.prefixes.group(batch.work) == chosen
        if chosen:
            assert least <= batch.saved() < 2100
    prompts = Batch(sequences, 1)
    prompts.work[7] = prompts.work[7][0], 2
    assert not prompts.prefixes.group(prompts.work)


@pytest.mark.parametrize(("sequences", "fewest"), [(256, 6), (128, 12)])
def test_the_limits_of_the_docs(sequences: int, fewest: int) -> None:
    """Pages that all sequences of a step must share with eight KV heads (docs/tuning.md)."""
    for common in range(4, 20):
        batch = Batch([(0, common, 20)] * sequences, least=cdiv(LEAST_READS, 8))
        assert batch.prefixes.group(batch.work) == (common >= fewest)


def test_a_step_with_other_sequences_is_decided_anew() -> None:
    """Rows are reused: sequences of their own follow eight that shared the prefix, in the same rows."""
    batch = Batch([(0, 16, 20)] * 130, least=1900)
    assert batch.prefixes.group(batch.work)
    batch.rows.pages[:8] = 999_000 + np.arange(8 * WIDTH).reshape(8, WIDTH)
    batch.work[:8] = [(SimpleNamespace(row=row, computed=20 * PAGE_SIZE), 1) for row in range(8)]
    assert not batch.prefixes.group(batch.work)


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_is_a_lower_bound(seed: int) -> None:
    """Against the plan that a program makes of the same block tables; at least two thirds of it, and no less than in
    the order of arrival.
    """
    source = random.Random(seed)
    tile = source.choice((16, 32, 128))
    lengths = [source.randrange(0, WIDTH - 1) for _ in range(source.randrange(1, 6))]
    sequences = [
        (group, lengths[group], source.randrange(lengths[group] // 2, WIDTH) if source.random() < 0.1 else WIDTH)
        for group in (source.randrange(len(lengths)) for _ in range(source.randrange(CASCADE_SEQUENCES, 257)))
    ]
    batch = Batch(sequences, least=0, tile=tile)
    before = batch.saved()
    assert batch.prefixes.group(batch.work)
    estimate = batch.prefixes._saved(batch.prefixes._prefixes([sequence for sequence, _ in batch.work]))
    assert estimate <= batch.saved() <= 1.5 * estimate + 1 and batch.saved() >= before


@pytest.mark.parametrize("seed", range(6))
def test_answers_do_not_depend_on_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, preemption, prompts in chunks and steps in flight; the fake model reads what each plan's block
    table refers to.
    """
    monkeypatch.setattr(shared_prefixes, "CASCADE_SEQUENCES", 4)
    source = random.Random(seed)
    pages, overlap = source.choice((26, 40)), source.random() < 0.5
    engine = make_engine(
        pages, 640, 12, source.choice((70, 400)), 2, 2, overlap, asynchronous=bool(seed % 2), cascade=(8, 12)
    )
    plans = record(engine)
    beginnings = [random_prompt(source, 300) for _ in range(2)]
    wanted = {}
    for number in range(24):
        ids = source.choice((beginnings[0], beginnings[0], beginnings[1], [])) + random_prompt(source, 9)
        adapter, length = source.choice((-1, -1, 0)), source.randrange(5, 60)
        ask(engine, str(number), ids, length, None if adapter < 0 else f"adapter{adapter}")
        wanted[str(number)] = continuation(ids, adapter, length, VOCABULARY)
    assert tokens(run(engine)) == wanted
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)
    chosen = [plan for plan in plans if plan.cascade]
    assert chosen and len(chosen) < len(plans) and engine.scheduler.stats().cascade_steps == len(chosen)
    assert all(plan.decode and saved_reads(plan.block_table, plan.context_lens, 8) >= 12 for plan in chosen)
    assert pages > 26 or engine.scheduler.states.preemptions


def record(engine: Any) -> list[StepPlan]:
    """The plans of an engine from now on."""
    plans: list[StepPlan] = []
    submit = engine.runner.submit

    def submit_and_record(plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    engine.runner.submit = submit_and_record
    return plans


def test_plans_without_it_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with cascade attention whose steps share too little plans as one without."""
    monkeypatch.setattr(shared_prefixes, "CASCADE_SEQUENCES", 4)
    tables = []
    for cascade in ((0, 0), (8, 1000)):
        source = random.Random(0)
        engine = make_engine(60, 640, 8, 400, cascade=cascade)
        plans = record(engine)
        beginning = random_prompt(source, 300)
        for number in range(8):
            ask(engine, str(number), beginning + random_prompt(source, 9), 20)
        run(engine)
        assert not any(plan.cascade for plan in plans)
        tables.append([plan.block_table.tolist() for plan in plans])
    assert tables[0] == tables[1]
