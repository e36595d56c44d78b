"""`LLM(tensor_parallel_size=2)`: two processes answer as one does, with drafts too, take adapters in together, and end
together.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sidestream import LLM, SamplingParams, VersionConflictError
from sidestream.compiler.options import OptionError
from sidestream.compiler.run import cuda_graph
from sidestream.graphs.adapter_config import CONFIG, AdapterError
from sidestream.graphs.model_directory import WEIGHTS
from sidestream.ops.core.kv_layout import PAGE_SIZE
from sidestream.runtime.worker.tensor_parallel.parallel_model import ParallelModel
from sidestream.runtime.worker.tensor_parallel.peers import RankError
from support.tiny import AdapterSpec, tiny_adapters, tiny_llama

PROMPTS = ["a", "some longer text than that", "other words"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),  # one exchange of the best of each part
    SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, speculation="off"),  # two
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"regex": "[a-c]+"}),  # masks after drafts
]
ROLLOUT = SamplingParams(temperature=1.0, seed=2, max_tokens=8, ignore_eos=True, logprobs=0)
SIZES: dict[str, Any] = {
    "precision": "fp32",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_loras": 2,
    "num_kv_pages": 4,
    "kv_host_gb": 0.01,
    "show_progress": False,
}


def memory_of(adapter: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter's tensors and config, as a trainer has them."""
    return load_file(adapter / WEIGHTS), json.loads((adapter / CONFIG).read_text())


def answers(llm: LLM, adapters: list[Any]) -> list[list[int]]:
    return [
        output.outputs[0].token_ids
        for params in PARAMS
        for output in llm.generate(PROMPTS, params, adapters, use_tqdm=False)
    ]


def cached(llm: LLM) -> list[list[int]]:
    """Prompts of more pages than the device has; at the second time their first pages are in host memory."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [
        llm.generate([[start, *range(100)]], params, use_tqdm=False)[0].outputs[0].token_ids
        for _ in range(2)
        for start in range(5)
    ]


def read_from_disk(llm: LLM, expected: list[list[int]]) -> None:
    """Each rank reads its part of pages that have left host memory."""
    host = llm.engine.scheduler.states.host
    while host._saving or host._unwritten or host._num_writes:
        llm.generate([[1, 2, 3]], use_tqdm=False)
    host._forget_pages()
    assert cached(llm) == expected
    stats = llm.engine.scheduler.stats()
    assert stats.disk_pages_read > 0 and stats.disk_pages_damaged == stats.disk_failures == 0


@pytest.mark.first
def test_two_ranks_answer_as_one_process_does_and_end_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    base = tiny_llama(tmp_path, num_hidden_layers=1, num_key_value_heads=1, tokenizer=True)
    activated = AdapterSpec(rank=7, extra={"alora_invocation_tokens": list(b"er")})  # aLoRA, not in the first prompt
    one, two, three = tiny_adapters(base, [AdapterSpec(rank=4), activated, AdapterSpec(rank=5)])
    odd = json.loads((Path(three) / CONFIG).read_text()) | {"target_modules": ["q_proj"]}  # of seven that it has
    (Path(three) / CONFIG).write_text(json.dumps(odd))
    batches: list[list[Any]] = [["one", None, "two"], ["three", "three", "one"], ["two", "three", "one"]]
    batches.append([{"one": 0.7, "three": 0.3}, None, "two"])
    found = []
    for ranks, speculation in ((1, "off"), (2, 3)):
        cuda_graph._made.add("step of an earlier engine")
        llm = LLM(
            base.path,
            {"one": one, "two": two},
            tensor_parallel_size=ranks,
            speculation=speculation,
            kv_disk=tmp_path / "pages",
            **SIZES,
        )  # the ranks draft from the same former answers, or they would compute different steps
        # a new rank runs all of them, and on GPUs some of them wait for the same step of rank 0
        assert ("step of an earlier engine" in cuda_graph._made) == (ranks == 1)
        llm.add_adapter("three", three)  # one more than there are slots
        results = [answers(llm, batch) for batch in batches]
        llm.remove_adapter("one")
        llm.add_adapter("one", two)
        results.append(answers(llm, ["one", None, "three"]))
        expected = answers(llm, ["three", "three", None])
        for adapter in (one, three):
            llm.update_adapter("policy", *memory_of(adapter))
        assert answers(llm, ["policy", "policy@2", None]) == expected
        tensors, config = memory_of(one)
        with pytest.raises(AdapterError, match="NaN"):
            llm.update_adapter("policy", {name: each * float("nan") for name, each in tensors.items()}, config)
        llm.update_adapter("policy", tensors, config, version=7)
        results.append(answers(llm, ["policy@1", "policy@2", "policy"]))
        with pytest.raises(VersionConflictError, match="7"):
            llm.update_adapter("policy", tensors, config, version=7)
        found.append([*results, cached(llm)])
        assert llm.engine.scheduler.stats().prefix_host_hits >= 4 * PAGE_SIZE
        read_from_disk(llm, found[-1][-1])
        if ranks == 1:
            llm.close()
        assert "not targeted" in caplog.text and "not targeted" not in capfd.readouterr().err, "rank 1 is silent"
    assert found[0] == found[1] and llm.engine.scheduler.stats().history_accepted > 0
    mixed = [PARAMS[0], PARAMS[1], PARAMS[0]]
    assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, mixed, use_tqdm=False)] == [
        llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, params in zip(PROMPTS, mixed, strict=True)
    ]
    rollouts = [output.outputs[0] for output in llm.generate(PROMPTS, ROLLOUT, batches[1], use_tqdm=False)]
    scores = llm.score(PROMPTS, [each.token_ids for each in rollouts], batches[1])
    assert [score.logprobs.tolist() for score in scores] == [
        [next(iter(entry.values())).logprob for entry in each.logprobs] for each in rollouts
    ]
    parallel = llm.model
    assert isinstance(parallel, ParallelModel)
    before = answers(llm, ["policy@1", "policy@2", "policy"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)  # so the peer cannot open the tensors
        with pytest.raises(AdapterError, match="No such file"):
            llm.update_adapter("policy", tensors, config)
    assert answers(llm, ["policy@1", "policy@2", "policy"]) == before
    assert llm.update_adapter("policy", tensors, config).version == 8
    assert answers(llm, ["policy@1", "policy@2", "policy@8"]) == before
    with pytest.raises(OptionError, match="has a process group of torch"):
        LLM(base.path, tensor_parallel_size=2, **{**SIZES, "max_loras": None})
    (peer,) = (child.process for child in parallel.peers._children.values())
    os.kill(peer.pid, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 died \(signal 9, SIGKILL\)"):
        answers(llm, batches[0])
    llm.close()
    assert peer.poll() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"passes": ()}, "passes is for a model in one process"),
        ({"tensor_parallel_size": 3}, "must be one of"),
        ({"tensor_parallel_size": True}, "must be one of"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_before_any_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LLM(None, **{"tensor_parallel_size": 2, "device": "cpu", **options})
