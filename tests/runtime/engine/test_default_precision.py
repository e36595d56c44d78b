"""The precision of an engine where none is given, and what a start reports of it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidestream.compiler.options import OptionError
from sidestream.graphs.config import LlamaConfig
from sidestream.runtime.api.sampling_params import SamplingParams
from sidestream.runtime.demo_model import DEMO_MODEL
from sidestream.runtime.engine.options import EngineOptions
from sidestream.runtime.engine.resolve import default_precision
from sidestream.runtime.llm import LLM
from sidestream.runtime.quantization.defaults import FILE_NAME
from sidestream.runtime.worker.calibrate.first_start import calibrate_base_model
from sidestream.runtime.worker.model_loader import find_model
from sidestream.tools import cli
from sidestream.tools.commands.serve import settings_of
from support.tiny import TinyBase, oracle_greedy, tiny_llama

DTYPES = {"bfloat16": "bf16", "float16": "fp32", "float32": "fp32"}
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyBase]:
    """One model as transformers saves it in each dtype."""
    source = tiny_llama(tmp_path_factory.mktemp("fp32"), num_hidden_layers=1)
    found = {}
    for dtype in DTYPES:
        path = tmp_path_factory.mktemp(dtype)
        model = source.model.to(getattr(torch, dtype))
        model.save_pretrained(path)
        source.model.to(torch.float32)
        found[dtype] = TinyBase(path)
    return found


def precision(model: Any, device: str = "cpu", **keywords: Any) -> str:
    return find_model(model, **{"device": device, **keywords})[1].compiler.precision


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_computes_in_the_dtype_of_the_checkpoint(
    bases: dict[str, TinyBase], dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = bases[dtype]
    with LLM(base.path, **SMALL) as llm:
        assert llm.compiled.options.precision == DTYPES[dtype]
        (line,) = (each for each in capsys.readouterr().err.splitlines() if "precision" in each)
        assert line.startswith(f"sidestream: precision {DTYPES[dtype]}, ")
        assert ("float16 exactly" if dtype == "float16" else "as the checkpoint stores its weights") in line
        if DTYPES[dtype] == "fp32":
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            (output,) = llm.generate([[3, 1, 4, 1, 5]], params, use_tqdm=False)
            assert output.outputs[0].token_ids == oracle_greedy(base, None, [3, 1, 4, 1, 5], 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_decide_where_the_config_names_no_dtype(bases: dict[str, TinyBase], dtype: str, tmp_path: Path) -> None:
    shutil.copytree(bases[dtype].path, tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    former = fields.pop("dtype", None) or fields.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert former == dtype and LlamaConfig.from_directory(tmp_path).dtype == dtype
    assert precision(tmp_path) == DTYPES[dtype]
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file(weights, tmp_path / "model-00001-of-00001.safetensors")
    assert LlamaConfig.from_directory(tmp_path).dtype == dtype, "of a shard"
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"no header")
    assert LlamaConfig.from_directory(tmp_path).dtype == "bfloat16", "the checkpoint reports damage"


def test_a_gpu_keeps_int8_and_stored_eight_bits_stay(bases: dict[str, TinyBase]) -> None:
    config = LlamaConfig.from_directory(bases["float16"].path)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    options = EngineOptions()
    assert [default_precision(options, config, device) for device in (cpu, gpu)] == ["fp32", "int8"]
    for stored in ("int8", "fp8"):
        assert default_precision(options, replace(config, weight_format=stored), cpu) == stored
    for given in ({"calibration": "file"}, {"rounded_weights": "file"}):
        assert default_precision(EngineOptions(**given), config, cpu) == "int8"
    for given in ({"calibration": "off"}, {"calibration": "auto", "rounded_weights": "off"}):
        assert default_precision(EngineOptions(**given), config, cpu) == "fp32"


@pytest.mark.parametrize(
    ("keywords", "wanted"),
    [
        ({"precision": "int8"}, "int8"),
        ({"precision": "fp8", "kv_dtype": "int8"}, "fp8"),
        ({"precision": None}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"dtype": torch.bfloat16}, "bf16"),
        ({"dtype": "auto", "load_format": "dummy"}, "bf16"),
    ],
    ids=str,
)
def test_what_is_given_wins(bases: dict[str, TinyBase], keywords: dict[str, Any], wanted: str) -> None:
    assert precision(bases["bfloat16"].path, **keywords) == wanted


@pytest.mark.parametrize(
    "keywords",
    [{"kv_cache_dtype": "fp8"}, {"lora_dtype": "int8"}, {"hadamard": True}, {"smooth_channels": True}],
    ids=str,
)
def test_what_needs_eight_bits_names_the_default(bases: dict[str, TinyBase], keywords: dict[str, Any]) -> None:
    path = bases["bfloat16"].path
    with pytest.raises(OptionError, match=r"use precision='int8'.*precision='bf16', of the checkpoint, is the default"):
        find_model(path, device="cpu", **keywords)
    with pytest.raises(OptionError, match="precision='int8'") as caught:
        find_model(path, device="cpu", precision="fp32", **keywords)
    assert "is the default" not in str(caught.value)


def test_a_start_in_eight_bits_reports_its_calibration(
    bases: dict[str, TinyBase], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(*model: Any, **keywords: Any) -> str:
        with LLM(*model, **SMALL, **keywords) as llm:
            (found,) = (each for each in capsys.readouterr().err.splitlines() if "precision" in each)
            assert found == f"sidestream: {llm.model.precision}"
        return found

    path = shutil.copytree(bases["bfloat16"].path, tmp_path / "model")
    for chosen in ("int8", "fp8"):
        remedy = f"`sidestream calibrate {path}`"
        assert line(path, precision=chosen).startswith(f"sidestream: precision {chosen}, not calibrated: {remedy}")
    assert line(path, precision="int8", load_format="dummy").endswith("not calibrated: the weights are random")
    config = LlamaConfig.from_directory(path)
    calibrate_base_model(path, config, [([5] * 40, -1)], torch.device("cpu")).save(path / FILE_NAME)
    assert line(path, precision="int8") == "sidestream: precision int8, calibrated"
    assert line(path).startswith("sidestream: precision bf16, as the checkpoint"), "found, and not asked for"
    assert line(path, calibration=path / FILE_NAME) == "sidestream: precision int8, calibrated"
    assert line(path, calibration=path / FILE_NAME, precision="bf16").endswith("this one is not used")


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_commands_leave_the_precision_to_the_model(bases: dict[str, TinyBase], command: str) -> None:
    path = str(bases["float32"].path)
    options = cli.build_parser().parse_args([command, path])
    assert options.precision is None
    if command == "serve":
        settings = settings_of(options)
        assert precision(settings.model, **settings.llm) == "fp32"
        settings = settings_of(cli.build_parser().parse_args([command, path, "--precision", "int8"]))
        assert precision(settings.model, **settings.llm) == "int8"


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["inspect", "dump"],
        ["inspect", "explain"],
        ["inspect", "ledger"],
        ["bench", "latency"],
        ["bench", "throughput"],
    ],
    ids=str,
)
def test_commands_that_show_the_compiler_keep_int8(command: list[str]) -> None:
    assert cli.build_parser().parse_args(command).precision == "int8"


def test_the_demo_and_the_dump_report_int8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "dump", str(DEMO_MODEL), "--layers", "0", "-o", str(tmp_path)]) == 0
    assert "for precision int8" in capsys.readouterr().out
    assert cli.main(["inspect", "explain", "--no-changes"]) == 0
    assert capsys.readouterr().out.startswith("precision int8\n")
