"""Reads `tokenizer.model` (SentencePiece) as a tokenizer of the tokenizers library that encodes as transformers does.

The file is a protobuf message (sentencepiece_model.proto); only a few fields are read.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..api.errors import RequestError

MODEL = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of pieces; unused (5) and byte (6) need no treatment
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"


@dataclass
class SentencePieceModel:
    """Content of a file. `pieces`: text, score and type of each id; `named`: special pieces by name."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    unknown: int = 0
    named: dict[str, str] = field(default_factory=dict)
    charsmap: bytes = b""
    prefix: bool = True
    strip: bool = True
    escape: bool = True


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a file. Raises RequestError unless it is a SentencePiece model of a supported kind."""
    try:
        return _model(path.read_bytes())
    except (ValueError, IndexError, struct.error, OSError) as error:
        raise RequestError(
            f"{path.name} is not a sentencepiece model (Llama 3's tokenizer.model is not one); put the model's "
            "tokenizer.json next to it"
        ) from error


def _model(data: bytes) -> SentencePieceModel:
    found = SentencePieceModel()
    trainer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            found.pieces.append((piece[1].decode() if 1 in piece else "", _float(piece.get(2)), piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
            found.charsmap = normalizer.get(2, b"")
            found.prefix, found.strip, found.escape = (bool(normalizer.get(key, 1)) for key in (3, 4, 5))
    found.kind, found.byte_fallback = trainer.get(3, UNIGRAM), bool(trainer.get(35, 0))
    found.unknown = trainer.get(40, 0)
    for name, at, text, usual in (("unk", 40, 45, 0), ("bos", 41, 46, 1), ("eos", 42, 47, 2)):
        if 0 <= trainer.get(at, usual) < len(found.pieces):
            default = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}[name]
            found.named[f"{name}_token"] = trainer[text].decode() if text in trainer else default
    if not found.pieces or found.kind not in (UNIGRAM, BPE):
        raise ValueError("no pieces, or of an unsupported kind")
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, number or bytes) of a protobuf message. Raises ValueError, IndexError."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, place = _varint(data, place)
        if size is None or place + size > len(data):
            raise ValueError("not a protobuf message")
        yield number, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("not a protobuf message")


def _float(data: bytes | None) -> float:
    return 0.0 if data is None else float(struct.unpack("<f", data)[0])


def build_tokenizer(model: SentencePieceModel, llama: bool, config: dict[str, Any], renamed: dict[int, str]) -> Any:
    """Return the model as a `tokenizers.Tokenizer`, without added tokens.

    llama     as transformers' LlamaTokenizer, which ignores the file's normalizer; else by the file's settings
    config    tokenizer_config.json: `legacy` prepends a space to each text between special tokens, and not only to the
              first; `add_prefix_space=False` (with `llama`) prepends none
    renamed   id -> the token that replaces a piece
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    llama = llama and model.kind == BPE
    scheme = "always" if config.get("legacy", not llama) else "first"
    prefix = config.get("add_prefix_space") is not False if llama else model.prefix
    tokenizer = Tokenizer(_unigram(model) if model.kind == UNIGRAM else _bpe(model, llama, {} if llama else renamed))
    if llama:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme if prefix else "never", split=False)
    else:
        steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
        if model.strip:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if model.escape:
            steps.append(normalizers.Replace(" ", SPACE))
        if prefix and scheme == "always":  # SentencePiece prepends one before a space, Metaspace does not
            steps.append(normalizers.Replace(Regex(rf"\A{SPACE}"), SPACE * 2))
        tokenizer.normalizer = normalizers.Sequence(steps)
        splits: list[Any] = [pre_tokenizers.Metaspace(SPACE, scheme, split=False)] if prefix else []
        whole = sorted((text for text, _, kind in model.pieces if kind == USER_DEFINED), key=len, reverse=True)
        if whole:
            splits.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, whole))), "isolated"))
        if splits:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    fallback = [decoders.ByteFallback()] if llama or model.byte_fallback else []
    start = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *fallback, decoders.Fuse(), *start])
    return tokenizer


def _unigram(model: SentencePieceModel) -> Any:
    from tokenizers import models

    return models.Unigram([piece[:2] for piece in model.pieces], model.unknown, model.byte_fallback)


def _bpe(model: SentencePieceModel, llama: bool, renamed: dict[int, str]) -> Any:
    """Return the model with the merges that its pieces imply, most likely piece first."""
    from tokenizers import models

    kept = {text for number, (text, _, _) in enumerate(model.pieces) if number not in renamed}
    names = [
        renamed[number] if number in renamed and renamed[number] not in kept else text
        for number, (text, _, _) in enumerate(model.pieces)
    ]
    numbers = {text: number for number, text in enumerate(names)}
    if llama:
        parts = numbers
    else:
        parts = {names[number]: number for number, piece in enumerate(model.pieces) if piece[2] == NORMAL}
    ranked = []
    for text, number in parts.items():
        for split in range(1, len(text)):
            left, right = text[:split], text[split:]
            if left in parts and right in parts:
                # transformers' order: by id or score, then by the lengths or texts of the parts
                rank = (number, len(left), len(right)) if llama else (-model.pieces[number][1], number, left, right)
                ranked.append((rank, left, right))
    options: dict[str, Any] = {"byte_fallback": True} if llama else {"byte_fallback": model.byte_fallback}
    if not llama:
        options["unk_token"] = model.named.get("unk_token", "<unk>")
        options["ignore_merges"] = any(kind == USER_DEFINED for _, _, kind in model.pieces)
    merges = [(left, right) for _, left, right in sorted(ranked)]
    return models.BPE(vocab=numbers, merges=merges, fuse_unk=True, **options)
