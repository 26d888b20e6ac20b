"""Conditions and seeds -> finished run folders, one after another: `python -m examples.study.run --help`.

For each seed the episodes of the untrained graph are collected once, in <folder>/collected-<seed>; every condition
starts from a copy of that folder, in <folder>/<condition>-<seed>, trains, and is compared on held-out tasks.

Invariants: a run with a result.json is finished and never touched again; one without goes on where it was; a folder
made with another configuration is refused, not mixed. Every run has a model server of its own: an adapter is served as
node@version, so those of two runs would have the same names, and vLLM's prefix cache goes by these names.
It does not know what is trained, nor what the results mean.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from examples.study.conditions import CONDITIONS, SEEDS
from examples.study.results import (
    Result,
    code_to_sha256,
    folder_to_result,
    read_result,
    text_sha256,
    write_result,
)
from marft_bridge.common.files import write_atomically
from marft_bridge.config.bridge import BridgeConfig, set_dotted
from marft_bridge.runs.run_folder import RunFolder
from trace_store.store import TraceStore

HERE = Path(__file__).parent
COLLECTED, CONFIG = "collected", "bridge.toml"
_KEPT = ("adapters", "bridge.json", "store.duckdb", "store.duckdb.journal", "store.duckdb.wal")

# Measured with examples/math_duo on two quiet cores; replaced by the mean of finished runs as soon as there is one.
_SERVER_S, _COMMAND_S, _ROLLOUT_S, _UPDATE_S, _OFFLINE_S = 45.0, 10.0, 0.23, 0.78, 0.26


class StudyError(Exception):
    """A run that cannot go on: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its folder, and the text of its configuration."""

    condition: str
    seed: int
    folder: RunFolder
    text: str
    config: BridgeConfig


def options_to_job(base: Mapping[str, Any], root: Path, condition: str, seed: int) -> Job:
    """The run of a condition (or of `COLLECTED`) with a seed.

    Raises:
        StudyError: the changes of the condition do not fit the common configuration.
    """
    folder = root / f"{condition}-{seed}"
    raw: dict[str, Any] = json.loads(json.dumps(base))
    raw |= {"name": f"study {condition}", "seed": seed}
    changes = {} if condition == COLLECTED else CONDITIONS[condition].changes
    for key, value in changes.items():
        set_dotted(raw, key, value)
    try:
        config = BridgeConfig.model_validate(raw)
    except ValidationError as error:
        raise StudyError(f"{condition}: {error.errors(include_url=False)[0]['msg']}") from None
    return Job(condition, seed, RunFolder(folder), dict_to_toml(raw), config)


def dict_to_toml(raw: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Nested tables of strings, numbers, truth values and lists of these or of tables as TOML."""
    tables = {key: value for key, value in raw.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_value_to_toml(value)}" for key, value in raw.items() if key not in tables]
    if path and lines:
        lines.insert(0, f"\n[{'.'.join(path)}]")
    text = "".join(f"{line}\n" for line in lines)
    return text + "".join(dict_to_toml(value, (*path, key)) for key, value in tables.items())


