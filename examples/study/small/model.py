"""Noisy transcripts of the four games -> a Llama of about a million weights that plays them badly.

It is what an instruct model is to a task that it half knows: it can do the sum, often does not, rambles, forgets what
it was told. Training by reward then has something to find. So it reads clean transcripts first, until it knows its
sums, and noisy ones after them. Made once from a seed, in some minutes of one core; loaded in less than a second.

Invariant: the same code makes the same transcripts; the folder's name carries the digest of this file, which has all
that makes them.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = [
    "<pad>",
    "<end>",
    "+",
    "-",
    "*",
    "=",
    "?",
    "[reasoner]",
    "[actor]",
    "[link]",
    "[writer]",
    "[router]",
    "[supervisor]",
    "[specialist]",
    "[said]",
    "[tool]",
    "plus",
    "minus",
    "times",
    "add",
    "sub",
    "mul",
    "calc",
    "done",
    "again",
    "so",
    "well",
    "think",
    "is",
    "the",
    "answer",
    "hmm",
    "maybe",
    "or",
    "we",
    "get",
    "none",
] + [str(number) for number in range(-9, 82)]
ID = {word: i for i, word in enumerate(WORDS)}
END = ID["<end>"]
_FIRST_NUMBER = ID["-9"]
FILLERS = ("so", "well", "think", "is", "the", "answer", "hmm", "maybe", "or", "we", "get")
MAX_TOKENS = 12
_STEPS, _CLEAN_STEPS, _BATCH, _RATE = 2400, 1500, 64, 3e-3


def words_to_ids(words: Sequence[str]) -> list[int]:
    """Words of the vocabulary to token ids, one each; a number is one word, however many digits it has."""
    return [ID[word] for word in words]


def digits(number: int) -> list[str]:
    """A number as words: one, since each that occurs is a token of its own."""
    return [str(number)]


def ids_to_numbers(ids: Sequence[int]) -> list[int]:
    """The numbers that stand in a text, left to right."""
    return [int(WORDS[i]) for i in ids if _FIRST_NUMBER <= i < len(WORDS)]


# -- what the small model has read -----------------------------------------------------------------------------------


class Draw(random.Random):
    """Chance, and whether what is written is clean: no sum of a player is wrong, and nothing is said around an answer.

    What router, supervisor and specialist choose, copy and report is noisy all the same.
    """

    clean = False


def _ramble(draw: Draw, longest: int) -> list[str]:
    first = draw.randrange(len(FILLERS))
    return [FILLERS[(first + i) % len(FILLERS)] for i in range(draw.randint(1, longest))]


def _number(draw: Draw, right: int, chance: float, others: Sequence[int]) -> int:
    return right if draw.clean or draw.random() < chance else draw.choice(list(others))


def _answer(draw: Draw, words: Sequence[str]) -> list[str]:
    """A text around some words: bare, behind a ramble, before one, or so long that no end comes in time."""
    style = 0.0 if draw.clean else draw.random()
    if style < 0.35:
        return [*words, "<end>"]
    if style < 0.6:
        return [*_ramble(draw, 4), *words, "<end>"]
    if style < 0.8:
        return [*words, *_ramble(draw, 4), *digits(draw.randint(0, 18)), "<end>"]
    return [*_ramble(draw, MAX_TOKENS), "<end>"]


def _duo(draw: Draw) -> tuple[list[str], list[str]]:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    question = [*digits(a), "+", *digits(b), "?"]
    worked = _number(draw, a + b, 0.5, range(19))
    working = _answer(draw, [*question[:-1], "=", *digits(worked)])[:MAX_TOKENS]
    if draw.random() < 0.5:
        return ["[reasoner]", *question], working
    heard = ids_to_numbers(words_to_ids(working))
    told = heard[-1] if heard and draw.random() < 0.7 else _number(draw, a + b, 0.3, range(19))
    return ["[actor]", *question, "[said]", *(w for w in working if w != "<end>")], _answer(draw, digits(told))


def _link(draw: Draw) -> tuple[list[str], list[str]]:
    value, own = draw.randint(0, 9), draw.randint(0, 9)
    carried = digits(value) if draw.random() < 0.9 else ["none"]
    new = _number(draw, (value + own) % 10 if carried != ["none"] else own, 0.65, range(10))
    answer = [*digits(new), "<end>"] if draw.random() < 0.85 else _answer(draw, digits(new))
    return ["[link]", *carried, "+", *digits(own), "?"], answer


def _loop(draw: Draw) -> tuple[list[str], list[str]]:
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    question = [*digits(a), "-", *digits(b), "?"]
    said = _number(draw, a - b, 0.45, range(-9, 10))
    if draw.random() < 0.5:
        return ["[writer]", *question], _answer(draw, digits(said))
    verdict = ("done" if draw.random() < 0.6 else "again") if said == a - b else draw.choice(("done", "again"))
    return ["[router]", *question, "[said]", *digits(said)], [verdict, "<end>"]


OPERATIONS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "add": ("plus", "+", lambda a, b: a + b),
    "sub": ("minus", "-", lambda a, b: a - b),
    "mul": ("times", "*", lambda a, b: a * b),
}


def _supervisor(draw: Draw) -> tuple[list[str], list[str]]:
    name = draw.choice(list(OPERATIONS))
    word = OPERATIONS[name][0]
    a, b = draw.randint(0, 9), draw.randint(0, 9)
    question = [*digits(a), word, *digits(b), "?"]
    stage = draw.random()
    if stage < 0.33:
        return ["[supervisor]", *question], [name if draw.random() < 0.6 else draw.choice(list(OPERATIONS)), "<end>"]
    sent = name if draw.random() < 0.7 else draw.choice(list(OPERATIONS))
    if stage < 0.66:
        copied = [x if draw.random() < 0.8 else draw.randint(0, 9) for x in (a, b)]
        call = ["calc", *digits(copied[0]), OPERATIONS[sent][1], *digits(copied[1])]
        return ["[specialist]", sent, *question], _answer(draw, call) if draw.random() < 0.5 else [*call, "<end>"]
    result = OPERATIONS[sent][2](a, b) if draw.random() < 0.8 else draw.randint(-9, 81)
    told = result if draw.random() < 0.5 else draw.randint(-9, 81)
    tool = digits(result) if draw.random() < 0.9 else ["none"]
    return ["[supervisor]", *question, "[tool]", *tool], _answer(draw, digits(told))


FAMILIES = (_duo, _link, _loop, _supervisor)


def make_batch(draw: Draw, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Transcripts to ids and labels [rows, length]; labels are -100 where nothing is learned (prompt and padding)."""
    ids, labels = [], []
    for _ in range(rows):
        prompt, answer = draw.choice(FAMILIES)(draw)
        prompt_ids, answer_ids = words_to_ids(prompt), words_to_ids(answer)[: MAX_TOKENS + 1]
        ids.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


def pretrain(folder: Path, seed: int = 0) -> Path:
    """Makes the model and writes it as a Hugging Face folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=_STEPS, pct_start=0.1)
    draw = Draw(seed)
    for step in range(_STEPS):
        draw.clean = step < _CLEAN_STEPS
        ids_BL, labels_BL = make_batch(draw, _BATCH)
        loss = model(input_ids=ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 500 == 0 or step == _STEPS - 1:
            print(f"step {step}: {float(loss.detach()):.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / "vocabulary.json").write_text(json.dumps(WORDS))
    return folder


def ensure_model(cache: Path) -> Path:
    """The model's folder below `cache`; made where it is not there yet."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = cache / f"study-model-{digest}"
    if not (folder / "config.json").is_file():
        pretrain(folder)
    return folder
