"""The generated tasks (data/arithmetic) and the training text of the base (data/tiny): answers checked by an
independent reading, files kept apart, wordings held out, the same bytes for a seed."""

import datetime
import importlib.util
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


tiny = load("tiny_prepare", ROOT / "data" / "tiny" / "prepare.py")
arithmetic = tiny.arithmetic
FILES = ["train", "heldout-same", "heldout-different", "heldout-wording"]
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def read(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def fold(text):
    """Another way to normalise than the script's: letters and digits alone, without any space."""
    return "".join(c for c in text.lower() if c.isalnum())


def marked(text):
    """The number after the last ####, or None."""
    found = re.findall(r"^#### (-?\d+)$", text, re.M)
    return int(found[-1]) if found else None


def right(x, op, y):
    return {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else None}[op]


def equations(text):
    return [(int(x), op, int(y), int(z)) for x, op, y, z in EQUATION.findall(text)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    arithmetic.make_tasks(folder, seed=0, quiet=True)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A small run of data/tiny/prepare.py by its command line."""
    folder = tmp_path_factory.mktemp("tiny") / "work"
    command = [sys.executable, ROOT / "data" / "tiny" / "prepare.py", "--output-dir", folder, "--clean-rows", "4000",
               "--mixed-rows", "2500", "--valid-rows", "200"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tokens" in done.stdout and "sha256" in done.stdout
    return folder


@pytest.fixture(scope="module")
def tokenizer(work):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(work / "tokenizer")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_same_seed_same_bytes(tmp_path, tasks):
    # A process of its own has another hash seed: nothing may depend on it.
    command = [sys.executable, ROOT / "data" / "arithmetic" / "prepare.py", "--output-dir", tmp_path / "again"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (tmp_path / "again" / f"{name}.jsonl").read_bytes() == (tasks / f"{name}.jsonl").read_bytes()
        assert f"{name}.jsonl: {240 if name == 'train' else 60} rows, sha256" in done.stdout
    arithmetic.make_tasks(tmp_path / "other", seed=1, quiet=True)
    for name in FILES:
        assert (tmp_path / "other" / f"{name}.jsonl").read_bytes() != (tasks / f"{name}.jsonl").read_bytes()


def test_a_longer_file_begins_with_the_shorter_one(tmp_path, tasks):
    arithmetic.make_tasks(tmp_path, seed=0, train=300, heldout=90, quiet=True)
    for name in FILES:
        assert (tmp_path / f"{name}.jsonl").read_bytes().startswith((tasks / f"{name}.jsonl").read_bytes())


def test_rows(tasks):
    ids = []
    for name in FILES:
        rows = read(tasks, name)
        assert len(rows) == (240 if name == "train" else 60)
        ids += [row["id"] for row in rows]
        for row in rows:
            assert list(row) == ["id", "prompt", "answer", "task", "family", "kind", "steps", "solution"]
            assert row["id"].startswith(name) and row["task"] == "arithmetic"
            assert [m["role"] for m in row["prompt"]] == ["user"]
            assert row["prompt"][0]["content"].endswith("\n" + arithmetic.INSTRUCTION)
            assert re.fullmatch(r"\d+", row["answer"])
            assert row["steps"] == len(equations(row["solution"]))
            assert "{" not in row["prompt"][0]["content"]  # a slot that nothing filled
        families = {row["family"] for row in rows}
        assert families == ({"counting", "calendar", "ordering"} if name == "heldout-different" else {"story"})
        if name != "heldout-different":
            assert {row["steps"] for row in rows} == {2, 3, 4}
    assert len(set(ids)) == len(ids)


def test_files_of_all_seeds_are_disjoint(tmp_path, work):
    groups = {"train": set(), "heldout": set(), "corpus": set(), "valid": set()}
    for seed in range(4):
        arithmetic.make_tasks(tmp_path / str(seed), seed, train=500, heldout=150, easy=seed % 2 == 1, quiet=True)
        texts = {name: [fold(r["prompt"][0]["content"]) for r in read(tmp_path / str(seed), name)] for name in FILES}
        everything = sum(texts.values(), [])
        assert len(set(everything)) == len(everything)  # nothing twice, in a file or between two
        groups["train"] |= set(texts["train"])
        groups["heldout"] |= set(everything) - set(texts["train"])
    hint = re.compile(r"\n\(The answer is \d+\.\)")
    for name, group in (("sft", "corpus"), ("sft-valid", "valid")):
        groups[group] |= {fold(hint.sub("", r["prompt"][0]["content"])) for r in read(work, name)}
    for row in read(work, "pretrain"):
        if "<|user|>" in row["text"]:
            question = row["text"].split("<|user|>\n")[1].split("<|end|>")[0]
            groups["corpus"].add(fold(hint.sub("", question)))
    assert len(groups["corpus"]) > 5000
    for one in groups:
        for other in groups:
            assert one == other or not groups[one] & groups[other], (one, other)


def test_splits_cover_every_hash_once():
    assert sorted(b for buckets in arithmetic.SPLITS.values() for b in buckets) == list(range(100))


def sentences_of(stories):
    """Every sentence of the phrasings as a pattern: slots for numbers take digits, the others one word."""
    patterns = set()
    for _, _, _, phrasings, _ in stories:
        for phrasing in phrasings:
            for sentence in re.split(r"(?<=[.?]) ", phrasing):
                pattern = re.escape(sentence).replace(r"\{", "{").replace(r"\}", "}")
                patterns.add(re.sub(r"\{(\w+)\}", lambda m: r"\d+" if len(m[1]) == 1 else r"[A-Za-z]+", pattern))
    return patterns


def test_heldout_wordings_stand_in_no_training_text(tasks, work):
    wording = re.compile("|".join(sorted(sentences_of(arithmetic.HELDOUT_STORIES))))
    training = (tasks / "train.jsonl").read_text() + (tasks / "heldout-same.jsonl").read_text()
    for name in ("pretrain", "sft", "sft-valid"):
        training += (work / f"{name}.jsonl").read_text()
    assert wording.search(training) is None
    for row in read(tasks, "heldout-wording"):  # the pattern does find what it looks for
        assert wording.search(row["prompt"][0]["content"])
    kinds = {story[0] for story in arithmetic.STORIES}
    assert len(kinds) == len(arithmetic.STORIES) >= 25
    assert not kinds & {story[0] for story in arithmetic.HELDOUT_STORIES}


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def test_worked_solutions_evaluate_to_the_answer(tmp_path):
    for seed, easy in ((0, False), (1, True)):
        arithmetic.make_tasks(tmp_path, seed, train=600, heldout=200, easy=easy, quiet=True)
        for name in FILES:
            for row in read(tmp_path, name):
                given = set(map(int, re.findall(r"\d+", row["prompt"][0]["content"])))
                rows = equations(row["solution"])
                seen = set()
                for x, op, y, z in rows:
                    assert right(x, op, y) == z, row
                    if row["family"] == "story":
                        # Every operand was given, was found before, or is the two of "half" and "twice".
                        assert {x, y} <= given | seen | {2}, row
                        assert 2 <= z <= 200
                    seen.add(z)
                assert rows[-1][3] == int(row["answer"]) == marked(row["solution"])


def month_of(text):
    """Month and day as "March 7" says, as a date of a year without a leap day."""
    months = "|".join(arithmetic.MONTHS)
    return [datetime.datetime.strptime(f"2023 {m} {d}", "%Y %B %d") for m, d in re.findall(rf"({months}) (\d+)", text)]


def by_brute_force(kind, text):
    """The answer of a problem of the different family from its text alone, by counting instead of by formula."""
    n = list(map(int, re.findall(r"\d+", text)))
    big, small = max(n, default=0), min((v for v in n if v > 1), default=0)
    between = re.search(r"from (\d+) to (\d+)", text)
    span = range(int(between[1]), int(between[2]) + 1) if between else range(0)
    days = re.search(r"(?:in|of|needs|back|day) (\d+) days", text)
    if kind == "count_range":
        return len(range(n[0], n[1] + 1))
    if kind == "count_even":
        return sum(v % 2 == (" odd " in text) for v in span)
    if kind in ("count_multiples", "count_multiples_between"):
        m = int(re.search(r"(?:multiples? of|divided by) (\d+)", text)[1])
        return sum(v % m == 0 for v in span)
    if kind == "count_left":
        return sum(v % small != 0 for v in range(1, big + 1))
    if kind == "count_letters":
        return sum(len(w) for w in re.findall("[a-z]+", text) if w in arithmetic.WORDS)
    if kind == "count_posts":
        return len(range(0, big + 1, small))
    if kind == "count_digits":
        return len("".join(map(str, range(1, big + 1))))
    if kind in ("date_after", "date_next_month"):
        return (month_of(text)[0] + datetime.timedelta(int(days[1]))).day
    if kind == "days_between":
        return (month_of(text)[1] - month_of(text)[0]).days
    if kind == "weeks_and_days":
        return len(range(7 * n[0])) + n[1]
    if kind == "weekday":
        today = 1 + arithmetic.WEEK.index(re.search(r"(?:Today is|born on a) (\w+day)", text)[1])
        for _ in range(n[-1]):
            today = today % 7 + 1
        return today
    if kind == "days_left":
        busy = int(re.search(r"(?:works|rains on) (\d+)", text)[1])
        return len(range(month_of(text)[0].day, arithmetic.MONTHS[text.split()[0]])) - busy
    if kind == "line_total":
        return n[0] - 1 + 1 + n[1] - 1
    if kind == "line_back":
        place = int(re.search(r"(\d+)(?:st|nd|rd|th)|number (\d+)", text)[0].strip("stndrhumbe "))
        return list(range(big, 0, -1)).index(place) + 1
    if kind == "place_moves":
        return n[0] - n[1] + n[2]
    if kind == "between_places":
        return len(range(n[0] + 1, n[1]))
    if kind == "height_rank":
        taller = re.findall(r"(\w+) is taller than (\w+)\.", text)
        who = re.search(r"which place has (\w+)\?", text, re.I)[1]
        order = [(b, a) for a, b in taller] if "from the shortest" in text else taller
        place, now = 1, who
        while any(b == now for _, b in order):
            place, now = place + 1, next(a for a, b in order if b == now)
        return place
    if kind == "largest_smallest":
        return max(n) - min(n)
    raise KeyError(kind)


@pytest.mark.parametrize("easy", [False, True])
def test_different_family_by_brute_force(easy):
    rng = random.Random(3)
    kinds = Counter()
    for _ in range(3000):
        problem = arithmetic.different_problem(rng, easy)
        assert by_brute_force(problem.kind, problem.text) == problem.answer, problem
        kinds[problem.kind] += 1
    functions = sum((hard_and_easy[easy] for hard_and_easy in arithmetic.DIFFERENT.values()), [])
    assert kinds.keys() == {f.__name__ for f in functions}


def test_easy_is_simpler():
    def effort(easy):
        rng = random.Random(0)
        return sum(len(p.steps) + max(row[3] for row in p.work()) / 20
                   for p in (arithmetic.different_problem(rng, easy) for _ in range(500)))
    assert effort(True) < 0.6 * effort(False)


def test_gold_is_right_and_gold_plus_one_is_wrong(tasks):
    for name in FILES:
        for row in read(tasks, name):
            gold = int(row["answer"])
            assert marked(f"Some words.\n#### {gold}") == gold
            assert marked(f"Some words.\n#### {gold + 1}") != gold


def test_styles_say_the_same():
    rng = random.Random(1)
    terse_length = verbose_length = 0
    for i in range(1000):
        problem = arithmetic.different_problem(rng) if i % 3 == 0 else arithmetic.story_problem(rng)
        terse, verbose, bare = (problem.solution(style) for style in ("terse", "verbose", "bare"))
        assert equations(terse) == equations(verbose) != [] and bare == f"#### {problem.answer}"
        assert marked(terse) == marked(verbose) == problem.answer
        assert "@" not in verbose and "{" not in verbose
        terse_length += len(terse)
        verbose_length += len(verbose)
    assert 1.7 < verbose_length / terse_length < 3
    with pytest.raises(ValueError, match="style is 'long'"):
        problem.solution("long")


@pytest.mark.parametrize("style", ["terse", "verbose"])
def test_a_slip_is_one_wrong_equation_carried_on(style):
    rng = random.Random(2)
    off = Counter()
    for i in range(3000):
        problem = arithmetic.different_problem(rng) if i % 3 == 0 else arithmetic.story_problem(rng)
        text = problem.solution(style, slip_rng=rng)
        rows = equations(text)
        wrong = [j for j, (x, op, y, z) in enumerate(rows) if right(x, op, y) != z]
        assert len(wrong) == 1, text
        assert marked(text) == rows[-1][3] != problem.answer
        # Up to the slip it is the right solution; after it, the wrong result is what is used.
        good = equations(problem.solution("terse"))
        assert rows[:wrong[0]] == good[:wrong[0]] and rows[wrong[0]][:3] == good[wrong[0]][:3]
        off[abs(rows[wrong[0]][3] - good[wrong[0]][3]) <= 10] += 1
        assert all(z >= 0 for *_, z in rows)
    assert off[True] > 0.7 * 3000


# ---------------------------------------------------------------------------------------------------------------------
# The base's text and tokenizer


def test_mixture(work):
    rows, counts = read(work, "sft"), Counter()
    for row in rows:
        assert [m["role"] for m in row["prompt"] + row["completion"]] == ["user", "assistant"]
        prompt, text = row["prompt"][0]["content"], row["completion"][0]["content"]
        steps = equations(text)
        slips = sum(right(x, op, y) != z for x, op, y, z in steps)
        hint = re.search(r"\n\(The answer is (\d+)\.\)$", prompt)
        kind = "bare" if not steps else "slip" if slips else "right"
        if hint:
            assert kind == "right" and int(hint[1]) == marked(text)
            counts["hint"] += 1
        else:
            counts[kind] += 1
        if steps:
            counts["worked"] += 1
            counts["verbose"] += not re.match(r"\d+ [-+*/] \d+ = \d+\n", text)
    plain = len(rows) - counts["hint"]
    assert abs(counts["hint"] / len(rows) - 0.1) < 0.03
    assert abs(counts["right"] / plain - 0.45) < 0.04
    assert abs(counts["slip"] / plain - 0.35) < 0.04
    assert abs(counts["bare"] / plain - 0.2) < 0.04
    assert abs(counts["verbose"] / counts["worked"] - 0.4) < 0.04


def test_clean_text_is_right(work):
    counts = Counter()
    for row in read(work, "pretrain"):
        chat = re.fullmatch(r"<\|user\|>\n(.*)<\|end\|>\n<\|assistant\|>\n(.*)<\|end\|>\n", row["text"], re.S)
        if not chat:
            counts["story"] += 1
            assert "####" not in row["text"] and "<|" not in row["text"]
            continue
        rows = equations(chat[2])
        assert rows and all(right(x, op, y) == z for x, op, y, z in rows)
        assert marked(chat[2]) == rows[-1][3]
        hint = re.search(r"\n\(The answer is (\d+)\.\)$", chat[1])
        assert not hint or int(hint[1]) == rows[-1][3]
        counts["hint" if hint else "plain"] += 1
    assert abs(counts["story"] / 4000 - 0.03) < 0.01
    assert abs(counts["hint"] / 4000 - 0.1) < 0.02


def test_tokenizer_reads_any_text(tokenizer):
    assert 1000 <= len(tokenizer) <= 2000
    rng = random.Random(4)
    texts = ["", " ", "\n\n  x\t", "a\u0301 \u00e9 \u65e5\u672c \U0001f389 \u0000 \ufffd", "3.14 = -2 - 1  * 7/8 1,234"]
    for _ in range(300):  # any code points but the surrogates, which are no text
        points = (rng.randrange(rng.choice((128, 0x3000, 0x110000))) for _ in range(rng.randint(1, 40)))
        texts.append("".join(chr(c) for c in points if not 0xD800 <= c < 0xE000))
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_one_token_each(tokenizer):
    ids = tokenizer("12 + 7 = 190, x42y 3.5 007\n#### 38")["input_ids"]
    pieces = [tokenizer.decode([i]) for i in ids]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("12719042350" + "0738")
    for token_id in range(len(tokenizer)):
        piece = tokenizer.decode([token_id])
        assert len(piece) == 1 or not any(c.isdigit() for c in piece)


def test_special_tokens_and_chat_template(tokenizer):
    assert tokenizer.convert_tokens_to_ids(tiny.SPECIAL) == [0, 1, 2, 3, 4]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|endoftext|>")
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": " 1 + 1? "},
            {"role": "assistant", "content": "#### 2"}, {"role": "user", "content": "Thanks"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == tiny.render(chat)
    assert text.startswith("<|system|>\nBe short.<|end|>\n<|user|>\n 1 + 1? <|end|>\n<|assistant|>\n#### 2<|end|>\n")
    # The opening for a reply is a prefix of the finished chat, in text and in tokens.
    opening = tokenizer.apply_chat_template(chat[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(opening) and opening.endswith("<|assistant|>\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    head = tokenizer(opening, add_special_tokens=False)["input_ids"]
    assert ids[:len(head)] == head
    assert "system" not in tokenizer.apply_chat_template(chat[1:2], tokenize=False)
    with pytest.raises(Exception, match="role judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_rows_are_short(work, tokenizer):
    rows = read(work, "sft")[:1000]
    prompts = tokenizer([tiny.render(r["prompt"]) + "<|assistant|>\n" for r in rows])["input_ids"]
    replies = tokenizer([r["completion"][0]["content"] + "<|end|>" for r in rows])["input_ids"]
    assert sum(map(len, prompts)) / 1000 < 60 and max(map(len, prompts)) < 128
    assert sum(map(len, replies)) / 1000 < 45 and max(map(len, replies)) < 100


# ---------------------------------------------------------------------------------------------------------------------
# Bad commands


@pytest.mark.parametrize("module, argv, word", [
    (arithmetic, ["--seed", "-1"], "--seed is -1"),
    (arithmetic, ["--seed", "nan"], "--seed"),
    (arithmetic, ["--train", "0"], "--train is 0"),
    (arithmetic, ["--heldout", "-3"], "--heldout is -3"),
    (arithmetic, ["--held", "3"], "--held"),
    (arithmetic, ["--unknown"], "--unknown"),
    (tiny, ["--hints", "nan"], "--hints is nan"),
    (tiny, ["--right", "0.9", "--slip", "0.4"], "--slip 0.4"),
    (tiny, ["--vocab-size", "200"], "--vocab-size is 200"),
    (tiny, ["--clean-rows", "10"], "--clean-rows is 10"),
    (tiny, ["--seed", "1", "--clean", "5000"], "--clean"),
])
def test_malformed_flags_exit_2(module, argv, word, capsys):
    with pytest.raises(SystemExit) as stop:
        module.get_args(argv)
    assert stop.value.code == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    script = ROOT / "data" / "arithmetic" / "prepare.py"
    done = subprocess.run([sys.executable, script, "--output-dir", tmp_path / "file"], capture_output=True, text=True)
    assert done.returncode == 2 and str(tmp_path / "file") in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine"

    # A kind with few problems runs out: an error with the numbers, not an endless search.
    def few(rng):
        return arithmetic.Problem(f"What is {rng.randint(1, 20)} + 1?", "few", "few", (("p", 1, "+", 1),), ("@",))

    with pytest.raises(ValueError, match="of 500 different problems found for split corpus; ask for fewer"):
        arithmetic.draw(random.Random(0), few, "corpus", 500)
