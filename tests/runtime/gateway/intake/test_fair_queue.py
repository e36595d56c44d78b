"""Owners take turns, and a turn that is left or cancelled goes to the next."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.gateway.intake.fair_queue import FairQueue


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_no_owner_gets_a_second_turn_before_all_that_wait(owners: list[int], slots: int, per_owner: int) -> None:
    queue, granted, active, most = FairQueue(slots, per_owner), list[str](), list[str](), list[str]()
    waits: list[set[str]] = []  # at each grant, the owners whose turn could have been granted

    async def work(owner: str) -> None:
        pending.append(owner)
        async with queue.turn(owner):
            pending.remove(owner)
            waits.append({each for each in pending if active.count(each) < per_owner})
            granted.append(owner)
            active.append(owner)
            assert len(active) <= slots and active.count(owner) <= per_owner
            most[:] = max(most, list(active), key=len)
            await asyncio.sleep(0)
            active.remove(owner)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for owner in owners:
                group.create_task(work(str(owner)))

    pending: list[str] = []
    asyncio.run(run())
    assert len(granted) == len(owners)
    assert len(most) == min(slots, sum(min(per_owner, owners.count(owner)) for owner in set(owners)))
    if slots == 1:
        for first, owner in enumerate(granted):
            later = next((index for index in range(first + 1, len(granted)) if granted[index] == owner), None)
            if later is not None:
                assert waits[first] - {owner} <= set(granted[first + 1 : later]), "those that waited come between"


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_cancelled_request_leaves_its_turn_to_the_next(granted_first: bool) -> None:
    async def run() -> None:
        queue = FairQueue(1, 1)
        await queue.start("a")
        cancelled = asyncio.create_task(queue.start("b"))
        following = asyncio.create_task(queue.start("c"))
        await asyncio.sleep(0)
        if granted_first:
            queue.end("a")
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        if not granted_first:
            queue.end("a")
        await asyncio.wait_for(following, 60)
        queue.end("c")
        assert queue.try_start("b")

    asyncio.run(run())


def test_a_turn_that_ends_before_a_cancelled_request_leaves_goes_to_the_next() -> None:
    async def run() -> None:
        queue = FairQueue(1, 1)
        await queue.start("a")
        cancelled = [asyncio.create_task(queue.start(owner)) for owner in ("b", "b", "c")]
        following = asyncio.create_task(queue.start("b"))
        await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        queue.end("a")  # in the iteration in which they are cancelled
        await asyncio.wait_for(following, 60)
        assert all(
            isinstance(each, asyncio.CancelledError)
            for each in await asyncio.gather(*cancelled, return_exceptions=True)
        )
        queue.end("b")
        assert queue.try_start("c")

    asyncio.run(run())
