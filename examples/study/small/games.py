"""Four graphs as functions of a trainer's own policies: tasks -> trajectories with exact token ids and log-probs.

    duo          reasoner -> actor: a sum of two digits, worked by the one, said by the other
    chain        eight links, each adds its own digit to what the one before it said, modulo ten
    loop         writer -> router -> writer ..., at most three drafts; each further draft costs a tenth
    supervisor   supervisor -> specialist -> tool -> supervisor: who is asked, what is called, what is answered

They are the shapes of the zoo without LangGraph and without a server, so that a run takes seconds. Half of a game's
tasks are trained on; the others are for evaluation.

Invariant: tokens come from softmax(logits / temperature) of the adapter, and the log-probs that are recorded are its.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from examples.study.small.model import (
    END,
    MAX_TOKENS,
    OPERATIONS,
    WORDS,
    digits,
    ids_to_numbers,
    words_to_ids,
)
from trace_store.records import Action, Edge, Episode, Outcome, Reward, Trajectory
from trainers.marft import MarftTrainer

TEMPERATURE = 1.0
Task = tuple[int | str, ...]


class Players:
    """The policies of a trainer, asked in batches."""

    def __init__(self, trainer: MarftTrainer, seed: int) -> None:
        self.trainer = trainer
        self.generator = torch.Generator().manual_seed(seed)
        self.sampled_tokens = 0
        self._is_untrained = True

    def learn_offline(self, stored: Sequence[Trajectory]) -> None:
        """Trains on what the untrained policies played, which is version 1 from then on, as in `marft-bridge train`."""
        self.trainer.warm_up(stored)
        self.trainer.replay(stored)
        self._is_untrained = False

    @torch.no_grad()
    def ask(self, agent: str, prompts: Sequence[Sequence[str]], max_tokens: int = MAX_TOKENS) -> list[Action]:
        """One action for each prompt, ended by `<end>` or by the limit."""
        policies = self.trainer.policies
        model = policies.model_of(agent)
        model.use(policies.adapter_of(agent))
        prompt_ids = [words_to_ids(prompt) for prompt in prompts]
        longest = max(map(len, prompt_ids))
        ids_BL = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompt_ids])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids])
        position_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)
        sampled: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        open_B = torch.ones(len(prompts), dtype=torch.bool)
        cache, step_BL, step_position_BL = None, ids_BL, position_BL
        for _ in range(max_tokens):
            out = model.peft(
                input_ids=step_BL,
                attention_mask=mask_BL,
                position_ids=step_position_BL,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logp_BV = (out.logits[:, -1].float() / TEMPERATURE).log_softmax(-1)
            drawn_B1 = torch.multinomial(logp_BV.exp(), 1, generator=self.generator)
            said_B = logp_BV.gather(1, drawn_B1).squeeze(1).tolist()
            for i in torch.nonzero(open_B).squeeze(1).tolist():
                sampled[i].append(int(drawn_B1[i]))
                logprobs[i].append(said_B[i])
            open_B &= drawn_B1.squeeze(1) != END
            if not bool(open_B.any()):
                break
            mask_BL = torch.cat([mask_BL, torch.ones(len(prompts), 1, dtype=mask_BL.dtype)], 1)
            step_position_BL = position_BL[:, -1:] + len(sampled[int(torch.nonzero(open_B)[0])])
            step_BL = drawn_B1
        self.sampled_tokens += sum(map(len, sampled))
        version = 0 if self._is_untrained else self.trainer.rounds + 1
        return [
            _to_action(agent, ids, tokens, logp, version, max_tokens)
            for ids, tokens, logp in zip(prompt_ids, sampled, logprobs, strict=True)
        ]


def _to_action(
    agent: str, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], version: int, max_tokens: int
) -> Action:
    return Action(
        action_id=agent,
        episode_id="e",
        node=agent,
        index=0,
        step=None,
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(tokens),
        logprobs=tuple(logprobs),
        model="study",
        adapter=None,
        adapter_version=version,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=None,
        max_tokens=max_tokens,
        seed=None,
        finish_reason="stop" if tokens[-1] == END else "length",
        completion=None,
        started_ns=0,
        ended_ns=1,
        trainable=True,
    )


def to_trajectory(task: Task, number: int, actions: Sequence[Action], reward: float, correct: bool) -> Trajectory:
    """Actions one after another, each dependent on the one before."""
    outcome: Outcome = "terminated"
    episode = Episode(
        episode_id=f"e{number}",
        run_id="study",
        task_id=" ".join(map(str, task)),
        split="train",
        sample=0,
        round=None,
        variant=None,
        seed=None,
        adapters={},
        outcome=outcome,
        reason=None,
        started_ns=0,
        ended_ns=1,
        span_count=1,
    )
    episode_id = episode.episode_id
    numbered = tuple(replace(a, episode_id=episode_id, action_id=str(i), index=i) for i, a in enumerate(actions))
    edges = tuple(Edge(episode_id, str(i), str(i + 1), "data") for i in range(len(numbered) - 1))
    rewards = (
        Reward(episode_id, "reward", reward, "study", 1),
        Reward(episode_id, "correct", float(correct), "study", 1),
    )
    return Trajectory(episode, numbered, edges, rewards)


def text(action: Action) -> list[str]:
    """The words that were said, without the end."""
    return [WORDS[i] if i < len(WORDS) else "none" for i in action.sampled_ids or () if i != END]


def last_number(action: Action) -> int | None:
    """The last number of a text that came to its end in time, or None."""
    numbers = ids_to_numbers(action.sampled_ids or ())
    return numbers[-1] if numbers and action.finish_reason == "stop" else None


def _graded(action: Action, answer: int) -> tuple[float, bool]:
    """1 for the right number at the end, 0.1 where it only occurs."""
    if last_number(action) == answer:
        return 1.0, True
    return (0.1 if answer in ids_to_numbers(action.sampled_ids or ()) else 0.0), False


def _ints(task: Task) -> list[int]:
    return [int(part) for part in task]


def play_duo(players: Players, tasks: Sequence[Task]) -> list[Trajectory]:
    """A reasoner works the sum, an actor reads that and answers."""
    questions = [[*digits(int(a)), "+", *digits(int(b)), "?"] for a, b in tasks]
    workings = players.ask("reasoner", [["[reasoner]", *q] for q in questions])
    prompts = [["[actor]", *q, "[said]", *text(w)] for q, w in zip(questions, workings, strict=True)]
    answers = players.ask("actor", prompts)
    played = []
    for i, (task, working, answer) in enumerate(zip(tasks, workings, answers, strict=True)):
        reward, correct = _graded(answer, sum(_ints(task)))
        played.append(to_trajectory(task, i, [working, answer], reward, correct))
    return played


LINKS = tuple(f"link{i}" for i in range(8))


def play_chain(players: Players, tasks: Sequence[Task]) -> list[Trajectory]:
    """Eight links; the last one's digit counts."""
    carried: list[list[str]] = [digits(int(task[0])) for task in tasks]
    rows: list[list[Action]] = [[] for _ in tasks]
    for k, agent in enumerate(LINKS):
        prompts = [["[link]", *c, "+", *digits(int(t[k + 1])), "?"] for c, t in zip(carried, tasks, strict=True)]
        actions = players.ask(agent, prompts, max_tokens=6)
        for i, action in enumerate(actions):
            rows[i].append(action)
            number = last_number(action)
            carried[i] = ["none"] if number is None else digits(abs(number) % 10)
    played = []
    for i, (task, actions) in enumerate(zip(tasks, rows, strict=True)):
        correct = last_number(actions[-1]) == sum(_ints(task)) % 10
        played.append(to_trajectory(task, i, actions, float(correct), correct))
    return played


