"""
What holds for every test: one thread a process, the project's folder on the path, and no test writes to the real
records. `guesser` is a tiny model that gets a problem right about half the time, so that there is something to learn.
"""
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
if not torch.cuda.is_available():   # the kernels of fused.py then run in Triton's interpreter; read at its import
    os.environ["TRITON_INTERPRET"] = "1"

import helpers  # noqa: E402

torch.set_num_threads(1)

RECORDS = [helpers.ROOT / "labbook.md"]


@pytest.fixture(scope="session", autouse=True)
def real_records_are_left_alone(tmp_path_factory):
    """Runs of a test have a model or a task file below pytest's folder: none of them may be in the real records."""
    yield
    base = str(tmp_path_factory.getbasetemp())
    for path in RECORDS:
        assert not path.exists() or base not in path.read_text(encoding="utf-8"), f"a test wrote to {path}"
    for config in (helpers.ROOT / "runs").glob("*/config.json"):
        assert base not in config.read_text(encoding="utf-8"), f"a test wrote to {config.parent}"


@pytest.fixture(scope="session")
def guesser(tmp_path_factory):
    """A model folder. Whatever is asked, its answer is `#### 1` or `#### 2`, and now and then a sentence before it."""
    return train_guesser(tmp_path_factory.mktemp("guesser") / "model")


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """A tasks folder: 12 problems to train on, 4 in each held-out file. Of three, one is never right."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [helpers.problem(i, f"{i}?", [1, 2, 7][i % 3]) for i in range(24)]
    helpers.write_rows(folder / "train.jsonl", rows[:12])
    helpers.write_rows(folder / "heldout-same.jsonl", rows[12:16])
    helpers.write_rows(folder / "heldout-different.jsonl", rows[16:20])
    return folder


def train_guesser(folder, steps=100):
    import common
    from model import save_model
    from train_sft import as_batch, sft_loss
    tokenizer, model = helpers.tiny_tokenizer(), helpers.tiny_model(seed=3)
    texts = ["#### 1", "#### 2", "ok\n#### 1", "so 2\n#### 2"]
    rows = [(common.encode_prompt(tokenizer, [{"role": "user", "content": f"{i}?"}]),
             common.encode_completion(tokenizer, text, helpers.EOS)) for i in range(10) for text in texts]
    ids, mask, length = as_batch(rows)
    pack = common.pack_rows(ids, mask, length, range(len(rows)), model.device)
    optimizer = common.make_optimizer(model, 1e-2)
    for step in range(steps):
        hidden = model(pack.ids, pack.lengths)[pack.where]
        grad, _ = common.head_backward(hidden, model.head_weight, pack.targets,
                                       lambda logp, entropy, at: sft_loss(logp, entropy, at, len(pack.targets)))
        hidden.backward(grad)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    save_model(model, folder, tokenizer)
    return folder
