"""KV pages in host memory: never a wrong token or a lost page, and what has left the device is not computed again."""

import random

import pytest
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.sequence import Status
from sidestream.runtime.scheduler.step_plan import StepPlan
from support.engines import VOCABULARY, ask, assert_idle, make_engine, prompt, random_prompt, run, tokens
from support.fake_runner import continuation


@pytest.mark.parametrize("disk_pages", [0, 25])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_are_those_of_each_request_alone(seed: int, disk_pages: int) -> None:
    """Few pages in all tiers, slow and failing copies, failing steps, aborts, adapters that come and go"""
    source = random.Random(seed)
    for _ in range(20):
        serve_prefixes(source, disk_pages)


def serve_prefixes(source: random.Random, disk_pages: int) -> None:
    """Requests with few different beginnings, one after the other or together, of an engine of random sizes."""
    engine = make_engine(
        pages=source.randint(8, 14),
        max_model_len=450,
        max_num_seqs=source.randint(1, 4),
        budget=source.choice((8, 200, 1000)),
        slots=2,
        adapters=2,
        overlap=source.random() < 0.5,
        asynchronous=True,
        patience=9,
        host_pages=source.randint(2, 24),
        disk_pages=disk_pages,
    )
    engine.runner.copy_delay = source.randint(1, 6)
    engine.runner.file_delay = source.choice((1, 4, 30))
    rates = source.choice(((0, 0), (0, 0), (0.1, 0), (0, 0.1)))
    engine.runner.failing_copies = {ticket for ticket in range(200) if source.random() < rates[0]}
    fail_steps(engine, {step for step in range(1000) if source.random() < rates[1]})
    beginnings = [random_prompt(source, 260) for _ in range(3)]
    requests, ended, aborts = {}, {}, {}

    def step() -> None:
        ended.update({output.request_id: output.outputs[0] for output in engine.step()[1]})
        for name in [name for name, steps in aborts.items() if steps == 0]:
            engine.abort(name)
        for name in aborts:
            aborts[name] -= 1

    for index in range(14):
        prompt = source.choice(beginnings)[: source.choice((130, 200, 260))] + random_prompt(
            source, source.randint(1, 9)
        )
        requests[f"r{index}"] = prompt, source.choice((-1, -1, 0, 1)), source.randint(1, 70)
        adapter, count = requests[f"r{index}"][1:]
        ask(engine, f"r{index}", prompt, count, None if adapter < 0 else f"adapter{adapter}")
        if source.random() < 0.2:
            aborts[f"r{index}"] = source.randint(0, 9)
        for _ in range(source.choice((0, 3, 1000))):
            if engine.has_work:
                step()
        if disk_pages and source.random() < 0.1:  # by another engine
            engine.runner.files.clear()
    while engine.has_work:
        step()
    assert ended.keys() | aborts.keys() == requests.keys()
    for name, (prompt, adapter, count) in requests.items():
        if name in ended and ended[name].finish_reason != "error":
            assert ended[name].token_ids == continuation(prompt, adapter, count, VOCABULARY)
    while engine.scheduler.is_loading:
        engine.take_loads_in()
    assert_idle(engine)


def fail_steps(engine: Engine, failing: set[int]) -> None:
    """Let these steps fail on the device; the engine recovers as the batcher does."""
    runner, scheduler = engine.runner, engine.scheduler
    submit, collect, commit = runner.submit, runner.collect, engine.commit

    def submit_or_fail(plan: StepPlan):
        if plan.step not in failing:
            return submit(plan)
        runner.fail(plan)
        return plan.step

    def commit_or_fail(result):
        if not isinstance(result, int):
            return commit(result)
        scheduler.fail_step(result)
        return []

    runner.submit = submit_or_fail
    runner.collect = lambda handle: handle if isinstance(handle, int) else collect(handle)
    engine.commit = commit_or_fail


def fill_device(engine: Engine, count: int = 4) -> None:
    """Other prompts until the pages of earlier ones have left the device."""
    for index in range(count):
        ask(engine, f"other{index}", prompt(200, 50 + index), 1)
        run(engine)


def test_a_prefix_that_has_left_the_device_is_not_computed_again():
    engine = make_engine(pages=10, budget=256, host_pages=40)
    ids = prompt(200)
    ask(engine, "first", ids, 5)
    run(engine)
    fill_device(engine)
    before = engine.runner.computed
    ask(engine, "again", [*ids, 1], 5)
    assert tokens(run(engine))["again"] == continuation([*ids, 1], -1, 5, VOCABULARY)
    assert engine.runner.computed - before == 201 - 3 * PAGE_SIZE + 4
    stats = engine.scheduler.stats()
    assert (stats.prefix_host_hits, stats.host_pages_loaded) == (3 * PAGE_SIZE, 3)
    assert stats.host_pages_saved >= 9 and stats.host_pages_used == stats.host_pages_saved
    assert_idle(engine)


