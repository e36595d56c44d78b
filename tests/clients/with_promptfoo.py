"""Run promptfoo: an evaluation over chat, completions and responses."""

import json
import subprocess
from pathlib import Path

SAMPLING = {"temperature": 0, "max_tokens": 32}
CONFIG = {
    "prompts": ["What is the capital of {{country}}?"],
    "providers": [
        {"id": "openai:chat:demo_model", "label": "chat", "config": SAMPLING},
        {"id": "openai:completion:demo_model", "label": "completion", "config": SAMPLING},
        {"id": "openai:responses:demo_model", "label": "responses", "config": SAMPLING},
        {"id": "openai:chat:pirate", "label": "adapter", "config": SAMPLING},
    ],
    "tests": [
        {"vars": {"country": "France"}, "assert": [{"type": "contains", "value": "Paris"}]},
        {"vars": {"country": "Italy"}, "assert": [{"type": "contains", "value": "Rome"}]},
    ],
}

Path("promptfooconfig.json").write_text(json.dumps(CONFIG))
command = ["promptfoo", "eval", "--config", "promptfooconfig.json", "--no-cache", "--no-table", "--output", "out.json"]
done = subprocess.run(command, capture_output=True, text=True)
assert Path("out.json").exists(), done.stdout + done.stderr
stats = json.loads(Path("out.json").read_text())["results"]["stats"]
assert (stats["successes"], stats["failures"], stats["errors"]) == (8, 0, 0), (stats, done.stdout[-3000:])
assert stats["tokenUsage"]["completion"] > 0, stats
