"""Random updates, switches, pinned requests and preemptions: each token is the one of the version that an answer names.

The fake model's next token depends on all tokens and on the adapter of the last one.
"""

import random

from support.engines import ask, assert_idle, make_engine, random_prompt
from support.fake_runner import next_token

NAME = "adapter0"
SEEDS = 25


def continued(prompt, numbers, vocabulary):
    """The tokens after a prompt under the adapter number of each."""
    tokens = list(prompt)
    for number in numbers:
        tokens.append(next_token(tokens, number, vocabulary))
    return tokens[len(prompt) :]


def check(seed):
    source = random.Random(seed)
    engine = make_engine(
        pages=source.choice((6, 40)),
        max_model_len=320,
        slots=source.choice((1, 2, 3)),
        adapters=1,
        asynchronous=True,
        overlap=source.random() < 0.7,
        max_num_seqs=source.choice((2, 4)),
        budget=source.choice((16, 64)),
        patience=16,
    )
    runner, names = engine.runner, engine.scheduler.adapter_numbers
    mixed = set()

    def say(seen, adapter, failed=False):
        tokens = [token for token, _, _ in seen]
        if {other for _, _, other in seen} != {adapter}:
            mixed.add(tuple(tokens))
        return next_token(tokens, adapter, runner.vocabulary)

    runner.say = say
    engine.switches.add(NAME, 0, 1, switch=False)
    prompts, counts, submitted, pinned, outputs = {}, {}, {}, set(), {}
    while engine.has_work or len(prompts) < 12:
        if len(prompts) < 12 and source.random() < 0.3:
            request = f"r{len(prompts)}"
            shared = list(range(70)) if source.random() < 0.4 else []
            prompts[request] = shared + random_prompt(source, source.randrange(1, 90))
            counts[request], submitted[request] = source.randrange(1, 40), names[NAME]
            name = NAME if source.random() < 0.7 else f"{NAME}@{names[NAME] + 1}"
            if name != NAME:
                names[name] = names[NAME]
                pinned.add(request)
            ask(engine, request, prompts[request], counts[request], name)
        if source.random() < 0.06:
            names[NAME] += 1
            engine.switches.add(NAME, names[NAME], names[NAME] + 1, switch=source.random() < 0.7)
            if names[NAME] > 2 and source.random() < 0.5:
                engine.scheduler.forget_adapter(names[NAME] - 2)
        for output in engine.step()[1]:
            outputs[output.request_id] = output

    switched = 0
    for request, prompt in prompts.items():
        completion, count = outputs[request].outputs[0], counts[request]
        assert completion.finish_reason == "length", completion.stop_reason
        found, versions = completion.token_ids, completion.versions
        if versions:
            assert request not in pinned and versions[0][0] == 0
            assert versions == sorted(set(versions)) and versions[-1][0] < count + 1
            starts = [*(first for first, _ in versions[1:]), count]
            numbers = [
                version - 1 for (first, version), end in zip(versions, starts, strict=True) for _ in range(first, end)
            ]
            switched += 1
        else:
            possible = [submitted[request]] if request in pinned else range(submitted[request], names[NAME] + 1)
            numbers = next(
                [number] * count
                for number in [*possible, -1]
                if number < 0 or continued(prompt, [number] * count, runner.vocabulary) == found
            )
            whole = tuple(prompt + found)
            assert not any(whole[: len(each)] == each for each in mixed if len(each) >= len(prompt)), "keys of another"
        assert found == continued(prompt, numbers[:count], runner.vocabulary)
    assert_idle(engine)
    return switched, engine.scheduler.stats().preemptions


def test_tokens_are_those_of_the_versions_of_an_answer(pytestconfig):
    count = 50 * SEEDS if pytestconfig.getoption("--exhaustive") else SEEDS
    results = [check(seed) for seed in range(count)]
    assert sum(switched for switched, _ in results) > SEEDS and sum(preempted for _, preempted in results) > 2


def test_a_slot_that_has_another_adapter_by_now_is_not_loaded():
    engine = make_engine(slots=1, adapters=2, asynchronous=True)
    ask(engine, "a", [1, 2, 3], 4, "adapter1")
    while not engine.scheduler.states.slots.is_resident(1):
        engine.step()
    engine.scheduler.load_with_plan(0, 0)
    while engine.has_work:
        engine.step()
    assert not any(len(plan.slot_loads) for plan in engine.runner.plans)
