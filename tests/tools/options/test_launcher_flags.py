"""Flags of other launchers: taken with their effect, taken without one and said so, or refused with the remedy."""

import argparse
import contextlib
import re
import tomllib
from pathlib import Path

import pytest
from sidestream.compiler.options import OptionError
from sidestream.runtime.engine.options import keywords
from sidestream.runtime.engine.vllm_keywords import ACCEPTED, UNSUPPORTED_KEYWORDS, without_vllm_keywords
from sidestream.tools import cli
from sidestream.tools.commands.serve import settings_of
from sidestream.tools.options.launcher_flags import launcher_flags

LAUNCHERS: dict[str, str] = tomllib.loads(Path(__file__).with_name("launchers.toml").read_text())
OTHERS = {"--model", "--config", "--dtype", "--quantization"}
"""Flags whose effect other tests show."""


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
        ("--tokenizer other/one", "put tokenizer.json"),
        ("--revision main", "download the model first"),
        ("--ssl-certfile x.pem", "put a proxy"),
        ("--hf-overrides.rope.theta 5", "change config.json"),
        ("--nnodes 2", "start more gateways"),
        ("--max-total-tokens 2048", "use --max-model-len for the tokens of a request"),
        ("--adapter-id org/name", "--lora-modules NAME=DIR"),
        ("--speculative-algorithm EAGLE3", "use --speculation 'auto'"),
    ],
)
def test_flags_of_what_there_is_not_name_the_remedy(
    arguments: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", *arguments.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and f"error: {arguments} is not supported; " in line and remedy in line


def serve_parser() -> argparse.ArgumentParser:
    (commands,) = (action.choices for action in cli.build_parser()._actions if action.choices)
    parser: argparse.ArgumentParser = commands["serve"]
    return parser


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_flag_of_a_launcher_is_known(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser, unknown = serve_parser(), []
    ours = set(parser._option_string_actions)
    words = LAUNCHERS[launcher].split()
    for word in words:
        flag, takes_value, _ = word.partition("=")
        if flag in ours | OTHERS:
            continue
        with contextlib.suppress(SystemExit):
            parser.parse_args(["some-model", flag, *(["1"] if takes_value else []), "--port", "1"])
        said = capsys.readouterr().err
        if not re.search(rf"{flag} ?1? (has no effect: |is not supported; |is --)", said):
            unknown.append((flag, said))
    assert unknown == [] and len(words) > 30


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_flag_of_a_launcher_is_known_in_python(launcher: str) -> None:
    """As a keyword of `LLM`, but flags of the server alone."""
    served, unknown = set(serve_parser()._option_string_actions), []
    for word in LAUNCHERS[launcher].split():
        flag, takes_value, _ = word.partition("=")
        if not flag.startswith("--") or flag in served | OTHERS:
            continue
        name = flag[2:].replace("-", "_")
        with contextlib.suppress(OptionError):
            unknown += without_vllm_keywords({name: "1" if takes_value else True}, adapters=False)
    assert set(unknown) <= set(keywords())


def test_the_table_leads_to_flags_of_serve_and_repeats_none_of_them() -> None:
    ours = set(serve_parser()._option_string_actions)
    renamed, flags = launcher_flags()
    keywords = {f"--{name.replace('_', '-')}" for name in (*UNSUPPORTED_KEYWORDS, *ACCEPTED)}
    assert set(renamed.values()) <= ours | set(flags)
    repeated = (set(renamed) | set(flags)) & ours - keywords - {"--no-enable-prefix-caching"}
    assert repeated == set(), "serve has these itself: delete them from launcher_flags.toml"
    named = {flag for each in flags.values() for flag in re.findall(r"--[a-z-]+", each.unsupported.remedy)}
    assert named <= ours | {"--profile"}  # of the bench


def test_the_help_shows_none_of_them() -> None:
    shown = serve_parser().format_help()
    assert "--trust-remote-code" not in shown and "--attention-backend" not in shown and "--context-length" not in shown


@pytest.mark.parametrize(
    ("arguments", "effect"),
    [
        ("--context-length 4096", {"max_model_len": 4096}),
        ("--max_model_len 4k", {"max_model_len": 4000}),
        ("--max-model-len=4K", {"max_model_len": 4096}),
        ("--max-running-requests 7 --mem-fraction-static=0.5", {"max_num_seqs": 7, "gpu_memory_utilization": 0.5}),
        ('--preferred-sampling-params={"top_k":4}', {"override_generation_config": {"top_k": 4}}),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":5}', {"speculation": 5}),
        ('-sc={"method":"eagle3","model":"head","num_speculative_tokens":3}', {"speculation": 3, "draft": "head"}),
        ("--speculative-config.method ngram --max-num-seqs 2", {"speculation": "auto", "max_num_seqs": 2}),
        ("--override-generation-config.temperature=0.5", {"override_generation_config": {"temperature": 0.5}}),
        ("-tp 2", {"tensor_parallel_size": 2}),
        ("-q fp8", {"precision": "fp8"}),
        ("--max-active-adapters 3 --quantize fp8", {"max_loras": 3, "precision": "fp8"}),
        ("--disable-cuda-graph --disable-radix-cache", {"enforce_eager": True, "enable_prefix_caching": False}),
        ("--attention-backend X --nnodes 1 --cudagraph-capture-sizes 1 2 4 --seed 3", {"seed": 3}),
    ],
)
def test_renamed_flags_have_the_effect_of_ours(model: str, arguments: str, effect: dict[str, object]) -> None:
    assert llm_of(model, *arguments.split()) == llm_of(model) | effect


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{}", "its method is not supported; use --speculation 'auto' or a number, and --draft DIR"),
        ('{"method":"medusa","model":"x"}', "its method is not supported"),
        ('{"method":"ngram","num_speculative_tokens":9}', "num_speculative_tokens=9 must be from 1 to 7"),
        ('{"method":"ngram","acceptance_method":"x"}', "'acceptance_method' is not supported"),
        ("ngram", "its method is not supported"),
    ],
)
def test_other_speculation_is_refused(config: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--speculative-config", config])
    assert f"--speculative-config {config}: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["8g", "k", "1e400k", "8 K x"])
def test_a_number_with_another_suffix_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--max-model-len", number])
    assert "is not an integer; write it such as 8192, 8k or 8K" in capsys.readouterr().err


def test_a_file_of_flags_has_them_too(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(f'model = "{model}"\ndtype = "bfloat16"\nenable-chunked-prefill = true\n')
    assert llm_of("--config", str(file)) == llm_of(model) | {"precision": "bf16"}
    assert llm_of("--config", str(file), "--precision", "fp32")["precision"] == "fp32"
    assert "--enable-chunked-prefill has no effect" in capsys.readouterr().err
    file.write_text('context-length = 512\nattention-backend = "X"\nallowed-methods = ["*"]\n')
    assert llm_of("--config", str(file)) == llm_of() | {"max_model_len": 512}
    assert "--attention-backend X has no effect" in capsys.readouterr().err
    file.write_text("trust-remote-code = true\n")
    with pytest.raises(SystemExit):
        llm_of("--config", str(file))
    assert "--trust-remote-code is not supported; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--generate", "--enable-everything"])
def test_what_is_not_alike_is_not_suggested(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", flag])
    assert "did you mean" not in capsys.readouterr().err
