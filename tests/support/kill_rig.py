"""collect, train and compare, each ended by SIGKILL at random moments and begun again, against one that is left alone.

    PYTHONPATH=tests:. python -m support.kill_rig --kills 1000 --seed 1

A command is a forked child of a process that has imported everything, so that a try costs its work and no start. The
model server is a process of its own, which no kill ends; what it answers follows from the request's model, seed and
messages. Half of the moments are drawn uniformly over the time that the command takes when it is left alone; the others
over the phase that was hit least, so that short ones are hit as well. A second process is now and then started on the
same folder before the first is killed.

What is held of every story (one run folder from collect to compare):

- An episode whose rewards were synced, which is when a command counts it, is in the store once, whole and rewarded;
  every planned episode was finished once.
- Adapters, checkpoint, metrics and reports are those of the story that was left alone, bit for bit; but for times,
  paths and random ids.
- One process at a time holds the run folder; a killed one lets go.
- Nothing half-written is read: no traceback, no torn line of a journal, no fault by `traces doctor`, no file left over.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import importlib
import json
import math
import mmap
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import marft_bridge.training.train as train_command
import trainers.marft as marft
from marft_bridge import cli
from marft_bridge.rollouts.collector import Collector
from marft_bridge.rollouts.graph_stage import Stage
from marft_bridge.runs.run_folder import RunFolder
from support.compare_rig import APPS
from support.study_server import StudyServer
from support.tiny_policy import save_tiny_llama
from trace_store.checkup import store_to_faults
from trace_store.store import TraceStore

PHASES = ("between", "rollout", "offline", "score", "update", "checkpoint", "publish")
COMMANDS = ("collect", "train", "compare")
PHASES_OF = {
    "collect": ("rollout",),
    "train": ("rollout", "offline", "score", "update", "checkpoint", "publish"),
    "compare": ("rollout",),
}
EPISODES, ROUNDS, TASKS = 6, 2, 4
KILLS_OF = {"collect": 4, "train": 12, "compare": 4}  # of a story, at most
INTRUDER_SHARE = 0.25  # of the tries: a second process is started before the first is killed
PATIENCE_S = 120.0  # after which a command hangs
MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - what a kill leaves is the same on any disk, and syncs cost nothing here

CONFIG = """
name = "kills"
seed = 5

[graph]
app = "{apps}:duo"
nodes = ["reasoner", "actor"]
tasks = "{apps}:tasks"
task_to_input = "{apps}:to_input"
reward = "{apps}:reward"

[model]
path = "{model}"

[serve]
attach = "{url}"

[sampling]
temperature = 0.8
max_tokens = 16

[collect]
episodes = {episodes}
in_flight = 3

[train]
rounds = {rounds}
episodes_per_round = {episodes}
samples_per_task = 2
keep_advantages = true

[train.trainer.optimizer]
lr = 1e-3

[train.trainer.replay]
share = 0.3

