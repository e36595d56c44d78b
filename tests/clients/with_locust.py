"""Run locust: four users with chats of the base model and streamed chats of an adapter."""

import os
import subprocess
import sys
from pathlib import Path

import gevent
from locust import HttpUser, events, task

REQUESTS = 16
BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
KEY = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


class Asker(HttpUser):
    """Ask the base model and an adapter."""

    @task
    def chat(self) -> None:
        body = BODY | {"model": "demo_model"}
        with self.client.post(
            "/v1/chat/completions", json=body, headers=KEY, name="chat", catch_response=True
        ) as answer:
            if "Paris" not in answer.text:
                answer.failure(answer.text)

    @task
    def stream(self) -> None:
        body = BODY | {"model": "pirate", "stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, headers=KEY, name="stream", stream=True, catch_response=True
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1:] != [b"data: [DONE]"]:
                answer.failure(repr(lines[-1:]))


@events.test_start.add_listener
def stop_after_requests(environment, **_) -> None:
    def count(**_) -> None:
        if environment.stats.total.num_requests >= REQUESTS:
            gevent.spawn(environment.runner.quit)  # a quit within a user would end this user first

    events.request.add_listener(count)


@events.quitting.add_listener
def check(environment, **_) -> None:
    total = environment.stats.total
    environment.process_exit_code = int(total.num_failures > 0 or total.num_requests < REQUESTS)


if __name__ == "__main__":  # locust imports this file as its locustfile
    command = ["--headless", "--users", "4", "--spawn-rate", "4", "--run-time", "180s", "--only-summary"]
    command += ["--host", os.environ["SIDESTREAM_URL"], "--locustfile", __file__]
    sys.exit(subprocess.run([Path(sys.executable).parent / "locust", *command]).returncode)
