"""
pretrain.py: what its settings do to loss, gradient and weights. How it is resumed, stopped and refused is in
test_scripts.py, with the other training scripts.
"""
import json

import pytest
import torch
from launch import metrics
from safetensors.torch import load_file
from test_scripts import pretrain_flags, succeed

torch.set_num_threads(1)


def pretrained(folder, guesser, *more):
    """A run of a second, its learning rate 1e-3 from the first step on -> its folder."""
    succeed(*pretrain_flags(folder, guesser, None, "--lr", "1e-3", "--warmup", 0, *more))
    return folder


def test_micro_batch_tokens_change_nothing_but_memory(guesser, tmp_path):
    """X21: a backward pass for each document, and one for all of them; of weights that do not move."""
    whole, split = (pretrained(tmp_path / name, guesser, "--max-steps", 1, "--lr", 0, *more)
                    for name, more in (("whole", []), ("split", ["--micro-batch-tokens", 1])))
    for key in ("loss", "entropy", "grad_norm"):
        assert metrics(split)[0][key] == pytest.approx(metrics(whole)[0][key], rel=1e-5)
    valid = [json.loads((folder / "final.json").read_text())["losses"]["valid"] for folder in (whole, split)]
    assert valid[0] == pytest.approx(valid[1], rel=1e-5)


def test_schedule_by_hand(guesser, tmp_path):
    """X28: the learning rate that each step was made with."""
    folder = pretrained(tmp_path / "run", guesser, "--max-steps", 4, "--schedule", "linear")
    assert [r["lr"] for r in metrics(folder)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_weight_decay_by_hand(guesser, tmp_path):
    """X28: a step of AdamW takes lr * decay = 1% off the weights before it; what the gradient does is the same."""
    without, with_decay = (load_file(pretrained(tmp_path / f"by{decay}", guesser, "--max-steps", 1, "--weight-decay",
                                                decay) / "checkpoint" / "model.safetensors") for decay in (0, 10))
    for name, after in without.items():
        assert torch.allclose(after - with_decay[name], 0.01 * after, rtol=0, atol=2e-5), name   # 1% of a step of 1e-3
        assert (after - with_decay[name]).norm() > 0.005 * after.norm()
