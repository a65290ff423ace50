"""
Makes the tokenizer and the training text of the embedded base model.

    python data/tiny/prepare.py                    # about a minute; writes data/tiny/work

    work/tokenizer/       byte-level BPE in Hugging Face form: every digit is a token and so is every byte, hence it
                          reads any text; chat template without a default system line
    work/pretrain.jsonl   {"text"}: worked problems as rendered chats, all right, terse and verbose, plus small stories
    work/sft.jsonl        {"prompt", "completion"}: the mixed style: right, with one slip, or the bare answer
    work/sft-valid.jsonl  the same mixture from problems that sft.jsonl and pretrain.jsonl never use

The mixture makes the base uneven on purpose: it can solve most problems and does so only sometimes, which leaves
reinforcement learning something to sharpen. A base that is merely stopped early has nothing to sharpen.

Every problem comes from the split "corpus" (valid: "valid") of data/arithmetic/prepare.py, which no task file of any
seed uses, and from the training wordings alone. About every tenth prompt also holds the final answer as a hint, in the
form that the teacher of train_opd.py gives it, and its solution is right: so the base can use a hint.
"""

import argparse
import hashlib
import importlib.util
import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
SPECIAL = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
HINT = "\n(The answer is {}.)"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role ' + message['role'] + ' is none of system, user, assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Pieces that BPE never merges across, in this order: a sign with its two spaces (one token an operator), one digit, a
# word with the space before it, other signs, spaces.
PIECES = r" [-+*/=] (?=\p{N})|\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"


