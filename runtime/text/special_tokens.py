"""Reads the special and added tokens in a checkpoint's files, as transformers does.

tokenizer_config.json, and in older checkpoints special_tokens_map.json and added_tokens.json.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..api.errors import RequestError
from .sentencepiece_model import MODEL, read_sentencepiece

CONFIG = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CLASS_DEFAULTS = {  # tokens of transformers' class that tokenizer_config.json does not set
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
}
# model types for which transformers ignores the class in tokenizer_config.json
CLASS_OF_TYPE = {"mistral": "", "phi3": "", "qwen2": "Qwen2Tokenizer"}
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

Token = dict[str, Any]  # arguments of `tokenizers.AddedToken`


def read_text(path: Path) -> str | None:
    """Return the text of a file, or None if there is none. Raises ValueError and OSError."""
    return path.read_text(encoding="utf-8") if path.is_file() else None


def read_object(path: Path, read: Callable[[Path], str | None] = read_text) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file. Raises RequestError for anything else."""
    try:
        text = read(path)
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError, OSError) as problem:
        raise RequestError(f"{path} cannot be read: {problem}; download or copy it again") from None
    if not isinstance(found, dict):
        raise RequestError(f"{path} cannot be read: it is not a JSON object; download or copy it again")
    return found


def tokenizer_class(directory: Path, config: Mapping[str, Any]) -> str:
    """Return the tokenizer's class in transformers, such as `LlamaTokenizer`; "": no special behaviour."""
    name, model_type = config.get("tokenizer_class"), read_object(directory / "config.json").get("model_type")
    if isinstance(model_type, str) and model_type in CLASS_OF_TYPE:
        return CLASS_OF_TYPE[model_type]
    return name.removesuffix("Fast") if isinstance(name, str) else ""


class TokenFiles:
    """Tokens in a directory's files.

    config       tokenizer_config.json, with additions from special_tokens_map.json
    named        name -> text, such as `eos_token` -> `</s>`: variables of chat templates
    by_id        id -> token, of tokens listed with an id
    lists_extra  whether there is a list of special tokens without names
    """

    def __init__(self, config: Mapping[str, Any], special: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = dict(config)
        if "additional_special_tokens" in self.config and not self.config.get("extra_special_tokens"):
            self.config["extra_special_tokens"] = self.config["additional_special_tokens"]
        decoder = self.config.get("added_tokens_decoder")
        if not isinstance(decoder, dict):
            self.config |= special
            if "additional_special_tokens" in special:
                self.config.setdefault("extra_special_tokens", special["additional_special_tokens"])
        extra = self.config.get("extra_special_tokens")
        fields = self.config | (extra if isinstance(extra, dict) else {})
        others = [name for name in fields if name.endswith("_token") and name not in NAMES]
        self._named = {name: token for name in (*NAMES, *others) if (token := as_token(fields.get(name))) is not None}
        self.lists_extra = "extra_special_tokens" in self.config and not isinstance(extra, dict)
        self._extra = [token for entry in extra if (token := as_token(entry))] if isinstance(extra, list) else []
        if isinstance(decoder, dict):
            found = {int(key): as_token(entry) for key, entry in decoder.items() if str(key).isdecimal()}
        else:
            known = {token["content"] for token in (*self._named.values(), *self._extra)}
            found = {
                number: {"content": text, "special": text in known, "normalized": text not in known}
                for text, number in added.items()
                if isinstance(number, int)
            }
        self.by_id = {number: token for number, token in sorted(found.items()) if token is not None}
        self.named = {name: str(token["content"]) for name, token in self._named.items()}

    @classmethod
    def of(cls, directory: Path) -> "TokenFiles":
        """Read the files of a directory. Raises RequestError for unreadable ones."""
        config = read_object(directory / CONFIG)
        special = read_object(directory / "special_tokens_map.json")
        defaults = CLASS_DEFAULTS.get(tokenizer_class(directory, config), {})
        if (directory / MODEL).is_file() and not (directory / "tokenizer.json").is_file():
            defaults = read_sentencepiece(directory / MODEL).named | defaults
            special.pop("additional_special_tokens", None)  # transformers uses the model's own
        config = defaults | config
        return cls(config, special, read_object(directory / "added_tokens.json"))

    def added(self, there: set[str]) -> list[Token]:
        """Return the tokens to add to a tokenizer with the added tokens `there`, in the order of their ids."""
        made = list(self.by_id.values())
        listed = there | {token["content"] for token in made}
        names = {token["content"] for token in self._named.values()}
        for token in (*self._named.values(), *self._extra):
            if token["content"] not in listed:
                listed.add(token["content"])
                made.append({"special": True, **token})
        return [token | {"special": True} if token["content"] in names else token for token in made]


def as_token(entry: Any) -> Token | None:
    """Return a token given as text or as an object with flags; None for anything else."""
    if isinstance(entry, str):
        return {"content": entry}
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    special = entry.get("special") is True
    flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
    return {"content": entry["content"], "special": special, "normalized": not special, **flags}
