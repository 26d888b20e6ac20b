"""Lessons of a team -> episodes of the app with one node, which says what the team said, recorded in a scratch folder.

Each lesson is tried until the app takes it: a turn for each message of the team, then one turn up to each call of a
tool, then both with an earlier agent's message as the answer. Invariants: no model is asked; a lesson counts as taken
only where the app made a call for every turn, came to its end, and earned no less than the team.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from marft_bridge.common.progress import Reporter, Task
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.distillation.given_turns import GivenTurns
from marft_bridge.distillation.lessons import Lesson
from marft_bridge.distillation.role_turns import Turn, UndistillableError, messages_to_answers, messages_to_turns
from marft_bridge.forks.given_tools import given_tools
from marft_bridge.model_calls.scripted_model import ScriptedPolicy
from marft_bridge.rollouts.app import App
from marft_bridge.rollouts.collector import Job
from marft_bridge.rollouts.episode_plan import EpisodeRequest, derived_seed
from marft_bridge.rollouts.graph_stage import open_stage
from marft_bridge.rollouts.run_counts import Tally
from marft_bridge.runs.run_folder import DISTILLED_FROM, RunFolder

WORSE = "the app's reward of the team's answer is worse than the team's"


@dataclass(frozen=True, slots=True)
class _Trial:
    """One way to put a lesson: its turns, and the answer among the team's messages."""

    answer: int
    turns: tuple[Turn, ...]


@dataclass(slots=True)
class _Pupil:
    """A lesson while it is tried."""

    lesson: Lesson
    sample: int
    trials: list[_Trial] = field(default_factory=list)  # that are left
    faults: dict[int, list[str]] = field(default_factory=dict)  # answer -> why its trials failed; the likeliest first

    def note(self, trial: _Trial, fault: str) -> None:
        """Keeps why a trial failed. Another answer can mend a reward that is worse, and nothing else."""
        self.faults.setdefault(trial.answer, []).append(fault)
        is_last = all(later.answer != trial.answer for later in self.trials)
        if is_last and WORSE not in self.faults[trial.answer]:
            self.trials.clear()

    @property
    def fault(self) -> str | None:
        """Why the app does not take the lesson, by its likeliest answer; None where nothing failed for good."""
        faults = next(iter(self.faults.values()), [])
        return WORSE if WORSE in faults else faults[-1] if faults else None


def play_lessons(
    config: BridgeConfig,
    app: App,
    lessons: Sequence[Lesson],
    *,
    scratch: RunFolder,
    run_id: str,
    samples: Mapping[str, int],
    reporter: Reporter,
) -> dict[str, str | None]:
    """Runs the app on the task of every lesson, its node answered by the lesson's turns.

    Args:
        scratch: where the episodes are recorded; of each lesson the last one counts.
        run_id: of the run that the episodes will belong to.
        samples: task -> how many samples of it are there already.

    Returns:
        The team's episode -> why the app does not take it; None where it does.

    Raises:
        BridgeError: the app cannot be opened.
    """
    (node,) = config.graph.nodes
    used = Counter(samples)
    pupils = []
    for lesson in lessons:
        pupil = _Pupil(lesson, sample=used[lesson.task["id"]])
        used[lesson.task["id"]] += 1
        try:
            pupil.trials = _lesson_to_trials(lesson)
        except UndistillableError as error:
            pupil.faults[-1] = [str(error)]
        pupils.append(pupil)
    scripted = replace(app, build=lambda _: app.build(ScriptedPolicy()))
    with (
        open_stage(config, scratch, reporter) as stage,
        stage.open_app(scripted, None, None) as collector,
        given_tools(),
    ):
        while open_pupils := [pupil for pupil in pupils if pupil.trials]:
            jobs, trials = [], []
            for pupil in open_pupils:
                trial = pupil.trials.pop(0)
                script = GivenTurns(node, trial.turns)
                request = _to_request(pupil, script, run_id=run_id, seed=config.seed)
                jobs.append((collector, request, tally := Tally()))  # its own: one lesson says nothing of the others
                trials.append((pupil, trial, script, tally))
            with reporter.bars(), reporter.task("distil", len(jobs)) as task:
                running = stage.run_async(jobs, config.collect.in_flight, partial(_show_finished, task, Counter()))
                stage.loop.run(running)
            for pupil, trial, script, tally in trials:
                fault = _find_fault(pupil.lesson, script, tally, reward=config.train.trainer.reward)
                if fault is None:
                    pupil.trials.clear()
                    pupil.faults.clear()
                else:
                    pupil.note(trial, fault)
        if stage.losses:
            reporter.say(stage.losses)
    return {pupil.lesson.episode_id: pupil.fault for pupil in pupils}


def _show_finished(task: Task, counts: Counter[str], _: Job) -> None:
    counts["finished"] += 1
    task.update(counts["finished"])


def _lesson_to_trials(lesson: Lesson) -> list[_Trial]:
    """The ways to put a lesson, in order. Raises UndistillableError where there is none."""
    trials = []
    for answer in messages_to_answers(lesson.messages):
        apart, together = (
            tuple(messages_to_turns(lesson.messages, answer, each_apart=each_apart)) for each_apart in (True, False)
        )
        trials += [_Trial(answer, turns) for turns in ([together] if apart == together else [apart, together])]
    if not trials:
        raise UndistillableError("no message of the team could be its answer")
    return trials


def _to_request(pupil: _Pupil, script: GivenTurns, *, run_id: str, seed: int) -> EpisodeRequest:
    task = pupil.lesson.task
    return EpisodeRequest(
        run_id=run_id,
        task=task,
        split="train",
        sample=pupil.sample,
        seed=derived_seed(seed, None, task["id"], sample=pupil.sample),
        adapters={},
        beginning=script,
        tags={DISTILLED_FROM: pupil.lesson.episode_id},
    )


def _find_fault(lesson: Lesson, script: GivenTurns, tally: Tally, *, reward: str) -> str | None:
    """Why a trial failed; None where the app took it."""
    if not tally.outcomes["terminated"]:
        (reason,) = tally.reasons
        return reason if tally.outcomes["truncated"] else f"the app fails on it: {reason}"
    if script.turns_given < len(script.turns):
        return "the app ends before the team's last message"
    value = tally.mean(reward)
    if value is None:
        reasons = [reason for (name, reason) in tally.missing_rewards if name == reward]
        return f"the app gives it no reward {reward!r}" + (f": {reasons[0]}" if reasons else "")
    return WORSE if lesson.reward is not None and value < lesson.reward else None
