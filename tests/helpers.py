"""
What several test files share: tiny random models and tokenizers, files of rows, and scripts run as a user runs them.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:   # `pytest` alone, unlike `python -m pytest`, does not add the project's folder
    sys.path.insert(0, str(ROOT))

from model import llama_config, new_model, save_model  # noqa: E402  (the path above comes first)

DATA = ROOT.parent / "shared" / "data"   # real data sets, where this checkout has them beside it
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]   # ids 0 to 4; the bytes follow
TEMPLATE = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EOS = SPECIAL.index("<|end|>")


# ----------------------------------------------------------------------------------------------------------------------
# Models and tokenizers

def tiny_config(kind="llama", **overrides):
    """config.json of a model of some 10 thousand parameters that fits tiny_tokenizer(), as a dict."""
    raw = llama_config(len(SPECIAL) + 256, 32, layers=2, heads=4, kv_heads=2, intermediate_size=48, context=512,
                       eos=EOS, pad=0)
    raw |= {"architectures": [KINDS[kind]], "model_type": kind}
    return raw | overrides


def tiny_model(kind="llama", seed=0, scale=1.0, **overrides):
    """
    A model of random weights (fp32, CPU). `scale` multiplies every matrix: at 1 the distributions are nearly uniform.
    Norm weights and biases are random too, so that one that is left out shows. `overrides` go into config.json.
    """
    model = new_model(tiny_config(kind, **overrides), seed)
    gen = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(scale)
            else:
                p.add_(0.2 * torch.randn(p.shape, generator=gen))
    return model


def tiny_tokenizer():
    """Every byte is a token (id 5 + its place in the byte-level alphabet), five special tokens, a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(SPECIAL + alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>",
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = TEMPLATE
    return fast


def tiny_folder(folder, kind="llama", seed=0, scale=1.0, **overrides):
    """A model and its tokenizer as a folder in Hugging Face format -> its Path."""
    save_model(tiny_model(kind, seed, scale, **overrides), folder, tiny_tokenizer())
    return Path(folder)


# ----------------------------------------------------------------------------------------------------------------------
# Files and scripts

def write_rows(path, rows):
    """Dicts as JSON lines -> the path."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Path(path)


def read_rows(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def problem(number, question, answer):
    """A task row."""
    return {"id": f"p{number}", "prompt": [{"role": "user", "content": question}], "answer": answer,
            "task": "arithmetic"}


def script_env(**more):
    """One thread, no network, and no way to the real records."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **more}


def run_script(name, *args, cwd=ROOT, timeout=120, env=None):
    """`python NAME ARGS` in a process of its own -> CompletedProcess with text output. `name` is a path below ROOT."""
    return subprocess.run([sys.executable, str(ROOT / name), *map(str, args)], cwd=cwd, timeout=timeout, text=True,
                          capture_output=True, env=script_env(**(env or {})))
