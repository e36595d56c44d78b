"""`sidestream calibrate` as a user sees it, and what `LLM` and `serve` make of its file."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sidestream.compiler.options import DEFAULT_PRECISION, EIGHT_BITS, CompileOptions, OptionError
from sidestream.ops.attention.append_kv import append_kv
from sidestream.ops.core.kv_layout import kv_cache_shape, kv_scales_shape
from sidestream.ops.elementwise.hadamard import hadamard
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.llm import LLM
from sidestream.runtime.quantization.calibration import (
    FILE_NAME,
    KEY,
    KV_DTYPES,
    TREATMENTS,
    Calibration,
    CalibrationError,
    LayerStatistics,
    load_calibration,
)
from sidestream.runtime.quantization.kv_error import stored
from sidestream.runtime.quantization.model_statistics import attention_inputs
from sidestream.tools import cli
from sidestream.tools.commands.calibrate import as_text, documents
from sidestream.tools.commands.serve import settings_of
from sidestream.tools.options.engine import compile_arguments, layers
from support.paged import plain_model
from support.tiny import AdapterSpec, TinyBase, tiny_adapters, tiny_llama

ENGINE: dict[str, Any] = {
    "device": "cpu",
    "show_progress": False,
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return tiny_llama(tmp_path_factory.mktemp("calibrate"), tokenizer=True)


@pytest.fixture(scope="module")
def adapter(base: TinyBase) -> Path:
    return tiny_adapters(base, [AdapterSpec(rank=4)])[0]


@pytest.fixture(scope="module")
def written(base: TinyBase, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "calibration.safetensors"
    assert (
        cli.main(
            [
                "calibrate",
                str(base.path),
                "--lora-modules",
                f"one={adapter}",
                "--tokens",
                "200",
                "--length",
                "100",
                "-o",
                str(path),
            ]
        )
        == 0
    )
    return path


def figures(int8: tuple[float, ...], e4m3: tuple[float, ...]) -> LayerStatistics:
    """One error for each of TREATMENTS and dtype."""
    rows = {"int8": int8, "fp8_e4m3": e4m3}
    errors = {
        (kv_dtype, *each): error for kv_dtype, row in rows.items() for each, error in zip(TREATMENTS, row, strict=True)
    }
    return LayerStatistics(errors, {(kv_dtype, rotated): 0.0 for kv_dtype in KV_DTYPES for rotated in (False, True)})


def test_the_report_shows_every_layer_and_the_choice(
    base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "text.txt"
    prompts.write_text("To be, or not to be, that is the question. " * 10)
    assert (
        cli.main(
            [
                "calibrate",
                str(base.path),
                "--prompts",
                str(prompts),
                "--tokens",
                "96",
                "-o",
                str(tmp_path / "c.safetensors"),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "base: 96 tokens, adapters: none" in shown
    assert re.search(
        r"precision int8: kv_dtype=int8, .*\nprecision fp8: kv_dtype=(fp8_e4m3|int8), Hadamard in (all|no|layers)",
        shown,
    ), "the default first"
    rows = [line.split() for line in shown.splitlines() if re.match(r" *\d+ +\d", line)]
    assert len(rows) == 4 and all(row[-1].endswith("x") and float(row[-1][:-1]) >= 1.0 for row in rows[:2]), shown
    assert all(len(row) == 5 for row in rows[2:]), "the values' table"
    assert max(map(len, shown.partition("written to")[0].splitlines())) <= 100


def test_what_is_written_can_be_read_again(written: Path, tmp_path: Path) -> None:
    found = load_calibration(written)
    assert (found.tokens, found.adapters, len(found.layers), found.key_centers[0].shape) == (400, ("one",), 2, (2, 64))
    found.save(tmp_path / "again")
    again = load_calibration(tmp_path / "again")
    assert (again.layers, again.fingerprint) == (found.layers, found.fingerprint)
    assert all(map(torch.equal, again.key_centers, found.key_centers))


def test_the_centers_are_the_mean_keys_after_rope(base: TinyBase, tmp_path: Path) -> None:
    """Against the keys of transformers' own cache."""
    path, text = tmp_path / "c.safetensors", "The quick brown fox jumps over the lazy dog."
    (tmp_path / "text.txt").write_text(text)
    assert cli.main(["calibrate", str(base.path), "--prompts", str(tmp_path / "text.txt"), "-o", str(path)]) == 0
    ids = torch.tensor([list(text.encode())])
    cache = base.model(ids, use_cache=True).past_key_values
    for layer, center in enumerate(load_calibration(path).key_centers):
        want = cache.layers[layer].keys[0].mean(1)
        assert (center - want).norm() < 0.02 * want.norm()


