"""`sidestream calibrate --round`, and what `LLM` makes of its file: closer answers, or one error with the remedy."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.quantization.defaults import FILE_NAME, file_name
from sidestream.runtime.quantization.rounded_weights import KEY, RoundingError, open_rounding
from sidestream.runtime.worker.calibrate.scorer import Document, Scorer, plan
from sidestream.tools import cli
from sidestream.tools.eval.real.measure import Reference
from sidestream.tools.eval.teacher_forced import compare
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "show_progress": False,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}
TEXT = "Sing, goddess, of the wrath that brought the Achaeans countless woes, and sent many souls to Hades. " * 6
ROUNDED = file_name("int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("rounding"), tokenizer=True, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def adapter(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=4)])[0]


@pytest.fixture(scope="module")
def written(base: TinyBase, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the command writes."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "text").write_text(TEXT)
    asked = ["calibrate", str(base.path), "--lora-modules", f"one={adapter}", "--prompts", str(folder / "text")]
    asked += ["--tokens", "400", "--length", "100", "--round"]
    assert cli.main([*asked, "-o", str(folder / FILE_NAME)]) == 0
    return folder


def divergence(base: TinyBase, adapter: Path, **options: Any) -> dict[str | None, float]:
    """Mean KL to transformers and peft in fp32 over a text, of the base and of the adapter."""
    ids = list(TEXT[40:140].encode())
    texts = [Document(ids), Document(ids, "one")]
    llm = LLM(base.path, {"one": adapter}, kv_dtype="bf16", lora_dtype="bf16", num_kv_pages=16, **ENGINE, **options)
    scorer = Scorer(llm.model, 64, 4, 16, 2)
    steps = list(plan([100, 100], 64, 4, 16))
    found = compare(Reference(base.path, {"one": adapter}, "cpu"), scorer, texts, steps)
    return {text.adapter: float(found.kl[found.document == place].mean()) for place, text in enumerate(texts)}


def test_answers_come_closer_with_and_without_an_adapter(base: TinyBase, adapter: Path, written: Path) -> None:
    given = {"calibration": written / FILE_NAME}
    nearest = divergence(base, adapter, **given, norm_rotation=64, rotate_values=True)
    rounded = divergence(base, adapter, **given, rounded_weights=written / ROUNDED)
    assert all(rounded[name] < 0.9 * nearest[name] for name in (None, "one")), (rounded, nearest)


def test_the_file_is_found_next_to_the_model_and_says_so(base: TinyBase, adapter: Path, written: Path) -> None:
    for name in (FILE_NAME, ROUNDED):
        shutil.copy(written / name, base.path / name)
    try:
        llm = LLM(base.path, {"one": adapter}, precision="int8", **ENGINE)
        used = llm.compiled.options
        assert used.rounded_weights and used.norm_rotation == 64 and used.rotate_values and used.smooth_channels
        taken = next(record for record in llm.compiled.records if record.name == "use_rounded_weights")
        assert taken.matches == 9 and "use_rounded_weights" in llm.compiled.report()
        held = load_file(written / ROUNDED)
        for name in ("q", "k", "v"):
            assert held[f"model.layers.0.self_attn.{name}_proj.weight.rounded"].dtype == torch.int8
        (head,) = (
            tensor
            for name, tensor in llm.engine.runner.tensors.items()  # type: ignore[attr-defined]
            if name.endswith("int8") and "embed" in name
        )
        assert torch.equal(head, held["model.embed_tokens.weight.rounded"])
        assert len(llm.generate(["To be"], adapter="one", use_tqdm=False)[0].outputs[0].token_ids) > 0
        for options in ({"rounded_weights": "off"}, {"precision": "fp8"}, {"precision": "bf16"}):
            given = {"precision": "int8", **ENGINE, **options}
            assert not LLM(base.path, **given).compiled.options.rounded_weights
    finally:
        for name in (FILE_NAME, ROUNDED):
            (base.path / name).unlink()


def test_the_same_text_writes_the_same_bytes(base: TinyBase, adapter: Path, written: Path, tmp_path: Path) -> None:
    asked = ["calibrate", str(base.path), "--lora-modules", f"one={adapter}", "--prompts", str(written / "text")]
    asked += ["--tokens", "400", "--length", "100", "--round"]
    assert cli.main([*asked, "-o", str(tmp_path / "c")]) == 0
    assert (tmp_path / ROUNDED).read_bytes() == (written / ROUNDED).read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm_rotation": 8}, r"made with norm_rotation=64, but these options have norm_rotation=8: start with"),
        ({"rotate_values": False}, r"made with rotate_values=True"),
        ({"smooth_channels": False}, r"made with smooth_channels=True.*rounded_weights='off'"),
        ({"precision": "fp8"}, r"made with precision='int8'"),
        (
            {"disable_passes": ("smooth_channels",)},
            r"have model.*weight as quantize\(smooth.*calibrate .*--round",
        ),
        ({"load_format": "dummy", "calibration": None}, "random weights"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_other_options_are_refused_by_name(base: TinyBase, written: Path, options: dict[str, Any], said: str) -> None:
    given = {"calibration": written / FILE_NAME, "rounded_weights": str(written / ROUNDED), **options}
    with pytest.raises(RoundingError, match=said):
        LLM(base.path, **given, **ENGINE)


def test_another_checkpoint_or_calibration_is_refused(base: TinyBase, written: Path, tmp_path: Path) -> None:
    """An adapter merged into one projection makes another checkpoint."""
    merged = tmp_path / "merged"
    shutil.copytree(base.path, merged)
    weights = load_file(merged / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    given = {"calibration": written / FILE_NAME, "rounded_weights": written / ROUNDED}
    with pytest.raises(RoundingError, match="another checkpoint"):
        LLM(merged, **given, **ENGINE)
    exponents = tmp_path / FILE_NAME
    with safe_open(str(written / FILE_NAME), framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["model.norm.channel_exponents"] = -tensors["model.norm.channel_exponents"] + 1
    save_file(tensors, exponents, metadata=metadata)
    with pytest.raises(RoundingError, match="another calibration"):
        LLM(base.path, **{**given, "calibration": exponents}, **ENGINE)


def test_a_file_that_is_not_whole_is_refused(base: TinyBase, written: Path, tmp_path: Path) -> None:
    tensors, path = load_file(written / ROUNDED), tmp_path / "bad.safetensors"
    origin = msgspec.to_builtins(open_rounding(written / ROUNDED).origin)
    for said in ({}, [], {**origin, "version": 9}, {**origin, "options": {}}, {**origin, "recipes": 3}):
        save_file(tensors, path, metadata={KEY: json.dumps(said)})
        with pytest.raises(RoundingError, match=r"cannot be read.*--round"):
            open_rounding(path)
    for data in (b"", b"no safetensors", (written / ROUNDED).read_bytes()[:-5]):
        path.write_bytes(data)
        with pytest.raises(RoundingError):
            open_rounding(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RoundingError, match="not a regular file"):
        open_rounding(path)
    with pytest.raises(RoundingError, match="does not exist"):
        open_rounding(tmp_path / "none")
    path.unlink()
    given = {"calibration": written / FILE_NAME, "rounded_weights": path}
    name = "model.layers.0.mlp.down_proj.weight.rounded"
    for changed in ({name: tensors[name].float()}, {name: tensors[name][:16]}, {f"{name}_scale": torch.zeros(128)}):
        save_file({**tensors, **changed}, path, metadata={KEY: json.dumps(origin)})
        with pytest.raises(RoundingError, match=r"down_proj\.weight\.rounded"):
            LLM(base.path, **given, **ENGINE)


def test_flags(base: TinyBase, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--norm-rotation", "64"), ("--rotate-values", "on")):
        assert cli.main(["calibrate", str(base.path), flag, value]) == 2
        assert f"{flag} is an option of --round" in capsys.readouterr().err


def test_a_calibration_goes_next_to_the_model_and_never_to_anothers_weights(
    base: TinyBase, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["calibrate", str(base.path), "--prompts", str(written / "text"), "--tokens", "40", "--length", "40"]
    file, rounded = base.path / FILE_NAME, base.path / ROUNDED
    try:
        assert cli.main(asked) == 0 and LLM(base.path, precision="int8", **ENGINE).compiled.options.smooth_channels
        shutil.copy(written / ROUNDED, rounded)
        before = file.read_bytes()
        assert cli.main(asked) == 2 and "round it again with --round" in capsys.readouterr().err
        assert file.read_bytes() == before
    finally:
        for path in (file, rounded):
            path.unlink(missing_ok=True)


def test_each_of_two_ranks_takes_its_part(base: TinyBase, adapter: Path, written: Path) -> None:
    """Their answers are closer to one process's than those of weights that are rounded to nearest."""
    given: dict[str, Any] = {"calibration": str(written / FILE_NAME), "norm_rotation": 64, "kv_dtype": "bf16", **ENGINE}
    held, scores = load_file(written / ROUNDED), []
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for ranks, rounded in ((1, written / ROUNDED), (1, "off"), (2, written / ROUNDED)):
        with LLM(base.path, {"one": adapter}, tensor_parallel_size=ranks, rounded_weights=rounded, **given) as llm:
            outputs = llm.generate([TEXT[10:70], TEXT[30:90]], asked, [None, "one"], use_tqdm=False)
            tokens = [each for output in outputs for each in output.prompt_logprobs or () if each]
            scores.append(torch.tensor([one.logprob for each in tokens for one in each.values()]))
            first = dict(llm.model.runner.tensors)
    for layer in (0, 1):
        for module in ("self_attn.o_proj", "mlp.down_proj"):
            whole = held[f"model.layers.{layer}.{module}.weight.rounded"]
            part = first[f"p_model_layers_{layer}_{module.replace('.', '_')}_weight_int8"]
            assert torch.equal(part, whole[:, : whole.shape[1] // 2])
    one, nearest, two = scores
    assert (two - one).abs().mean() < (nearest - one).abs().mean()
