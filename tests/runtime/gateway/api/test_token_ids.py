"""Token ids in completions and chats: returned ids, truncated prompts, ids as token names, echo, scoring."""

import asyncio
import functools

import pytest
from sidestream.runtime.gateway.auth.admission import NoAuth
from support.gateway import FakeEngines, events, gateway

HELLO = {"messages": [{"role": "user", "content": "hey"}], "max_tokens": 3}
RENDERED = [ord(letter) for letter in "<user>hey<assistant>"]


def ask(path, tokens_as_ids=False, **body):
    """The answer's status, its JSON (or events), and the requests that the engines got."""

    async def run():
        engines = FakeEngines()
        async with gateway(engines, tokens_as_ids=tokens_as_ids) as http:
            answer = await http.post(path, json=body)
        streamed = body.get("stream") and answer.status_code == 200
        return answer.status_code, events(answer.text) if streamed else answer.json(), engines.asked

    return asyncio.run(run())


complete, chat = functools.partial(ask, "/v1/completions"), functools.partial(ask, "/v1/chat/completions")


def test_a_completion_returns_the_ids_of_its_prompt_and_its_tokens():
    status, answer, asked = complete(prompt=["hey", "you!"], n=2, max_tokens=3, return_token_ids=True)
    assert status == 200
    prompts = [[1, *map(ord, text)] for text in ("hey", "you!")]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert all(choice["token_ids"] == [0, 1, 2] and choice["text"] == "a b c " for choice in answer["choices"])
    assert [request.prompt for request in asked] == prompts, "the reported tokens are those that are computed"


def test_without_the_field_an_answer_has_no_ids():
    """They are null, as in vLLM, and left out of the events of a stream."""
    for _, answer, _ in (complete(prompt="hey"), chat(**HELLO)):
        (choice,) = answer["choices"]
        assert choice["token_ids"] is None and (answer | choice)["prompt_token_ids"] is None
    for _, stream, _ in (complete(prompt="hey", stream=True), chat(**HELLO, stream=True)):
        for event in stream[:-1]:
            assert "token_ids" not in event["choices"][0] and "prompt_token_ids" not in event | event["choices"][0]


def test_a_stream_of_completions_has_the_prompt_once_and_every_token():
    _, stream, _ = complete(prompt=[[5, 6], [7]], n=2, max_tokens=3, return_token_ids=True, stream=True)
    choices = [event["choices"][0] for event in stream[:-1]]
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["prompt_token_ids"] == ([5, 6] if index < 2 else [7])
        assert all("prompt_token_ids" not in choice for choice in own[1:])
        assert [token for choice in own for token in choice["token_ids"]] == [0, 1, 2]