def test_queries_keys_and_values_are_those_of_attention(base: TinyBase, adapter: Path) -> None:
    model, _ = plain_model(base, [adapter])
    for slot in (-1, 0):
        for q, k, v in attention_inputs(model, [5, 6, 7], slot, torch.device("cpu")):
            assert (q.shape, k.shape, v.shape) == ((3, 4, 64), (3, 2, 64), (3, 2, 64))
    with_base, with_adapter = (attention_inputs(model, [5, 6, 7], slot, torch.device("cpu"))[0][1] for slot in (-1, 0))
    assert not torch.equal(with_base, with_adapter)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_simulated_cache_is_the_one_that_the_op_fills(kv_dtype: str) -> None:
    keys, dtype = torch.randn(70, 2, 64), {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}[kv_dtype]
    cache, scales = torch.zeros(kv_cache_shape(2, 2, 64), dtype=dtype), torch.zeros(kv_scales_shape(2, 2))
    append_kv(keys, keys, cache, scales, torch.arange(70, dtype=torch.int32))
    read = (cache.float() * scales.unsqueeze(-1))[:, :, 0].transpose(1, 2).reshape(128, 2, 64)[:70]
    assert torch.equal(stored(keys, kv_dtype), read)
    assert (stored(keys, kv_dtype) - keys).norm() < 0.05 * keys.norm() and stored(
        hadamard(keys), kv_dtype
    ).shape == keys.shape


def test_every_adapter_gets_text() -> None:
    jobs = list(documents(range(50), 20, 3))
    assert [slot for _, slot in jobs] == [-1, -1, -1, 0, 0, 1, 1, 2, 2]
    assert [len(ids) for ids, _ in jobs[:3]] == [20, 20, 10] and jobs[3][0] == jobs[0][0] and jobs[5][0] == jobs[2][0]
    assert list(documents([1], 20, 1)) == []


def test_a_treatment_must_earn_its_place() -> None:
    same = figures((1.0, 0.97, 0.99, 0.96), (0.85, 0.85, 0.85, 0.85))
    assert same.treatment("int8") == (True, False)
    better = figures((1.0, 0.5, 2.0, 0.6), (0.1, 0.2, 0.05, 0.09))
    assert (better.treatment("int8"), better.treatment("fp8_e4m3")) == ((True, True), (False, False))


@pytest.mark.parametrize(("precision", "own", "other"), [("int8", "int8", "fp8_e4m3"), ("fp8", "fp8_e4m3", "int8")])
def test_each_precision_keeps_its_own_cache_unless_the_other_is_far_better(
    precision: str, own: str, other: str
) -> None:
    def layer(its: tuple[float, ...], others: tuple[float, ...]) -> LayerStatistics:
        return figures(its, others) if own == "int8" else figures(others, its)

    alike, far = layer((1.0,) * 4, (0.85,) * 4), layer((1.0, 0.5, 2.0, 0.6), (0.1, 0.2, 0.05, 0.09))
    centers = [torch.zeros(1, 64)] * 2
    assert Calibration("", [alike, alike], centers).kv_dtype(precision) == own
    mixed = Calibration("", [alike, far], centers)
    assert mixed.kv_dtype(precision) == other
    options: dict[str, Any] = {"precision": precision}
    assert mixed.options(CompileOptions(**options)) == CompileOptions(
        **options, kv_dtype=other, hadamard=(0,), center_keys=False
    )  # type: ignore[arg-type]
    assert mixed.options(CompileOptions(**options, kv_dtype=own)) == CompileOptions(
        **options, kv_dtype=own, center_keys=(1,)
    )  # type: ignore[arg-type]
    assert mixed.options(CompileOptions(**options, hadamard=False), hadamard=False) == CompileOptions(
        **options, kv_dtype=other, hadamard=False
    )  # type: ignore[arg-type]
    assert mixed.options(CompileOptions(precision="bf16")) == CompileOptions(precision="bf16")


