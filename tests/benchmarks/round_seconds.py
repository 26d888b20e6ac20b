"""How long one on-policy round takes, and where: rollout, score, update, publish; and how each grows.

`round_seconds` is the demo as it is. The others change one thing at a time: the number of agents, in chains of the zoo,
or the length of the calls, by a text of its own in every task. They learn so little that every round is alike. Their
figures are of one episode, because the longer ones can only be tried on few, and of a single round, to be affordable.

`agents_scaling_exponent` is what agents cost by themselves: later agents of the zoo's chains have longer prompts, and
in its own lines all calls are of one length.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import round_app
from benchmarks.harness import Measurement, bench
from benchmarks.rollout_rig import bench_model
from benchmarks.round_rig import changed, content_to_measurements, content_to_rounds, recorded_tokens
from benchmarks.round_table import exponent

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "math_duo/bridge.toml"
ZOO = {4: "quartet", 8: "octet", 12: "twelve"}

ROUNDS = 6  # of the demo, three for each measurement
COLLECTED = 48  # by the demo; it needs some that came out right

AGENTS = (2, 4, 8, 12)
EPISODES = 8  # of a round of a chain
TOKENS_APART = 0.05  # how far from 1 the exponent of a line's tokens may be
DEMO_TOKENS = 104  # of a call of the demo, on average: tests/benchmarks/duo_round.json
LENGTHS = {256: 8, 512: 4, 1024: 2, 2048: 2, 4096: 2}
"""Tokens of a call -> episodes of a round."""

_STEADY = {
    "train.trainer.optimizer.lr": 1e-6,  # so that the last round's answers are as long as the first one's
    "train.trainer.offline": {"mode": "off"},
}


def demo() -> dict[str, Any]:
    """The demo; fewer episodes are collected, which is no part of a round."""
    return changed(_content(DEMO), {"collect.episodes": COLLECTED, "train.evaluation_episodes": 0})


def chain(agents: int) -> dict[str, Any]:
    """So many agents in a line. What is not of the graph itself is the same for all numbers."""
    content = _content(EXAMPLES / f"zoo/{ZOO.get(agents, 'quartet')}.toml")
    if agents not in ZOO:
        nodes = [profile.role for profile in round_app.PAIR]
        content["graph"] |= {"app": f"{round_app.__name__}:build_pair", "nodes": nodes}
        content["name"] = "pair"
    return changed(content, _room_for(agents))


def line(agents: int) -> dict[str, Any]:
    """So many agents in a line whose calls are of one length, and whose rounds have the same steps to take."""
    content = _content(EXAMPLES / "zoo/quartet.toml")
    app = round_app.__name__
    content["graph"] |= {
        "app": f"{app}:build_line_{agents}",
        "nodes": round_app.line_nodes(agents),
        "reward": f"{app}:even_sum",
    }
    content["name"] = "line"
    changes = {
        "compare.metric": "reward",
        "train.trainer.objective.negative_weight": 1.0,  # else how many calls are learned from is a matter of luck
        "train.trainer.optimizer.minibatch_actions": EPISODES,
    }
    return changed(content, _room_for(agents) | changes)


def _room_for(agents: int) -> dict[str, Any]:
    """What is the same in all chains, and room for their adapters."""
    return _STEADY | {
        "serve.max_model_len": 544,
        "serve.max_loras": 2 * agents,
        "sampling.max_tokens": 16,
        "collect.episodes": EPISODES,
        "collect.in_flight": EPISODES,
        "train.episodes_per_round": EPISODES,
    }


def long_calls(length: int, tasks: Path) -> dict[str, Any]:
    """The demo with calls of so many tokens. Writes its tasks."""
    written = (json.dumps(task) + "\n" for task in round_app.long_tasks(length - DEMO_TOKENS))
    tasks.write_text("".join(written))
    changes = _STEADY | {
        "graph.tasks": str(tasks.resolve()),
        "serve.max_model_len": length + 128,
        "collect.episodes": LENGTHS[length],
        "train.episodes_per_round": LENGTHS[length],
    }
    return changed(_content(DEMO), changes)


def _content(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _served(content: dict[str, Any]) -> dict[str, Any]:
    return changed(content, {"model.path": str(bench_model().resolve())})


@bench
def round_seconds(folder: Path) -> Iterator[Measurement]:
    """A round of the demo: 64 episodes of two agents, median of three after one that warms up."""
    yield from content_to_measurements(_served(demo()), folder, rounds=ROUNDS, warm=1, per=1, unit="s")


def _bench_of_chain(agents: int) -> Callable[[Path], Iterator[Measurement]]:
    def measure(folder: Path) -> Iterator[Measurement]:
        content = _served(chain(agents))
        yield from content_to_measurements(content, folder, rounds=1, per=EPISODES, unit="s/episode")

    measure.__name__ = f"round_seconds_agents_{agents}"
    return measure


def _bench_of_length(length: int) -> Callable[[Path], Iterator[Measurement]]:
    def measure(folder: Path) -> Iterator[Measurement]:
        content = _served(long_calls(length, folder / "tasks.jsonl"))
        per = LENGTHS[length]
        yield from content_to_measurements(content, folder, rounds=1, per=per, unit="s/episode", length=length)

    measure.__name__ = f"round_seconds_length_{length}"
    return measure


@bench
def agents_scaling_exponent(folder: Path) -> Iterator[Measurement]:
    """k of seconds ~ agents^k, for one round of lines of 2 to 12 agents; beside it that of their recorded tokens."""
    seconds, tokens = dict[int, float](), dict[int, int]()
    for agents in AGENTS:
        run = folder / str(agents)
        run.mkdir()
        (parts,) = content_to_rounds(_served(line(agents)), run, 1)
        seconds[agents], tokens[agents] = sum(parts.values()), recorded_tokens(run)
    yield growth_to_measurement(seconds, tokens)


def growth_to_measurement(seconds: Mapping[int, float], tokens: Mapping[int, int]) -> Measurement:
    """A round's seconds and tokens by the number of agents -> their exponents, by least squares of the logarithms."""
    of_seconds, of_tokens = (exponent(list(sizes), list(sizes.values())) for sizes in (seconds, tokens))
    assert abs(of_tokens - 1) <= TOKENS_APART, f"tokens grow as agents^{of_tokens:.2f}: calls are not of one length"
    return Measurement(of_seconds, "exponent", of_tokens, of_seconds / of_tokens)


for _agents in AGENTS:
    bench(_bench_of_chain(_agents))
for _length in LENGTHS:
    bench(_bench_of_length(_length))