[compare]
tasks = {tasks}
mixed_teams = "off"
kl_actions = 4
"""


# -- the model server -----------------------------------------------------------------------------------------------


class SeededServer(StudyServer):
    """Answers are a function of the request; log-probs are those of the adapter as it is on the disk."""

    def __init__(self, model: Path) -> None:
        super().__init__(str(model), 0, None)
        self.answer = self._say
        self._read: dict[tuple[str, int], PeftModel] = {}

    def _say(self, body: dict[str, Any]) -> str:
        node = str(body["model"]).partition("@")[0]
        chance = random.Random(json.dumps([body["model"], body["seed"], body["messages"]]))
        if node == "reasoner":
            return chance.choice(("think", "hm"))
        return chance.choice(("yes", "no"))

    @torch.no_grad()
    def score(self, name: str, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
        """Log-probs of `sampled` after `prompt`."""
        folder = Path(self.adapters[name])
        with self._lock:
            key = (str(folder), (folder / "adapter_model.safetensors").stat().st_mtime_ns)
            if key not in self._read:
                base = AutoModelForCausalLM.from_pretrained(self._model)
                self._read[key] = PeftModel.from_pretrained(base, folder).eval()
            logits = self._read[key](input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        return [float(logp[i, token]) for i, token in enumerate(sampled)]


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server in a process of its own, until the block ends."""
    server = SeededServer(model)
    pid = fork(server.serve_forever, Path(os.devnull))
    server.server_close()
    try:
        yield server.url
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork(work: Callable[[], int | None], output: Path) -> int:
    """A child that does `work`, writes into `output`, exits with its result, and ends with its parent -> its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        code = work() or 0
    except BaseException:  # noqa: BLE001 - a child never returns
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


# -- what a command shows of itself ---------------------------------------------------------------------------------


class Board:
    """Memory that commands share with who kills them: the phase they are in, and who holds the run folder."""

    _LAYOUT = struct.Struct("=iii")  # phase, process that holds the folder, times that two held it

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._LAYOUT.size)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[0], False)
        os.set_blocking(self.pipe[1], False)

    def _write(self, index: int, value: int) -> None:
        struct.pack_into("=i", self._memory, 4 * index, value)

    def clear(self) -> None:
        """Before a command."""
        self._write(0, 0)
        with suppress(BlockingIOError):
            while os.read(self.pipe[0], 4096):
                pass

    def enter(self, phase: str) -> int:
        """Says that a phase begins -> the one before."""
        before = struct.unpack_from("=i", self._memory, 0)[0]
        self._write(0, PHASES.index(phase))
        os.write(self.pipe[1], bytes([PHASES.index(phase)]))
        return int(before)

    def leave(self, before: int) -> None:
        """Says that the phase has ended."""
        self._write(0, before)

    def hold(self) -> None:
        """Says that this process holds the folder; counts where the one that held it still lives after a second."""
        deadline_s = time.monotonic() + 1
        while (pid := struct.unpack_from("=i", self._memory, 4)[0]) and is_alive(pid):
            if time.monotonic() > deadline_s:
                self._write(2, self.violations + 1)
                break
            time.sleep(0.001)
        self._write(1, os.getpid())

    def let_go(self) -> None:
        """Says that this process is about to release it."""
        self._write(1, 0)

    def take_phase(self) -> str:
        """The phase of a process that was killed; the next one is in none."""
        phase = PHASES[struct.unpack_from("=i", self._memory, 0)[0]]
        self._write(0, 0)
        return phase

    @property
    def violations(self) -> int:
        """How often two processes held the folder."""
        return int(struct.unpack_from("=i", self._memory, 8)[0])

    def close(self) -> None:
        """Gives the pipe back."""
        for handle in self.pipe:
            os.close(handle)


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def show_on(board: Board, acknowledged: Path) -> None:
    """Lets the commands of this process show their phases, their hold of the folder, and what they acknowledge."""

    def phase(name: str, owner: Any, attribute: str) -> None:
        work = getattr(owner, attribute)

        @functools.wraps(work)
        def shown(*args: Any, **kwargs: Any) -> Any:
            before = board.enter(name)
            try:
                return work(*args, **kwargs)
            finally:
                board.leave(before)

        setattr(owner, attribute, shown)

    phase("rollout", Stage, "run")
    phase("offline", marft.MarftTrainer, "warm_up")
    phase("offline", marft.MarftTrainer, "replay")
    phase("score", train_command, "served_versions")
    phase("score", marft, "score_round")
    phase("update", marft, "update_in_order")
    phase("checkpoint", train_command._Training, "_commit")
    phase("publish", train_command._Training, "_publish")
    log = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    store_rewards = Collector._store_rewards

    async def shown_rewards(self: Collector, episode_id: str, score: Any) -> None:
        await store_rewards(self, episode_id, score)  # returns once they are synced
        os.write(log, f"{episode_id}\n".encode())

    Collector._store_rewards = shown_rewards  # type: ignore[method-assign]
    lock_for = RunFolder.lock_for

    @contextmanager
    def shown_lock(self: RunFolder, command: str) -> Iterator[None]:
        with lock_for(self, command):
            board.hold()
            try:
                yield
            finally:
                board.let_go()

    RunFolder.lock_for = shown_lock  # type: ignore[method-assign, assignment]


# -- a story --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """When a command is killed: `delay_s` after its start, or after it entered `phase` for the `entry`th time."""

    delay_s: float
    phase: str | None = None
    entry: int = 1
    lead_s: float | None = None  # a second process is started so long before, where there is time


@dataclass
class Times:
    """How long a command takes that is left alone, and how long each of its phases, as (phase, entry, seconds)."""

    whole_s: float
    phases: list[tuple[str, int, float]] = field(default_factory=list)

    def draw(self, rng: random.Random, kills: Mapping[str, int]) -> Moment:
        """A moment of either kind; of the phases, one that `kills` has fewest of."""
        lead_s = rng.uniform(0, 0.3) if rng.random() < INTRUDER_SHARE else None
        if rng.random() < 0.5:
            return Moment(rng.uniform(0, self.whole_s), lead_s=lead_s)
        name = min(sorted({phase for phase, _, _ in self.phases}), key=lambda phase: kills.get(phase, 0))
        _, entry, seconds = rng.choice([row for row in self.phases if row[0] == name])
        return Moment(rng.uniform(0, seconds), name, entry, lead_s=lead_s)


@dataclass
class Totals:
    """What came out of all stories."""

    stories: int = 0
    tries: int = 0
    kills: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)  # "train: update" -> kills
    refused: int = 0  # second processes that were refused
    took_over: int = 0  # second processes that went on once the first was dead
    acknowledged: int = 0
    losses: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps({**vars(self), "by_phase": dict(sorted(self.by_phase.items()))})


@dataclass
class Process:
    """A command that runs."""

    pid: int
    output: Path
    code: int | None = None  # None after the end: killed by us

    @property
    def text(self) -> str:
        """What it has said; nothing where it was killed before it opened its output."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def is_refused(self) -> bool:
        """Whether it ended because another one holds the folder."""
        return self.code == 2 and "is in use by `marft-bridge" in self.text


