"""Write a model directory without weights: config.json, a tokenizer of the vocabulary's size, and random adapters.

    python -m sidestream.tools.bench.model_directory DIR --adapters 8
    sidestream serve DIR --load-format dummy --lora-modules random-0=DIR/adapters/random-0 ...

The shape is that of Llama-3.1-8B, with `--tiny` that of two small layers with adapters of 50 kB, or with `--like MODEL`
that of another directory. Adapters have rank `--rank` and alpha 2 * rank on all projections.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.text.token_bytes import letters
from ..options.models import LLAMA_8B
from .random_model import write_random_adapter

TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def write_tokenizer(file: Path, vocabulary: int) -> None:
    """Return a byte-level tokenizer.json of `vocabulary` tokens: the 256 bytes, then pairs and triples of letters.

    Only outputs can have the pairs and triples.
    """
    alphabet = letters()
    names = {letter: byte for byte, letter in enumerate(alphabet[:vocabulary])}
    small = [letter for letter in alphabet if letter.isalpha() and letter.isascii()]
    words = (first + second + third for third in ["", *small] for first in small for second in small)
    for number in range(len(names), vocabulary):
        names[next(words)] = number
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": names, "merges": []},
    }
    file.write_text(json.dumps(content))


def write_model(directory: Path, config: Mapping[str, Any], adapters: int, rank: int) -> dict[str, str]:
    """Write the directory, and return its adapters, name -> directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    write_tokenizer(directory / "tokenizer.json", config["vocab_size"])
    return {
        f"random-{index}": write_random_adapter(directory / "adapters" / f"random-{index}", config, rank, index)
        for index in range(adapters)
    }


def main() -> int:
    """Write the directory of the command line."""
    parser = argparse.ArgumentParser(
        prog="bench_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="random adapters (default: none)")
    parser.add_argument("--rank", type=int, default=32)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--tiny", action="store_true", help="two small layers")
    shape.add_argument("--like", type=Path, metavar="MODEL", help="the shape of another model directory")
    options = parser.parse_args()
    config = (
        json.loads((options.like / "config.json").read_text()) if options.like else TINY if options.tiny else LLAMA_8B
    )
    write_model(options.directory, config, options.adapters, options.rank)
    print(f"wrote {options.directory} with {options.adapters} adapters of rank {options.rank}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