def test_the_modes_offered_are_those_that_quantize() -> None:
    assert EIGHT_BITS[0] == DEFAULT_PRECISION


def test_the_report_says_what_rotated_values_would_bring() -> None:
    layer = figures((1.0,) * 4, (1.0,) * 4)
    values = {
        (kv_dtype, rotated): 0.5 if rotated and kv_dtype == "int8" else 1.0
        for kv_dtype in KV_DTYPES
        for rotated in (False, True)
    }
    shown = as_text(Calibration("", [replace(layer, value_errors=values)], [torch.zeros(1, 64)]), "int8")
    int8, fp8 = (
        next(line for line in shown.splitlines() if line.startswith(f"precision {name}")) for name in ("int8", "fp8")
    )
    assert "--rotate-values on brings the values' error from 1.0e+00 to 5.0e-01" in int8 and "rotate" not in fp8


@pytest.mark.parametrize(("precision", "own"), [("int8", "int8"), ("fp8", "fp8_e4m3")])
def test_the_engine_follows_its_calibration(
    base: TinyBase, adapter: Path, written: Path, precision: Any, own: str
) -> None:
    found = load_calibration(written)
    chosen = replace(
        found,
        layers=[
            figures((1.0, 0.1, 1.0, 1.0), (1.0, 0.1, 1.0, 1.0)),
            figures((1.0, 1.0, 0.2, 1.0), (1.0, 1.0, 0.2, 1.0)),
        ],
    )
    llm = LLM(base.path, {"one": adapter}, precision=precision, calibration=chosen, **ENGINE)
    assert (llm.compiled.options.kv_dtype, llm.compiled.options.hadamard, llm.compiled.options.center_keys) == (
        own,
        (0,),
        (0,),
    )
    center = hadamard(found.key_centers[0])
    assert (
        torch.allclose(llm.engine.runner.tensors["key_center_0"], center, atol=1e-6)
        and "key_center_1" not in llm.engine.runner.tensors
    )  # type: ignore[attr-defined]
    assert len(llm.generate(["To be"], adapter="one", use_tqdm=False)[0].outputs[0].token_ids) > 0
    llm = LLM(base.path, precision=precision, calibration=chosen, hadamard=False, center_keys=(1,), **ENGINE)
    assert (llm.compiled.options.hadamard, llm.compiled.options.center_keys) == (False, (1,))


def test_rotated_values_with_adapters_loaded_into_slots(base: TinyBase, adapter: Path) -> None:
    """The rotation reaches weights and adapters the way they are loaded for serving."""
    answers = []
    for rotated in (False, True):
        llm = LLM(base.path, {"one": adapter}, precision="fp32", rotate_values=rotated, **ENGINE)
        outputs = llm.generate(
            ["To be", "or not"], SamplingParams(max_tokens=12, temperature=0.0), adapter=["one", None], use_tqdm=False
        )
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] and len(answers[0][0]) > 1


def test_a_calibration_next_to_the_checkpoint_is_found(base: TinyBase, written: Path) -> None:
    (base.path / FILE_NAME).write_bytes(written.read_bytes())
    try:
        found = LLM(base.path, precision="int8", **ENGINE).calibration
        assert found is not None and found.layers == load_calibration(written).layers
        assert LLM(base.path, precision="bf16", **ENGINE).calibration is None
    finally:
        (base.path / FILE_NAME).unlink()
    assert LLM(base.path, precision="int8", **ENGINE).calibration is None


def test_a_calibration_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pipe, endless = tmp_path / "pipe", tmp_path / "endless"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    for path in (pipe, endless, tmp_path):
        with pytest.raises(CalibrationError, match="is not a regular file"):
            load_calibration(path)