class Story:
    """One run folder, from collect to compare."""

    def __init__(self, folder: Path, model: Path, url: str) -> None:
        self.folder, self.run = folder, RunFolder(folder / "run")
        folder.mkdir()
        apps = folder / "apps.py"
        apps.write_text(APPS)
        sizes = {"episodes": EPISODES, "rounds": ROUNDS, "tasks": TASKS}
        self.config = folder / "bridge.toml"
        self.config.write_text(CONFIG.format(apps=apps, model=model, url=url, **sizes))
        self.acknowledged_log = folder / "acknowledged"
        self.acknowledged_log.touch()
        self.board = Board()
        self.processes: list[Process] = []

    def arguments(self, command: str, resume: bool) -> list[str]:
        """The command line."""
        flags = ["--without-signal"] if command == "train" else []
        flags += ["--resume"] if resume else []
        return [command, "--config", str(self.config), "--run", str(self.run.path), *flags]

    def start(self, command: str, resume: bool) -> Process:
        """A process that runs the command."""

        def work() -> int:
            show_on(self.board, self.acknowledged_log)
            return cli.run(self.arguments(command, resume))

        output = self.folder / f"output-{len(self.processes):03}-{command}"
        self.processes.append(Process(fork(work, output), output))
        return self.processes[-1]

    def wait(self, process: Process, moment: Moment | None, intrude: Callable[[], None]) -> str | None:
        """Waits for the end, or kills at the moment -> the phase in which it was killed; None where it ended."""
        handle, pipe = os.pidfd_open(process.pid), self.board.pipe[0]
        entries: Counter[str] = Counter()
        kill_s = time.monotonic() + moment.delay_s if moment is not None and moment.phase is None else math.inf
        lead_s = moment.lead_s if moment is not None else None
        end_s = time.monotonic() + PATIENCE_S
        try:
            while True:
                intrude_s = kill_s - lead_s if lead_s is not None else math.inf
                ready, _, _ = select.select([handle, pipe], [], [], max(0, min(kill_s, intrude_s, end_s) - _now()))
                if handle in ready:
                    process.code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
                    return None
                if pipe in ready:
                    name = PHASES[os.read(pipe, 1)[0]]
                    entries[name] += 1
                    if moment is not None and (name, entries[name]) == (moment.phase, moment.entry):
                        kill_s = _now() + moment.delay_s
                elif _now() >= end_s:
                    raise AssertionError(f"{process.output} hangs:\n{process.text}")
                elif _now() >= kill_s:
                    os.kill(process.pid, signal.SIGKILL)
                    code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
                    if code == -signal.SIGKILL:
                        return self.board.take_phase()
                    process.code = code  # it had just ended
                    return None
                elif _now() >= intrude_s:
                    lead_s = None
                    intrude()
        finally:
            os.close(handle)