DRAFTS = 3


def play_loop(players: Players, tasks: Sequence[Task]) -> list[Trajectory]:
    """A writer drafts, a router says done or again; a draft beyond the first costs 0.1."""
    rows: list[list[Action]] = [[] for _ in tasks]
    drafts: list[int | None] = [None] * len(tasks)
    questions = [[*digits(int(a)), "-", *digits(int(b)), "?"] for a, b in tasks]
    running = list(range(len(tasks)))
    used = [0] * len(tasks)
    for turn in range(DRAFTS):
        actions = players.ask("writer", [["[writer]", *questions[i]] for i in running])
        for i, action in zip(running, actions, strict=True):
            rows[i].append(action)
            drafts[i], used[i] = last_number(action), turn + 1
        if turn + 1 == DRAFTS:
            break
        said = {i: digits(value) if (value := drafts[i]) is not None else ["none"] for i in running}
        verdicts = players.ask("router", [["[router]", *questions[i], "[said]", *said[i]] for i in running], 3)
        again = []
        for i, verdict in zip(running, verdicts, strict=True):
            rows[i].append(verdict)
            if "again" in text(verdict):
                again.append(i)
        running = again
        if not running:
            break
    played = []
    for i, (task, actions) in enumerate(zip(tasks, rows, strict=True)):
        a, b = _ints(task)
        correct = drafts[i] == a - b
        played.append(to_trajectory(task, i, actions, float(correct) - 0.1 * (used[i] - 1), correct))
    return played


