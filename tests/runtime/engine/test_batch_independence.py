"""On the CPU an answer is the request's own: it does not depend on what else is in the batch, how prompts are cut, or
what was cached.
"""

import random
from contextlib import nullcontext
from itertools import product

import pytest
import sidestream
import torch
from sidestream.tools.bench.random_model import TINY, write_model
from support.other_kernels import OtherKernels
from support.processor import processor_name

# (sequences at once, tokens a step, prefix caching): the last steps are as large as those for which programs on a GPU
# have other launches: decode of 17 to 32 and of more rows, prompts of more than 256 tokens
SERVINGS = ((1, 192, False), (16, 64, True), (5, 256, False), (40, 1024, False))


# one of two layers has experts, with adapters on them
SPARSE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
MODELS = {"dense": TINY, "sparse": SPARSE}
PRECISIONS = ("int8", "fp8", "bf16", "fp32")


@pytest.mark.parametrize(("kind", "precision"), list(product(MODELS, PRECISIONS)))
def test_an_answer_does_not_depend_on_the_batch(tmp_path, pytestconfig, kind, precision):
    """Greedy tokens and their log-probabilities, to the bit, also while the libraries add in another order for each
    number of rows; they multiply in fp64 only.
    """
    exhaustive = pytestconfig.getoption("--exhaustive")
    if kind == "sparse" and precision != "bf16" and not exhaustive:
        pytest.skip("only with --exhaustive")
    source = random.Random(7)
    model, few = MODELS[kind], kind == "sparse" and not exhaustive
    adapters = write_model(tmp_path, model, 3, 8)
    options = {
        "load_format": "dummy",
        "precision": precision,
        "device": "cpu",
        "max_model_len": 192,
        "max_loras": 3,
        "show_progress": False,
    }
    beginning = [source.randrange(512) for _ in range(70)]
    prompts = [
        (beginning if index % 3 == 0 else []) + [source.randrange(512) for _ in range(source.randrange(1, 90))]
        for index in range(20 if few else 40)
    ]
    chosen = [source.choice([None, *adapters]) for _ in prompts]
    lengths = [4 + 2 * (index % 3) for index in range(len(prompts))]
    params = [
        sidestream.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=1) for length in lengths
    ]
    answers = []
    for variant, (size, tokens, caching) in enumerate(SERVINGS[::3] if few else SERVINGS):
        llm = sidestream.LLM(
            model, adapters, max_num_seqs=size, max_num_batched_tokens=tokens, enable_prefix_caching=caching, **options
        )
        kernels = OtherKernels(variant) if variant else None  # one sequence at a time takes the most steps
        with kernels or nullcontext():
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, adapter=chosen, use_tqdm=False)]
        assert kernels is None or set(kernels.products) == {torch.float64}, kernels
        answers.append([(each.token_ids, each.logprobs) for each in outputs])
    assert all(answer == answers[0] for answer in answers[1:]), processor_name()