def load_arithmetic():
    """data/arithmetic/prepare.py as a module; data/ is no package."""
    path = HERE.parent / "arithmetic" / "prepare.py"
    spec = importlib.util.spec_from_file_location("arithmetic_prepare", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


arithmetic = load_arithmetic()

# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def render(messages):
    """What CHAT_TEMPLATE makes of a finished chat; tests hold the two together."""
    return "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages)


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE tokenizer from plain texts without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # The alphabet of all 256 bytes goes in first, so no text is unknown.
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False, min_frequency=20,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder):
    """The three files that transformers.AutoTokenizer reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|endoftext|>",
              "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"], "model_max_length": 1024,
              "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    special = {k: config[k] for k in ("eos_token", "pad_token", "additional_special_tokens")}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def make_problem(rng, different):
    """A problem of the training wordings or, for a share of `different`, of the different family."""
    if rng.random() >= different:
        return arithmetic.story_problem(rng)
    # Every fourth is an easy one, so that an --easy task file is no foreign text.
    return arithmetic.different_problem(rng, easy=rng.random() < 0.25)


def problems(rng, split, count, different):
    """`count` problems of a split. One may come twice (there are only so many dates): it is in one split alone."""
    made = []
    while len(made) < count:
        problem = make_problem(rng, different)
        if arithmetic.split_of(problem) == split:
            made.append(problem)
    return made


def user_message(problem, hint):
    return {"role": "user", "content": problem.content + (HINT.format(problem.answer) if hint else "")}


def small_story(rng):
    """A few plain sentences, so that the text is not only problems."""
    (name, he, his), (other, _, _) = rng.sample(arithmetic.NAMES, 2)
    things, items = rng.sample(arithmetic.THINGS, 2)
    box = rng.choice(arithmetic.BOXES)[0]
    place = rng.choice("garden kitchen school park market lake river house forest beach station library".split())
    when = rng.choice(["One day", "In the morning", "After school", "On Sunday", "Last week", "In the evening"])
    weather = rng.choice("The sun was warm.|It rained a little.|A cold wind came up.|There was snow on the trees.|"
                         "The air smelled of bread.|It was very quiet.".split("|"))
    start = rng.choice([f"{when} {name} went to the {place}.", f"{when} {name} and {other} met at the {place}.",
                        f"{when} {name} found a {box} near the {place}.", f"There was a {place} that {name} loved."])
    middle = rng.sample([
        f"{name} had some {things} in {his} {box}.", f"{other} asked for the {things}.",
        f"{he.capitalize()} liked {items} more than {things}.", f"They looked for {items} and found none.",
        f'"Where are my {things}?" said {other}.', f'"I have no {items}," said {name}.',
        f"A dog ran off with one of the {things}.", f"{other} wanted to paint all the {items} blue.",
        f"Then {other} gave {name} a few {items}.", f"It was hard to carry the {box} home.", weather],
        rng.randint(2, 5))
    end = rng.choice([f"At the end {name} was happy.", "They went home and told everybody.", f"{other} laughed.",
                      f"So {name} kept the {things}.", "The next day they came back.",
                      f"{name} slept well that night."])
    return " ".join([start, *middle, end])


def clean_rows(rng, count, args):
    """Rows {"text"} of right worked solutions, some with the answer as a hint, and small stories."""
    rows = []
    for problem in problems(rng, "corpus", count, args.different):
        if rng.random() < args.stories:
            rows.append({"text": small_story(rng)})
            continue
        style = "verbose" if rng.random() < args.verbose_clean else "terse"
        chat = [user_message(problem, rng.random() < args.hints),
                {"role": "assistant", "content": problem.solution(style)}]
        rows.append({"text": render(chat)})
    return rows


def mixed_rows(rng, split, count, args):
    """Rows {"prompt", "completion"} of the mixed style."""
    rows = []
    for problem in problems(rng, split, count, args.different):
        hint, draw = rng.random() < args.hints, rng.random()
        style = "verbose" if rng.random() < args.verbose else "terse"
        if hint or draw < args.right:
            text = problem.solution(style)
        elif draw < args.right + args.slip:
            text = problem.solution(style, slip_rng=rng)
        else:
            text = problem.solution("bare")
        rows.append({"prompt": [user_message(problem, hint)], "completion": [{"role": "assistant", "content": text}]})
    return rows


def rows_of(what, rng, split, count, args):
    return clean_rows(rng, count, args) if what == "pretrain" else mixed_rows(rng, split, count, args)


def count_tokens(tokenizer, rows):
    """Lengths of prompts (with the assistant's opening) and of completions (with <|end|>), in tokens; a row of text is
    split at the assistant's opening, and a story counts as a completion."""
    prompts, completions = [], []
    for start in range(0, len(rows), 4096):
        texts = [r["text"] if "text" in r else render(r["prompt"] + r["completion"]) for r in rows[start:start + 4096]]
        for encoding in tokenizer.encode_batch(texts):
            cut = encoding.ids.index(3) + 2 if 3 in encoding.ids else 0  # 3 is <|assistant|>, then a newline
            prompts += [cut] if cut else []
            completions.append(len(encoding.ids) - cut)
    return prompts, completions


# ---------------------------------------------------------------------------------------------------------------------


def get_args(argv=None):
    parser = argparse.ArgumentParser(description="Makes tokenizer and training text of the base.", allow_abbrev=False)
    add = parser.add_argument
    add("--output-dir", default=str(HERE / "work"), help="folder for tokenizer/ and the three files")
    add("--seed", type=int, default=1000, help="seed, 0 or more; the same seed gives the same bytes")
    add("--vocab-size", type=int, default=1280, help="tokens in the vocabulary, 1000 to 2000")
    add("--clean-rows", type=int, default=120_000, help="rows of pretrain.jsonl")
    add("--mixed-rows", type=int, default=16_000, help="rows of sft.jsonl")
    add("--valid-rows", type=int, default=500, help="rows of sft-valid.jsonl")
    add("--different", type=float, default=0.3, help="share of problems of the different family")
    add("--hints", type=float, default=0.1, help="share of prompts that hold the answer; their solution is right")
    add("--stories", type=float, default=0.03, help="share of small stories in pretrain.jsonl")
    add("--verbose-clean", type=float, default=0.5, help="share of verbose solutions in pretrain.jsonl")
    add("--right", type=float, default=0.45, help="share of right worked solutions in sft.jsonl, hint rows apart")
    add("--slip", type=float, default=0.35, help="share of solutions with a slip in sft.jsonl; the rest are bare")
    add("--verbose", type=float, default=0.4, help="share of verbose ones among the worked solutions of sft.jsonl")
    args = parser.parse_args(argv)
    for flag in ("different", "hints", "stories", "verbose_clean", "right", "slip", "verbose"):
        if not 0 <= getattr(args, flag) <= 1:  # nan fails too
            parser.error(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; a share lies between 0 and 1")
    if args.right + args.slip > 1:
        parser.error(f"--right {args.right} and --slip {args.slip} make {args.right + args.slip}; at most 1 together")
    for flag, least, most in (("seed", 0, None), ("clean_rows", 1000, None), ("mixed_rows", 1, None),
                              ("valid_rows", 1, None), ("vocab_size", 1000, 2000)):
        value = getattr(args, flag)
        if value < least or most and value > most:
            wanted = f"{least} to {most}" if most else f"{least} or more"
            parser.error(f"--{flag.replace('_', '-')} is {value}; it must be {wanted}")
    return args


def make(args):
    """Writes everything below args.output_dir and prints what it wrote."""
    out = Path(args.output_dir)
    plan = [("pretrain", "corpus", args.clean_rows), ("sft", "corpus", args.mixed_rows),
            ("sft-valid", "valid", args.valid_rows)]
    # A stream of its own for each file: the length of one does not move another.
    files = {name: rows_of(name, random.Random(f"tiny {args.seed} {name}"), split, count, args)
             for name, split, count in plan}
    # Special tokens are cut out of the text that the merges are learned from.
    texts = (piece for row in files["pretrain"][:40_000] for piece in row["text"].replace("|>", "<|").split("<|")[::2])
    tokenizer = train_tokenizer(texts, args.vocab_size)
    save_tokenizer(tokenizer, out / "tokenizer")
    sha = hashlib.sha256((out / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    print(f"{out / 'tokenizer'}: {tokenizer.get_vocab_size()} tokens, sha256 {sha}")
    for name, rows in files.items():
        sha = arithmetic.write_jsonl(out / f"{name}.jsonl", rows)
        prompts, completions = count_tokens(tokenizer, rows)
        print(f"{out / name}.jsonl: {len(rows)} rows, {sum(prompts) + sum(completions)} tokens, "
              f"prompt mean {sum(prompts) / len(prompts):.1f} max {max(prompts)}, "
              f"completion mean {sum(completions) / len(completions):.1f} max {max(completions)}, sha256 {sha}")


if __name__ == "__main__":
    args = get_args()
    try:
        make(args)
    except OSError as error:
        print(f"prepare.py: error: cannot write below {args.output_dir}: {error}", file=sys.stderr)
        sys.exit(2)
