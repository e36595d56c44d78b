"""Once a server is ready, no step waits for a program: it runs in a larger one until a thread has built its own."""

import threading

import pytest
import sidestream
from sidestream.compiler import api
from sidestream.compiler.program.program import Bucket
from sidestream.runtime.server.gpu_process import ServedModel
from sidestream.runtime.server.settings import ServeSettings
from sidestream.runtime.worker.model_runner import ModelRunner
from sidestream.runtime.worker.programs.bound_programs import BoundPrograms
from sidestream.tools.bench.random_model import TINY, write_model

OPTIONS = {"load_format": "dummy", "device": "cpu", "max_model_len": 192, "max_loras": 2, "show_progress": False}
WAIT = 300  # seconds


def bucket(tokens: int, sequences: int, decode: bool = False, lora: bool = False) -> Bucket:
    return Bucket(tokens, sequences, 8, 2, decode=decode, lora=lora)


FIRST = (bucket(64, 8, lora=True), bucket(8, 8, decode=True, lora=True))


class Maker:
    """Makes a bucket's name, on any thread but its own only when allowed to."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.allowed, self.fails, self.thread = threading.Event(), fails, threading.current_thread()
        self.made: list[str] = []

    def __call__(self, wanted: Bucket) -> str:
        if threading.current_thread() is not self.thread:
            assert self.allowed.wait(WAIT)
        self.made.append(wanted.name)
        if wanted.name in self.fails:
            raise ValueError(wanted.name)
        return wanted.name


def test_the_smallest_program_that_holds_a_step_serves_it_until_its_own_is_built():
    programs, make = BoundPrograms[str](), Maker()
    middle = bucket(32, 8, lora=True)
    programs.build_in_background((*FIRST, middle), make)
    wanted = [bucket(16, 4), bucket(16, 4, lora=True), bucket(64, 2), bucket(2, 2, decode=True)]
    holding = [middle, middle, FIRST[0], FIRST[1]]
    assert [programs.get(each, make) for each in (*wanted, *wanted)] == [each.name for each in (*holding, *holding)]
    make.allowed.set()
    assert programs._jobs.flush(WAIT)
    assert [programs.get(each, make) for each in wanted] == [each.name for each in wanted]
    assert make.made == [each.name for each in (*FIRST, middle, *wanted)]


def test_a_program_without_adapters_or_with_fewer_rows_serves_no_other_step():
    programs, make = BoundPrograms[str](), Maker()
    programs.build_in_background((*FIRST, bucket(32, 8), bucket(32, 1, lora=True)), make)
    assert programs.get(bucket(16, 4, lora=True), make) == FIRST[0].name
    assert programs.get(bucket(16, 4), make) == bucket(32, 8).name
    make.allowed.set()
    assert programs._jobs.flush(WAIT)


def test_a_program_that_cannot_be_built_is_tried_once_and_its_steps_go_on():
    wrong, right = bucket(16, 4), bucket(4, 4)
    programs, make = BoundPrograms[str](), Maker(fails=(wrong.name,))
    programs.build_in_background(FIRST, make)
    make.allowed.set()
    for _ in range(2):
        assert programs.get(wrong, make) == FIRST[0].name
        assert programs._jobs.flush(WAIT)
    programs.get(right, make)
    assert programs._jobs.flush(WAIT)
    assert make.made == [each.name for each in (*FIRST, wrong, right)]


def test_two_threads_never_build_at_the_same_time():
    """Torch's tracer, which the first build imports, can't be imported by two threads together."""
    programs, started, go_on = BoundPrograms[str](), [], threading.Event()

    def make(wanted: Bucket) -> str:
        started.append(wanted.name)
        if wanted not in FIRST:
            assert go_on.wait(WAIT)
        return wanted.name

    programs.build_in_background(FIRST, make)
    programs.get(bucket(16, 4), make)  # its thread builds it
    larger = bucket(128, 8)  # no program holds its steps, so that who needs it builds it
    others = [threading.Thread(target=programs.get, args=(larger, make)) for _ in range(2)]
    for other in others:
        other.start()
        other.join(0.2)
    assert len(started) == len(FIRST) + 1
    go_on.set()
    for other in others:
        other.join(WAIT)
    assert programs._jobs.flush(WAIT)
    assert sorted(started) == sorted(each.name for each in (*FIRST, bucket(16, 4), larger))


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that captured the model, built or bound a program, in order."""
    names: list[str] = []

    def noting(called):
        def call(*args, **kwargs):
            names.append(threading.current_thread().name)
            return called(*args, **kwargs)

        return call

    monkeypatch.setattr(api, "build_program", noting(api.build_program))
    monkeypatch.setattr(api, "optimize", noting(api.optimize))
    monkeypatch.setattr(ModelRunner, "_bind", noting(ModelRunner._bind))
    return names


def test_no_step_builds_a_program_once_the_server_is_ready(tmp_path, monkeypatch, builders):
    """The second start is the worst case: its first programs are kept, so that the model itself is captured later."""
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    adapters = write_model(tmp_path / "model", TINY, 2, 8)
    settings = ServeSettings(model=str(tmp_path / "model"), llm=OPTIONS, adapters=adapters)
    served = [ServedModel(settings) for _ in range(2)][1]
    llm = sidestream.LLM(tmp_path / "model", adapters, **OPTIONS)
    llm.engine.runner = served.runner
    ready, here = len(builders), threading.current_thread().name
    prompts = [[7] * length for length in (1, 3, 20, 40, 90)]
    chosen = [None, *adapters, *adapters]
    params = sidestream.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)

    def answers(count: int) -> list[object]:
        found = llm.generate(prompts[:count], params, adapter=chosen[:count], use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]

    padded = answers(5)
    assert here not in builders[ready:]
    assert served.runner.programs._jobs.flush(WAIT)
    assert len(builders) > ready
    assert answers(5) == padded and answers(3) == padded[:3] and answers(1) == padded[:1]
    assert here not in builders[ready:]
