"""Step times are measured for every program that a scheduler may choose; the engine stays unchanged."""

from typing import Any

import pytest
from sidestream import LLM, SamplingParams
from sidestream.compiler.cost.hardware import H200
from sidestream.runtime.worker.programs.bound_programs import estimate_longest_step
from sidestream.tools.bench.random_model import TINY, write_model

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_loras": 2,
    "max_num_seqs": 2,
    "max_model_len": 192,
    "show_progress": False,
}
SIZES = {(size, rows) for size in (1, 2) for rows in (1, 2, 4, 8)}


def test_every_size_is_timed_and_nothing_is_stored(tmp_path):
    adapters = write_model(tmp_path, TINY, 2, 8)
    llm = LLM(TINY, adapters, device="cpu", speculation="auto", **OPTIONS)
    prompts, names = [list(range(2, 120)), list(range(7, 90))], [None, *adapters][:2]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answers() -> list[list[int]]:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, names, use_tqdm=False)]

    before = answers()
    runner: Any = llm.engine.runner
    assert llm.engine.scheduler.limits.step_times == () == runner.measure_step_times(), "nothing is captured on a CPU"
    runner.captures = True
    measured = runner.measure_step_times()
    runner.captures = False
    assert len(measured) == len(SIZES) and {sizes[:2] for sizes in measured} == SIZES
    assert all(seconds > 0 for *_, seconds in measured)
    hits = llm.engine.scheduler.stats().prefix_hits
    assert answers() == before and llm.engine.scheduler.stats().prefix_hits > hits, "pages have what they had"


def test_the_longest_step_reads_all_weights_and_whole_contexts(tmp_path):
    adapters = write_model(tmp_path, TINY, 2, 8)
    llm = LLM(TINY, adapters, device="cpu", max_num_batched_tokens=64, **OPTIONS)
    largest = llm.model.compiled.program(llm.model.runner.buckets.largest())
    assert llm.model.longest_step == estimate_longest_step(largest, 192, None) == 0.0, (
        "the cost model does not cover CPUs"
    )
    weights = sum(buffer.nbytes for buffer in largest.of_kind("weight"))
    short, long = (estimate_longest_step(largest, length, H200) for length in (64, 192))
    assert weights / 4.8e12 < short < long < 1.0, "the datasheet's 4.8 TB/s"


@pytest.mark.gpu
def test_a_start_on_a_gpu_times_what_it_captured(tmp_path):
    adapters = write_model(tmp_path, TINY, 2, 8)
    for speculation, sizes in (("auto", SIZES), (7, set())):
        llm = LLM(TINY, adapters, device="cuda", speculation=speculation, **OPTIONS)
        measured = llm.engine.scheduler.limits.step_times
        assert {entry[:2] for entry in measured} == sizes and all(0 < entry[2] < 1 for entry in measured)
        assert llm.model.longest_step > 0, "the cost model knows the GPU"
        del llm
