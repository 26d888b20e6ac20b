"""Transcripts of the four games -> a Llama of under a million weights, with a tokenizer, that plays them badly.

    python -m examples.benchmarks.small_model .cache            # makes it, where it is not there yet
    python -m examples.benchmarks.small_model .cache --measure  # and says how often it solves the first level

The small model of `examples/study/small` knows the words of its own games only, so these have one of their own: a plain
Hugging Face folder that a server takes as any other. It is what an instruct model is to a task that it half knows:
right now and then, mostly not, and at times not even a move. Training by reward then has something to find. So it reads
clean transcripts first, until it knows the games, and noisy ones after them, as that of the small study does. Its chat
template shows it the last message alone: profiles and examples are for models that can read them.

Invariants: the same code makes the same transcripts; none is of a task that a benchmark has, held out or trained on;
the folder's name carries the digest of this file and of the games.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import itertools
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graphs import countdown, game_turns, grid_moves, plan_path, sokoban, sudoku
from graphs.game_turns import Position, played_to_report, situation_to_text

GAMES: dict[str, ModuleType] = {"plan_path": plan_path, "sudoku": sudoku, "sokoban": sokoban, "countdown": countdown}
LEVELS = 1
"""Of each game: the first."""
TRANSCRIPT_SEEDS = range(100_000, 102_000)
"""Seeds of the tasks that transcripts are of, but for those that a benchmark has, too."""
RIGHT = {"plan_path": 0.04, "sudoku": 0.35, "sokoban": 0.05, "countdown": 0.7}
"""How often the teacher of a game acts for the best in noisy transcripts. The model copies moves well and reckons
badly, so where it has to reckon it is shown more that is right; guesses are right now and then, too."""
SLIP = {"sudoku": 0.3, "countdown": 0.1}
"""How often a guess has another cell or number than the position."""
ADOPTED = 0.6
"""How often a planner says what the tool found to be right, having read it."""
RAMBLING = 0.05
"""How often an answer is no move at all."""
MAX_NUMBER = 200
MAX_TOKENS = 32
PAD, END, UNKNOWN, ANSWER = "<pad>", "<end>", "<unknown>", "<answer>"
_STEPS, _CLEAN_STEPS, _BATCH, _RATE = 2700, 1800, 48, 2e-3
_LESSONS = ("plan_path", "sudoku", "sokoban", "countdown", "sudoku", "countdown")
"""Whose transcripts a step is of, in turn: reckoning takes more of them than moving."""
_WORD = r"[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]"
_TEMPLATE = "{{ messages[-1]['content'] }} " + ANSWER
_HIDDEN, _LAYERS, _HEADS = 128, 3, 4


# -- what is best -----------------------------------------------------------------------------------------------------


def best_answer(name: str, position: Position) -> str:
    """An answer that solves the position; the empty text where none does any more."""
    return {"plan_path": _walk, "sudoku": _fill, "sokoban": _push, "countdown": _reckon}[name](position)


def _walk(position: Position) -> str:
    at, goal = tuple(position["at"]), tuple(position["goal"])
    ways: dict[Any, str] = {at: ""}
    queue = deque([at])
    while queue and goal not in ways:
        cell = queue.popleft()
        for move in grid_moves.DIRECTIONS:
            beside = grid_moves.step_from(cell, move)
            if beside not in ways and plan_path.is_free(position["grid"], beside):
                ways[beside] = f"{ways[cell]} {move}"
                queue.append(beside)
    return ways.get(goal, "").strip()


def _push(position: Position) -> str:
    room = sokoban.read_room(position["room"])
    start = (room.player, room.boxes)
    ways = {start: ""}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state[1] == room.goals:
            return ways[state].strip()
        for move in grid_moves.DIRECTIONS:
            following = sokoban.push(room.floor, state, move)
            if following is not None and following not in ways:
                ways[following] = f"{ways[state]} {move}"
                queue.append(following)
    return ""


def _fill(position: Position) -> str:
    grid = [[digit if given else 0 for digit, given in zip(*rows, strict=True)] for rows in _rows(position)]
    cells = [(row, column) for row, column in itertools.product(range(4), repeat=2) if not grid[row][column]]

    def solve(index: int) -> bool:
        if index == len(cells):
            return True
        row, column = cells[index]
        for digit in sorted(sudoku.choices(grid, row, column)):
            grid[row][column] = digit
            if solve(index + 1):
                return True
        grid[row][column] = 0
        return False

    solve(0)
    wrong = [(row, column) for row, column in cells if position["grid"][row][column] != grid[row][column]]
    return " ".join(f"r{row + 1}c{column + 1}={grid[row][column]}" for row, column in wrong)


def _rows(position: Position) -> Iterator[tuple[list[int], list[bool]]]:
    return zip(position["grid"], position["given"], strict=True)


def _reckon(position: Position) -> str:
    for numbers in itertools.permutations(position["numbers"]):
        for operators in itertools.product(position["operators"], repeat=len(numbers) - 1):
            pairs = zip(operators, numbers[1:], strict=True)
            text = f"{numbers[0]}" + "".join(f" {operator} {number}" for operator, number in pairs)
            if countdown.expression_to_value(text) == position["target"]:
                return text
    return ""


# -- transcripts ------------------------------------------------------------------------------------------------------


class Teacher(random.Random):
    """Chance, and whether what is written is clean: all for the best, and always a move."""

    clean = False


@functools.cache
def transcript_tasks(name: str, level: Any) -> tuple[dict[str, Any], ...]:
    """Tasks of TRANSCRIPT_SEEDS that differ from each other and from every task of the benchmark in what is shown."""
    module = GAMES[name]
    tasks = module.level_to_tasks(level, itertools.chain(range(module.TASKS), TRANSCRIPT_SEEDS))
    own_ids = {f"{level.name}-{seed}" for seed in range(module.TASKS)}
    return tuple(task for task in tasks if task["id"] not in own_ids)


def teacher_answer(name: str, position: Position, draw: Teacher) -> str:
    """An answer of the game's form: for the best where it is clean, or else by the share `RIGHT`, and else a guess."""
    if draw.clean and (best := best_answer(name, position)):
        return best
    if draw.random() < RAMBLING:
        return draw.choice(("no moves", "goal", "right", "Empty none"))
    best = best_answer(name, position)
    if draw.random() < RIGHT[name] and best:
        return best
    match name:
        case "sudoku":
            cells = re.findall(r"r[0-9]c[0-9]", best) or ["r1c1"]
            slips = [
                f"r{draw.randint(1, 4)}c{draw.randint(1, 4)}" if draw.random() < SLIP[name] else cell for cell in cells
            ]
            return " ".join(f"{cell}={draw.randint(1, 4)}" for cell in slips)
        case "countdown":
            given = draw.sample(position["numbers"], len(position["numbers"]))
            numbers = [draw.randint(1, 20) if draw.random() < SLIP[name] else number for number in given]
            return str(numbers[0]) + "".join(f" {draw.choice(position['operators'])} {n}" for n in numbers[1:])
    moves = best.split() or ["U"]
    length = max(1, len(moves) + draw.choice((-1, 0, 0, 1)))
    return " ".join(draw.choices("UDLR", k=length))


