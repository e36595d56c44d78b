"""Copies of KV pages: content and order, on a CPU and on a GPU, where steps run meanwhile."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.scheduler.step_plan import PageCopies
from sidestream.runtime.worker.transfer.page_copier import PageCopier, _prepare, stacked_specs, unstacked
from support.sampling_plans import plan, sampling

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGES, PLACES, LAYERS = 40, 12, 5
CACHES = {
    f"{kind}_{layer}": spec
    for layer in range(LAYERS)
    for kind, spec in (
        ("kv_caches", ((PAGES, 2, 2, 64, 32), torch.int8)),
        ("kv_scales", ((PAGES, 2, 2, 64), torch.float32)),
    )
}


def make(device: str) -> tuple[dict[str, torch.Tensor], PageCopier]:
    """Caches of random values, and their copier."""
    stacks = {
        name: torch.randint(-99, 99, shape, device=device).to(dtype)
        for name, (shape, dtype) in stacked_specs(CACHES).items()
    }
    return unstacked(CACHES, stacks), PageCopier(list(stacks.values()), PLACES, torch.device(device))


def finished(copier: PageCopier, count: int) -> list[tuple[int, str | None]]:
    found: list[tuple[int, str | None]] = []
    while len(found) < count:
        found += copier.finished(1.0)
    return sorted(found)


def test_layers_of_one_kind_are_one_tensor() -> None:
    stacks = stacked_specs(CACHES)
    assert {shape for shape, _ in stacks.values()} == {(LAYERS, PAGES, 2, 2, 64, 32), (LAYERS, PAGES, 2, 2, 64)}
    caches = unstacked(CACHES, {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in stacks.items()})
    assert list(caches) == list(CACHES)
    assert all((tuple(caches[name].shape), caches[name].dtype) == spec for name, spec in CACHES.items())
    assert len({cache.data_ptr() for cache in caches.values()}) == 2 * LAYERS


@pytest.mark.parametrize("device", DEVICES)
def test_pages_return_as_they_were(device: str) -> None:
    caches, copier = make(device)
    before = {name: cache.clone() for name, cache in caches.items()}
    copier.start(PageCopies(1, [(3, 0), (7, 11), (39, 5)], []))
    copier.start(PageCopies(2, [(8, 4), (20, 6)], [(11, 20), (5, 3), (4, 0)]))
    copier.start(PageCopies(3, [], [(6, 30)]))
    assert finished(copier, 3) == [(1, None), (2, None), (3, None)]
    changed = {20: 7, 3: 39, 0: 8, 30: 20}
    for name, cache in caches.items():
        for page in range(PAGES):
            assert torch.equal(cache[page], before[name][changed.get(page, page)]), (name, page)


@pytest.mark.parametrize("to_host", [True, False])
def test_a_copy_of_the_driver_has_the_page_s_row_of_every_layer(to_host: bool) -> None:
    """The arithmetic of cuMemcpy3D on tensors of this process."""
    stack = torch.randint(0, 99, (LAYERS, PAGES, 48), dtype=torch.uint8)
    host = torch.randint(100, 200, (PLACES, LAYERS, 48), dtype=torch.uint8)
    expected = (stack if to_host else host).clone()
    kind = _prepare(host, stack, to_host)
    kind.device.y, kind.memory.host = 7, kind.start + 4 * kind.stride
    copy, sides = kind.copy, (kind.copy.source, kind.copy.target)
    assert ctypes.sizeof(copy) == 200 and [side.memory_type for side in sides] == ([2, 1] if to_host else [1, 2])
    for layer in range(copy.depth):
        source, target = ((side.host or side.device) + (layer * side.height + side.y) * side.pitch for side in sides)
        ctypes.memmove(target, source, copy.width_in_bytes)
    assert torch.equal(host[4], stack[:, 7])
    assert torch.equal(expected, stack if to_host else host)


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_copy_is_reported(device: str) -> None:
    _, copier = make(device)
    copier.start(PageCopies(1, [(3, PLACES)], []))
    copier.start(PageCopies(2, [(3, 1)], []))
    (first, problem), second = finished(copier, 2)
    assert first == 1 and problem and second == (2, None)


def writing(pages: list[int]) -> Any:
    """A plan that writes these pages, a token each."""
    count = len(pages)
    found = plan(sampling(count))
    fields = {
        "positions": np.zeros(count, np.int32),
        "block_table": np.array(pages, np.int32)[:, None],
        "context_lens": np.ones(count, np.int32),
        "query_start": np.arange(count + 1, dtype=np.int32),
        "slot_mapping": np.array(pages, np.int32) * PAGE_SIZE,
    }
    return type(found)(**{**vars(found), **fields})


@pytest.mark.gpu
@pytest.mark.parametrize("writes", [[3], [3, 9], [9]])
def test_steps_wait_for_the_copies_of_pages_that_they_write_only(writes: list[int]) -> None:
    """A hundred saves are enqueued behind the steps; the step overwrites the last page at once"""
    stacks = [torch.zeros(32, 200, 1 << 17, dtype=torch.int8, device="cuda")]
    copier = PageCopier(stacks, 150, torch.device("cuda"))
    stacks[0][:, 3] = 5
    copier.start(PageCopies(1, [*((page, page - 50) for page in range(51, 150)), (3, 0)], []))
    waits = copier._in_flight[0].after_saves
    copier.before_step(writing(writes))
    marker = torch.cuda.Event()
    stacks[0][:, writes] = 7
    marker.record()
    marker.synchronize()
    assert waits.query() or 3 not in writes
    assert finished(copier, 1) == [(1, None)]
    copier.start(PageCopies(2, [], [(0, 100)]))
    finished(copier, 1)
    assert (stacks[0][:, 100] == 5).all()
    assert (stacks[0][:, writes] == 7).all()


@pytest.mark.gpu
def test_a_save_does_not_overwrite_a_host_page_that_is_being_loaded() -> None:
    stacks = [torch.zeros(32, 300, 1 << 17, dtype=torch.int8, device="cuda")]
    copier = PageCopier(stacks, 100, torch.device("cuda"))
    stacks[0][:, 1], stacks[0][:, 2] = 1, 2
    copier.start(PageCopies(1, [(1, 99)], []))
    copier.start(PageCopies(2, [], [(place, 100 + place) for place in range(100)]))
    copier.start(PageCopies(3, [(2, 99)], []))
    copier.start(PageCopies(4, [], [(99, 250)]))
    assert finished(copier, 4) == [(ticket, None) for ticket in (1, 2, 3, 4)]
    assert (stacks[0][:, 199] == 1).all() and (stacks[0][:, 250] == 2).all()
