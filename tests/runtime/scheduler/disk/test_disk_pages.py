"""KV pages in files: the orders of the scheduler. Neither the disk nor its failures delay or change an answer."""

from pathlib import Path

import pytest
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.engine.engine import Engine
from sidestream.runtime.scheduler.disk.disk_pages import PAGE_DAMAGED, SUFFIX
from sidestream.runtime.scheduler.sequence import Status
from support.engines import VOCABULARY, ask, assert_idle, make_engine, prompt, run, tokens
from support.fake_runner import continuation

IDS = prompt(200)


def engine_of(folder: Path, files: dict | None = None, **options) -> Engine:
    """An engine of ten pages, and of twelve in host memory; `files`: those of an earlier engine."""
    for key in files or ():
        (folder / f"f-{key.hex()}{SUFFIX}").touch()
    sizes = {"pages": 10, "budget": 256, "host_pages": 12, "disk_pages": 100, "disk_prefix": folder / "f-"}
    engine = make_engine(**(sizes | options))
    engine.runner.files = {} if files is None else files
    engine.runner.file_delay = 1
    return engine


def fill(engine: Engine, count: int = 8) -> None:
    """Other prompts, until the pages of earlier ones have left the device and host memory; all are written."""
    for index in range(count):
        ask(engine, f"other{index}", prompt(200, 50 + index), 8)
        run(engine)


def write_first(engine: Engine, adapter: str | None = None) -> None:
    """The prompt IDS, until its pages have only files."""
    ask(engine, "first", IDS, 1, adapter)
    run(engine)
    fill(engine)
    assert engine.scheduler.stats().disk_pages_written >= 20
    assert not any(key in engine.scheduler.states.host._pages for key in list(engine.runner.files)[:3])


def test_a_prefix_that_has_left_host_memory_is_not_computed_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    write_first(engine)
    before = engine.runner.computed
    ask(engine, "again", [*IDS, 1], 5)
    assert tokens(run(engine))["again"] == continuation([*IDS, 1], -1, 5, VOCABULARY)
    assert engine.runner.computed - before == 201 - 3 * PAGE_SIZE + 4
    stats = engine.scheduler.stats()
    assert (stats.disk_pages_read, stats.prefix_host_hits, stats.disk_failures) == (3, 3 * PAGE_SIZE, 0)
    assert_idle(engine)


def test_a_later_engine_finds_the_files(tmp_path: Path) -> None:
    earlier = engine_of(tmp_path)
    write_first(earlier)
    for name in ("notes.page", f"g-{'0' * 64}{SUFFIX}", f"f-{'x' * 64}{SUFFIX}"):
        (tmp_path / name).touch()
    engine = engine_of(tmp_path, earlier.runner.files)
    assert engine.scheduler.stats().disk_pages_used == len(earlier.runner.files)
    ask(engine, "again", [*IDS, 1], 5)
    assert tokens(run(engine))["again"] == continuation([*IDS, 1], -1, 5, VOCABULARY)
    assert engine.runner.computed == 201 - 3 * PAGE_SIZE + 4


@pytest.mark.parametrize("hashes", [None, {0: "x", 1: "y"}])
def test_adapters_share_files_with_later_engines_only_by_content(tmp_path: Path, hashes: dict | None) -> None:
    """Numbers of adapters without a content hash are those of another adapter after a restart."""
    adapters = {"slots": 2, "adapters": 2, "hashes": hashes}
    earlier = engine_of(tmp_path, **adapters)
    write_first(earlier, "adapter0")
    for adapter, pages in (("adapter1", 0), ("adapter0", 3 if hashes else 0)):
        engine = engine_of(tmp_path, earlier.runner.files, **adapters)
        ask(engine, "again", [*IDS, 1], 1, adapter)
        run(engine)
        assert engine.scheduler.stats().disk_pages_read == pages


def test_others_run_while_a_prefix_is_read(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    write_first(engine)
    engine.runner.file_delay = 40
    ask(engine, "again", [*IDS, 1], 1)
    ask(engine, "same", [*IDS, 2], 1)
    ask(engine, "new", prompt(70, 9), 10)
    engine.step()
    assert [each.status for each in engine.scheduler.states.host._waiting] == [Status.LOADING] * 2
    finished = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step()[1]]
    assert finished[0] == "new" and engine.scheduler.stats().disk_pages_read == 3