def test_a_chat_returns_the_ids_of_the_rendered_prompt():
    _, answer, asked = chat(**HELLO, n=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == asked[0].prompt == RENDERED
    assert [choice["token_ids"] for choice in answer["choices"]] == [[0, 1, 2]] * 2


def test_a_stream_of_a_chat_has_the_prompt_in_its_first_event():
    _, stream, _ = chat(**HELLO, n=2, return_token_ids=True, stream=True)
    assert [event.get("prompt_token_ids") for event in stream[:-1]] == [RENDERED] + [None] * (len(stream) - 2)
    for index in range(2):
        own = [choice for event in stream[:-1] for choice in event["choices"] if choice["index"] == index]
        assert [token for choice in own for token in choice.get("token_ids", [])] == [0, 1, 2]
        assert "".join(choice["delta"].get("content", "") for choice in own) == "a b c "


def test_tokens_are_named_by_their_ids():
    _, answer, _ = complete(prompt="hey", max_tokens=2, logprobs=2, return_tokens_as_token_ids=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:0", "token_id:1"]
    assert logprobs["top_logprobs"][1] == {"token_id:1": -0.5, "token_id:2": -1.5}
    assert logprobs["text_offset"] == [0, 2]
    _, answer, _ = chat(**HELLO, logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    second = answer["choices"][0]["logprobs"]["content"][1]
    assert second["token"] == "token_id:1" and bytes(second["bytes"]) == b"b "
    assert [top["token"] for top in second["top_logprobs"]] == ["token_id:1", "token_id:2"]
    for value, names in ((None, ["token_id:0"]), (False, ["a "])):  # with the server's flag
        _, answer, _ = complete(True, prompt="x", max_tokens=1, logprobs=1, return_tokens_as_token_ids=value)
        assert answer["choices"][0]["logprobs"]["tokens"] == names
    _, stream, _ = chat(True, **HELLO, logprobs=True, stream=True)
    scored = [event["choices"][0]["logprobs"] for event in stream[:-1]]
    assert [entry["token"] for each in scored if each for entry in each["content"]] == [
        f"token_id:{token}" for token in range(3)
    ]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [13, 14]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [10, 11]),
        ({"truncate_prompt_tokens": 9}, [10, 11, 12, 13, 14]),
        ({"truncate_prompt_tokens": -1}, [10, 11, 12, 13, 14]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4093}, [12, 13, 14]),
    ],
)
def test_truncated_prompts(fields, kept):
    _, answer, asked = complete(**({"prompt": [10, 11, 12, 13, 14], "max_tokens": 2, "echo": True} | fields))
    assert asked[0].prompt == kept
    assert answer["choices"][0]["text"].startswith("".join(map(chr, kept)))
    assert answer["usage"]["prompt_tokens"] == len(kept)


def test_a_truncated_chat_keeps_its_end():
    _, answer, asked = chat(**HELLO, truncate_prompt_tokens=11, return_token_ids=True)
    assert answer["prompt_token_ids"] == asked[0].prompt == RENDERED[-11:]


@pytest.mark.parametrize("length", [0, 4097])
def test_a_length_that_cannot_be_kept_is_refused(length):
    status, answer, asked = complete(prompt="hey", truncate_prompt_tokens=length)
    assert status == 400 and answer["error"]["param"] == "truncate_prompt_tokens" and not asked
    assert str(length) in answer["error"]["message"] and "4096" in answer["error"]["message"]


