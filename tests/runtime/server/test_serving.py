"""A server's answers, over a model that is a hash: batcher, GPU process and supervisor are the real ones."""

import json
import os
import signal

import pytest
from sidestream.runtime.protocol.framing import encode
from sidestream.runtime.protocol.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Chunks,
    Continued,
    Done,
    GetChatTemplates,
    GetStats,
    ListAdapters,
    LoadAdapter,
    Sampling,
    Submit,
    UnloadAdapter,
)
from support.fake_runner import continuation, next_token
from support.serving import GREEDY, GUARD, Answer, Server, serve_fake

VOCABULARY = 251


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_fake(tmp_path_factory.mktemp("serving"), adapters=4, step_seconds=0.001) as server:
        yield server


@pytest.fixture
def wire(server: Server):
    with server.connect() as wire:
        yield wire


def sampling(**fields) -> Sampling:
    return Sampling(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **fields})


def letters(text: str) -> list[int]:
    return list(text.encode())


def decoded(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_streams_of_mixed_adapters_are_right(wire):
    prompts = {f"r{index}": [index, 2, 3 + index] * (1 + 9 * (index % 4)) for index in range(24)}
    adapters = {name: (None, "a0", "a1", "a2", "a3")[index % 5] for index, name in enumerate(prompts)}
    for name, prompt in prompts.items():
        wire.submit(name, sampling(max_tokens=20), prompt_token_ids=prompt, adapter=adapters[name])
    for name, prompt in prompts.items():
        answer = wire.answer(name)
        number = -1 if adapters[name] is None else int(adapters[name][1:])
        assert answer.token_ids[0] == continuation(prompt, number, 20, VOCABULARY)
        assert answer.reasons == {0: "length"} and answer.accepted == len(prompt)
        assert answer.usage.output_tokens == 20 and answer.usage.prompt_tokens == len(prompt)
        assert 0 < answer.usage.first_token_seconds <= answer.usage.total_seconds


def test_text_comes_in_whole_characters(wire):
    wire.submit("t", sampling(max_tokens=60), prompt="héllo")
    answer = wire.answer("t")
    expected = continuation(letters("héllo"), -1, 60, VOCABULARY)
    assert answer.token_ids[0] == expected and answer.texts[0] == decoded(expected)
    assert len(answer.chunks) > 10, "a stream"


@pytest.mark.parametrize("stop", [[], ["\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd"]])
def test_an_answer_goes_on_where_another_engine_stopped(wire, stop):
    """Its text is mostly broken bytes, and continues within them."""
    params = sampling(n=2, max_tokens=40, stop=stop)
    wire.submit("whole", params, prompt="héllo", adapter="a1")
    whole = wire.answer("whole")
    for cut in range(1, len(whole.chunks), 9):
        seen = {0: Answer(), 1: Answer()}
        for chunk in whole.chunks[:cut]:
            seen[chunk.index].take(chunk)
        continues = [
            Continued(each.token_ids.get(index, []), len(each.texts.get(index, "")), index in each.reasons)
            for index, each in seen.items()
        ]
        name = f"rest{cut}"
        rest = wire.answers[name] = Answer(
            token_ids={index: list(each.token_ids) for index, each in enumerate(continues)}
        )
        wire.send(Submit(name, prompt="héllo", adapter="a1", sampling=params, continues=continues))
        wire.answer(name)
        assert rest.token_ids == whole.token_ids, "`first` counts what was there before"
        for index in range(2):
            assert seen[index].texts.get(index, "") + rest.texts.get(index, "") == whole.texts[index]
            assert (seen[index].reasons | rest.reasons)[index] == whole.reasons[index]
        assert rest.usage.output_tokens == whole.usage.output_tokens
        assert rest.usage.prompt_tokens == whole.usage.prompt_tokens


def test_what_cannot_go_on_is_told_so(wire):
    wire.send(Submit("a", prompt="x", sampling=sampling(n=2), continues=[Continued([1])]))
    wire.send(Submit("b", prompt="x", sampling=sampling(), continues=[Continued([1])], stream=False))
    wire.until(lambda: len(wire.others) == 2)
    assert [(each.request_id, each.code) for each in wire.others] == [
        ("a", "invalid_request"),
        ("b", "invalid_request"),
    ]
    assert "1 entries for n=2" in wire.others[0].message and "stream=true" in wire.others[1].message


def test_a_long_text_is_encoded_next_to_the_loop(wire):
    text = "x" * 300 + "y" * 100
    wire.submit("long", prompt=text)
    wire.submit("longer", prompt="z" * 5000)
    assert wire.answer("long").token_ids[0] == continuation(letters(text), -1, 8, VOCABULARY)
    refused = wire.answer("longer").error
    assert refused.code == "invalid_request" and "--max-model-len 512" in refused.message


def test_an_answer_that_does_not_stream_comes_whole(wire):
    wire.submit("whole", sampling(max_tokens=300), prompt_token_ids=[5, 6], stream=False)
    answer = wire.answer("whole")
    expected = continuation([5, 6], -1, 300, VOCABULARY)
    assert answer.token_ids[0] == expected and answer.texts[0] == decoded(expected)
    assert [len(chunk.token_ids) for chunk in answer.chunks] == [256, 44], "long answers are cut"


@pytest.mark.parametrize("stream", [True, False])
def test_several_completions_stop_strings_and_stop_ids(wire, stream):
    expected = continuation([9, 9], -1, 40, VOCABULARY)
    wire.submit("n", sampling(max_tokens=40, n=3), prompt_token_ids=[9, 9], stream=stream)
    wire.submit("stop", sampling(max_tokens=40, stop_token_ids=[expected[10]]), prompt_token_ids=[9, 9], stream=stream)
    answer = wire.answer("n")
    assert answer.token_ids == dict.fromkeys(range(3), expected) and answer.reasons == dict.fromkeys(range(3), "length")
    assert answer.usage.output_tokens == 120
    stopped = wire.answer("stop")
    assert stopped.reasons == {0: "stop"} and stopped.chunks[-1].stop_reason == expected[10]
    assert stopped.token_ids[0] == expected[: expected.index(expected[10]) + 1]
    text = decoded(expected)
    string = next(letter for letter in text[5:] if letter.isascii() and letter.isprintable())
    wire.submit("string", sampling(max_tokens=40, stop=[string]), prompt_token_ids=[9, 9], stream=stream)
    found = wire.answer("string")
    assert found.texts[0] == text[: text.index(string)] and found.chunks[-1].stop_reason == string


def test_many_log_probabilities_of_prompts_fit_into_frames(wire):
    """500 tokens and 21 log-probabilities of each, for 12 requests at once."""
    prompts = {f"p{index}": [index, 2, 3, 5, 7] * 100 for index in range(12)}
    for name, prompt in prompts.items():
        wire.submit(name, sampling(max_tokens=3, prompt_logprobs=20), prompt_token_ids=prompt, stream=name < "p5")
    for name, prompt in prompts.items():
        answer = wire.answer(name)
        assert answer.token_ids[0] == continuation(prompt, -1, 3, VOCABULARY)
        scored = [place for chunk in answer.chunks for place in chunk.prompt_logprobs or ()]
        assert [place[0].token_id for place in scored] == prompt[1:]
        said = [next_token(prompt[:place], -1, VOCABULARY) for place in range(1, len(prompt))]
        assert [place[0].rank for place in scored] == said
        assert max(len(encode(Chunks([chunk]))) for chunk in answer.chunks) < MAX_FRAME_BYTES // 8


def test_a_prompt_that_was_seen_is_not_computed_again(wire):
    prompt = [7, 7, 7, 9] * 40
    for name, expected in (("first", 0), ("second", 128)):
        wire.submit(name, prompt_token_ids=prompt)
        answer = wire.answer(name)
        assert answer.usage.cached_tokens == expected and answer.token_ids[0] == continuation(prompt, -1, 8, VOCABULARY)


def test_an_abort_ends_a_request_and_frees_its_pages(server, wire):
    with server.held(beyond=120):
        wire.submit("gone", sampling(max_tokens=400), prompt_token_ids=[1] * 100)
        wire.submit("stays", sampling(max_tokens=30), prompt_token_ids=[2])
        wire.until(lambda: wire.answers["gone"].num_tokens > 3)
        wire.send(Abort(["gone", "unknown"]))
        wire.call(GetStats(1))  # what was sent before it has been read
    answer = wire.answer("gone")
    assert answer.reasons == {0: "abort"} and answer.usage.output_tokens == len(answer.token_ids[0]) < 400
    assert wire.answer("stays").token_ids[0] == continuation([2], -1, 30, VOCABULARY)
    assert server.wait_for(lambda stats: stats["requests_open"] == 0)["pages_in_use"] == 0


@pytest.mark.parametrize(("fields", "options", "code", "words"), [
    ({"prompt_token_ids": [1], "adapter": "nobody"}, {}, "unknown_adapter", "nobody"),
    ({"prompt_token_ids": [251]}, {}, "invalid_request", "out of vocabulary: the model has 251 tokens"),
    ({"prompt_token_ids": []}, {}, "invalid_request", "empty"),
    ({"prompt_token_ids": [1], "prompt": "x"}, {}, "invalid_request", "exactly one"),
    ({}, {}, "invalid_request", "exactly one"),
    ({"prompt_token_ids": [1]}, {"temperature": -1.0}, "invalid_request", "temperature"),
    ({"prompt_token_ids": [1]}, {"top_p": float("nan")}, "invalid_request", "top_p"),
    ({"prompt_token_ids": [1]}, {"min_tokens": 9}, "invalid_request", "min_tokens=9"),
    ({"prompt_token_ids": [1]}, {"logit_bias": {300: 1.0}}, "invalid_request", "token 300"),
    ({"prompt_token_ids": [1]}, {"allowed_token_ids": [300]}, "invalid_request", "allowed_token_ids names token 300"),
    ({"prompt_token_ids": [1]}, {"allowed_token_ids": []}, "invalid_request", "allowed_token_ids"),
    ({"prompt_token_ids": [1]}, {"bad_words": ["x" * 2000] * 3}, "invalid_request", "6000 characters in all"),
    ({"prompt_token_ids": [1] * 600}, {}, "invalid_request", "--max-model-len 512"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(wire, fields, options, code, words):
    wire.submit("bad", sampling(**options), **fields)
    error = wire.answer("bad").error
    assert error.code == code and words in error.message
    wire.submit("bad", prompt_token_ids=[1])  # the id is free again
    assert wire.answer("bad").token_ids[0] == continuation([1], -1, 8, VOCABULARY)


def test_ids_belong_to_a_connection(server, wire):
    with server.connect() as other:
        with server.held():
            wire.submit("same", sampling(max_tokens=40), prompt_token_ids=[1])
            other.submit("same", sampling(max_tokens=40), prompt_token_ids=[2])
            wire.until(lambda: wire.answers["same"].accepted is not None)
            wire.send(Submit("same", prompt_token_ids=[3], sampling=GREEDY))
            other.send(Abort(["never"]))
            wire.until(lambda: bool(wire.others))
        assert wire.answer("same").token_ids[0] == continuation([1], -1, 40, VOCABULARY), (
            "the newcomer disturbs nothing"
        )
        assert [error.code for error in wire.others] == ["duplicate_id"]
        assert other.answer("same").token_ids[0] == continuation([2], -1, 40, VOCABULARY)


def test_a_deadline_ends_a_request(wire):
    wire.submit("late", sampling(max_tokens=500), prompt_token_ids=[1], deadline_seconds=0.05)
    assert wire.answer("late").error.code == "deadline_exceeded"
    wire.submit("intime", prompt_token_ids=[1], deadline_seconds=GUARD)
    assert wire.answer("intime").reasons == {0: "length"}


def test_adapters_come_and_go(server, wire, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "serving0"
    (directory / "new").mkdir(exist_ok=True)
    (directory / "newer").mkdir(exist_ok=True)
    infos = wire.call(ListAdapters(1)).adapters
    assert [info.name for info in infos] == ["a0", "a1", "a2", "a3"]
    for number in range(4):  # more than there are slots: the first ones are put out again
        wire.submit(f"near{number}", prompt_token_ids=[4], adapter=f"a{number}")
        wire.answer(f"near{number}")
    wire.until(lambda: "cpu" in {info.where for info in wire.call(ListAdapters(1)).adapters})
    assert {info.where for info in infos} <= {"gpu", "cpu", "disk"} and all(
        info.running == info.waiting == 0 for info in infos
    )
    assert type(wire.call(LoadAdapter(2, "fresh", str(directory / "new")))).__name__ == "Done"
    wire.submit("f", prompt_token_ids=[4], adapter="fresh")
    fresh = wire.answer("f").token_ids[0]  # the numbers of adapters depend on what other tests have loaded
    number = next(number for number in range(4, 30) if fresh == continuation([4], number, 8, VOCABULARY))
    assert wire.call(LoadAdapter(3, "fresh", str(directory / "newer"))).code == "adapter_in_use"
    wire.submit("old", sampling(max_tokens=200), prompt_token_ids=[4], adapter="fresh")
    wire.until(lambda: wire.answers["old"].num_tokens > 1)
    assert type(wire.call(LoadAdapter(4, "fresh", str(directory / "newer"), replace=True))).__name__ == "Done"
    wire.submit("young", prompt_token_ids=[4], adapter="fresh")
    assert wire.answer("young").token_ids[0] == continuation([4], number + 1, 8, VOCABULARY), (
        "the name means the new content"
    )
    assert wire.answer("old").token_ids[0] == continuation([4], number, 200, VOCABULARY), (
        "open requests end with the old connection"
    )
    problems = [
        wire.call(LoadAdapter(5, "x", "/etc")),
        wire.call(LoadAdapter(6, "x", str(directory / ".." / ".."))),
        wire.call(LoadAdapter(7, "x", str(directory / "missing"))),
    ]
    assert [problem.code for problem in problems] == ["forbidden", "forbidden", "adapter_not_found"]
    assert not any(str(directory) in problem.message for problem in problems)
    with server.held(beyond=20):
        wire.submit("open", sampling(max_tokens=400), prompt_token_ids=[4], adapter="fresh")
        wire.until(lambda: wire.answers["open"].num_tokens > 1)
        assert wire.call(UnloadAdapter(10, "fresh")).code == "adapter_in_use"
        wire.send(Abort(["open"]))
        wire.call(GetStats(12))
    assert wire.answer("open").reasons == {0: "abort"}
    wire.until(lambda: not any(info.running for info in wire.call(ListAdapters(11)).adapters))
    assert type(wire.call(UnloadAdapter(8, "fresh"))).__name__ == "Done"
    assert wire.call(UnloadAdapter(9, "fresh")).code == "unknown_adapter"
    wire.submit("g", prompt_token_ids=[4], adapter="fresh")
    assert wire.answer("g").error.code == "unknown_adapter"


def test_one_change_of_a_name_at_a_time(wire, tmp_path_factory):
    """An unload that overtakes a replacement would leave the name there, with the new weights."""
    directory = tmp_path_factory.getbasetemp() / "serving0"
    for name in ("one", "two"):
        (directory / name).mkdir(exist_ok=True)
    assert type(wire.call(LoadAdapter(1, "twice", str(directory / "one")))).__name__ == "Done"
    (directory / "two" / "held").touch()
    wire.send(LoadAdapter(2, "twice", str(directory / "two"), replace=True))
    refused = wire.call(UnloadAdapter(3, "twice"))
    (directory / "two" / "held").unlink()
    wire.until(lambda: any(getattr(other, "call", None) == 2 for other in wire.others))
    (replaced,) = wire.others
    wire.others.clear()
    assert (refused.code, type(replaced).__name__) == ("adapter_in_use", "Done")
    assert type(wire.call(UnloadAdapter(4, "twice"))).__name__ == "Done"
    assert "twice" not in {info.name for info in wire.call(ListAdapters(5)).adapters}
    (directory / "circle").symlink_to(directory / "circle")
    assert wire.call(LoadAdapter(6, "circle", str(directory / "circle"))).code == "adapter_not_found"


def test_hello_comes_first_and_the_instance_must_be_right(server):
    wire = server.connect()
    wire.submit("early", prompt_token_ids=[1])
    wire.until(lambda: bool(wire.others))
    assert wire.others.pop().code == "hello_first"
    wire.hello()
    wire.send(Abort([]), instance=b"x" * 16)
    wire.until(lambda: bool(wire.others))
    assert wire.others.pop().code == "wrong_instance"
    wire.hello().submit("now", prompt_token_ids=[1])
    assert wire.answer("now").reasons == {0: "length"}
    assert server.health().status == "ok"
    wire.socket.close(0)


def test_owners_of_one_connection_share_its_steps(tmp_path):
    """A gateway serves many owners: the backlog of one does not delay another's request."""
    with serve_fake(tmp_path, step_seconds=0.002, max_num_seqs=2) as server, server.connect() as wire:
        names = [f"a{index}" for index in range(12)]
        with server.held():
            for name in names:
                wire.submit(name, sampling(max_tokens=30), prompt_token_ids=[1], owner="a")
            wire.submit("b", sampling(max_tokens=2), prompt_token_ids=[2], owner="b")
            wire.until(lambda: wire.answers["b"].accepted is not None)
        wire.answer("b")
        assert sum(not wire.answers[name].chunks for name in names) > 6, "most of the other's have not started"
        assert all(wire.answer(name).reasons == {0: "length"} for name in names)


def test_sigterm_for_all_processes_at_once_ends_the_server(tmp_path):
    """As a terminal, a container or pkill may send it."""
    with serve_fake(tmp_path) as server:
        server.connect().hello().socket.close(0)
        server.await_text("serving at")  # before that, a death is a start that failed
        for pid in (server.child("server.batcher"), server.child("fake_gpu"), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        # 1 if a process was seen to die first, 2 if it was being started again by then
        assert server.process.wait(GUARD) in (0, 1, 2)
        assert not list(tmp_path.rglob("*.sock"))


def test_sigterm_drains(tmp_path):
    with serve_fake(tmp_path, drain_seconds=8.0) as server, server.connect() as wire:
        with server.held():
            wire.submit("short", sampling(max_tokens=30), prompt_token_ids=[1])
            wire.submit("endless", sampling(max_tokens=400), prompt_token_ids=[2])
            wire.until(lambda: all(answer.accepted is not None for answer in wire.answers.values()))
            with server.held(beyond=20):
                wire.until(lambda: wire.answers["endless"].num_tokens > 2)
                server.process.send_signal(signal.SIGTERM)
                wire.until(lambda: server.health().status == "draining")
                wire.submit("late", prompt_token_ids=[3])
                assert wire.answer("late").error.code == "draining"
                with server.held(beyond=100):
                    assert wire.answer("short").token_ids[0] == continuation([1], -1, 30, VOCABULARY)
                    assert wire.answer("endless").reasons == {0: "abort"}
        assert server.process.wait(GUARD) == 0
        assert "draining for up to 8 s" in server.log.read_text()


def test_a_start_that_fails_says_why(tmp_path):
    with serve_fake(tmp_path, fail_start="the model is broken") as server:
        assert server.process.wait(60) == 2
        assert "error: the model is broken" in server.log.read_text()


def test_an_address_is_served_once(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with (
        serve_fake(tmp_path / "one") as server,
        server.connect() as wire,
        serve_fake(tmp_path / "two", bind=server.address) as other,
    ):
        assert other.process.wait(60) != 0
        assert "another engine serves" in other.log.read_text()
        wire.submit("a", prompt_token_ids=[1])
        assert wire.answer("a").reasons == {0: "length"}


def test_the_default_of_several_chat_templates_is_served(tmp_path):
    (tmp_path / "model").mkdir()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    with serve_fake(tmp_path) as server, server.connect() as wire:
        assert (wire.welcome.chat_template, wire.welcome.bos_token, wire.welcome.eos_token) == ("D", "<s>", "</s>")
        assert wire.welcome.chat_templates == {"default": "D", "tool_use": "T"}
        assert wire.welcome.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_an_adapters_own_chat_template_is_served(tmp_path):
    template, tokens = "S{{ eos_token }}", {"eos_token": "</s>"}
    for name, source in (("first", "F"), ("second", template)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text(source)
    (tmp_path / "second" / "tokenizer_config.json").write_text(json.dumps(tokens))
    digests = []
    with serve_fake(tmp_path, admin=True) as server, server.connect() as wire:
        for call, (name, found) in enumerate((("first", ("F", {})), ("second", (template, tokens)), ("second", None))):
            assert isinstance(wire.call(LoadAdapter(call, "own", str(tmp_path / name), replace=True)), Done)
            answer = wire.call(GetChatTemplates(10, "own"))
            received = answer.chat_templates, answer.special_tokens
            assert found is None or ({"default": found[0]}, found[1]) == received
            digests += [info.chat_template for info in wire.call(ListAdapters(11)).adapters]
        assert digests[0] and digests[1] == digests[2] and digests[0] != digests[1]
        unknown = wire.call(GetChatTemplates(12, "nobody"))
        assert (unknown.chat_templates, unknown.special_tokens) == ({}, {})


def test_one_connections_long_streams_make_way_for_another(tmp_path):
    with (
        serve_fake(tmp_path, step_seconds=0.01, max_num_seqs=2, num_pages=256, max_model_len=8192) as server,
        server.connect() as greedy,
        server.connect() as other,
    ):
        for index in range(6):
            greedy.submit(f"g{index}", sampling(max_tokens=8000), prompt_token_ids=[index])
        greedy.until(lambda: greedy.answers["g0"].num_tokens > 1)
        other.submit("o", sampling(max_tokens=4), prompt_token_ids=[9])
        assert other.answer("o").token_ids[0] == continuation([9], -1, 4, VOCABULARY)
        while greedy.receive():
            pass
        assert not any(answer.over for answer in greedy.answers.values()), "it waited for none of them"
        greedy.until(lambda: len(greedy.answers["g1"].token_ids[0]) >= 100)
        found = greedy.answers["g1"].token_ids[0]
        assert found == continuation([1], -1, len(found), VOCABULARY), "put back, and nothing lost"