def test_a_slow_disk_delays_no_eviction(tmp_path: Path) -> None:
    """Nothing is written in time: pages leave host memory without a file."""
    engine = engine_of(tmp_path)
    engine.runner.file_delay = 1 << 30
    for index in range(12):
        ask(engine, str(index), prompt(200, index), 3)
        assert tokens(run(engine))[str(index)] == continuation(prompt(200, index), -1, 3, VOCABULARY)
    stats = engine.scheduler.stats()
    assert stats.host_pages_saved >= 30 and stats.disk_pages_written == 0 and stats.disk_pages_dropped >= 15
    assert len(engine.scheduler.states.host._orders) <= 3


@pytest.mark.parametrize(("problem", "counted"), [("the disk fails", (0, 1)), (PAGE_DAMAGED, (1, 0)), (None, (0, 0))])
def test_a_page_that_cannot_be_read_is_computed(tmp_path: Path, problem: str | None, counted: tuple[int, int]) -> None:
    """None: another engine has deleted the file. The pages before it are used."""
    engine = engine_of(tmp_path)
    write_first(engine)
    lost = list(engine.runner.files)[1]
    end_order = engine.runner._end_order
    if problem is None:
        del engine.runner.files[lost]
    else:
        engine.runner._end_order = lambda ticket, order: problem if order.key == lost else end_order(ticket, order)
    before = engine.runner.computed
    ask(engine, "again", [*IDS, 1], 5)
    assert tokens(run(engine))["again"] == continuation([*IDS, 1], -1, 5, VOCABULARY)
    assert engine.runner.computed - before == 201 - PAGE_SIZE + 4
    stats = engine.scheduler.stats()
    assert (stats.disk_pages_damaged, stats.disk_failures) == counted and stats.disk_pages_read == 2
    assert_idle(engine)


def test_pages_of_a_step_that_may_fail_are_not_written(tmp_path: Path) -> None:
    """They are saved to host memory before the step's result is known."""
    engine = engine_of(tmp_path, pages=7, max_model_len=400, overlap=True)
    ask(engine, "first", prompt(200), 1)
    engine.step()
    engine.abort("first")
    ask(engine, "other", prompt(300, 9), 1)
    engine.scheduler.schedule()
    copies = engine.scheduler.take_copies()
    assert any(each.saves for each in copies)
    for each in copies:
        engine.scheduler.copies_done(each.ticket)
    assert not any(each.file for each in engine.scheduler.take_copies())


def test_reset_deletes_the_files(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    write_first(engine)
    assert engine.scheduler.reset_prefix_cache() and engine.scheduler.stats().disk_pages_used == 0
    engine.start_copies()
    engine.take_loads_in()
    assert not engine.runner.files
    ask(engine, "again", IDS, 1)
    before = engine.runner.computed
    run(engine)
    assert engine.runner.computed - before == 200


def test_weights_that_may_change_end_the_use_of_files(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    write_first(engine)
    kept = dict(engine.runner.files)
    engine.forget_device()
    fill(engine)
    ask(engine, "again", [*IDS, 1], 5)
    assert tokens(run(engine))["again"] == continuation([*IDS, 1], -1, 5, VOCABULARY)
    stats = engine.scheduler.stats()
    assert engine.runner.files == kept and (stats.disk_pages_used, stats.disk_pages_read) == (0, 0)


def test_pages_that_were_being_read_at_a_reset_are_not_used(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    write_first(engine)
    engine.runner.file_delay = 5
    ask(engine, "again", [*IDS, 1], 1)
    engine.step()
    before = engine.runner.computed
    assert engine.scheduler.states.num_loading == 1 and engine.scheduler.reset_prefix_cache()
    run(engine)
    stats = engine.scheduler.stats()
    assert engine.runner.computed - before == 201 and stats.disk_pages_read == 0
    assert_idle(engine)