def _value_to_toml(value: Any) -> str:
    """Its scalars are those of JSON; a table in a list is written inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value_to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value_to_toml, value)) + "]"
    return json.dumps(value)


def run_job(job: Job, collected: RunFolder) -> Result:
    """Everything that is left to do of one run.

    Raises:
        StudyError: a command failed, or the folder belongs to another configuration.
    """
    began, code = time.monotonic(), code_to_sha256()
    fresh = not job.folder.path.exists()
    if fresh:
        _copy(collected, job.folder)
    _claim(job)
    commands = [_command(name, job.folder, resume=_begun(job.folder, name)) for name in ("train", "compare")]
    # With a trap the shell outlives the command that is stopped, and with it the folder's lock is free when it ends.
    script = f"trap 'exit 143' TERM; {' && '.join(map(shlex.join, commands))}"
    _run([*_command("serve", job.folder), "--", "sh", "-c", script], job.folder)
    seconds = time.monotonic() - began if fresh else None
    reward = job.config.train.trainer.reward
    same = code if fresh and code == code_to_sha256() else None
    cores = len(os.sched_getaffinity(0)) if fresh else None
    result = folder_to_result(job.folder, job.condition, job.seed, job.text, reward, seconds, same, cores)
    write_result(job.folder.path, result)
    return result


def collect_once(job: Job) -> None:
    """The episodes that all conditions of a seed begin with; does nothing where they are there."""
    done = job.folder.path / "done"
    _claim(job)
    if not done.exists():
        _run(_command("collect", job.folder, resume=_begun(job.folder, "collect")), job.folder)
        write_atomically(done, text_sha256(job.text) + "\n")


def _copy(source: RunFolder, target: RunFolder) -> None:
    """All that a run folder holds after `collect`, but what belongs to the process that ran; whole, or not at all."""
    part = target.path.with_name(f".{target.path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700)
    for name in _KEPT:
        found = source.path / name
        if found.is_dir():
            shutil.copytree(found, part / name)
        elif found.exists():
            shutil.copy2(found, part / name)
    part.rename(target.path)


def _claim(job: Job) -> None:
    """Puts the run's configuration file into its folder; refuses a folder in which there is another one."""
    path = job.folder.path / CONFIG
    job.folder.create()
    if path.exists() and path.read_text(encoding="utf-8") != job.text:
        raise StudyError(f"{job.folder.path} was made with another configuration: move it away, or choose a --folder")
    write_atomically(path, job.text)


def _begun(folder: RunFolder, command: str) -> bool:
    if not folder.store.exists():
        return False
    with TraceStore.open(folder.store, wait_s=60) as store:
        return any(run.command == command for run in store.runs())


def _command(name: str, folder: RunFolder, resume: bool = False) -> list[str]:
    files = ["--config", str(folder.path / CONFIG), "--run", str(folder.path)]
    flags = ["--without-signal"] if name == "train" else []  # a condition without signal is a result, too
    return [sys.executable, "-m", "marft_bridge", name, *files, *flags, *(["--resume"] if resume else [])]


def _run(argv: Sequence[str], folder: RunFolder) -> None:
    """Runs a command, with what it says in the folder's study.log; when this is stopped, so is the command.

    It has a process group of its own, so that Ctrl-C reaches it once, from here.
    """
    log = folder.path / "study.log"
    with log.open("a", encoding="utf-8") as said:
        child = subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, process_group=0, env=_environment())
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code != 0:
        end = "".join(f"\n    {line}" for line in log.read_text(encoding="utf-8").splitlines()[-8:])
        raise StudyError(f"{shlex.join(argv[2:4])} ended with {code}; the end of {log}:{end}")


def _environment() -> dict[str, str]:
    """The seed is in the configuration: one in the environment would overrule it."""
    return {name: value for name, value in os.environ.items() if name != "MARFT_SEED"}


# -- the plan ---------------------------------------------------------------------------------------------------------


def estimated_seconds(config: BridgeConfig) -> float:
    """How long one run takes by what was measured before the study: server, offline phase, rounds, comparison."""
    train, tasks = config.train, config.compare.tasks or 0
    offline = 0.0 if train.trainer.offline.mode == "off" else _OFFLINE_S * config.collect.episodes
    rounds = train.rounds * train.episodes_per_round * (_ROLLOUT_S + _UPDATE_S)
    compared = 2 * tasks * config.compare.samples_per_task * _ROLLOUT_S
    return _SERVER_S + 2 * _COMMAND_S + offline + rounds + compared


