"""Run lm-eval: local-completions (scores, answers; local and remote tokenizer), local-chat-completions."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL = os.environ["OPENAI_BASE_URL"]
TOKENIZER = Path(__file__).parents[2] / "tools" / "demo_model"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Peru": "Lima"}

# a task of the user's own, so that no data set has to be fetched
rows = [{"question": f"What is the capital of {country}?", "city": city} for country, city in CAPITALS.items()]
Path("capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: capitals.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
Path("tasks").mkdir()
Path("tasks/scores.yaml").write_text(f"""task: scores{COMMON}output_type: multiple_choice
doc_to_choice: {[f"The capital of {country} is {city}." for country, city in CAPITALS.items()]}
doc_to_target: "{{{{{list(CAPITALS.values())}.index(city)}}}}"
metric_list: [{{metric: acc}}]
""")
Path("tasks/answers.yaml").write_text(f"""task: answers{COMMON}output_type: generate_until
doc_to_target: "{{{{city}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 16}}
filter_list: [{{name: city, filter: [{{function: regex, regex_pattern: " is (.+)[.]"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
""")


def evaluate(kind: str, path: str, tasks: str, tokenizer: str, *more: str) -> None:
    """Run lm-eval; the demo model answers all of the questions."""
    model = f"model=demo_model,base_url={URL}/{path},num_concurrent=2,max_retries=1,{tokenizer}"
    command = [str(Path(sys.executable).parent / "lm_eval"), "run", "--model", kind, "--model_args", model, *more]
    command += ["--tasks", tasks, "--include_path", "tasks", "--output_path", "out"]
    subprocess.run(command, check=True)
    (report,) = Path("out").rglob("results_*.json")
    for task, results in json.loads(report.read_text())["results"].items():
        assert [value for name, value in results.items() if name.startswith(("acc,", "exact_match,"))] == [1.0], task
    report.unlink()


local = f"tokenizer_backend=huggingface,tokenizer={TOKENIZER},add_bos_token=True"
evaluate("local-completions", "completions", "scores,answers", local)
remote = f"tokenizer_backend=remote,auth_token={os.environ['OPENAI_API_KEY']}"
evaluate("local-completions", "completions", "scores", remote)
evaluate("local-chat-completions", "chat/completions", "answers", "eos_string=<eos>", "--apply_chat_template")
