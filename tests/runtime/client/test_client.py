"""The blocking `Client` against a small server that implements the protocol."""

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sidestream.runtime.api.errors import EngineDeadError, RequestError, ServerError
from sidestream.runtime.api.lora_request import LoRARequest
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.client.client import Client
from sidestream.runtime.protocol import messages as protocol
from support.serving import GUARD
from support.wire_server import WireServer


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "run").mkdir(mode=0o700)
    return f"ipc://{tmp_path}/run/engine.sock"


@pytest.fixture
def server(address: str) -> Iterator[WireServer]:
    with WireServer(address) as server:
        yield server


def until(condition: Callable[[], bool], seconds: float = GUARD) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_and_calls(server: WireServer) -> None:
    with Client(server.address) as client:
        assert client.connect().model == "fake"
        assert [chunk.text for chunk in client.stream("To be", SamplingParams(max_tokens=3), adapter="pirate")] == [
            " 0",
            " 1",
            " 2",
        ]
        outputs = client.generate(["a", [1, 2]], SamplingParams(max_tokens=2), adapter=["pirate", None])
        assert [output.outputs[0].text for output in outputs] == [" 0 1"] * 2
        assert [adapter.name for adapter in client.list_adapters()] == ["pirate", "shout"]
        client.load_adapter("x", "/x")
        client.unload_adapter("x")
        with pytest.raises(ServerError, match="root"):
            client.load_adapter("x", "x")
        assert client.stats()["pages_in_use"] == 0 and client.health().status == "ok"


def test_chat_sends_what_the_servers_template_makes(address: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    hello, bye = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]
    with WireServer(address, chat_template=template, bos_token="<s>") as server, Client(address) as client:
        outputs = client.chat([hello, bye], SamplingParams(max_tokens=2), ["pirate", None])
        assert [output.prompt for output in outputs] == ["<s><user>hello<assistant>", "<s><user>bye<assistant>"]
        assert [output.outputs[0].text for output in outputs] == [" 0 1"] * 2
        sent = {message.prompt: message.adapter for message in server.submits}
        assert sent == {"<s><user>hello<assistant>": "pirate", "<s><user>bye<assistant>": None}
        assert not any(message.add_special_tokens for message in server.submits), "the template has put BOS in"
        prompts = client.chat_prompts(hello, chat_template="{{ messages[0].content }}!")
        assert prompts == [{"prompt": "hello!", "add_special_tokens": False}]
        list(client.stream(prompts[0], SamplingParams(max_tokens=1)))
        client.generate("hello!", SamplingParams(max_tokens=1))
        assert [message.add_special_tokens for message in server.submits[-2:]] == [False, True]
        with pytest.raises(RequestError, match=r"messages\[0\].role=.a root. must be"):
            client.chat([{"role": "a root", "content": "x"}])
        (process,) = client._client._renderer.processes
        assert process._child._child is not None
    assert process._child._child is None, "it ends with the client"


