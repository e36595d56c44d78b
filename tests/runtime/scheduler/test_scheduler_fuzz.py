"""Everything at once, at random: shared beginnings, adapters over few slots, few pages, priorities, deadlines,
aborts.
"""

import os
import random

import pytest
from support.engines import VOCABULARY, Clock, ask, assert_idle, make_engine, random_prompt
from support.fake_runner import continuation

FEW = 20
ROUNDS = int(os.environ.get("SIDESTREAM_FUZZ", "60"))


@pytest.mark.parametrize("seed", [*range(ROUNDS), 269355930])
def test_everything_at_once(seed, pytestconfig):
    if FEW <= seed < ROUNDS and not (pytestconfig.getoption("--exhaustive") or "SIDESTREAM_FUZZ" in os.environ):
        pytest.skip(f"{FEW} seeds; run with --exhaustive")
    source = random.Random(seed)
    clock, adapters, asynchronous = Clock(), source.randrange(1, 10), source.random() < 0.7
    loading = {"delay": lambda number: source.randrange(1, 8)} if asynchronous else {}
    engine = make_engine(
        source.randrange(8, 40),
        450,
        source.randrange(1, 7),
        source.choice([8, 40, 200]),
        source.randrange(1, 5),
        adapters,
        source.random() < 0.5,
        asynchronous=asynchronous,
        patience=source.choice([1, 4, 9, 30]),
        clock=clock,
        **loading,
    )
    beginnings = [random_prompt(source, 260) for _ in range(2)]
    wanted, outputs, count, steps = {}, {}, source.randrange(5, 40), 0
    while len(wanted) < count or engine.has_work:
        if len(wanted) < count and source.random() < 0.4:
            ids = source.choice(beginnings)[: source.choice((0, 70, 130, 200))] + random_prompt(
                source, source.randrange(1, 60)
            )
            name, adapter, length = str(len(wanted)), source.randrange(-1, adapters), source.randrange(1, 60)
            ask(
                engine,
                name,
                ids,
                length,
                None if adapter < 0 else f"adapter{adapter}",
                priority=source.choice((0, 0, 0, -1, 2)),
                timeout=source.choice((None, None, None, source.random() * 30)),
            )
            wanted[name] = continuation(ids, adapter, length, VOCABULARY)
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()[1]}
        clock.now += 0.1
        if wanted and source.random() < 0.02:
            name = source.choice(list(wanted))
            engine.abort(name)
            outputs.setdefault(name, None)
        steps += 1
        assert steps < 30000, "it does not come to an end"
    assert outputs.keys() == wanted.keys()
    for name, output in outputs.items():
        if output is not None:
            assert output.token_ids == (
                wanted[name][: len(output.token_ids)] if output.finish_reason == "timeout" else wanted[name]
            )
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)