_SYMBOLS = {symbol: compute for _, symbol, compute in OPERATIONS.values()}


def _call(words: Sequence[str]) -> list[str]:
    """What the tool answers to the first call in a text."""
    if "calc" in words:
        parts = list(words[words.index("calc") + 1 :])[:3]
        if len(parts) == 3 and parts[0].isdigit() and parts[2].isdigit() and parts[1] in _SYMBOLS:
            result = _SYMBOLS[parts[1]](int(parts[0]), int(parts[2]))
            return digits(result) if -9 <= result <= 81 else ["none"]
    return ["none"]


def play_supervisor(players: Players, tasks: Sequence[Task]) -> list[Trajectory]:
    """The supervisor picks a specialist, who calls the tool; the supervisor reads the result and answers."""
    questions = [[*digits(int(a)), str(word), *digits(int(b)), "?"] for a, word, b in tasks]
    picks = players.ask("supervisor", [["[supervisor]", *q] for q in questions], 3)
    names = [next((w for w in text(p) if w in OPERATIONS), None) for p in picks]
    calls: dict[int, Action] = {}
    asked = [i for i, name in enumerate(names) if name is not None]
    for name in OPERATIONS:
        mine = [i for i in asked if names[i] == name]
        if mine:
            made = players.ask(f"{name}_specialist", [["[specialist]", name, *questions[i]] for i in mine], 8)
            calls.update(zip(mine, made, strict=True))
    results = [_call(text(calls[i])) if i in calls else ["none"] for i in range(len(tasks))]
    prompts = [["[supervisor]", *q, "[tool]", *r] for q, r in zip(questions, results, strict=True)]
    answers = players.ask("supervisor", prompts)
    compute = {word: function for word, _, function in OPERATIONS.values()}
    played = []
    for i, task in enumerate(tasks):
        answer = compute[str(task[1])](int(task[0]), int(task[2]))
        reward, correct = _graded(answers[i], answer)
        actions = [picks[i], *([calls[i]] if i in calls else []), answers[i]]
        played.append(to_trajectory(task, i, actions, reward, correct))
    return played


@dataclass(frozen=True, slots=True)
class Game:
    """A graph with its agents and tasks."""

    name: str
    agents: tuple[str, ...]
    play: Callable[[Players, Sequence[Task]], list[Trajectory]]
    tasks: tuple[Task, ...]
    heldout: tuple[Task, ...]


def _split(name: str, agents: tuple[str, ...], play: Callable[..., list[Trajectory]], tasks: Sequence[Task]) -> Game:
    shuffled = list(tasks)
    random.Random(name).shuffle(shuffled)
    half = len(shuffled) // 2
    return Game(name, agents, play, tuple(shuffled[:half]), tuple(shuffled[half:]))


def _drawn(name: str, length: int, count: int) -> list[Task]:
    draw = random.Random(f"{name} tasks")
    return list(dict.fromkeys(tuple(draw.randint(0, 9) for _ in range(length)) for _ in range(count)))


GAMES = {
    game.name: game
    for game in (
        _split("duo", ("reasoner", "actor"), play_duo, [(a, b) for a in range(10) for b in range(10)]),
        _split("chain", LINKS, play_chain, _drawn("chain", 9, 240)),
        _split("loop", ("writer", "router"), play_loop, [(a, b) for a in range(10) for b in range(10)]),
        _split(
            "supervisor",
            ("supervisor", *(f"{name}_specialist" for name in OPERATIONS)),
            play_supervisor,
            [(a, word, b) for word, _, _ in OPERATIONS.values() for a in range(10) for b in range(10)],
        ),
    )
}


def mean(trajectories: Sequence[Trajectory], reward: str) -> float:
    """Mean of a reward over trajectories."""
    return sum(t.team_reward(reward) or 0.0 for t in trajectories) / len(trajectories)
