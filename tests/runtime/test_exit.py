"""Scripts that end without closing what they have made: the exit code is theirs, and nothing else is printed."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAD = """
import signal, sys
from sidestream import LLM, SamplingParams, StructuredOutputsParams

def make(**options):
    return LLM(device="cpu", show_progress=False, max_num_seqs=16, **options)

def main():
"""
TAIL = """
if __name__ == "__main__":
    main()
"""
MANY = 20
"""Runs of each script with --exhaustive: 200 of all."""
# name -> what the script does, its exit code, and the last line of its stderr
SCRIPTS = {
    "one": ("llm = make()", 0, ""),
    "two": ("first = make()\nsecond = make()", 0, ""),
    "replaced": ("llm = make()\nllm = make()", 0, ""),
    "second after a closed one": (
        """
        with make() as first:
            first.generate("What is the capital of Peru?", SamplingParams(max_tokens=2), "pirate", use_tqdm=False)
        second = make()
        """,
        0,
        "",
    ),
    "error": ("llm = make()\nraise LookupError('on purpose')", 1, "LookupError: on purpose"),
    "sys.exit": ("llm = make()\nsys.exit(3)", 3, ""),
    "Ctrl-C": (
        "llm = make()\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.raise_signal(signal.SIGINT)",
        -2,
        "KeyboardInterrupt",
    ),
    "open stream": (
        """
        llm = make()
        fits = StructuredOutputsParams(regex="[a-z]{40}")
        chunks = llm.stream(["a"] * 12, SamplingParams(max_tokens=32, structured_outputs=fits), ["yoda", None] * 6)
        next(chunks)
        """,
        0,
        "",
    ),
    "spawned child": (
        """
        import multiprocessing
        child = multiprocessing.get_context("spawn").Process(target=make)
        child.start()
        child.join()
        sys.exit(child.exitcode)
        """,
        0,
        "",
    ),
    "forked children": (
        """
        import multiprocessing, os
        child = multiprocessing.get_context("fork").Process(target=make)
        child.start()
        child.join()
        llm = make()
        forked = os.fork()
        if not forked:
            sys.exit(4)
        sys.exit((child.exitcode, os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])) != (0, 4))
        """,
        0,
        "",
    ),
}


def run(script: Path) -> tuple[int, str]:
    # Python 3.12 warns when a process with threads forks, which is the point of one script
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_without_closing_its_models(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    body, code, last = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n" + TAIL)
    for _ in range(MANY if pytestconfig.getoption("--exhaustive") else 1):
        returned, errors = run(script)
        # CPython 3.12 forgets the interrupt if C code evaluates a string while the interpreter exits, and returns 1
        assert returned in ((code, 1) if name == "Ctrl-C" else (code,)), errors
        assert errors.rstrip("\n").rpartition("\n")[2] == last
        assert last.startswith(("LookupError", "KeyboardInterrupt")) or not errors


def test_an_exit_waits_for_a_thread_without_an_owner(tmp_path: Path) -> None:
    """A model may be collected in a thread of its own, which no finalizer waits for then."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import threading, time, torch
            from sidestream.runtime.adapters.background_jobs import BackgroundJobs

            owners, alone = [BackgroundJobs("keeper", idle_seconds=0.0)], threading.Event()

            def job(stopped):
                owners.clear()
                alone.set()
                end = time.monotonic() + 1.0
                while time.monotonic() < end:
                    torch.randn(300, 300).to(torch.bfloat16).float().amax(1)

            owners[0].submit(job)
            alone.wait()
        """)
    )
    assert run(script) == (0, "")


def test_an_exit_stops_threads_that_start_meanwhile_and_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import atexit, threading, time
            from sidestream.runtime.processes import threads

            def begin_another():
                stop.wait()
                threads.start_thread(late.wait, name="late", stop=late.set)

            def check():
                began = time.monotonic()
                threads.end_threads(3.0)
                print(stop.is_set(), late.is_set(), hung.is_alive(), time.monotonic() - began >= 3.0)

            stop, late = threading.Event(), threading.Event()
            threads.start_thread(begin_another, name="first", stop=stop.set)
            hung = threads.start_thread(threading.Event().wait, name="hung", stop=lambda: None)
            atexit.unregister(threads.end_threads)
            atexit.register(check)
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True True True\n", "")