def test_chat_with_the_templates_of_adapters_and_for_tools(address: str) -> None:
    """An adapter's own template comes before the model's; one for tools is taken where there are any."""
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
    named = {"default": plain, "tool_use": "{{ tools | length }} tools: " + plain, "rag": "R"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with (
        WireServer(address, chat_template=plain, chat_templates=named, special_tokens={"eos_token": "</s>"}) as server,
        Client(address) as client,
    ):
        server.templates = {
            "pirate": {"default": "Arr {{ messages[-1].tool_calls[0].function.arguments.a }}{{ eos_token }}"}
        }
        (base, shout, pirate) = client.chat_prompts([talk] * 3, [None, "shout", "pirate"])
        assert base == shout == {"prompt": "<user>hi<assistant></s>", "add_special_tokens": False}
        assert pirate["prompt"] == "Arr 1</own>"
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert client.chat_prompts(talk, tools=tools)[0]["prompt"] == "1 tools: <user>hi<assistant></s>"
        assert client.chat_prompts(talk, chat_template="rag")[0]["prompt"] == "R"
        (output,) = client.chat(talk, SamplingParams(max_tokens=1), "pirate")
        assert output.prompt == "Arr 1</own>" and server.submits[-1].adapter == "pirate"


def test_an_adapter_as_vllm_names_it(server: WireServer) -> None:
    """By the rules of LLM; the directory is one on the server's machine."""
    pirate, late = LoRARequest("pirate", 1), LoRARequest("late", 2, "/adapters/late")
    params = SamplingParams(max_tokens=1)
    with Client(server.address) as client:
        outputs = client.generate(["a", "b", "c"], params, lora_request=[pirate, None, late])
        assert [output.lora_request for output in outputs] == [pirate, None, late]
        assert [output.adapter for output in outputs] == ["pirate", None, "late"]
        assert {message.prompt: message.adapter for message in server.submits} == {
            "a": "pirate",
            "b": None,
            "c": "late",
        }
        loads = [(call.name, call.path) for call in server.calls if isinstance(call, protocol.LoadAdapter)]
        assert loads == [("late", "/adapters/late")]
        server.adapters.append(protocol.AdapterInfo("late", 8, "cc"))
        (one, two) = client.generate(["d", "e"], params, lora_request=late)
        assert one.lora_request == two.lora_request == late and one.adapter == "late"
        list(client.stream("f", params, lora_request=late))
        assert server.submits[-1].adapter == "late"
        assert sum(isinstance(call, protocol.LoadAdapter) for call in server.calls) == 1, "it is known now"
        other = LoRARequest("late", 2, "/elsewhere")
        for asked, adapter, text in (
            (other, None, "loaded from another directory"),
            ([pirate], None, "1 entries for 2 prompts"),
            ("pirate", None, "must be a LoRARequest"),
            (pirate, "pirate", "give one of them"),
        ):
            with pytest.raises(RequestError, match=text):
                client.generate(["a", "b"], params, adapter, lora_request=asked)
        with pytest.raises(ServerError, match="outside the adapter root"):
            client.generate("a", params, lora_request=LoRARequest("new", 3, "relative"))


def test_results_have_ids_of_their_own_and_times(server: WireServer) -> None:
    with Client(server.address) as client:
        before = time.time()
        outputs = [output for _ in range(2) for output in client.generate(["a", [1, 2]], SamplingParams(max_tokens=2))]
        after = time.time()
    assert len({output.request_id for output in outputs}) == 4
    assert {output.request_id for output in outputs} == {message.request_id for message in server.submits}
    assert [output.prompt_token_ids for output in outputs] == [[], [1, 2]] * 2
    for output in outputs:
        assert output.metrics is not None and before <= output.metrics.arrival_time <= output.metrics.finished_time
        assert output.metrics.finished_time <= after


def test_it_stays_alive_between_calls_and_hears_of_death(address: str) -> None:
    with WireServer(address, hold=True) as server, Client(server.address) as client:
        stream = client.stream("x")
        next(stream)
        until(lambda: server.beats > 3)  # the caller is busy; heartbeats go on
        server.die()
        with pytest.raises(EngineDeadError):
            next(stream)
        with pytest.raises(StopIteration):
            next(stream)


def test_leaving_a_stream_aborts_it(server: WireServer) -> None:
    server.hold = True
    with Client(server.address) as client:
        for _ in client.stream("one", request_id="left"):
            break
        gc.collect()
        until(lambda: server.aborts == ["left"])
        stream = client.stream("two", request_id="closed")
        next(stream)
        stream.close()
        until(lambda: server.aborts == ["left", "closed"])
        stream = client.stream("three", request_id="ended")
        next(stream)
        client.abort("ended")
        assert [chunk.finish_reason for chunk in stream] == ["abort"]
        with pytest.raises(TimeoutError):
            client.generate("four", timeout=0.05)
        until(lambda: len(server.aborts) == 4)


def test_many_threads_share_one_client(server: WireServer) -> None:
    problems: list[BaseException] = []

    def work(client: Client, number: int) -> None:
        try:
            for round_ in range(10):
                count = 1 + (number + round_) % 7
                if round_ % 2:
                    assert len(list(client.stream([number], SamplingParams(max_tokens=count)))) == count
                else:
                    assert (
                        len(client.generate([number], SamplingParams(max_tokens=count))[0].outputs[0].token_ids)
                        == count
                    )
        except BaseException as problem:
            problems.append(problem)

    with Client(server.address) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD)
        assert not problems
        assert len(server.submits) == 160


