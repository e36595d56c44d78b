"""Steps that fail because of one request, and faults of the planning itself: the request ends, and nothing else is
lost.
"""

import random

import pytest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.scheduler.logit_edits import LogitEdits
from support.engines import VOCABULARY, Engine, Request, ask, assert_idle, make_engine, random_prompt, run, tokens
from support.fake_runner import continuation

POISON = VOCABULARY - 1


def drive(engine: Engine, ahead: int, limit: int = 3000) -> tuple[dict, int]:
    """To the end, with `ahead` steps in flight; steps that hold the poison thrice in a row fail. (outputs, failed
    steps).
    """
    runner, outputs, flying, failures = engine.runner, {}, [], 0
    for _ in range(limit):
        engine.take_loads_in()
        plan = engine.plan()
        if plan is not None:
            ids = plan.input_ids.tolist()
            bad = any(ids[place : place + 3] == [POISON] * 3 for place in range(len(ids)))
            flying.append((plan.step, runner.fail(plan) if bad else runner.submit(plan)))
        if flying and (plan is None or len(flying) > ahead):
            step, result = flying.pop(0)
            if result is None:
                engine.scheduler.fail_step(step)
                failures += 1
            else:
                outputs |= {
                    output.request_id: output.outputs[0]
                    for output in engine.deliver(engine.commit(runner.collect(result)), result)[1]
                }
        outputs |= {output.request_id: output.outputs[0] for output in engine.take_ended()[1]}
        if not flying and plan is None and not engine.scheduler.has_work:
            return outputs, failures
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("seed", range(40))
def test_the_culprit_is_found_and_nobody_else_is_hurt(seed):
    source = random.Random(seed)
    slots, ahead = source.randrange(3), source.randrange(2)
    engine = make_engine(
        pages=source.choice((12, 40, 90)),
        max_model_len=450,
        max_num_seqs=source.randrange(1, 12),
        budget=source.choice((16, 70, 300)),
        slots=slots,
        adapters=3 if slots else 0,
        overlap=bool(ahead),
        asynchronous=bool(slots) and source.random() < 0.5,
    )
    beginning = random_prompt(source, 200)
    prompts, culprits, adapters = {}, set(), {}
    for index in range(source.randrange(2, 24)):
        name, ids = (
            str(index),
            beginning[: source.choice((0, 0, 70, 150))]
            + [source.randrange(POISON) for _ in range(source.randrange(1, 60))],
        )
        if source.random() < 0.15:
            ids += [POISON] * 3 + [source.randrange(POISON) for _ in range(source.randrange(40))]
            culprits.add(name)
        adapters[name] = source.randrange(-1, 3) if slots else -1
        prompts[name] = ids
        ask(engine, name, ids, source.randrange(1, 40), None if adapters[name] < 0 else f"adapter{adapters[name]}")
    outputs, failures = drive(engine, ahead)
    assert outputs.keys() == prompts.keys()
    for name, output in outputs.items():
        expected = continuation(prompts[name], adapters[name], len(output.token_ids), VOCABULARY)
        if [POISON] * 3 in [expected[place : place + 3] for place in range(len(expected))]:
            continue  # the model itself may say it
        assert output.token_ids == expected
        if name not in culprits:
            assert output.finish_reason == "length", "it was alone or not at fault"
    if engine.scheduler.limits.max_num_batched_tokens >= 70 and culprits:
        assert failures and all(outputs[name].finish_reason == "error" for name in culprits if len(prompts[name]) < 60)
    while engine.scheduler.states.slots.num_loading:
        engine.take_loads_in()
    assert_idle(engine)