def test_others_run_while_a_prefix_is_loaded():
    engine = make_engine(pages=10, budget=256, host_pages=40)
    engine.runner.copy_delay = 30
    ids = prompt(200)
    ask(engine, "first", ids, 1)
    run(engine)
    fill_device(engine)
    ask(engine, "again", [*ids, 1], 1)
    ask(engine, "new", prompt(70, 9), 10)
    finished = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step()[1]]
        if not finished:
            assert engine.scheduler.stats().waiting == 1 and engine.scheduler.has_work
    assert finished == ["new", "again"]


def test_requests_with_one_prefix_share_its_load():
    engine = make_engine(pages=12, budget=256, host_pages=40)
    ids = prompt(200)
    ask(engine, "first", ids, 1)
    run(engine)
    fill_device(engine)
    before = engine.runner.computed
    for name in "abc":
        ask(engine, name, [*ids, 1], 2)
    assert set(map(tuple, tokens(run(engine)).values())) == {tuple(continuation([*ids, 1], -1, 2, VOCABULARY))}
    assert engine.scheduler.stats().host_pages_loaded == 3
    assert engine.runner.computed - before == 3 * (201 - 3 * PAGE_SIZE + 1)


@pytest.mark.parametrize("hashes", [{}, {0: "x", 1: "x"}])
def test_adapters_share_pages_in_host_memory_only_with_equal_content(hashes):
    engine = make_engine(pages=10, budget=256, slots=2, adapters=2, hashes=hashes, host_pages=40)
    ids = prompt(200)
    ask(engine, "first", ids, 1, "adapter0")
    run(engine)
    fill_device(engine)
    ask(engine, "other", [*ids, 1], 1, "adapter1")
    engine.step()
    assert engine.scheduler.stats().host_pages_loaded == (3 if hashes else 0)


def test_a_failed_copy_empties_the_directory_and_the_prompt_is_computed():
    engine = make_engine(pages=10, budget=256, host_pages=40)
    ids = prompt(200)
    ask(engine, "first", ids, 1)
    run(engine)
    fill_device(engine)
    held = engine.scheduler.stats()
    engine.runner.failing_copies = {engine.scheduler.states.host._ticket + 1}
    ask(engine, "again", [*ids, 1], 1)
    before = engine.runner.computed
    assert tokens(run(engine)) == {"again": continuation([*ids, 1], -1, 1, VOCABULARY)}
    left = engine.scheduler.stats()
    assert left.host_pages_loaded - held.host_pages_loaded == 3 and left.host_pages_used < held.host_pages_used - 3
    assert engine.runner.computed - before == 201 and left.prefix_host_hits == 0


def test_pages_of_a_failed_step_are_not_read_from_host_memory():
    """They are saved before the failure is known."""
    engine = make_engine(pages=7, max_model_len=400, budget=256, overlap=True, host_pages=10)
    fail_steps(engine, {0})
    ask(engine, "first", prompt(200), 1)
    engine.step()
    engine.abort("first")
    ask(engine, "other", prompt(300, 9), 1)
    engine.step()
    assert engine.scheduler.stats().host_pages_saved >= 3
    run(engine)
    ask(engine, "again", prompt(200), 3)
    assert tokens(run(engine)) == {"again": continuation(prompt(200), -1, 3, VOCABULARY)}


def test_an_aborted_request_leaves_its_load_to_others():
    engine = make_engine(pages=10, budget=256, host_pages=40)
    ids = prompt(200)
    ask(engine, "first", ids, 1)
    run(engine)
    fill_device(engine)
    engine.runner.copy_delay = 5
    ask(engine, "again", [*ids, 1], 1)
    engine.step()
    (sequence,) = engine.scheduler.states.host._waiting
    assert sequence.status is Status.LOADING
    engine.abort("again")
    assert not engine.scheduler.has_work
    ask(engine, "later", [*ids, 1], 1)
    assert tokens(run(engine)) == {"later": continuation([*ids, 1], -1, 1, VOCABULARY)}
    assert engine.scheduler.stats().host_pages_loaded == 3
    assert_idle(engine)


def test_idle_pages_are_saved_before_they_are_evicted():
    """No step has to wait for the save of a page that it writes."""
    engine = make_engine(pages=40, budget=64, host_pages=40, max_num_seqs=2)
    saved: set[int] = set()
    copy_pages, submit = engine.runner.copy_pages, engine.runner.submit
    at_once: list[int] = []

    def count_saves(copies):
        copy_pages(copies)
        at_once[:] = [page for page, _ in copies.saves]

    def check(plan):
        written = set((plan.slot_mapping // PAGE_SIZE).tolist())
        saved.update(written.intersection(at_once))
        at_once.clear()
        return submit(plan)

    engine.runner.copy_pages, engine.runner.submit = count_saves, check
    for index in range(30):
        ask(engine, str(index), prompt(200, index), 3)
        run(engine)
    assert engine.scheduler.stats().host_pages_saved > 40 and not saved


def test_reset_forgets_host_memory_too():
    engine = make_engine(pages=10, budget=256, host_pages=40)
    ask(engine, "first", prompt(200), 1)
    run(engine)
    fill_device(engine)
    assert engine.scheduler.reset_prefix_cache() and engine.scheduler.stats().host_pages_used == 0
    ask(engine, "again", prompt(200), 1)
    before = engine.runner.computed
    run(engine)
    assert engine.runner.computed - before == 200