def _print_plan(jobs: Sequence[Job], collecting: Sequence[Job], results: Sequence[Result | None]) -> None:
    known = [result.seconds for result in results if result is not None and result.seconds is not None]
    total = 0.0
    for job in collecting:
        if not (job.folder.path / "done").exists():
            seconds = _SERVER_S + _COMMAND_S + job.config.collect.episodes * _ROLLOUT_S
            total += seconds
            print(f"collect seed {job.seed}: about {seconds / 60:.1f} min")
    for job, result in zip(jobs, results, strict=True):
        if result is not None:
            print(f"{job.condition} seed {job.seed}: done")
            continue
        seconds = sum(known) / len(known) if known else estimated_seconds(job.config)
        total += seconds
        state = "goes on" if job.folder.path.exists() else "to run"
        print(f"{job.condition} seed {job.seed}: {state}, about {seconds / 60:.1f} min")
    basis = "finished runs" if known else "examples/math_duo on two quiet cores"
    print(f"{len(jobs)} runs, {results.count(None)} left: about {total / 60:.0f} min, by {basis}")


def finished_result(job: Job) -> Result | None:
    """The result of a job that is done; None of one that is not.

    Raises:
        StudyError: its folder holds a run of another configuration.
    """
    result = read_result(job.folder.path)
    if result is not None:
        refuse_other_configuration(job, result.config_sha256)
    return result


def refuse_other_configuration(job: Job, config_sha256: str) -> None:
    """Raises StudyError where a job's folder holds what another configuration made."""
    if config_sha256 != text_sha256(job.text):
        raise StudyError(f"{job.folder.path} holds a run of another configuration: move it away, or choose a --folder")


def _line(result: Result) -> str:
    first, last = result.rounds[1], result.rounds[-1]
    took = "after an interruption" if result.seconds is None else f"in {result.seconds / 60:.1f} min"
    rewards = " -> ".join("-" if each.reward is None else f"{each.reward:.3f}" for each in (first, last))
    held = result.heldout
    return (
        f"{result.condition} seed {result.seed}: done {took}; reward {rewards}; "
        f"held-out {held.metric} {held.before:.3f} -> {held.after:.3f}"
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CONDITIONS]:
        raise argparse.ArgumentTypeError(f"no condition {unknown[0]!r}; there are: {', '.join(CONDITIONS)}")
    return names


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1,2") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left of the plan, seed after seed; 2 after a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.study.run", description="Run the study, or go on with it."
    )
    parser.add_argument("--only", type=_names, default=list(CONDITIONS), help="conditions, separated by commas")
    parser.add_argument("--seeds", type=_seeds, default=list(SEEDS), help="separated by commas")
    parser.add_argument("--config", type=Path, default=HERE / "study.toml", help="what all conditions share")
    parser.add_argument("--folder", type=Path, default=Path("runs/study"), help="where the run folders are")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and how long it will take")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        base = tomllib.loads(given.config.read_text(encoding="utf-8"))
        # By seed first: an incomplete study then holds whole comparisons.
        jobs = [options_to_job(base, given.folder, name, seed) for seed in given.seeds for name in given.only]
        collecting = {seed: options_to_job(base, given.folder, COLLECTED, seed) for seed in given.seeds}
        results = [finished_result(job) for job in jobs]
        if given.dry_run:
            _print_plan(jobs, list(collecting.values()), results)
            return 0
        left = [job for job, result in zip(jobs, results, strict=True) if result is None]
        return run_each("study", [(_title(job), partial(_finish, job, collecting[job.seed])) for job in left])
    except StudyError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _title(job: Job) -> str:
    return f"{job.condition} seed {job.seed}"


def _finish(job: Job, collecting: Job) -> str:
    """Runs a job, and first what it starts from; the line that says how it went."""
    collect_once(collecting)
    return _line(run_job(job, collecting.folder))


def run_each(program: str, runs: Sequence[tuple[str, Callable[[], str]]]) -> int:
    """Runs titled runs in their order, each to the line that is printed of it; 2 when one failed. A second failure in a
    row is not chance, and ends it."""
    failed, before = 0, False
    for title, run in runs:
        try:
            print(run(), flush=True)
        except StudyError as error:
            if before:
                raise
            print(f"{program}: {title}: {error}", file=sys.stderr, flush=True)
            failed, before = failed + 1, True
        else:
            before = False
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
