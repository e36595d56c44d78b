"""The API reference and the commands' help, as Markdown: what a line `::: NAME` of a page stands for.

`::: sidestream.LLM` stands for the class with its docstring, its public methods and properties; `::: commands` for what
every command's `--help` prints, under its name. mkdocs_hooks puts the text in when the site is built, so neither can
be out of date.
"""

import argparse
import enum
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

DIRECTIVE = re.compile(r"^::: (?P<name>\S.*)$", re.MULTILINE)
ROW = re.compile(r"(?P<name>[\w`*][^\s](?:[^\s]| (?! ))*|\w) {2,}(?P<text>\S.*)")
LONGEST_NAME = 45  # of what a docstring lists; longer ones are prose with two spaces in it
LONGEST_DEFAULT = 60  # of a parameter; a longer one is left out
WIDTH = 100
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z_a-z])")


class DirectiveError(ValueError):
    """A page asks for a name or a command that there is not."""


def expanded(page: str) -> str:
    """A page's Markdown with every directive replaced. Raises DirectiveError for one that means nothing."""
    return DIRECTIVE.sub(lambda found: _text(found["name"].strip()), page)


def _text(name: str) -> str:
    if name == "commands":
        return _commands_help()
    module, _, attribute = name.rpartition(".")
    try:
        thing = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise DirectiveError(f"there is no {name!r}") from None
    return "\n".join(described(attribute, thing))


def _commands_help() -> str:
    from ...cli import build_parser

    return "\n".join(
        f"## {parser.prog.removeprefix('sidestream ')}\n\n```text\n{parser.format_help()}```\n"
        for parser in commands(build_parser())
    )


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands below `parser`, in their order."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for choice in action.choices.values():
            yield from commands(choice)


def described(name: str, thing: Any) -> Iterator[str]:
    """A class's or a function's part of the page, line by line."""
    yield from (f"### {name}", "")
    if not (isinstance(thing, type) and issubclass(thing, (BaseException, enum.Enum))):
        yield from ("```python", signature(name, thing), "```", "")
    yield from (markdown(inspect.getdoc(thing) or ""), "")
    for member, value in vars(thing).items() if isinstance(thing, type) else ():
        if member.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, (property, cached_property)):
            yield from (f"#### {name}.{member}", "", markdown(inspect.getdoc(value) or ""), "")
        elif isinstance(value, (FunctionType, classmethod, staticmethod)):
            call = getattr(thing, member)
            text = signature(member, call, bound=isinstance(value, FunctionType))
            yield from (f"#### {name}.{member}", "", "```python", text, "```", "")
            yield from (markdown(inspect.getdoc(call) or ""), "")


def signature(name: str, call: Any, bound: bool = False) -> str:
    """The call as Python, one parameter a line where it is long; `bound`: the first parameter is left out."""
    found = inspect.signature(call)
    parameters = list(found.parameters.values())[int(bound) :]
    if isinstance(call, type):
        found = found.replace(return_annotation=inspect.Signature.empty)
    words = []
    for index, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and (
            index == 0 or parameters[index - 1].kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            words.append("*")
        if parameter.default is not parameter.empty and len(repr(parameter.default)) > LONGEST_DEFAULT:
            parameter = parameter.replace(default=...)
        words.append(_shorter(str(parameter)).replace("Ellipsis", "..."))
    result = "" if found.return_annotation is found.empty else f" -> {_shorter(_annotation(found.return_annotation))}"
    coroutine = "async " if inspect.iscoroutinefunction(call) else ""
    line = f"{coroutine}{name}({', '.join(words)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{coroutine}{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){result}"


def _annotation(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return annotation.__name__ if plain else str(annotation)


def _shorter(text: str) -> str:
    return _MODULES.sub("", text).replace("<factory>", "...")


def markdown(doc: str) -> str:
    """A docstring as Markdown: aligned names and texts become tables, indented lines code, the rest paragraphs."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = block.split("\n")
        if all(line.startswith("    ") for line in lines):
            blocks.append("\n".join(["```python", *(line[4:] for line in lines), "```"]))
        else:
            blocks += _lists(lines)
    return "\n\n".join(blocks)


def _lists(lines: list[str]) -> Iterator[str]:
    """Paragraphs and tables of one block."""
    prose: list[str] = []
    rows: list[list[str]] = []
    for line in lines:
        found = ROW.fullmatch(line)
        if found is not None and len(found["name"]) <= LONGEST_NAME:
            if prose:
                yield _escaped(" ".join(prose))
                prose = []
            rows.append([found["name"].replace("`", ""), found["text"]])
        elif rows and line.startswith("  "):
            rows[-1][1] += f" {line.strip()}"
        else:
            if rows:
                yield _table(rows)
                rows = []
            prose.append(line.strip())
    if rows:
        yield _table(rows)
    if prose:
        yield _escaped(" ".join(prose))


def _table(rows: list[list[str]]) -> str:
    lines = [f"| `{name}` | {_escaped(text)} |" for name, text in rows]
    return "\n".join(["| name | what it is |", "| --- | --- |", *lines])


def _escaped(text: str) -> str:
    """Prose that means the same in Markdown; code spans stay as they are."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*|\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    parts[1::2] = [part.replace("|", "\\|") for part in parts[1::2]]
    return "`".join(parts)
