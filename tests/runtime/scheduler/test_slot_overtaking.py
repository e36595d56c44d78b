"""With more adapters than slots, requests that come later do not overtake a request without bound."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidestream.runtime.scheduler.adapter_slots import MAX_OVERTAKING_LOADS
from support.engines import ask, assert_idle, make_engine, prompt, run

TOKENS = 4


def replace(engine, name, number):
    """Give a name new content, as the server does."""
    numbers = engine.scheduler.adapter_numbers
    old, numbers[name] = numbers[name], number
    engine.scheduler.forget_adapter(old)


def churn(replacements, owners, steps=700, names=6, clients=12):
    """Return the steps that each request waited: clients send one request after another while names are replaced."""
    source = random.Random(5)
    engine = make_engine(
        pages=200,
        slots=2,
        adapters=names,
        max_num_seqs=16,
        overlap=True,
        asynchronous=True,
        delay=lambda number: source.randrange(1, 6),
    )
    sent, waits, idle, number = {}, [], list(range(clients)), names
    for step in range(steps):
        for client in idle:
            request = f"{client}-{step}"
            adapter = f"adapter{source.randrange(names)}"
            ask(engine, request, prompt(8, step), TOKENS, adapter, owner=str(client % owners))
            sent[request] = step
        if source.random() < replacements:
            replace(engine, f"adapter{source.randrange(names)}", number)
            number += 1
        finished = [output.request_id for output in engine.step()[1]]
        waits += [step - sent.pop(request) for request in finished]
        idle = [int(request.split("-")[0]) for request in finished]
    return waits + [steps - since for since in sent.values()]


@pytest.mark.parametrize(("replacements", "owners"), [(0.0, 1), (0.3, 1), (0.3, 12), (1.0, 1)])
def test_no_small_request_waits_long_while_names_are_replaced(replacements, owners):
    waits = churn(replacements, owners)
    assert len(waits) > 100 and max(waits) < 120, sorted(waits)[-5:]


def test_a_request_keeps_its_place_while_its_name_is_replaced():
    engine = make_engine(pages=100, slots=1, adapters=2, asynchronous=True)
    ask(engine, "running", prompt(9), 30, "adapter0", owner="busy")
    ask(engine, "early", prompt(9, 1), TOKENS, "adapter1", owner="busy")
    order = []
    for number in range(2, 12):
        replace(engine, "adapter1", number)
        ask(engine, f"version {number}", prompt(9, number), TOKENS, "adapter1", owner=f"fresh {number}")
        order += [output.request_id for output in engine.step()[1]]
    order += run(engine)
    assert order.index("early") <= 1 + MAX_OVERTAKING_LOADS, order


def count_overtaking_loads(engine):
    """Return a list that gets, for each load, how many in a row were not for the oldest request without a slot."""
    slots, counts, start = engine.scheduler.states.slots, [0], engine.scheduler.states.slots.start_load

    def lacks_slot(sequence):
        held = slots.is_resident(sequence.number) or slots.is_loading(sequence.number)
        return sequence.status.value == "waiting" and sequence.number >= 0 and not held

    def start_load(number, committed, spared):
        waiting = [each.sequence for request in engine._requests.values() for each in request.completions]
        oldest = min(filter(lacks_slot, waiting), key=lambda sequence: sequence.order, default=None)
        slot = start(number, committed, spared)
        if slot is not None:
            counts.append(0 if oldest is None or oldest.number == number else counts[-1] + 1)
        return slot

    slots.start_load = start_load
    return counts


@settings(max_examples=15, deadline=None)
@given(
    slots=st.integers(1, 4),
    names=st.integers(2, 8),
    rows=st.integers(1, 8),
    overlap=st.booleans(),
    owners=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
)
def test_loads_for_later_requests_are_bounded(slots, names, rows, overlap, owners, seed):
    source = random.Random(seed)
    engine = make_engine(
        pages=60,
        slots=slots,
        adapters=names,
        max_num_seqs=rows,
        overlap=overlap,
        asynchronous=True,
        patience=source.choice((4, 16)),
        delay=lambda number: source.randrange(1, 5),
    )
    counts, number = count_overtaking_loads(engine), names
    for index in range(80):
        if source.random() < 0.6:
            adapter, tokens = f"adapter{source.randrange(names)}", source.choice((2, 5, 20))
            fields = {"owner": str(source.randrange(owners)), "priority": source.choice((0, 0, 1))}
            ask(engine, str(index), prompt(source.randrange(1, 12), index), tokens, adapter, **fields)
        if source.random() < 0.3:
            replace(engine, f"adapter{source.randrange(names)}", number)
            number += 1
        if source.random() < 0.05:
            engine.abort(str(source.randrange(index + 1)))
        engine.step()
    run(engine)
    assert max(counts) <= MAX_OVERTAKING_LOADS + slots - 1
    engine.plan()
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)