def _now() -> float:
    return time.monotonic()


def leave_alone(story: Story) -> dict[str, Times]:
    """Runs a story without a kill -> how long its parts took."""
    times = {}
    for command in COMMANDS:
        began_s, entered = _now(), list[tuple[str, float]]()
        process = story.start(command, resume=False)
        handle = os.pidfd_open(process.pid)
        while not select.select([handle], [], [], 0.001)[0]:
            with suppress(BlockingIOError):
                entered += [(PHASES[code], _now()) for code in os.read(story.board.pipe[0], 64)]
        process.code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        os.close(handle)
        assert process.code == 0, process.text
        counted: Counter[str] = Counter()
        phases = []
        for (name, at_s), (_, next_s) in zip(entered, [*entered[1:], ("", _now())], strict=True):
            counted[name] += 1
            phases.append((name, counted[name], next_s - at_s))
        times[command] = Times(_now() - began_s, phases)
    return times


def tell(story: Story, times: dict[str, Times], rng: random.Random, totals: Totals, most_kills: int) -> None:
    """Runs a story in which commands are killed and started again until each has ended."""
    for command in COMMANDS:
        kills_left = min(KILLS_OF[command], most_kills)
        resume, second, is_done = False, list[Process](), False

        def intrude(command: str = command, second: list[Process] = second) -> None:
            second.append(story.start(command, resume=True))

        while not is_done or second:
            if second:
                process, came_second = second.pop(), True
            else:
                story.board.clear()
                process, came_second = story.start(command, resume), False
            totals.tries += 1
            hits = {phase: totals.by_phase[f"{command}: {phase}"] for phase in PHASES}
            moment = times[command].draw(rng, hits) if kills_left > 0 else None
            phase = story.wait(process, moment, intrude)
            if phase is not None:
                kills_left -= 1
                most_kills -= 1
                totals.kills += 1
                totals.by_phase[f"{command}: {phase}"] += 1
                resume = True
            elif process.is_refused:
                assert came_second or second, f"the folder stayed locked:\n{process.text}"
                totals.refused += 1
                continue
            elif process.code == 2 and "nothing to resume in" in process.text:
                resume = False
            elif process.code == 2 and "already holds a run of it; go on with --resume" in process.text:
                resume = True
            else:
                assert process.code == 0, f"{process.output} ended with {process.code}:\n{process.text}"
                is_done = True
            totals.took_over += came_second


# -- what is held ---------------------------------------------------------------------------------------------------

