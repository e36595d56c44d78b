"""`sidestream chat` and `complete` against a small server, and the template's limits."""

import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.protocol import messages as protocol
from sidestream.runtime.text import chat_files
from sidestream.runtime.text.chat_files import ChatTemplateError
from sidestream.runtime.text.chat_renderer import TemplateProcess
from sidestream.tools import cli
from sidestream.tools.options.client import printable
from support.wire_server import WireServer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n  {% generation %}<{{ message['role'] }}>{{ message.content | "
    "trim }}{% endgeneration %}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASK = [{"role": "user", "content": " hi "}]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WireServer]:
    (tmp_path / "run").mkdir(mode=0o700)
    with WireServer(
        f"ipc://{tmp_path}/run/engine.sock", chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>"
    ) as server:
        yield server


def command(server: WireServer, *arguments: str) -> int:
    flag = "--server" if arguments[0] == "generate" else "--address"
    return cli.main([*arguments, flag, server.address, "--connect-timeout", "60"])


def prompts(server: WireServer) -> list[Any]:
    return [message.prompt for message in server.submits]


def test_one_question(server: WireServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(server, "chat", "-m", "hello", "--system", "be brief", "-a", "pirate", "--max-tokens", "3") == 0
    assert capsys.readouterr().out == "0 1 2\n"
    assert prompts(server) == ["<s><system>be brief<user>hello<assistant>"]
    assert not server.submits[0].add_special_tokens, "the template has put BOS in"
    assert server.submits[0].adapter == "pirate"


def test_a_conversation_remembers_and_obeys_commands(
    server: WireServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "one",
        "",
        "/adapter shout",
        "two",
        "/adapters",
        "/reset",
        "/adapter none",
        "/system be kind",
        "three",
        "/nonsense",
        "/quit",
        "never",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert command(server, "chat", "--max-tokens", "2") == 0
    assert prompts(server) == [
        "<s><user>one<assistant>",
        "<s><user>one<assistant>0 1<user>two<assistant>",
        "<s><system>be kind<user>three<assistant>",
    ]
    assert [message.adapter for message in server.submits] == [None, "shout", None]
    shown = capsys.readouterr().out
    assert shown.count("0 1\n") == 3 and "pirate\nshout" in shown and "commands:" in shown


def test_a_refused_turn_is_said_and_forgotten(
    server: WireServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(message: protocol.Submit) -> protocol.Error | None:
        too_long = "bad" in (message.prompt or "")
        return (
            protocol.Error(code="invalid_request", message="the prompt is too long", request_id=message.request_id)
            if too_long
            else None
        )

    server.refuse = refuse
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\ngood\n"))
    assert command(server, "chat", "--max-tokens", "1") == 2
    assert prompts(server)[-1] == "<s><user>good<assistant>"
    assert "too long" in capsys.readouterr().err


def test_without_a_template_each_line_stands_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    with WireServer(f"ipc://{tmp_path}/engine.sock") as server:
        assert command(server, "chat") == 0
        assert prompts(server) == ["one", "two"]
        assert "answered by itself" in capsys.readouterr().err
        (tmp_path / "mine.jinja").write_text("[{{ messages[-1].content }}]")
        assert command(server, "chat", "-m", "three", "--chat-template", str(tmp_path / "mine.jinja")) == 0
        assert prompts(server)[-1] == "[three]"
        assert command(server, "chat", "-m", "four", "--chat-template", str(tmp_path)) == 2
        assert "no chat template" in capsys.readouterr().err


def test_generate_on_a_server(server: WireServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(server, "generate", "-p", "To be", "--max-tokens", "3", "--echo") == 0
    assert capsys.readouterr().out == "To be 0 1 2\n"
    assert (
        command(
            server,
            "generate",
            "-p",
            "a",
            "--prompt-ids",
            "1,2",
            "-a",
            "shout",
            "-a",
            "none",
            "--json",
            "--max-tokens",
            "2",
        )
        == 0
    )
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [
        (answer.get("prompt"), answer.get("prompt_token_ids"), answer["adapter"], answer["text"]) for answer in answers
    ] == [("a", None, "shout", " 0 1"), (None, [1, 2], None, " 0 1")]
    assert command(server, "generate", "-p", "a", "-p", "b", "--max-tokens", "1") == 0
    assert "[base] a\n0" in capsys.readouterr().out
    assert command(server, "generate", "-p", "a", "-a", "x", "-a", "y") == 2
    assert command(server, "generate", "-p", "a", "--temperature", "-1") == 2
    assert "temperature" in capsys.readouterr().err
    for flags in (["models/x"], ["--precision", "bf16"], ["--chat"]):
        assert command(server, "generate", "-p", "a", *flags) == 2
        assert "cannot be used with --server" in capsys.readouterr().err


def test_no_server_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["chat", "--address"], ["generate", "-p", "x", "--server"]):
        assert cli.main([*arguments, f"ipc://{tmp_path}/x/none.sock", "--connect-timeout", "0.2"]) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1 and "nothing serves at" in said


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\n\tc\x07\u202e") == "a [31mb\n\tc  "


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 0.5 s"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if", "TemplateSyntaxError"),
    ],
    ids=["slow", "large", "long", "classes", "mutation", "include", "refusal", "syntax"],
)  # fmt: skip
def test_a_bad_template_costs_little_and_the_next_one_works(source: str, said: str) -> None:
    with closing(TemplateProcess()) as process:
        with pytest.raises(ChatTemplateError, match=said):
            process.render(source, {}, ASK, {}, seconds=0.5 if "0.5 s" in said else 20.0)
        assert process.render("{{ messages[0].content }}", {}, ASK, {}) == " hi "


def test_a_template_has_what_templates_use() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% "
        "endfor %}"
        "{{ tools }}{{ strftime_now('%Y') | length }}"
    )
    with closing(TemplateProcess()) as process:
        text = process.render(source, {"bos_token": "<s>"}, [{"role": "user", "content": "<é>"}], {"tools": 7})
        assert text == '<s>[{"role": "user", "content": "<é>"}]0174'


def test_inputs_are_bounded() -> None:
    source, large = "{{ messages[0].content }}", "x" * 10**6
    with closing(TemplateProcess()) as process:
        with pytest.raises(ChatTemplateError, match="characters"):
            process.render("x" * (chat_files.MAX_TEMPLATE_CHARACTERS + 1), {}, ASK, {})
        with pytest.raises(ChatTemplateError, match="new one"):
            process.render(source, {}, [{"role": "user", "content": 10 * large}], {})
        answer = process.render(source, {}, [{"role": "user", "content": large}], {})
        assert answer == large, "more than a pipe holds"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background (its jobs ignore
    SIGINT).
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(server: WireServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.hold = True
    said = io.StringIO()

    def interrupt() -> None:
        while "0" not in said.getvalue():
            time.sleep(0.01)
        server.hold = False
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr("sys.stdout", said)
    assert command(server, "chat", "--max-tokens", "1") == 0
    assert "0 [interrupted]" in said.getvalue()
    assert prompts(server)[1] == "<s><user>one<assistant>0<user>two<assistant>"
    assert server.aborts == ["r1"]
