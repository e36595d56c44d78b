"""The templates in a directory are those of transformers, and an adapter's directory costs little whatever it holds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.text import chat_files
from sidestream.runtime.text.chat_files import (
    ChatTemplateError,
    ChatTemplates,
    read_adapter_chat,
    read_chat_templates,
    read_template_file,
)
from support.tiny_tokenizers import byte_level
from transformers import AutoTokenizer, PreTrainedTokenizerFast

NAMED = {"default": "D{{ eos_token }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def save(directory: Path, template: Any, in_files: bool) -> None:
    made = byte_level(["<s>", "</s>", "<pad>"], None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=template, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(directory, save_jinja_files=in_files)


@pytest.mark.parametrize("in_files", [True, False], ids=["files", "field"])
@pytest.mark.parametrize("names", [["default"], ["default", "tool_use"], ["tool_use", "default", "rag"]], ids="+".join)
def test_the_template_that_transformers_selects(names: list[str], in_files: bool, tmp_path: Path) -> None:
    template = NAMED["default"] if names == ["default"] else {name: NAMED[name] for name in names}
    save(tmp_path, template, in_files)
    ours, theirs = read_chat_templates(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for chosen in (None, "rag", "another {{ 1 }}"):
        for tools in (None, TOOLS, []):
            assert ours.select(chosen, tools is not None) == theirs.get_chat_template(chosen, tools)
    assert ours.tokens == theirs.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def test_without_a_default_tools_decide(tmp_path: Path) -> None:
    save(tmp_path, {"tool_use": "T", "rag": "R"}, True)
    ours, theirs = read_chat_templates(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.select(None, True) == theirs.get_chat_template(None, TOOLS) == "T"
    with pytest.raises(ValueError, match="no default"):
        theirs.get_chat_template()
    with pytest.raises(ChatTemplateError, match="rag, tool_use"):
        ours.select(None, False)


def test_which_file_comes_first(tmp_path: Path) -> None:
    assert read_chat_templates(tmp_path) == read_chat_templates(None) == ChatTemplates()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A", "bos_token": {"content": "<s>"}, "eos_token": None}))
    assert read_chat_templates(tmp_path) == ChatTemplates({"default": "A"}, {"bos_token": "<s>"})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "B"}))
    assert read_chat_templates(tmp_path).templates == {"default": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert read_chat_templates(tmp_path).templates == {"default": "C"}
    assert read_chat_templates(tmp_path, "mine") == ChatTemplates({"default": "mine"}, {"bos_token": "<s>"})
    config.write_text("{")
    with pytest.raises(ChatTemplateError, match="cannot be read"):
        read_chat_templates(tmp_path)


def test_a_file_for_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("é")
    assert read_template_file(tmp_path / "t.jinja") == "é"
    assert read_template_file("{% for m in messages %}{{ m.content }}\n{% endfor %}").endswith("{% endfor %}")
    (tmp_path / "b.jinja").write_bytes(b"\xff")
    (tmp_path / "l.jinja").write_text("x" * (1 << 19))
    for name, expected in {"no": "No such file", "b": "not UTF-8", "l": "characters"}.items():
        with pytest.raises(ChatTemplateError, match=expected):
            read_template_file(tmp_path / f"{name}.jinja")


@pytest.mark.parametrize("kept", ["all", "tokenizer.json", "tokenizer_config.json"])
def test_an_adapters_directory(kept: str, tmp_path: Path) -> None:
    """Added tokens are found in whichever file a trainer leaves."""
    save(tmp_path, NAMED, True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    if kept == "tokenizer_config.json":
        config = json.loads((tmp_path / kept).read_text())
        decoder = {number: token.__getstate__() for number, token in tokenizer.added_tokens_decoder.items()}
        (tmp_path / kept).write_text(json.dumps(config | {"added_tokens_decoder": decoder}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if kept not in ("all", name):
            (tmp_path / name).unlink()
    chat = read_adapter_chat(tmp_path, [tmp_path.resolve()])
    assert chat.templates.templates == NAMED and chat.unknown == {}
    tokens = {} if kept == "tokenizer.json" else {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert chat.templates.tokens == tokens
    over = chat.templates.over(ChatTemplates({"default": "base"}, {"eos_token": "<end>", "unk_token": "<unk>"}))
    assert over == ChatTemplates(NAMED, {"eos_token": "<end>", "unk_token": "<unk>"} | tokens)


def test_an_adapter_without_templates_has_those_of_the_base(tmp_path: Path) -> None:
    chat, base = read_adapter_chat(tmp_path), ChatTemplates({"default": "base"})
    assert chat.digest == "" and chat.unknown == {} and chat.templates.over(base) is base


def test_copies_of_one_template_share_their_memory(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text("{{ x }}" * 1000)
    first, second = (read_adapter_chat(tmp_path / name).templates.templates["default"] for name in ("one", "two"))
    assert first is second


def test_a_hostile_adapter_is_refused(tmp_path: Path) -> None:
    """Pipes, devices, links out of the root, deep and large files: none of them is waited for or read whole."""
    roots = [tmp_path.resolve()]
    (tmp_path / "secret").write_text("{}")
    deep = "[" * 200_000
    places: dict[str, Any] = {
        "chat_template.jinja": [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero"),
                                lambda path: path.symlink_to("/etc/passwd"), lambda path: path.write_bytes(b"\xff"),
                                lambda path: path.write_text("x" * (chat_files.MAX_TEMPLATE_BYTES + 1))],
        "tokenizer_config.json": [lambda path: path.write_text(deep), lambda path: path.write_text("[]"),
                                  lambda path: path.write_text(" " * (chat_files.MAX_FILE_BYTES + 1))],
        "tokenizer.json": [lambda path: os.mkfifo(path)],
    }  # fmt: skip
    for name, makers in places.items():
        for number, make in enumerate(makers):
            directory = tmp_path / f"{name}{number}"
            directory.mkdir()
            make(directory / name)
            with pytest.raises(ChatTemplateError):
                read_adapter_chat(directory, roots)
    harmless = tmp_path / "harmless"
    harmless.mkdir()
    (harmless / "tokenizer.json").write_text('{"added_tokens": ' + deep)
    (harmless / "tokenizer_config.json").write_text(
        '{"chat_template": {"a": 1}, "eos_token": 3, "added_tokens_decoder": [1]}'
    )
    assert read_adapter_chat(harmless, roots) == chat_files.NO_CHAT