def test_close_ends_what_is_open_and_the_thread(server: WireServer) -> None:
    server.hold = True
    before = set(threading.enumerate())
    client = Client(server.address)
    stream = client.stream("x", request_id="x")
    next(stream)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.generate("y")
        except BaseException as problem:
            errors.append(problem)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: len(server.submits) == 2)
    client.close()
    client.close()
    waiting.join(GUARD)
    assert [type(problem) for problem in errors] == [EngineDeadError]
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)
    assert set(threading.enumerate()) <= before
    for call in (client.stats, lambda: client.generate("x"), lambda: next(client.stream("x"))):
        with pytest.raises(RequestError, match="closed"):
            call()
    until(lambda: sorted(server.aborts) == ["r1", "x"])


def test_a_client_that_cannot_connect_leaves_no_thread(address: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(EngineDeadError, match="nothing serves"), Client(address, connect_timeout=0.2):
        pass
    assert set(threading.enumerate()) <= before


def test_a_program_may_end_without_closing_and_ctrl_c_aborts(server: WireServer) -> None:
    server.hold = True
    code = textwrap.dedent(f"""
        import os, signal, sys, threading
        from sidestream import Client
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
        client = Client({server.address!r})
        try:
            for chunk in client.stream("x", request_id="interrupted"):
                threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        except KeyboardInterrupt:
            client.stats()
            print("torch" in sys.modules)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "False", "")
    until(lambda: server.aborts == ["interrupted"])


def test_a_forked_child_is_told_to_make_its_own(server: WireServer) -> None:
    code = textwrap.dedent(f"""
        import os
        from sidestream import Client
        with Client({server.address!r}) as client:
            client.stats()
            child = os.fork()
            if child == 0:
                for use in (client.stats, lambda: next(client.stream("x"))):
                    try:
                        use()
                    except ValueError as problem:
                        print(problem, flush=True)
                with Client({server.address!r}) as own:
                    print(own.health().status, flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            print(client.health().status)
    """)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    refused = "this client belongs to the process that made it; make one in each process"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [refused, refused, "ok", "ok"]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("client = Client(ADDRESS)\nclient.connect()", 0),
        ("client = Client(ADDRESS)\nstream = client.stream('x')\nnext(stream)\nsys.exit(3)", 3),
        (
            """
            Client(ADDRESS).connect()
            gc.collect()
            for thread in threading.enumerate()[1:]:
                thread.join(60)
            print([each.name for each in threading.enumerate()[1:]])
            """,
            0,
        ),
        ("Client('ipc:///nowhere/engine.sock')", 0),
        (
            """
            async def main():
                client = AsyncClient(ADDRESS)
                await client.connect()
                async for chunk in client.stream("x"):
                    break

            asyncio.run(main())
            """,
            0,
        ),
        (
            """
            client, loop = AsyncClient(ADDRESS), asyncio.new_event_loop()
            loop.run_until_complete(client.connect())
            """,
            0,
        ),
    ],
)
def test_a_client_that_was_not_closed_ends_with_its_program(server: WireServer, code: str, exit_code: int) -> None:
    server.hold = True
    head = (
        f"import asyncio, gc, sys, threading\nfrom sidestream import AsyncClient, Client\nADDRESS = {server.address!r}"
    )
    script = f"{head}\n{textwrap.dedent(code)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (exit_code, "")
    assert done.stdout in ("", "[]\n"), "a client that nothing refers to leaves no thread"