@pytest.mark.parametrize(("given", "entries"), [(True, 1), (False, None)])
def test_logprobs_of_completions_may_be_a_truth_value(given, entries):
    _, answer, asked = complete(prompt="hey", max_tokens=2, logprobs=given)
    assert asked[0].params.logprobs == entries
    assert (answer["choices"][0]["logprobs"] is None) == (entries is None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_can_begin_with_the_message_that_it_continues(stream):
    parts = [{"type": "text", "text": "Well,"}, {"type": "text", "text": "then: "}]
    for content, echoed in (("So: ", "So: "), (parts, "Well,\nthen: ")):
        messages = [*HELLO["messages"], {"role": "assistant", "content": content}]
        body = {"max_tokens": 2, "n": 2, "echo": True, "continue_final_message": True, "stream": stream}
        _, answer, _ = chat(messages=messages, **body)
        for index in range(2):
            if stream:
                own = [choice for event in answer[:-1] for choice in event["choices"] if choice["index"] == index]
                text = "".join(choice["delta"].get("content", "") for choice in own)
            else:
                text = answer["choices"][index]["message"]["content"]
            assert text == echoed + "a b "
    _, answer, _ = chat(**HELLO, echo=True)
    assert answer["choices"][0]["message"]["content"] == "a b c ", "a user's message is not repeated"


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_returned_or_counted_if_none_is_requested(stream):
    body = {"prompt": ["hey", "you"], "max_tokens": 0, "echo": True, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    _, answer, _ = complete(**body, **options)
    choices = [choice for event in answer[:-1] for choice in event["choices"]] if stream else answer["choices"]
    for index, text in enumerate(body["prompt"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert own[-1]["finish_reason"] == "length" and [id for each in own for id in each["token_ids"]] == []
    usage = answer[-2]["usage"] if stream else answer["usage"]
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"] == 8


def test_zero_tokens_without_an_echo_are_refused():
    status, answer, asked = complete(prompt="hey", max_tokens=0)
    assert status == 400 and answer["error"]["param"] == "max_tokens" and not asked
    assert "echo=true" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "more"),
    [
        ("/v1/completions", "logprobs", {"prompt": "hey"}),
        ("/v1/completions", "prompt_logprobs", {"prompt": "hey"}),
        ("/v1/chat/completions", "top_logprobs", HELLO | {"logprobs": True}),
        ("/v1/chat/completions", "prompt_logprobs", HELLO),
    ],
)
def test_the_whole_vocabulary_exceeds_the_limit_that_the_error_names(path, field, more):
    status, answer, asked = ask(path, **more, **{field: -1})
    assert status == 400 and not asked and answer["error"]["param"] == field
    assert "at most 20" in answer["error"]["message"] and f"{field}=-1" in answer["error"]["message"]


def test_a_text_can_be_continued_without_special_tokens():
    _, _, asked = complete(prompt="hey", add_special_tokens=False)
    assert asked[0].prompt == "hey" and not asked[0].add_special_tokens
    _, answer, asked = complete(prompt="hey", add_special_tokens=False, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == asked[0].prompt == [*map(ord, "hey")]


def test_given_tokens_of_a_prompt_take_the_place_of_the_messages():
    """As vLLM's routers send them to the server that answers after the one that rendered the chat."""
    given = [9, 10, 11, *map(ord, "<think>")]
    fields = {"kv_transfer_params": {"prompt_token_ids": given}, "return_token_ids": True}
    _, answer, asked = chat(**HELLO, **fields)
    assert answer["prompt_token_ids"] == asked[0].prompt == given and answer["choices"][0]["token_ids"] == [0, 1, 2]
    _, stream, _ = chat(**HELLO, **fields, stream=True)
    assert stream[0]["prompt_token_ids"] == given
    _, _, (cut,) = chat(**HELLO, **fields, truncate_prompt_tokens=2)
    assert cut.prompt == given[-2:]
    kwargs = {"chat_template": "{{ '<think>' }}", "structured_outputs": {"choice": ["a"]}}
    for tokens, start in ((given, "inside"), ([5, 6], "optional")):
        _, _, (request,) = chat(**HELLO, **kwargs, kv_transfer_params={"prompt_token_ids": tokens})
        assert request.params.structured_outputs.reasoning == start, "their end shows how the answer begins"
    for nothing in ({}, None, {"prompt_token_ids": None}):
        _, answer, _ = chat(**HELLO, kv_transfer_params=nothing, return_token_ids=True)
        assert answer["prompt_token_ids"] == RENDERED


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt_token_ids": [256]}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "kv_transfer_params.prompt_token_ids[0]"),
        ({"prompt_token_ids": [True]}, "kv_transfer_params.prompt_token_ids[0]"),
        ({"prompt_token_ids": []}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "kv_transfer_params.prompt_token_ids"),
        ({"do_remote_prefill": True}, "kv_transfer_params.do_remote_prefill"),
    ],
)
def test_given_tokens_are_checked(params, param):
    status, answer, asked = chat(**HELLO, kv_transfer_params=params)
    assert (status, answer["error"]["param"]) == (400, param) and not asked, answer
    status, answer, asked = ask("/v1/chat/completions/batch", messages=[HELLO["messages"]], kv_transfer_params=params)
    assert status == 400 and not asked


def test_given_tokens_count_for_the_limits_of_a_key():
    reserved = []

    class Admission(NoAuth):
        def admit(self, caller, model, prompt_tokens, *rest):
            reserved.append(prompt_tokens)
            return super().admit(caller, model, prompt_tokens, *rest)

    async def run():
        async with gateway(FakeEngines(), Admission()) as http:
            params = {"prompt_token_ids": [5] * 900}
            await http.post("/v1/chat/completions", json=HELLO | {"kv_transfer_params": params})

    asyncio.run(run())
    assert reserved == [900]
