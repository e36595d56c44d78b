"""What type checkers and editors see of the installed package: real types, the keywords of `LLM`, and mistakes."""

import ast
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import sidestream
import torch
from sidestream.compiler.options import Layers
from sidestream.compiler.pipeline import Pass
from sidestream.runtime.engine.llm_keywords import LLMKeywords
from sidestream.runtime.engine.options import keyword_default, keywords
from sidestream.runtime.engine.vllm_keywords import ACCEPTED
from sidestream.runtime.quantization.calibration import Calibration
from support.installed import Installed

SKIPPED = "[mypy-torch.*,triton.*,numpy.*]\nfollow_imports = skip\n"  # they take a minute, and no type below is theirs
SCRIPT = """\
import asyncio
from pathlib import Path

import sidestream
from sidestream import LLM, AsyncClient, Client, LoRARequest, RequestError, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=16, stop=["."])
llm = LLM("models/llama", {"sql": Path("adapters/sql")}, precision="bf16", speculation=3, calibration=Path("file"))
outputs = llm.generate(["one", "two"], [params, params], adapter=["sql", None])
reveal_type(outputs)  # list[RequestOutput]
reveal_type(outputs[0].outputs[0].text)  # str
messages = [{"role": "user", "content": "three"}]
reveal_type(llm.chat(messages, params)[0].outputs[0].token_ids)  # list[int]
for piece in llm.stream("four", params, adapter="sql"):
    reveal_type(piece.text)  # str
reveal_type(llm.max_model_len)  # int
with Client(call_timeout=5.0) as client:
    asked = LoRARequest("sql", 1, "adapters/sql")
    reveal_type(client.generate("five", params, lora_request=asked))  # list[RequestOutput]
    reveal_type([chunk.text for chunk in client.stream("six")])  # list[str]


async def main() -> None:
    async with AsyncClient("tcp://127.0.0.1:5757") as other:
        reveal_type(await other.chat(messages, params))  # list[RequestOutput]
        async for chunk in other.stream("seven", params):
            reveal_type(chunk.token_ids)  # list[int]


asyncio.run(main())
try:
    reveal_type(sidestream.compile(NotImplemented))  # CompiledModel
except RequestError as problem:
    print(problem)
number: int = outputs[0].outputs[0].text  # error: assignment
LLM(max_model_length=64)  # error: call-arg
LLM(precision="int4")  # error: arg-type
LLM(max_num_seqs="8")  # error: arg-type
llm.generate("eight", {"temperature": 0.0})  # error: arg-type
client.generate("nine", adapter=3)  # error: arg-type
outputs[0].outputs[0].texts  # error: attr-defined
SamplingParams(temprature=0.0)  # error: call-arg
sidestream.SamplingParameters  # error: attr-defined
"""


def test_mypy_finds_types_and_mistakes(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = True\n{SKIPPED}")
    python = str(installed.home / "bin" / "python")
    command = [python, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "--show-error-codes", "script.py"]
    done = installed.run(*command, cwd=tmp_path, more=True, timeout=900)
    shown: dict[int, list[str]] = {}
    for line in done.stdout.splitlines():
        where, message = line.split(" ", 1)
        if found := re.fullmatch(r"script\.py:(\d+):", where):
            shown.setdefault(int(found[1]), []).append(message)
        else:
            assert line.startswith("Found "), done.stdout + done.stderr
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        _, comment, wanted = line.partition("  # ")
        said = [each for each in shown.get(number, ()) if "defined in" not in each and "defined here" not in each]
        if not comment:
            assert not said, f"{line}: {said}"
        elif wanted.startswith("error: "):
            code = wanted.removeprefix("error: ")
            assert len(said) == 1 and said[0].endswith(f"[{code}]"), f"{line}: {said}"
        else:
            (revealed,) = (re.sub(r"\b(?:[a-z_]+\.)+", "", each) for each in said if "Revealed" in each)
            assert wanted in revealed and "Any" not in revealed.partition(wanted)[0], f"{line}: {said}"


def test_the_package_says_that_it_is_typed(installed: Installed, tmp_path: Path) -> None:
    code = "from importlib.resources import files; print(files('sidestream').joinpath('py.typed').is_file())"
    assert installed.run(str(installed.home / "bin" / "python"), "-c", code, cwd=tmp_path).stdout == "True\n"


def test_names_have_the_types_of_what_they_load() -> None:
    """The imports for type checkers are those that `__getattr__` makes, and an import of the package makes neither."""
    tree = ast.parse(inspect.getsource(sidestream))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: home if ":" in home else f"{home}:{name}" for name, home in sidestream._HOME.items()}
    assert imported == homes and sidestream.__all__ == ["__version__", *sidestream._HOME]
    code = "import sys, json, sidestream; print(json.dumps([name for name in sys.modules if 'sidestream' in name]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in json.loads(done.stdout) if not name.startswith("__editable__")] == ["sidestream"]


def test_the_keywords_of_llm_are_those_of_its_options() -> None:
    wider = {Layers: bool | Collection[int], tuple[str, ...]: Sequence[str]}
    names = {"torch": torch, "Pass": Pass, "Calibration": Calibration}
    typed = typing.get_type_hints(LLMKeywords, localns=names)
    declared = keywords()
    assert typed.keys() == declared.keys() | set(ACCEPTED)
    for name, option in declared.items():
        if option.type is Any:
            assert Any not in (typed[name], *typing.get_args(typed[name]))
            continue
        wanted: Any = wider.get(option.type, option.type)
        if keyword_default(option) is None:
            wanted = wanted | None
        assert typed[name] == wanted, name