_KEYS = """
SELECT e.run_id, e.round, e.variant, e.task_id, e.sample, e.episode_id, e.outcome, e.adapters::VARCHAR,
  list_sort(list((r.name, r.value)))
FROM episodes e JOIN episode_reward r USING (episode_id) GROUP BY ALL ORDER BY ALL
"""
_ACTIONS = """
SELECT e.run_id, e.round, e.variant, e.task_id, e.sample, a.node, a.prompt_ids, a.sampled_ids, a.logprobs, a.adapter
FROM episodes e JOIN actions a USING (episode_id)
WHERE EXISTS (SELECT 1 FROM rewards r WHERE r.episode_id = e.episode_id) ORDER BY ALL
"""
_LEARNED = """
SELECT l.node, l.version, e.run_id, e.round, e.task_id, e.sample
FROM adapter_episodes l LEFT JOIN episodes e USING (episode_id) ORDER BY ALL
"""


_OF_ONE_RUN = {"seconds", "seconds_mean", "minutes", "date", "created", "graph", "episode_id"}


def refuse_loss(story: Story) -> int:
    """Raises AssertionError where something acknowledged is lost or doubled -> the number of acknowledged episodes."""
    acknowledged = story.acknowledged_log.read_text().split()
    assert len(set(acknowledged)) == len(acknowledged)
    with TraceStore.open(story.run.store) as store:
        counts = store.take_in()
        rows = store.sql(_KEYS)
        rewarded = {row[5] for row in rows}
        faults = [fault.message for fault in store_to_faults(store) if fault.level == "error"]
    assert not faults, faults
    assert counts.spans == counts.rewards == counts.torn == 0, f"a command that ended left {counts} in the journal"
    missing = set(acknowledged) - rewarded
    assert not missing, f"{len(missing)} of {len(acknowledged)} acknowledged episodes are lost: {sorted(missing)[:3]}"
    assert len(rewarded) == len(rows)
    keys = [row[:5] for row in rows]
    assert len(set(keys)) == len(keys), [key for key, count in Counter(keys).items() if count > 1]
    assert {row[6] for row in rows} == {"terminated"}
    planned = {"collect": EPISODES, "train": EPISODES * ROUNDS, "compare-1": 2 * TASKS}
    assert Counter(key[0] for key in keys) == planned
    assert story.board.violations == 0, "two processes held the run folder"
    for process in story.processes:
        assert "Traceback" not in process.text, process.text
    assert not list(story.run.path.rglob("*.foreign"))
    return len(acknowledged)


