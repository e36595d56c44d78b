"""Flags of `vllm serve`: taken with their effect, taken without one and said so, or refused with the remedy."""

from pathlib import Path

import pytest
from sidestream.runtime.engine.vllm_keywords import UNSUPPORTED_FLAGS, UNSUPPORTED_KEYWORDS
from sidestream.tools import cli
from sidestream.tools.commands.serve import settings_of


def llm_of(*arguments: str) -> dict[str, object]:
    return settings_of(cli.build_parser().parse_args(["serve", *arguments])).llm


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "effect"),
    [
        ("--dtype float32", {"precision": "fp32"}),
        ("--dtype bfloat16", {"precision": "bf16"}),
        ("--dtype auto", {}),
        ("--quantization fp8", {"precision": "fp8"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-lora", {"max_loras": 1, "max_lora_rank": 16}),
        ("--enable-lora --max-loras 3 --max-lora-rank 64", {"max_loras": 3, "max_lora_rank": 64}),
    ],
)
def test_flags_with_an_effect(model: str, arguments: str, effect: dict[str, object]) -> None:
    assert llm_of(model, *arguments.split()) == llm_of(model) | effect


def test_model_may_be_a_flag(model: str) -> None:
    parse = cli.build_parser().parse_args
    assert settings_of(parse(["serve", "--model", model])).model == model
    assert parse(["generate", "--model", model]).model == parse(["generate", model]).model == model


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--enable-prefix-caching", "it is on"),
        ("--enable-chunked-prefill", "it is so anyway"),
        ("--pipeline-parallel-size 1", "it is so anyway"),
        ("--enable-auto-tool-choice", "chat template"),
        ("--tool-call-parser llama3_json", "chat template"),
        ("--disable-log-requests", "--access-log FILE"),
        ("--swap-space 4", "it is so anyway"),
        ("--no-trust-remote-code", "it is so anyway"),
    ],
)
def test_flags_without_an_effect_say_so(
    model: str, arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = llm_of(model)
    assert llm_of(model, *arguments.split()) == plain
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sidestream: {arguments} has no effect: ") and reason in line


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--trust-remote-code", "no code of a model is run"),
        ("--pipeline-parallel-size 4", "use --tensor-parallel-size"),
        ("--quantization gptq", "use --precision int8, fp8, bf16 or fp32"),
        ("--dtype half", "use --precision"),
        ("--cpu-offload-gb 8", "fewer --num-kv-pages"),
        ("--num-gpu-blocks-override 99", "use --num-kv-pages"),
        ("--no-enable-chunked-prefill", "raise --max-num-batched-tokens"),
        ("--speculative-config {}", "use --speculation 'auto' or a number, and --draft DIR"),
        ("--tokenizer other/one", "put tokenizer.json"),
        ("--revision main", "download the model first"),
        ("--ssl-certfile x.pem", "put a proxy"),
    ],
)
def test_flags_of_what_there_is_not_name_the_remedy(
    arguments: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", *arguments.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and f"error: {arguments} is not supported; " in line and remedy in line


def test_every_flag_of_the_table_is_there_and_none_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (action.choices for action in cli.build_parser()._actions if action.choices)
    known = commands["serve"]._option_string_actions
    assert {f"--{name.replace('_', '-')}" for name in (*UNSUPPORTED_KEYWORDS, *UNSUPPORTED_FLAGS)} <= set(known)
    assert "--trust-remote-code" not in commands["serve"].format_help()


def test_a_file_of_flags_has_them_too(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'model = "{model}"\ndtype = "bfloat16"\nenable-chunked-prefill = true\n')
    assert llm_of("--config", str(file)) == llm_of(model) | {"precision": "bf16"}
    assert llm_of("--config", str(file), "--precision", "fp32")["precision"] == "fp32"
    assert "--enable-chunked-prefill has no effect" in capsys.readouterr().err
    file.write_text("trust-remote-code = true\n")
    with pytest.raises(SystemExit):
        llm_of("--config", str(file))
    assert "--trust-remote-code is not supported; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--generate", "--enable-everything", "--lora-path"])
def test_what_is_not_alike_is_not_suggested(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", flag])
    assert "did you mean" not in capsys.readouterr().err
