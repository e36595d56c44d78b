"""Run AIPerf: a load of streamed chats; no request fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOKENIZER = Path(__file__).parents[2] / "tools" / "demo_model"

command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--endpoint-type", "chat", "--streaming"]
command += ["--model", "demo_model", "--tokenizer", str(TOKENIZER), "--url", os.environ["SIDESTREAM_URL"]]
command += ["--api-key", os.environ["OPENAI_API_KEY"], "--ui", "none", "--artifact-dir", "report"]
command += ["--request-count", "6", "--concurrency", "2", "--isl", "32", "--osl", "8"]
command += ["--extra-inputs", "ignore_eos:true"]
# offline, AIPerf looks for tokenizers in the hub's cache only, not in directories
subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": ""}, check=True)
(report,) = Path("report").rglob("profile_export_aiperf.json")
results = json.loads(report.read_text())
assert results["request_count"]["avg"] == 6 and not results.get("error_summary"), results
assert results["output_sequence_length"]["avg"] > 0
