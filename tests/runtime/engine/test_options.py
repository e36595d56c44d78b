"""The options of `LLM`: each is declared once, as a field, and everything else follows from the fields."""

import argparse
import inspect
from dataclasses import fields

import pytest
import sidestream
from sidestream.compiler.options import CompileOptions, OptionError
from sidestream.runtime.engine.options import EngineOptions, keywords, read_keywords
from sidestream.runtime.engine.resolve import compile_options
from sidestream.runtime.llm import LLM
from sidestream.tools import cli


def test_the_signature_shows_every_keyword() -> None:
    parameters = inspect.signature(sidestream.LLM).parameters
    assert list(parameters)[:2] == ["model", "adapters"]
    assert {name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY} == set(keywords())
    assert not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert parameters["gpu_memory_utilization"].default == 0.9
    assert parameters["hadamard"].default is parameters["precision"].default is None, "device and model decide"
    assert "disable_passes" in parameters and not {"disable", "pdl", "check_counts"} & set(parameters)


def test_the_documentation_says_what_every_keyword_does() -> None:
    for name, option in keywords().items():
        text = " ".join(str(LLM.__doc__).split())
        assert f"{name} {option.metadata['doc']}" in text
    for options in (CompileOptions, EngineOptions):
        assert all(f"\n{option.name} " in str(options.__doc__) for option in fields(options))


@pytest.mark.parametrize(
    ("given", "near"),
    [("max_num_seq", "max_num_seqs"), ("presicion", "precision"), ("disable", "disable_passes"), ("modell", "model")],
)
def test_an_unknown_keyword_names_the_nearest(given: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"no option {given!r}; did you mean {near!r}"):
        LLM(**{given: 1})


def test_keywords_go_to_the_options_that_they_are_of() -> None:
    engine, given = read_keywords({"max_num_seqs": 7, "disable_passes": ["quantize_kv"], "hadamard": None, "seed": 3})
    assert (engine.max_num_seqs, engine.seed) == (7, 3)
    assert given == {"disable": ["quantize_kv"]}, "what the calibration decides is not given"
    assert compile_options(engine, given) == CompileOptions(disable=("quantize_kv",))
    with pytest.raises(OptionError, match="max_num_seqs=0 must be an integer from 1 to 256"):
        read_keywords({"max_num_seqs": 0})
    with pytest.raises(OptionError, match="load_format='gguf' is not known"):
        read_keywords({"load_format": "gguf"})


def test_flags_have_the_choices_defaults_and_words_of_their_options() -> None:
    (commands,) = (each for each in cli.build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    flags = {each.dest: each for each in commands.choices["serve"]._actions if each.help != argparse.SUPPRESS}
    shown = {name: option for name, option in keywords().items() if name in flags}
    assert len(shown) >= 18
    for name, option in shown.items():
        assert option.metadata["doc"] in str(flags[name].help)
        assert flags[name].default in (None, option.default), "a flag that is not given leaves the option alone"
    assert list(flags["precision"].choices or ()) == ["int8", "fp8", "bf16", "fp32"]
    assert "(default: 256, on a CPU 16)" in str(flags["max_num_seqs"].help)