def test_one_of_many_is_found_in_few_steps():
    engine = make_engine(pages=200, max_num_seqs=64, budget=300)
    for index in range(63):
        ask(engine, str(index), [index, 1], 30)
    for _ in range(4):
        engine.step()
    ask(engine, "bad", [POISON] * 3, 30)
    ask(engine, "new", [5, 5], 30)
    before = len(engine.runner.plans)
    outputs, failures = drive(engine, 1)
    assert outputs.pop("bad").finish_reason == "error" and failures <= 3, "newcomers are tried first"
    assert {output.finish_reason for output in outputs.values()} == {"length"} and len(outputs) == 64
    assert len(engine.runner.plans) - before < 45
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("place", ["edits", "match", "publish"])
def test_a_fault_of_the_planning_ends_the_request_that_it_is_about(monkeypatch, overlap, place):
    engine = make_engine(overlap=overlap, max_num_seqs=4, slots=2, adapters=2)
    beginning = [7] * 130

    def broken(original, pick):
        def replacement(*arguments):
            if pick(arguments).request_id == "bad":
                raise KeyError("broken")
            return original(*arguments)

        return replacement

    if place == "edits":
        monkeypatch.setattr(LogitEdits, "add", broken(LogitEdits.add, lambda arguments: arguments[1]))
    else:
        cache = engine.scheduler.states.prefix_cache
        monkeypatch.setattr(cache, place, broken(getattr(cache, place), lambda arguments: arguments[0]))
    for index in range(3):
        ask(engine, str(index), [*beginning, index], 20, f"adapter{index % 2}")
    engine.add(
        Request(
            "bad", None, [*beginning, 3], SamplingParams(temperature=0, max_tokens=9, logit_bias={5: 1.0}), "adapter0"
        )
    )
    ask(engine, "late", [*beginning, 9], 20, "adapter0")
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    del outputs["bad"]
    numbers = {"0": 0, "1": 1, "2": 0, "late": 0}
    assert tokens(outputs) == {
        name: continuation([*beginning, 9 if name == "late" else int(name)], numbers[name], 20, VOCABULARY)
        for name in numbers
    }
    assert_idle(engine)


def test_a_fault_that_nobody_can_be_blamed_for_is_raised(monkeypatch):
    engine = make_engine()
    ask(engine, "a", [1], 3)
    monkeypatch.setattr(engine.scheduler, "expire", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()


@pytest.mark.parametrize("seed", range(12))
def test_requests_move_to_another_engine_and_suspects_run_alone(seed):
    """What an engine has begun goes on in the next one; nobody shares a step with one that is suspected."""
    source = random.Random(seed)
    former, later = (make_engine(slots=2, adapters=3, overlap=bool(seed % 2)) for _ in range(2))
    asked = {}
    for index in range(8):
        name, ids, count = f"r{index}", random_prompt(source, source.randrange(1, 90)), source.randrange(2, 60)
        number = source.randrange(-1, 3)
        asked[name] = continuation(ids, number, count, VOCABULARY)
        ask(former, name, ids, count, None if number < 0 else f"adapter{number}", stream=bool(index % 3))
    outputs = {}
    for _ in range(source.randrange(1, 30)):
        outputs |= {output.request_id: output for output in former.step()[1]}
    moved = former.unfinished()
    suspects = {request.request_id for request, _ in moved if source.random() < 0.5}
    for request, stream in moved:
        later.add(request, stream, request.request_id in suspects)
    assert later.scheduler.batch_builder.suspects.request_ids == suspects
    plans, submit = [], later.runner.submit

    def watched(plan):
        ids = {sequence.request_id for sequence in later.scheduler.issued(plan.step)}
        plans.append((later.scheduler.batch_builder.suspects.request_ids | ids & suspects, ids))
        return submit(plan)

    later.runner.submit = watched
    outputs |= run(later)
    assert tokens(outputs) == asked and len(outputs) == 8
    tried = [ids for suspected, ids in plans[: len(suspects)] if suspected]
    assert [len(ids) for ids in tried] == [1] * len(suspects) and set().union(*tried) <= suspects
    assert_idle(later)


def test_a_suspect_whose_adapter_cannot_be_loaded_ends():
    engine = make_engine(slots=1, adapters=1, asynchronous=True, failing={0: "no such file"})
    engine.add(Request("r", None, [1, 2], SamplingParams(max_tokens=3, temperature=0), "adapter0"), alone=True)
    output = run(engine)["r"].outputs[0]
    assert output.finish_reason == "error" and not engine.scheduler.has_work
