"""Benchmarks, conditions and seeds -> finished run folders, one after another.

    python -m examples.benchmarks.run --dry-run                      # what is left of the plan
    python -m examples.benchmarks.run                                # all, at the first level, on the small model
    python -m examples.benchmarks.run --only at-grpo --level published --published --model models/Qwen3-1.7B

For each benchmark and seed the episodes of the untrained team are collected once; every condition starts from a copy
of them, trains, and is compared on held-out tasks before and after. The machinery is that of `examples.study.run`, and
so are its invariants: a finished run is never touched again, one that was stopped goes on where it was, and a folder
that was made with another configuration is refused.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from examples.benchmarks.conditions import CONDITIONS
from examples.benchmarks.results import BenchmarkRun, folder_to_rounds, read_run, result_to_run, write_run
from examples.study.results import text_sha256
from examples.study.run import (
    COLLECTED,
    Job,
    StudyError,
    collect_once,
    dict_to_toml,
    finished_result,
    refuse_other_configuration,
    run_each,
    run_job,
)
from marft_bridge.config.bridge import BridgeConfig, set_dotted
from marft_bridge.runs.run_folder import RunFolder

HERE = Path(__file__).parent
GAMES = ("plan_path", "sudoku", "sokoban", "countdown")
LEVELS = {"first": "first_tasks", "easy": "easy_tasks", "middle": "middle_tasks", "published": "tasks"}
SMALL = "small"
SEEDS = (10, 11, 12, 13, 14)
"""Fixed, with the rounds, before any was looked at, but for what the page says."""


def setting_to_options(
    game: str, level: str, model: str, *, published: bool = False, over: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration of a benchmark as a dictionary: its file, at this level, on this model.

    Args:
        game: one of GAMES.
        level: one of LEVELS.
        model: what `model.path` says.
        published: whether published.toml is put over it, and the writer writes Python.
        over: further tables to put over it.
    """
    raw = tomllib.loads((HERE / f"{game}.toml").read_text(encoding="utf-8"))
    set_dotted(raw, "graph.tasks", f"graphs.{game}:{LEVELS[level]}")
    set_dotted(raw, "model.path", model)
    if published:
        raw = _put_over(raw, tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8")))
        set_dotted(raw, "graph.app", f"examples.benchmarks.python_tool:{game}")
    return _put_over(raw, over or {})


def _put_over(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested tables as one; the second wins."""
    merged = dict(first)
    for name, value in second.items():
        merged[name] = _put_over(merged.get(name, {}), value) if isinstance(value, Mapping) else value
    return merged


def options_to_job(base: Mapping[str, Any], root: Path, condition: str, seed: int) -> Job:
    """The run of a condition (or of `COLLECTED`) with a seed.

    Raises:
        StudyError: the changes of the condition do not fit the configuration.
    """
    raw: dict[str, Any] = json.loads(json.dumps(base))
    raw |= {"name": f"{base['name']} {condition}", "seed": seed}
    changes = {} if condition == COLLECTED else CONDITIONS[condition].changes
    for key, value in changes.items():
        set_dotted(raw, key, value)
    try:
        config = BridgeConfig.model_validate(raw)
    except ValidationError as error:
        raise StudyError(f"{condition}: {error.errors(include_url=False)[0]['msg']}") from None
    return Job(condition, seed, RunFolder(root / f"{condition}-{seed}"), dict_to_toml(raw), config)


def job_to_setting_sha256(job: Job) -> str:
    """Of everything that is configured but the seed, and the folder of the model, which may lie anywhere."""
    options = tomllib.loads(job.text)
    set_dotted(options, "seed", 0)
    set_dotted(options, "model.path", Path(options["model"]["path"]).name)
    return text_sha256(dict_to_toml(options))


def finish_job(job: Job, collected: Job, game: str, level: str, model: str) -> BenchmarkRun:
    """Everything that is left to do of one run.

    Raises:
        StudyError: a command failed, or a folder belongs to another configuration.
    """
    result = finished_result(job)  # there where an earlier command ended between its two last files
    if result is None:
        collect_once(collected)
        result = run_job(job, collected.folder)
    rounds = folder_to_rounds(job.folder, job.config.train.trainer.reward)
    run = result_to_run(result, rounds, game=game, level=level, model=model, setting_sha256=job_to_setting_sha256(job))
    write_run(job.folder.path, run)
    return run


def finished_run(job: Job) -> BenchmarkRun | None:
    """The result of a job that is done; None of one that is not.

    Raises:
        StudyError: its folder holds a run of another configuration.
    """
    run = read_run(job.folder.path)
    if run is not None:
        refuse_other_configuration(job, run.config_sha256)
    return run


def run_to_line(run: BenchmarkRun) -> str:
    """What came out, for a terminal."""
    took = "after an interruption" if run.seconds is None else f"in {run.seconds / 60:.1f} min"
    solved = " ".join("-" if each.correct is None else f"{each.correct:.2f}" for each in run.rounds[1:])
    return (
        f"{run.game} {run.level} {run.condition} seed {run.seed}: done {took}; solved by round {solved}; held-out "
        f"{run.heldout.metric} {run.heldout.before:.3f} -> {run.heldout.after:.3f}"
    )


def _choice(known: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are: {', '.join(known)}")
        return chosen

    return names


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,1,2") from None


def _tables(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left of the plan, seed after seed; 2 after a user error."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.run", description="Run the benchmarks.")
    parser.add_argument("--games", type=_choice(GAMES), default=list(GAMES), help="separated by commas")
    parser.add_argument("--only", type=_choice(list(CONDITIONS)), default=list(CONDITIONS), help="conditions")
    parser.add_argument("--seeds", type=_seeds, default=list(SEEDS), help="separated by commas")
    parser.add_argument("--level", choices=list(LEVELS), default="first")
    parser.add_argument("--model", default=SMALL, help=f"{SMALL!r}, or what model.path of a configuration may be")
    parser.add_argument("--published", action="store_true", help="published.toml on top, and Python as the tool")
    parser.add_argument("--over", type=_tables, help="a TOML file that is put over every configuration, at last")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks"), help="where the run folders are")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the small model is, or is made")
    parser.add_argument("--dry-run", action="store_true", help="print the plan")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run_plan(given)
    except StudyError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130


def _run_plan(given: argparse.Namespace) -> int:
    """By seed first: an incomplete plan then holds whole comparisons."""
    model = given.model
    if model == SMALL:
        from examples.benchmarks.small_model import ensure_model, model_folder  # torch, which a plan can do without

        model = str(model_folder(given.cache) if given.dry_run else ensure_model(given.cache))
    plan = [
        (game, options_to_job(base, root, COLLECTED, seed), options_to_job(base, root, condition, seed))
        for seed in given.seeds
        for game in given.games
        for base in [setting_to_options(game, given.level, model, published=given.published, over=given.over)]
        for root in [given.folder / given.level / game]
        for condition in given.only
    ]
    left = [(game, collected, job) for game, collected, job in plan if finished_run(job) is None]
    if given.dry_run:
        waiting = {job.folder.path for _, _, job in left}
        for game, _, job in plan:
            begun = "goes on" if job.folder.path.exists() else "to run"
            state = begun if job.folder.path in waiting else "done"
            print(f"{game} {given.level} {job.condition} seed {job.seed}: {state}")
        print(f"{len(plan)} runs, {len(left)} left")
        return 0

    def finish(game: str, collected: Job, job: Job) -> str:
        return run_to_line(finish_job(job, collected, game=game, level=given.level, model=given.model))

    return run_each(
        "benchmarks",
        [
            (f"{game} {job.condition} seed {job.seed}", partial(finish, game, collected, job))
            for game, collected, job in left
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
