"""`sidestream chat`: a conversation with a running server."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options.client import add_connection_options, add_sampling_options, connect, printable, sampling_params
from ..options.engine import add_command

if TYPE_CHECKING:
    from ...runtime.api.sampling_params import SamplingParams
    from ...runtime.client.client import Client
    from ...runtime.text.chat_files import ChatTemplates
    from ...runtime.text.chat_renderer import ChatRenderer
    from ...runtime.text.prompts import Prompt

DESCRIPTION = """\
Talk with a running server. The chat template is that of the server's model, or --chat-template; without a template
each line is a prompt of its own.

Ctrl-C ends an answer, a second one (or Ctrl-D) the chat. Lines that begin with a slash:
  /adapter NAME   use this adapter (`none`: the base model)
  /adapters       list all adapters
  /system TEXT    the system message, from the next line on
  /reset          forget the conversation
  /quit"""

EXAMPLES = """\
examples:
  sidestream chat
  sidestream chat --adapter pirate --system "Answer in one sentence."
  sidestream chat -m "What is the capital of France?"                    one question only
  sidestream chat --chat-template models/llama                           the template of a model directory, or a .jinja
                                                                         file
  sidestream chat --address tcp://gpu-host:5757 --keys keys/client-alice"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the `sidestream` parser."""
    usage = "%(prog)s [-a NAME] [-m TEXT] [options]"
    parser = add_command(commands, "chat", "talk with a running server", DESCRIPTION, EXAMPLES, run, usage)
    group = parser.add_argument_group("conversation")
    group.add_argument("-a", "--adapter", metavar="NAME", help="first adapter (default: the base model)")
    group.add_argument("-m", "--message", metavar="TEXT", help="send this, print the answer, and end")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument(
        "--chat-template", type=Path, metavar="PATH", help="a file or a model directory (default: the server's)"
    )
    add_sampling_options(parser, temperature=0.7, max_tokens=512)
    add_connection_options(parser)


def find_templates(path: Path | None, client: "Client") -> "ChatTemplates":
    """Return the templates of --chat-template, or the server's, if any. Raises ChatTemplateError."""
    from ...runtime.protocol.chat_templates import welcome_templates
    from ...runtime.text.chat_files import (
        DEFAULT,
        ChatTemplateError,
        ChatTemplates,
        read_chat_templates,
        read_template_file,
    )

    served = welcome_templates(client.connect())
    if path is None:
        return served
    if not path.is_dir():
        return ChatTemplates({DEFAULT: read_template_file(path)}, served.tokens)
    templates = read_chat_templates(path)
    if not templates.templates:
        raise ChatTemplateError(
            f"{path} has no chat template: neither chat_template.jinja nor the field in tokenizer_config.json"
        )
    return templates


class Conversation:
    """The messages of a chat, its adapter and its system message. `turn` prints an answer as it grows.

    `is_served`: the templates are the server's, and an adapter's own take precedence.
    """

    def __init__(
        self,
        client: "Client",
        templates: "ChatTemplates",
        renderer: "ChatRenderer",
        params: "SamplingParams",
        adapter: str | None,
        system: str | None,
        is_served: bool = True,
    ) -> None:
        self.client, self.templates, self.renderer, self.params = client, templates, renderer, params
        self.is_served = is_served
        self.adapter = None if adapter == "none" else adapter
        self.system = system
        self.messages: list[dict[str, str]] = []

    def prompt(self) -> "Prompt":
        """Return the prompt of the next answer. Raises ChatTemplateError."""
        from ...runtime.text.prompts import without_special_tokens

        templates = self.templates
        if self.adapter is not None and self.is_served:
            templates = self.client.chat_templates(self.adapter).over(templates)
        if not templates.templates:
            return self.messages[-1]["content"]
        system = [{"role": "system", "content": self.system}] if self.system else []
        return without_special_tokens(self.renderer.prompts(templates, system + self.messages)[0])

    def turn(self, text: str) -> str:
        """Send a message and print the answer. An interruption ends the answer but keeps its text.

        A failed turn is removed.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            chunks = self.client.stream(self.prompt(), self.params, self.adapter)
            try:
                for chunk in chunks:
                    new = chunk.text if answer else chunk.text.lstrip()
                    answer += new
                    print(printable(new), end="", flush=True)
            except KeyboardInterrupt:
                chunks.close()
                print(" [interrupted]", end="")
        except BaseException:
            self.messages.pop()
            raise
        print(flush=True)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash; return False at the end of the chat."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("quit", "exit", "q"):
            return False
        if name == "adapters":
            print("none (the base model)", *sorted(adapter.name for adapter in self.client.list_adapters()), sep="\n")
        elif name == "adapter" and rest:
            self.adapter = None if rest == "none" else rest
            print(f"continuing with {self.adapter or 'the base model'}")
        elif name == "system":
            self.system = rest or None
        elif name == "reset":
            self.messages.clear()
        else:
            print("commands: /adapter NAME, /adapters, /system TEXT, /reset, /quit")
        return True


def run(options: argparse.Namespace) -> int:
    """Run the chat."""
    from ...runtime.text.chat_renderer import ChatRenderer

    params = sampling_params(options)
    with connect(options) as client:
        templates, renderer = find_templates(options.chat_template, client), ChatRenderer()
        try:
            if not templates.templates:
                print("The server's model has no chat template: each line is answered by itself.", file=sys.stderr)
            conversation = Conversation(
                client, templates, renderer, params, options.adapter, options.system, options.chat_template is None
            )
            if options.message is not None:
                conversation.turn(options.message)
                return 0
            return talk(conversation)
        finally:
            renderer.close()


def talk(conversation: Conversation) -> int:
    """Read lines until their end, print errors of turns, and return the exit code."""
    from ...runtime.api.errors import EngineDeadError, RequestError, ServerError

    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401  (line editing for input())

        print(
            f"Talking with {printable(conversation.client.connect().model)}. /help lists commands, Ctrl-D ends.",
            file=sys.stderr,
        )
    failed = 0
    while True:
        try:
            line = input(f"{conversation.adapter or 'base'}> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return failed
        if not line:
            continue
        try:
            if not line.startswith("/"):
                conversation.turn(line)
            elif not conversation.command(line):
                return failed
        except (RequestError, ServerError) as problem:
            print(f"sidestream: error: {' '.join(printable(str(problem)).split())}", file=sys.stderr)
            if isinstance(problem, EngineDeadError) and not terminal:
                return 2
            failed = 0 if terminal else 2
