"""Run GuideLLM: a load of streamed completions and one of streamed chats; no request fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "tools" / "demo_model"

for request_format in ("/v1/completions", "/v1/chat/completions"):
    server = f"target={os.environ['SIDESTREAM_URL']},model=demo_model,api_key={os.environ['OPENAI_API_KEY']}"
    options = {
        "backend": f"kind=openai_http,request_format={request_format},{server}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "output": "kind=json,path=report.json",
    }
    command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console-interactive"]
    subprocess.run([*command, *(word for name, value in options.items() for word in (f"--{name}", value))], check=True)
    (run,) = json.loads(Path("report.json").read_text())["benchmarks"]
    requests = run["requests"]
    assert requests["successful"] and not requests["errored"], requests["errored"][:1]
    # the server's own counts: the requests ask for exactly 8 tokens
    assert {each["output_tokens"] for each in requests["successful"]} == {8}