def transcripts(name: str, draw: Teacher) -> Iterator[tuple[str, str]]:
    """(question, answer) of one run after another, for ever."""
    module = GAMES[name]
    game = module.GAME
    while True:
        level = module.LEVELS[draw.randrange(LEVELS)]
        task = draw.choice(transcript_tasks(name, level))
        position, feedback = module.task_to_input(task)["position"], ""
        for _ in range(level.turn_limit):
            situation = situation_to_text(game, position, feedback)
            proposal = teacher_answer(name, position, draw)
            yield f"{situation}\n{game.writer.question}", proposal
            trial = module.play(position, proposal)
            adopts = trial.solved and draw.random() < ADOPTED
            answer = proposal if adopts else teacher_answer(name, position, draw)
            yield f"{situation}\n{played_to_report(trial)}\n{game.planner.question}", answer
            played = module.play(position, answer)
            position, feedback = played.position, played.note
            if played.solved or played.over:
                break


def text_to_words(text: str) -> list[str]:
    """The words of a text, as the tokenizer splits it."""
    return re.findall(_WORD, text)


def vocabulary() -> list[str]:
    """Every word of some thousand transcripts, and the numbers up to MAX_NUMBER, in a fixed order."""
    words = {str(number) for number in range(MAX_NUMBER + 1)}
    for name in GAMES:
        for question, answer in itertools.islice(transcripts(name, Teacher(name)), 2000):
            words |= {*text_to_words(question), *text_to_words(answer)}
    return [PAD, END, UNKNOWN, ANSWER, *sorted(words)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    ids = {word: number for number, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[ANSWER],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_batch(
    rows: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transcripts to ids and labels [rows, length]; labels are -100 where nothing is learned (question and padding)."""
    ids, labels = [], []
    for question, answer in rows:
        prompt_ids = tokenizer(f"{question} {ANSWER}")["input_ids"]
        answer_ids = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=-100)


# -- the model --------------------------------------------------------------------------------------------------------


def pretrain(folder: Path, seed: int = 0, steps: int = _STEPS) -> Path:
    """Makes the model and writes it as a Hugging Face folder, which is whole or not there."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=3 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.1)
    teachers = {name: Teacher(f"{name} {seed}") for name in GAMES}
    sources = {name: transcripts(name, teacher) for name, teacher in teachers.items()}
    for step in range(steps):
        for teacher in teachers.values():
            teacher.clean = step < _CLEAN_STEPS
        rows = list(
            itertools.islice(sources[_LESSONS[step % len(_LESSONS)]], _BATCH)
        )  # of one game: they are of like length
        ids_BL, labels_BL = make_batch(rows, tokenizer)
        loss = model(input_ids=ids_BL, labels=labels_BL, attention_mask=(ids_BL != tokenizer.pad_token_id).long()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 300 < len(_LESSONS) or step == steps - 1:
            print(f"step {step}: {float(loss.detach()):.3f}", flush=True)
    part = folder.with_name(f".{folder.name}.part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
    return folder


def model_folder(cache: Path) -> Path:
    """Where the model is, or will be, below `cache`."""
    digest = hashlib.sha256()
    for module in (game_turns, grid_moves, *GAMES.values()):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return cache / f"benchmark-model-{digest.hexdigest()[:12]}"


def ensure_model(cache: Path) -> Path:
    """The model's folder below `cache`; made where it is not there yet."""
    folder = model_folder(cache)
    if not (folder / "config.json").is_file():
        cache.mkdir(parents=True, exist_ok=True)
        pretrain(folder)
    return folder


class FolderModel(BaseChatModel):
    """A Hugging Face folder as a chat model that samples in this process, one call after another."""

    model: Any
    tokenizer: Any
    temperature: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> FolderModel:
        """The model in a folder."""
        return cls(model=AutoModelForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder))

    @torch.no_grad()
    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        chat = [{"role": "user", "content": str(message.content)} for message in messages]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, return_tensors="pt")
        out = self.model.generate(
            **ids, do_sample=True, temperature=self.temperature, top_k=0, top_p=1.0, max_new_tokens=MAX_TOKENS
        )
        answer = self.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

    @property
    def _llm_type(self) -> str:
        return "folder"


async def share_solved(module: ModuleType, model: BaseChatModel, tasks: Sequence[dict[str, Any]]) -> float:
    """The share of the tasks that the game's graph solves with this model, once each."""
    graph = module.build(model)
    results = [await graph.ainvoke(module.task_to_input(task)) for task in tasks]
    return sum(result["turns"][-1]["solved"] for result in results) / len(results)


def main() -> None:
    """Makes the model, and measures it where that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.benchmarks.small_model", description=__doc__.split("\n")[0]
    )
    parser.add_argument("cache", type=Path, help="where the model's folder goes")
    parser.add_argument(
        "--measure", type=int, nargs="?", const=200, metavar="TASKS", help="tasks of a level, once each"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = ensure_model(given.cache)
    print(folder)
    if given.measure:
        torch.manual_seed(1)
        model = FolderModel.load(folder)
        for name, module in GAMES.items():
            for level in module.LEVELS[:LEVELS]:
                tasks = list(module.level_to_tasks(level, range(given.measure)))
                share = asyncio.run(share_solved(module, model, tasks))
                print(f"{name} {level.name}: {share:.3f} of {len(tasks)}", flush=True)


if __name__ == "__main__":
    main()
