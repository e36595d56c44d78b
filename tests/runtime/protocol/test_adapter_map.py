"""The map of adapters and its clock: the order of messages does not matter, later changes win, memory is bounded."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sidestream.runtime.protocol.adapter_map import (
    MAX_AHEAD_SECONDS,
    MAX_COUNTER,
    AdapterEntry,
    AdapterMap,
    HybridClock,
    Stamp,
    StampError,
)

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STAMPS = st.builds(Stamp, st.integers(0, 3), st.integers(0, 2), st.sampled_from("ab"))
ENTRIES = st.builds(
    AdapterEntry, st.sampled_from("xyz"), STAMPS, st.sampled_from([None, "/v1", "/v2"]), st.sampled_from(["", "c1"])
)


@QUICK
@given(st.lists(ENTRIES, max_size=12), st.randoms(use_true_random=False))
def test_maps_that_received_the_same_entries_are_equal(entries: list[AdapterEntry], source: random.Random) -> None:
    shuffled = entries + entries[:4]
    source.shuffle(shuffled)
    one, other = AdapterMap(entries), AdapterMap(shuffled)
    assert one.entries == other.entries
    for name, entry in one.entries.items():
        assert entry.stamp == max(each.stamp for each in entries if each.name == name)


@QUICK
@given(st.lists(st.one_of(st.floats(0, 100), STAMPS), max_size=20))
def test_a_clock_goes_on_whatever_the_physical_clock_does(events: list[float | Stamp]) -> None:
    now = [50.0]
    clock = HybridClock("me", lambda: now[0])
    seen = [Stamp()]
    for event in events:
        if isinstance(event, Stamp):
            clock.observe(event)
            seen.append(event)
        else:
            now[0] = event
            stamp = clock.tick()
            assert stamp > max(seen)
            seen.append(stamp)


def test_a_stamp_far_ahead_is_refused_and_moves_no_clock() -> None:
    clock = HybridClock("me", lambda: 1000.0)
    with pytest.raises(StampError, match="61 s ahead"):
        clock.observe(Stamp(1_061_000, 0, "x"))
    assert clock.tick().milliseconds == 1_000_000
    clock.observe(Stamp(1_000_000 + int(MAX_AHEAD_SECONDS * 1000), MAX_COUNTER, "x"))
    assert clock.tick() == Stamp(1_060_001, 0, "me"), "the counter does not overflow"


def test_clocks_that_were_set_back_together_accept_each_others_stamps() -> None:
    clock = HybridClock("me", lambda: 1000.0, last=Stamp(5_000_000, 3, "me"))
    assert clock.tick() == Stamp(5_000_000, 4, "me"), "later than the last one"
    clock.observe(Stamp(5_000_000, 9, "you"))
    assert clock.tick() == Stamp(5_000_000, 10, "me")
    with pytest.raises(StampError):
        clock.observe(Stamp(5_000_001, 0, "you"))


def test_tombstones_are_bounded_and_what_they_covered_stays_away() -> None:
    held = AdapterMap(max_tombstones=3)
    held.merge(AdapterEntry("kept", Stamp(1), "/kept", "c"))
    for number in range(10):
        held.merge(AdapterEntry(f"gone{number}", Stamp(100 + number)))
    assert sorted(held.entries) == ["gone7", "gone8", "gone9", "kept"]
    assert held.is_outdated("gone0", Stamp(99)) and not held.is_outdated("kept", Stamp(1))
    assert not held.merge(AdapterEntry("gone0", Stamp(99), "/old", "c")), "a late copy of what was unloaded"
    assert held.merge(AdapterEntry("gone0", Stamp(200), "/new", "c"))
    assert held.merge(AdapterEntry("kept", Stamp(2), "/kept", "d")), "the names that it has are not affected"
    assert held.is_unloaded("gone9") and held.loaded("gone9") is None and not held.is_unloaded("unknown")


@QUICK
@given(st.lists(ENTRIES, max_size=20), st.integers(1, 4))
def test_a_reader_of_changes_gets_the_map(entries: list[AdapterEntry], limit: int) -> None:
    source, copy, after = AdapterMap(), AdapterMap(), 0
    for entry in entries:
        source.merge(entry)
        found, after = source.changes(after, limit)
        assert len(found) <= limit
        for each in found:
            copy.merge(each)
    while after < source.sequence:
        found, after = source.changes(after, limit)
        for each in found:
            copy.merge(each)
    assert copy.entries == source.entries
    assert source.changes(after, limit) == ([], source.sequence)
    assert AdapterMap(source.changes(10**6, 99)[0]).entries == source.entries, "a number of an earlier map"


def test_an_undone_change_tells_what_it_had_replaced() -> None:
    """Also after it was undone again, and no more once its name is forgotten."""
    first, refused = AdapterEntry("a", Stamp(1, 0, "x"), "/1"), AdapterEntry("a", Stamp(2, 0, "y"), "/2")
    undone = AdapterEntry("a", refused.stamp.undo)
    changed = AdapterMap([first, refused])
    assert changed.former("a") == first
    for entry in (undone, AdapterEntry("a", undone.stamp.undo)):
        assert changed.merge(entry)
        assert entry.stamp.undone == refused.stamp and changed.former("a") == first
    later = AdapterEntry("a", Stamp(2, 1, "x"), "/3")
    assert undone.stamp < later.stamp and changed.merge(later)
    assert changed.former("a") == AdapterEntry("a", undone.stamp.undo)
    few = AdapterMap([first, undone], max_tombstones=0)
    assert few.former("a") is None and not few.entries
