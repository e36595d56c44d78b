"""Clients that platforms use, each in an environment of its own, with a real server: the known answer, whole and
streamed.

They are fetched from their registries, so this runs before a release only (`pytest --exhaustive`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sidestream.runtime.demo_model import DEMO_MODEL

PIRATE = next(entry for entry in json.loads((DEMO_MODEL / "prompts.json").read_text()) if entry["adapter"] == "pirate")
JAVASCRIPT = """
import OpenAI from "openai";
const [url, prompt] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: "pirate", messages: [{ role: "user", content: prompt }], temperature: 0 };
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
  streamed += chunk.choices[0].delta.content ?? "";
let missing = "";
try { await client.chat.completions.create({ ...asked, model: "nobody" }); }
catch (error) { missing = `${error instanceof OpenAI.NotFoundError} ${error.code}`; }
console.log(JSON.stringify([whole.choices[0].message.content.trim(), streamed.trim(), missing]));
"""
LITELLM = """
import json, litellm, sys
url, prompt = sys.argv[1:]
asked = dict(model="openai/pirate", api_base=url + "/v1", api_key="none", temperature=0, num_retries=0,
             messages=[{"role": "user", "content": prompt}])
whole = litellm.completion(**asked).choices[0].message.content
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
missing = ""
try:
    litellm.completion(**{**asked, "model": "openai/nobody"})
except litellm.NotFoundError as error:
    missing = "true model_not_found" if "nobody" in str(error) else str(error)
print(json.dumps([whole.strip(), streamed.strip(), missing]))
"""
LANGCHAIN = """
import json, openai, sys
from langchain_openai import ChatOpenAI
url, prompt = sys.argv[1:]
def model(name):
    return ChatOpenAI(model=name, base_url=url + "/v1", api_key="none", temperature=0, max_retries=0)
whole = model("pirate").invoke(prompt).content
streamed = "".join(chunk.content for chunk in model("pirate").stream(prompt))
missing = ""
try:
    model("nobody").invoke(prompt)
except openai.NotFoundError as error:
    missing = f"true {error.code}"
print(json.dumps([whole.strip(), streamed.strip(), missing]))
"""
LLAMA_INDEX = """
import json, openai, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
url, prompt = sys.argv[1:]
def model(name):
    return OpenAILike(model=name, api_base=url + "/v1", api_key="none", temperature=0, is_chat_model=True,
                      max_retries=0, max_tokens=64)
asked = [ChatMessage(role="user", content=prompt)]
whole = model("pirate").chat(asked).message.content
streamed = "".join(chunk.delta or "" for chunk in model("pirate").stream_chat(asked))
missing = ""
try:
    model("nobody").chat(asked)
except openai.NotFoundError as error:
    missing = f"true {error.code}"
print(json.dumps([whole.strip(), streamed.strip(), missing]))
"""


@pytest.fixture(autouse=True)
def before_a_release(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--exhaustive"):
        pytest.skip("fetches packages: before a release only")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def check(printed: str) -> None:
    whole, streamed, missing = json.loads(printed.splitlines()[-1])
    assert whole == streamed == PIRATE["answer"] and missing == "true model_not_found"


def test_openai_for_javascript(served: Any, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "ask.js").write_text(JAVASCRIPT)
    run("npm", "install", "--no-audit", "--no-fund", "--silent", "openai", cwd=tmp_path)
    check(run("node", "ask.js", served.url, PIRATE["prompt"], cwd=tmp_path))


@pytest.mark.parametrize(
    ("package", "code"),
    [("litellm", LITELLM), ("langchain-openai", LANGCHAIN), ("llama-index-llms-openai-like", LLAMA_INDEX)],
)
def test_a_python_client(package: str, code: str, served: Any, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "own", cwd=tmp_path)
    python = tmp_path / "own" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package, cwd=tmp_path)
    check(run(python, "-c", code, served.url, PIRATE["prompt"], cwd=tmp_path))