def test_a_calibration_of_another_model_is_refused(base: TinyBase, written: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "weights", seed=5)
    with pytest.raises(CalibrationError, match=r"another model of the same shape.*sidestream calibrate"):
        LLM(other.path, calibration=written, **ENGINE)
    deeper = tiny_llama(tmp_path / "layers", num_hidden_layers=3)
    with pytest.raises(CalibrationError, match="2 layers of 2 x 64 keys, this model 3 of 2 x 64"):
        LLM(deeper.path, calibration=written, **ENGINE)
    with pytest.raises(CalibrationError, match="random weights"):
        LLM(base.path, calibration=written, load_format="dummy", **ENGINE)


def test_a_damaged_file_is_refused(written: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(str(written), framework="pt") as file:
        content, tensors = json.loads(file.metadata()[KEY]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    path = tmp_path / "bad.safetensors"
    broken = [
        {**content, "version": 99},
        {**content, "layers": []},
        {**content, "layers": content["layers"][:1] * 3},
        {},
        [],
        "x",
        {**content, "layers": [{**content["layers"][0], "key_errors": []}] * 2},
        {**content, "layers": [{**content["layers"][0], "bias": "NaN"}] * 2},
    ]
    for each in broken:
        save_file(tensors, path, metadata={KEY: json.dumps(each)})
        with pytest.raises(CalibrationError, match="write it again with `sidestream calibrate`"):
            load_calibration(path)
    save_file({name: tensor * math.inf for name, tensor in tensors.items()}, path, metadata={KEY: json.dumps(content)})
    with pytest.raises(CalibrationError, match="not finite"):
        load_calibration(path)
    for data in (b"", b"no safetensors", written.read_bytes()[:-7]):
        path.write_bytes(data)
        with pytest.raises(CalibrationError):
            load_calibration(path)
    with pytest.raises(CalibrationError, match="does not exist"):
        load_calibration(tmp_path / "absent")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"center_keys": True}, "sidestream calibrate"),
        ({"hadamard": (0, 2)}, "layer 2, the model has layers 0 to 1"),
        ({"precision": "bf16", "center_keys": True}, "center_keys=True has an effect only if"),
    ],
)
def test_options_that_cannot_be_met_are_refused(base: TinyBase, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        LLM(base.path, **{"precision": "int8", **options}, **ENGINE)


def test_flags_name_layers(base: TinyBase, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [layers(text) for text in ("on", "off", "3", "0,3-5,4")] == [True, False, (3,), (0, 3, 4, 5)]
    parse = cli.build_parser().parse_args
    assert compile_arguments(parse(["inspect", "explain", "--hadamard", "0,2-3", "--rotate-values", "on"]))[
        "hadamard"
    ] == (
        0,
        2,
        3,
    )
    assert compile_arguments(parse(["inspect", "explain", "--no-hadamard"]))[
        "hadamard"
    ] is False and "hadamard" not in compile_arguments(parse(["inspect", "explain"]))
    llm = settings_of(parse(["serve", str(base.path), "--calibration", str(written), "--center-keys", "1"])).llm
    assert llm["calibration"] == str(written) and llm["center_keys"] == (1,) and "hadamard" not in llm
    (tmp_path / "server.toml").write_text(f'calibration = "{written}"\nhadamard = "0-1"\n')
    options = parse(["serve", str(base.path), "--config", str(tmp_path / "server.toml")])
    assert settings_of(options).llm["hadamard"] == (0, 1)
    with pytest.raises(SystemExit):
        parse(["serve", "--hadamard", "1;2"])
    assert "numbers of layers" in capsys.readouterr().err


def test_no_text_is_refused(base: TinyBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("")
    assert cli.main(["calibrate", str(base.path), "--prompts", str(tmp_path / "empty"), "-o", str(tmp_path / "c")]) == 2
    assert cli.main(["calibrate", str(base.path), "-o", str(tmp_path / "no" / "c")]) == 2
    shown = capsys.readouterr().err
    assert "fewer than two tokens" in shown and "existing directory" in shown and not (tmp_path / "c").exists()