def timeless(value: Any) -> Any:
    """JSON values without times, random ids, and the path of a story's own app."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name not in _OF_ONE_RUN}
    if isinstance(value, list):
        return [timeless(part) for part in value if not (isinstance(part, dict) and part.get("metric") == "seconds")]
    return value


def story_to_print(story: Story) -> dict[str, Any]:
    """Everything that a story leaves behind and that has to be the same each time, by a name."""
    run = story.run
    prints: dict[str, Any] = {}
    for path in sorted([*run.adapters.rglob("adapter_*"), *run.checkpoint.iterdir(), run.best]):
        prints[str(path.relative_to(run.path))] = hashlib.sha256(path.read_bytes()).hexdigest()
    for number, line in enumerate(map(json.loads, run.metrics.read_text().splitlines())):
        for name, value in line.items():
            prints[f"metrics {number} {name}"] = timeless({name: value})
    report = timeless(json.loads((run.path / "report.json").read_text()))
    for row in report["secondary"]:  # corrected for all metrics together, and one of them is the time that a run took
        for name in ("p_adjusted", "simultaneous", "outcome"):
            del row[name]
    for name, value in report.items():
        prints[f"report {name}"] = value
    prints["learned.json"] = json.loads((run.path / "learned.json").read_text())
    with TraceStore.open(run.store) as store:
        prints["episodes"] = [(*row[:5], *row[6:]) for row in store.sql(_KEYS)]
        prints["actions"] = store.sql(_ACTIONS)
        prints["learned from"] = store.sql(_LEARNED)
        prints["adapters"] = [(a.node, a.version, a.parent, a.sha256, a.metrics) for a in store.adapters()]
        for path in sorted(run.advantages.iterdir()):
            query = "SELECT unit, advantage, normalised FROM read_parquet(?)"
            prints[f"advantages {path.name}"] = store.sql(query, (str(path),))
    prints["files"] = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*"))
    return prints


def refuse_difference(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    """Raises AssertionError that shows how two stories differ."""
    differing = [name for name in sorted(expected.keys() | actual.keys()) if expected.get(name) != actual.get(name)]
    shown = [f"{name}: {expected.get(name)!r:.600} is now {actual.get(name)!r:.600}" for name in differing[:6]]
    if "files" in differing:  # a long list, whose beginning is alike
        shown.append(f"files that one alone has: {sorted({*expected['files']} ^ {*actual['files']})}")
    assert not differing, f"{len(differing)} differ from the run that was left alone: {differing}\n" + "\n".join(shown)


def import_needed(folder: Path, model: Path) -> dict[str, Any]:
    """Runs one story in a child -> what it leaves, with all modules that it needed imported here.

    So no later child spends time on imports.
    """
    names = folder / "modules"
    with served(model) as url:
        story = Story(folder / "alone-0", model, url)

        def work() -> int:
            for command in COMMANDS:
                assert cli.run(story.arguments(command, resume=False)) == 0
            names.write_text("\n".join(sys.modules))
            return 0

        pid = fork(work, folder / "imports-output")
        assert os.waitpid(pid, 0)[1] == 0, (folder / "imports-output").read_text()
    for name in names.read_text().split("\n"):
        if not name.startswith(("__main__", "support.kill_rig", "marft_user", "bridge_")):
            with suppress(ImportError, ValueError):
                importlib.import_module(name)
    refuse_loss(story)
    return story_to_print(story)


def run_stories(kills: int, seed: int, folder: Path, report: Callable[[str], None]) -> Totals:
    """Stories until so many kills have come; a story that fails is kept in `folder`, and the next one begins."""
    torch.set_num_threads(1)
    began_s = _now()
    model = save_tiny_llama(folder / "model", vocabulary=257)
    (model / "tokenizer.json").write_text("{}")
    expected = import_needed(folder, model)
    with served(model) as url:  # again: what differs between two that are left alone says nothing of kills
        story = Story(folder / "alone-1", model, url)
        times = leave_alone(story)
        refuse_loss(story)
        refuse_difference(expected, story_to_print(story))
    report(json.dumps({command: round(of.whole_s, 2) for command, of in times.items()}))
    totals, rng = Totals(), random.Random(seed)
    while totals.kills < kills:
        with served(model) as url:
            story = Story(folder / f"story-{totals.stories}", model, url)
            try:
                tell(story, times, rng, totals=totals, most_kills=kills - totals.kills)
                totals.acknowledged += refuse_loss(story)
                refuse_difference(expected, story_to_print(story))
            except Exception as error:  # noqa: BLE001 - a file that cannot be read is a loss as well
                totals.losses.append(f"{story.folder}: {error}")
                report(f"LOSS {story.folder}: {error}")
            else:
                shutil.rmtree(story.folder)
            story.board.close()
        totals.stories += 1
        totals.seconds = _now() - began_s
        report(totals.to_text())
    return totals


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill commands at random moments, start them again, compare.")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where stories that failed are kept, below a folder that is new")
    flags = parser.parse_args()
    disk = MEMORY_DISK if MEMORY_DISK.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kills-", dir=disk) as folder:
        totals = run_stories(flags.kills, flags.seed, Path(folder), _print_line)
        if totals.losses and flags.keep is not None:
            shutil.copytree(folder, flags.keep)
    return 1 if totals.losses else 0


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
