"""
SmolLM2-135M-Instruct on a GPU: sampler and trainer agree in bf16, and no sample hangs on generation_config.json.
"""
import pytest
import torch
from test_smollm2 import folder, prompts, tokenizer, with_other_generation_config  # noqa: F401  (fixtures)

import common
from engine import Engine
from model import load_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def on_gpu(folder):  # noqa: F811
    return load_model(folder, device=torch.device("cuda"), compute_dtype=torch.bfloat16)


def test_sampler_and_trainer_differ_by_less_than_a_hundredth(folder, prompts):  # noqa: F811
    """Through the same kernels: what is left is the order of sums, which flips roundings here and there."""
    model = on_gpu(folder)
    r = Engine(model, slots=80).generate(prompts, 4, max_new=128, seed=1)
    gap = (common.score(model, r)[0] - r.logp)[r.mask[:, 1:]]
    assert gap.abs().mean() < (0.01 if model.kernels() else 0.03)


def test_generation_config_changes_no_sample(folder, prompts, tmp_path):  # noqa: F811
    models = on_gpu(folder), on_gpu(with_other_generation_config(folder, tmp_path))
    for more in ({"seed": 7}, {"greedy": True}):
        a, b = (Engine(m, slots=24).generate(prompts[:6], 4, max_new=24, **more) for m in models)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.logp, b.logp)
