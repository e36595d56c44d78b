"""Penalties and biases do what vLLM's definitions say, row by row; the draw is the op's."""

import numpy as np
import torch
from sidestream.ops.elementwise.sample import reference as sample_reference
from sidestream.runtime.scheduler.step_plan import StepMasks
from sidestream.runtime.worker.sampler import Sampler, edited_logits
from support.sampling_plans import int32, plan, sampling
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def test_penalties():
    logits = torch.randn(2, 6)
    settings = sampling(
        2,
        history_rows=int32(0, 0, 1),
        history_tokens=int32(1, 4, 2),
        history_counts=int32(0, 3, 1),
        bias_rows=int32(1, 0),
        bias_tokens=int32(5, 0),
        bias_values=np.asarray([2.5, -np.inf], np.float32),
        presence_penalty=np.asarray([0.5, 0], np.float32),
        frequency_penalty=np.asarray([0.25, 1], np.float32),
        repetition_penalty=np.asarray([2, 1], np.float32),
    )
    expected = logits.clone()
    for token, count in ((1, 0), (4, 3)):
        value = logits[0, token]
        expected[0, token] = (value / 2 if value > 0 else value * 2) - 0.25 * count - 0.5 * (count > 0)
    expected[1, 2] -= 1
    expected[1, 5] += 2.5
    expected[0, 0] = -torch.inf
    assert torch.allclose(edited_logits(logits, settings), expected)


def test_only_allowed_tokens_are_left():
    logits = torch.randn(3, 9)
    settings = sampling(
        3,
        bias_rows=int32(0, 2),
        bias_tokens=int32(4, 4),
        bias_values=np.asarray([-np.inf, 1.5], np.float32),
        allowed_rows=int32(2, 0, 0, 0),
        allowed_tokens=int32(4, 7, 4, 0),
    )
    expected = torch.full_like(logits, -torch.inf)
    expected[0, [0, 7]] = logits[0, [0, 7]]
    expected[1] = logits[1]
    expected[2, 4] = logits[2, 4] + 1.5
    assert torch.equal(edited_logits(logits, settings), expected)


def test_greedy_rows_and_draws():
    logits = torch.randn(5, 50)
    sampler = Sampler(8, torch.device("cpu"))
    greedy = sampler(logits, plan(sampling(5, greedy=True, temperature=np.zeros(5, np.float32))))
    assert greedy.tokens.tolist() == logits.argmax(-1).tolist() and greedy.logprobs is None
    temperature = np.asarray([0, 1, 0.5, 2, 0], np.float32)
    settings = sampling(5, temperature=temperature, top_k=int32(0, 3, 0, 10, 5), num_logprobs=2)
    drawn = sampler(logits, plan(settings))
    arrays = (settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.seeds, settings.steps)
    assert drawn.tokens.tolist() == sample_reference(logits, *map(torch.from_numpy, arrays)).tolist()
    logprobs = logits.log_softmax(-1)
    assert torch.allclose(drawn.logprobs[:, 0], logprobs.gather(1, drawn.tokens.long()[:, None])[:, 0])
    assert torch.equal(drawn.logprob_tokens[:, 1:].long(), logprobs.topk(2).indices)
    assert drawn.ranks.tolist() == [
        (row > row[token]).sum().item() + 1 for row, token in zip(logprobs, drawn.tokens.tolist(), strict=True)
    ]


def test_processed_log_probabilities_are_those_of_transformers_warpers():
    """After biases, masks, temperature and each filter; a greedy row has those of its edited logits."""
    torch.manual_seed(3)
    logits = torch.randn(5, 50)
    temperature = np.asarray([0.5, 2.0, 1.0, 1.5, 0.0], np.float32)
    settings = sampling(
        5,
        temperature=temperature,
        top_k=int32(0, 7, 0, 0, 0),
        top_p=np.asarray([1.0, 1.0, 0.6, 1.0, 1.0], np.float32),
        min_p=np.asarray([0.0, 0.0, 0.0, 0.2, 0.0], np.float32),
        bias_rows=int32(0, 4),
        bias_tokens=int32(4, 9),
        bias_values=np.asarray([1.5, 100.0], np.float32),
        num_logprobs=50,
    )
    words = np.full((1, 2), -1, np.int32)
    words[0, 0] = ~0b111000  # tokens 3 to 5 are not allowed
    masks = StepMasks(0, int32(1), int32(0), words)
    found = Sampler(8, torch.device("cpu"), processed=True)(logits, plan(settings), masks)
    expected = logits.clone()
    expected[0, 4] += 1.5
    expected[4, 9] += 100.0
    expected[1, 3:6] = -torch.inf
    for row, degrees in enumerate(temperature.tolist()):
        expected[row] /= degrees or 1.0
    for row, warper in ((1, TopKLogitsWarper(7)), (2, TopPLogitsWarper(0.6)), (3, MinPLogitsWarper(0.2))):
        expected[row] = warper(None, expected[row : row + 1])[0]
    expected = expected.log_softmax(-1)
    ids = found.logprob_tokens.long()
    assert torch.allclose(found.logprobs, expected.gather(1, ids), atol=1e-5)
    assert found.logprobs[:, 0].isfinite().all() and ids[4, 0] == 9
    raw = Sampler(8, torch.device("cpu"))(logits, plan(settings), masks)
    assert raw.tokens.tolist() == found.tokens.tolist()
    assert torch.allclose(raw.logprobs, logits.log_softmax(-1).gather(1, raw.logprob_tokens.long()))


def test_logits_that_are_no_numbers_give_no_token():
    logits = torch.zeros(5, 7)
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    logits[3, 2] = torch.inf
    logits[4, 1] = -torch.inf
    for settings in (sampling(5, greedy=True), sampling(5), sampling(5, num_logprobs=2)):
        tokens = Sampler(5, torch.device("cpu"))(logits, plan(settings)).tokens.tolist()
        assert [token < 0 for token in tokens] == [False, True, True, True, False]


def test_tokens_of_prompts_are_scored_next_to_the_sampled_rows():
    logits = torch.randn(60, 30)
    rows, tokens = np.arange(1, 60, dtype=np.int32), np.arange(59, dtype=np.int32) % 30
    found = Sampler(4, torch.device("cpu"))(logits, plan(sampling(3, greedy=True, num_prompt_logprobs=2), rows, tokens))
    assert found.tokens.tolist() == logits[:3].argmax(-1).tolist() and found.logprobs is None
    logprobs = logits[1:].log_softmax(-1)
    wanted = torch.from_numpy(tokens).long()[:, None]
    assert torch.equal(found.prompt_tokens[:, :1].long(), wanted)
    assert torch.equal(found.prompt_tokens[:, 1:].long(), logprobs.topk(2).indices)
    assert torch.allclose(found.prompt_logprobs, logprobs.gather(1, found.prompt_tokens.long()))
    assert found.prompt_ranks.tolist() == ((logprobs > logprobs.gather(1, wanted)).sum(-1) + 1).tolist()
