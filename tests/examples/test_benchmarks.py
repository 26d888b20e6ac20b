"""Owns: the benchmarks of docs/benchmarks.md, from their configurations to their figures; graphs/ has the games.

- Every benchmark is a configuration as it stands, at every level, with the published setting on top, and in every way
  to train; two stand-in runs of each pull both agents towards what paid.
- Figures are those worked by hand; what was not run is said to be; the page in docs/ is what benchmarks.json gives.
- A run is done once, its folder is not mixed with another configuration, and its tokens and solved episodes are those
  of its store; on the whole path with a tiny model.
- The small model's teacher solves every task when it acts for the best; its transcripts are the same for a seed.
- Python of a writer is run in the sandbox, and fails there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from pydantic import Field
from support import study_server
from support.edge_rig import SaysNext
from support.growth_rig import fill
from support.paths import ROOT
from support.sample_spans import SampleTrace
from support.tiny_policy import save_tiny_llama
from support.zoo_rig import train_zoo
from transformers import AutoTokenizer

from examples.benchmarks import python_tool, report, run
from examples.benchmarks.conditions import BASELINE, CONDITIONS
from examples.benchmarks.figures import (
    area_at,
    area_differences,
    calls_of_a_run,
    learned,
    repeated_share,
    runs_by_setting,
    teaching_calls,
    token_curve,
)
from examples.benchmarks.page import NOT_RUN, TITLES, runs_to_page
from examples.benchmarks.results import (
    BenchmarkRound,
    BenchmarkRun,
    folder_to_rounds,
    json_to_run,
    read_run,
    run_to_json,
    write_run,
)
from examples.benchmarks.small_model import (
    ANSWER,
    GAMES,
    LEVELS,
    MAX_NUMBER,
    Teacher,
    best_answer,
    make_batch,
    make_tokenizer,
    pretrain,
    teacher_answer,
    transcript_tasks,
    transcripts,
)
from examples.study.results import HeldOut
from examples.study.run import COLLECTED
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.rollouts.app import load_app
from marft_bridge.runs.run_folder import RunFolder
from marft_bridge.serving.prepare_model import check_model_dir
from marft_bridge.training.advantage_log import file_to_advantages
from trace_store.journal import JournalRecord
from trace_store.records import Reward
from trace_store.store import TraceStore

FOLDER = ROOT / "examples/benchmarks"
each_game = pytest.mark.parametrize("game", run.GAMES)


def benchmark_round(number: int, solved: float, *, sampled_tokens: int) -> BenchmarkRound:
    """A round of eight whole runs of three calls each."""
    return BenchmarkRound(
        number=number,
        episodes=8,
        reward=solved * 2,
        correct=solved,
        sampled_tokens=sampled_tokens,
        calls=3.0,
        repeated_tokens=0,
        teaching_calls=None,
    )


def benchmark_run(
    condition: str, seed: int, solved: Sequence[float], *, tokens: int = 100, game: str = "sudoku", after: float = 0.5
) -> BenchmarkRun:
    """A run that solved 0.1 untrained and `solved` in its rounds, of `tokens` tokens each."""
    forked = condition != BASELINE
    rounds = [benchmark_round(0, 0.1, sampled_tokens=50)]
    rounds += [
        replace(
            benchmark_round(i + 1, share, sampled_tokens=tokens),
            repeated_tokens=tokens // 4 if forked else 0,
            teaching_calls=40 if forked else 50,
        )
        for i, share in enumerate(solved)
    ]
    heldout = HeldOut("correct", 8, 0.25, after)
    return BenchmarkRun(
        game=game,
        level="first",
        model="small",
        condition=condition,
        seed=seed,
        config_sha256="0" * 64,
        setting_sha256="1" * 64,
        code_sha256=None,
        seconds=60.0,
        rounds=tuple(rounds),
        heldout=heldout,
    )


# -- configurations ---------------------------------------------------------------------------------------------------


@each_game
@pytest.mark.parametrize("level", run.LEVELS)
def test_a_benchmark_loads_at_every_level_with_tasks_that_are_held_out(game: str, level: str) -> None:
    config = BridgeConfig.model_validate(run.setting_to_options(game, level, "smollm2-135m"))
    app = load_app(config)
    ids = [str(task["id"]) for task in (*app.train_tasks, *app.heldout_tasks)]
    assert len(set(ids)) == len(ids) >= 200
    assert all(name.startswith(f"{level}-") for name in ids)
    assert len(app.heldout_tasks) >= (config.compare.tasks or 0)
    shown = [str(app.task_to_input(task)) for task in (*app.train_tasks, *app.heldout_tasks)]
    assert len(set(shown)) == len(shown)


@each_game
def test_the_published_setting_fits_every_benchmark_and_its_writer_writes_python(game: str) -> None:
    config = BridgeConfig.model_validate(run.setting_to_options(game, "published", "m", published=True))
    app = load_app(config)
    assert config.graph.app == f"examples.benchmarks.python_tool:{game}"
    assert (config.train.episodes_per_round, config.train.samples_per_task) == (128, 4)
    assert len(app.heldout_tasks) >= (config.compare.tasks or 0) == 100


@each_game
def test_the_published_setting_updates_as_theirs_where_the_trainer_has_the_option(game: str) -> None:
    options = run.setting_to_options(game, "published", "m", published=True)
    trainer = run.options_to_job(options, Path("unused"), "at-grpo", 7).config.train.trainer
    assert (trainer.lora.rank, trainer.lora.alpha, len(trainer.lora.target_modules)) == (16, 32.0, 7)
    assert (trainer.optimizer.lr, trainer.optimizer.epochs, trainer.optimizer.minibatch_actions) == (5e-6, 1, 16)
    assert (trainer.objective.clip_low, trainer.objective.clip_high, trainer.experimental.dual_clip) == (0.2, 0.2, 3.0)
    assert trainer.objective.negative_weight == 1.0
    assert (trainer.granularity, trainer.offline.mode, trainer.experimental.schedule.floor) == ("token", "off", 0.3)


@each_game
@pytest.mark.parametrize("condition", [COLLECTED, *CONDITIONS])
def test_the_real_model_has_half_of_the_rollouts_and_all_else_alike(game: str, condition: str) -> None:
    over = tomllib.loads((FOLDER / "smollm2.toml").read_text())
    halved, whole = (
        run.options_to_job(
            run.setting_to_options(game, "first", "smollm2-135m", over=tables), Path("unused"), condition, 7
        ).config
        for tables in (over, None)
    )
    assert halved.train.episodes_per_round * 2 == whole.train.episodes_per_round
    assert halved.collect.episodes * 2 == whole.collect.episodes
    assert halved.train.rounds == whole.train.rounds
    assert (halved.train.trainer, halved.compare) == (whole.train.trainer, whole.compare)


@each_game
@pytest.mark.parametrize("condition", [COLLECTED, *CONDITIONS])
def test_a_condition_is_accepted_and_all_have_as_many_rounds_of_as_many_tokens(game: str, condition: str) -> None:
    base = run.setting_to_options(game, "first", "smollm2-135m")
    job = run.options_to_job(base, Path("unused"), condition, 7)
    shared = run.options_to_job(base, Path("unused"), BASELINE, 7).config
    assert (job.config.name, job.config.seed) == (f"{game} {condition}", 7)
    assert job.config.train.rounds == shared.train.rounds
    assert job.config.train.episodes_per_round == shared.train.episodes_per_round
    assert job.config.train.samples_per_task == shared.train.samples_per_task
    # With forks, half of the tokens go to half as many whole runs, of half as many tasks.
    has_forks = condition in ("trees", "at-grpo")
    assert job.config.train.chains_per_round == (32 if has_forks else 64)
    assert job.config.train.trees is None or job.config.train.trees.share == 0.5
    assert job.config.collect == shared.collect
    assert BridgeConfig.model_validate(tomllib.loads(job.text)) == job.config  # what the commands will read


def test_tables_on_top_win_over_everything() -> None:
    raw = run.setting_to_options("sudoku", "easy", "m", published=True, over={"train": {"rounds": 3}})
    assert raw["train"]["rounds"] == 3
    assert raw["train"]["samples_per_task"] == 4
    assert raw["graph"]["tasks"] == "graphs.sudoku:easy_tasks"


# -- learning, on a stand-in ------------------------------------------------------------------------------------------


def sometimes_solves(game: str) -> Any:
    """Both agents answer the first thing that a solver would, or no move, by the toss of a coin.

    What is right is short and what is wrong is other bytes, so that an adapter can tell them apart.
    """
    module = GAMES[game]
    answers: dict[str, str] = {}
    for task in itertools.chain(module.level_to_tasks(module.LEVELS[0], range(module.TASKS))):
        position = module.task_to_input(task)["position"]
        answers[module.describe(position)] = best_answer(game, position)

    def script(_: str, messages: list[dict[str, Any]], chance: random.Random) -> str:
        question = str(messages[-1]["content"])
        best = next((answer for shown, answer in answers.items() if question.startswith(shown)), "")
        return best if best and chance.random() < 0.5 else "zzzz zzzz"

    return script


@pytest.mark.slow
@each_game
def test_training_pulls_both_agents_towards_what_paid(game: str, tmp_path: Path) -> None:
    trained = train_zoo(FOLDER / f"{game}.toml", sometimes_solves(game), tmp_path, rounds=2, episodes=16)
    writer, planner = trained.config.graph.nodes
    assert min(trained.norms.values()) > 0
    assert trained.pull_to(planner, "local") > 0.2
    assert trained.pull_to(writer, "local") > 0.2
    for trajectory in trained.trained:
        local = [reward for reward in trajectory.rewards if reward.name == "local"]
        assert len(local) == len(trajectory.actions)
        assert {reward.scope for reward in local} == {"step"}


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["trees", "at-grpo"])
def test_rounds_with_forks_learn_from_what_was_forked(condition: str, tmp_path: Path) -> None:
    base = run.setting_to_options("countdown", "first", "smollm2-135m")
    path = tmp_path / "bridge.toml"
    path.write_text(run.options_to_job(base, tmp_path, condition, 7).text)
    trained = train_zoo(path, sometimes_solves("countdown"), tmp_path, rounds=2, episodes=16)
    assert min(trained.norms.values()) > 0
    assert [row["trees"]["forks"] > 0 for row in trained.rounds if row.get("trees")] == [True, True]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_a_curve_is_over_the_tokens_sampled_before_each_round() -> None:
    assert token_curve(benchmark_run("chains", 0, [0.2, 0.4, 0.6])) == ([0, 100, 200], [0.2, 0.4, 0.6])
    unknown = benchmark_run("chains", 0, [0.2, 0.4])
    rounds = (*unknown.rounds[:-1], replace(unknown.rounds[-1], sampled_tokens=None))
    assert token_curve(replace(unknown, rounds=rounds)) is None


def test_an_area_is_the_mean_share_on_the_way_to_its_budget() -> None:
    played = benchmark_run("chains", 0, [0.2, 0.4, 0.6])
    assert area_at(played, 200) == pytest.approx(0.4)
    assert area_at(played, 100) == pytest.approx(0.3)
    assert area_at(played, 150) == pytest.approx((0.3 * 100 + 0.45 * 50) / 150)  # 0.5 at 150, between its points
    assert area_at(played, 201) is None
    assert area_at(benchmark_run("chains", 0, [0.2]), 50) is None


def test_areas_are_compared_seed_by_seed_at_the_tokens_that_both_reached() -> None:
    runs = runs_by_setting(
        [
            benchmark_run("chains", 0, [0.0, 0.4, 0.8]),
            benchmark_run("chains", 1, [0.0, 0.4, 0.8]),
            benchmark_run("at-grpo", 0, [0.0, 0.8, 0.8], tokens=50),  # twice as far for the same tokens
            benchmark_run("at-grpo", 2, [0.0, 0.8, 0.8]),
        ]
    )[("sudoku", "first", "small")]
    # Both reached 100 tokens: 0.4 and 0.8 by then in the mean, (0.4 + 0.8) / 2 against 0.2.
    assert area_differences(runs, "at-grpo", "chains") == [pytest.approx(0.6 - 0.2)]
    assert area_differences(runs, "at-grpo", "trees") == []
    other_program = {"chains": {0: replace(runs["chains"][0], code_sha256="2" * 64)}, "at-grpo": runs["at-grpo"]}
    assert area_differences(other_program, "at-grpo", "chains") == []


def test_what_was_learned_is_after_less_before_over_seeds() -> None:
    interval = learned(
        {seed: benchmark_run("chains", seed, [0.2], after=after) for seed, after in [(0, 0.5), (1, 0.7)]}
    )
    # 0.25 and 0.45: mean 0.35, standard error 0.1, t of one degree of freedom 12.706
    assert interval.mean == pytest.approx(0.35)
    assert interval.low == pytest.approx(0.35 - 1.2706, abs=1e-3)


def test_what_trees_had_to_work_with_is_counted_over_rounds_of_training_and_seeds() -> None:
    chains, trees = ({seed: benchmark_run(name, seed, [0.2, 0.4]) for seed in (0, 1)} for name in ("chains", "trees"))
    assert (calls_of_a_run(chains), calls_of_a_run({})) == (3.0, None)
    assert (repeated_share(chains), repeated_share(trees), repeated_share({})) == (0.0, 25 / 125, None)
    assert (teaching_calls(chains), teaching_calls(trees), teaching_calls({})) == (500.0, 400.0, None)
    one = chains[0]
    not_kept = {0: replace(one, rounds=tuple(replace(each, teaching_calls=None) for each in one.rounds))}
    assert teaching_calls(not_kept) is None
    page = runs_to_page([*chains.values(), *trees.values()])
    assert "| Sudoku 4x4 | small | 3.0 | 20% | 500 | 400 |" in page
    assert "No setting has an interval yet." in page


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((0.1, 0.11, 0.12), "better in 1 and worse in 0 of the 1\nsettings"),
        ((-0.1, -0.11, -0.12), "better in 0 and worse in 1 of the 1\nsettings"),
        ((0.1, 0.0, -0.1), "better in 0 and worse in 0 of the 1\nsettings"),
        ((0.1, 0.1, 0.1), "No setting has an interval yet."),
    ],
)
def test_the_page_says_whether_trees_are_better_by_their_interval(gains: Sequence[float], said: str) -> None:
    runs = [benchmark_run("chains", seed, [0.2, 0.4]) for seed in range(3)]
    runs += [benchmark_run("trees", seed, [0.2 + gain, 0.4 + gain]) for seed, gain in enumerate(gains)]
    assert said in runs_to_page(runs)


def test_a_run_that_is_there_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="seed 0 is there twice"):
        runs_by_setting([benchmark_run("chains", 0, [0.2]), benchmark_run("chains", 0, [0.3])])


# -- the page ---------------------------------------------------------------------------------------------------------


def test_runs_of_different_configurations_are_not_averaged() -> None:
    one, other = benchmark_run("chains", 0, [0.1]), replace(benchmark_run("chains", 1, [0.1]), setting_sha256="2" * 64)
    with pytest.raises(ValueError, match="runs of sudoku first small chains are of different configurations"):
        runs_by_setting([one, other])
    of_two = [replace(benchmark_run("chains", seed, [0.1]), code_sha256=str(seed)) for seed in (0, 1)]
    assert "The runs are of 2 versions of the program." in runs_to_page(of_two)
    assert "versions of the program" not in runs_to_page([one])


def test_the_page_in_docs_is_what_the_runs_in_docs_give() -> None:
    runs = report.read_runs(ROOT / "docs/benchmarks.json")
    assert (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8") == runs_to_page(runs)


def test_what_was_not_run_is_said_to_be_and_what_was_has_its_interval() -> None:
    empty = runs_to_page([])
    assert all(f"| {title} | {NOT_RUN} |" in empty for title in TITLES.values())
    page = runs_to_page([benchmark_run("chains", seed, [0.2, 0.4], after=0.5 + seed / 10) for seed in (0, 1, 2)])
    assert "| Sudoku 4x4 | first | small | `chains` | 3 | 0.250 | 0.600 | +0.350 (+0.102 to +0.598) | – |" in page
    assert f"| Sudoku 4x4 | first | small | `at-grpo` | {NOT_RUN} |" in page
    assert f"| Plan-Path | {NOT_RUN} |" in page
    two = runs_to_page([benchmark_run("chains", seed, [0.2, 0.4]) for seed in (0, 1)])
    assert "| `chains` | 2 | 0.250 | 0.500 | +0.250 | – |" in two  # which agree, and would have one without a width
    one = runs_to_page([benchmark_run("chains", 0, [0.2, 0.4]), benchmark_run("at-grpo", 0, [0.4, 0.8])])
    assert "| `at-grpo` | 1 | 0.250 | 0.500 | +0.250 | +0.300 |" in one


def test_runs_are_kept_in_the_file_and_replaced_by_those_of_a_folder(tmp_path: Path) -> None:
    stored = [benchmark_run("chains", 0, [0.2]), benchmark_run("chains", 1, [0.2])]
    (tmp_path / "out").mkdir()
    arguments = ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    for number, each in enumerate(stored):
        folder = tmp_path / f"runs/first/sudoku/chains-{number}"
        folder.mkdir(parents=True)
        write_run(folder, each)
    assert report.main(arguments) == 0
    assert report.read_runs(tmp_path / "out/benchmarks.json") == stored
    (tmp_path / "runs/first/sudoku/chains-0/benchmark.json").unlink()
    newer = replace(stored[1], seconds=None)
    write_run(tmp_path / "runs/first/sudoku/chains-1", newer)
    assert report.main(arguments) == 0
    assert report.read_runs(tmp_path / "out/benchmarks.json") == [stored[0], newer]
    assert json_to_run(run_to_json(newer)) == newer


def test_a_file_that_holds_something_else_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "benchmarks.json").write_text('[{"game": "chess"}]')
    assert report.main(["--folder", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: ")


# -- the runner -------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_plan_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = run.setting_to_options("sudoku", "easy", "m")
    job = run.options_to_job(base, tmp_path / "easy/sudoku", "chains", 1)
    job.folder.create()
    done = replace(benchmark_run("chains", 1, [0.2]), config_sha256=run.text_sha256(job.text))
    write_run(job.folder.path, done)
    arguments = ["--games", "sudoku", "--seeds", "1", "--level", "easy", "--model", "m", "--folder", str(tmp_path)]
    assert run.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sudoku easy defaults seed 1: to run",
        "sudoku easy chains seed 1: done",
        "sudoku easy trees seed 1: to run",
        "sudoku easy at-grpo seed 1: to run",
        "4 runs, 3 left",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["easy"]


def test_a_folder_of_another_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = run.options_to_job(run.setting_to_options("sudoku", "first", "m"), tmp_path / "first/sudoku", "chains", 0)
    job.folder.create()
    write_run(job.folder.path, benchmark_run("chains", 0, [0.2]))
    arguments = ["--games", "sudoku", "--only", "chains", "--seeds", "0", "--model", "m", "--folder", str(tmp_path)]
    assert run.main(arguments) == 2
    assert "chains-0 holds a run of another configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--games", "chess"], "no 'chess'; there are: plan_path"),
        (["--only", "forests"], "no 'forests'; there are: defaults, chains"),
        (["--seeds", "x"], "'x' is not a list of numbers"),
        (["--over", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_what_is_not_there_is_refused_in_a_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(flags)
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_collected_trained_and_compared_and_its_rounds_are_those_of_its_store(tmp_path: Path) -> None:
    study_server.install(tmp_path / "site")
    model = save_tiny_llama(tmp_path / "model", vocabulary=257)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "small.toml").write_text(
        "[serve]\nmax_model_len = 4096\n[collect]\nepisodes = 8\nin_flight = 4\n"
        "[train]\nrounds = 2\nepisodes_per_round = 8\n[compare]\ntasks = 4\n"
    )
    argv = [sys.executable, "-m", "examples.benchmarks.run", "--games", "countdown", "--only", "chains", "--seeds", "0"]
    argv += ["--model", str(model), "--over", str(tmp_path / "small.toml"), "--folder", str(tmp_path / "runs")]
    paths = [str(tmp_path / "site"), str(ROOT / "tests"), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)

    first = start()
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.startswith("countdown first chains seed 0: done in ")
    folder = RunFolder(tmp_path / "runs/first/countdown/chains-0")
    found = read_run(folder.path)
    assert found is not None
    assert [(each.number, each.episodes) for each in found.rounds] == [(0, 8), (1, 8), (2, 8)]
    with TraceStore.open(folder.store, read_only=True) as store:
        for each in found.rounds:
            command = "train" if each.number else "collect"
            rows = [t for t in store.trajectories(run_ids=[command]) if (t.episode.round or 0) == each.number]
            sampled = sum(len(action.sampled_ids or ()) for t in rows for action in t.actions)
            assert each.sampled_tokens == sampled > 0
            assert each.repeated_tokens == 0
            assert each.calls == sum(len(t.actions) for t in rows) / 8
            advantages = [
                advantage
                for t in rows
                if each.number
                for advantage in file_to_advantages(folder.advantages, each.number, t.episode.episode_id).values()
            ]
            taught = sum(any(number != 0 for number in advantage.advantage) for advantage in advantages)
            assert each.teaching_calls == (taught if each.number else None)
            assert each.correct == sum(t.team_reward("correct") or 0.0 for t in rows) / 8
            assert each.reward == pytest.approx(sum(t.team_reward("reward") or 0.0 for t in rows) / 8)
    assert folder_to_rounds(folder, "reward") == found.rounds
    written = (folder.path / "benchmark.json").stat().st_mtime_ns
    again = start()
    assert (again.returncode, again.stdout) == (0, "")
    assert (folder.path / "benchmark.json").stat().st_mtime_ns == written


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1)])
def test_a_rounds_mean_is_the_same_to_the_last_bit_however_its_rows_stand(
    rewards: tuple[float, ...], tmp_path: Path
) -> None:
    records: list[list[JournalRecord]] = []
    for number, reward in enumerate(rewards):
        trace = SampleTrace(f"{number:x}")
        records.append([*trace.spans(RUN_ID="collect"), Reward(trace.trace_id, "reward", reward, "test", 1)])
    fill(RunFolder(tmp_path).store, records)
    (round_0,) = folder_to_rounds(RunFolder(tmp_path), "reward")
    assert round_0.reward == (0.1 + 0.2 + 0.3) / 3 != (0.3 + 0.2 + 0.1) / 3


# -- the small model --------------------------------------------------------------------------------------------------


@each_game
def test_the_teacher_solves_every_task_when_it_acts_for_the_best(game: str) -> None:
    module = GAMES[game]
    for level in module.LEVELS[:LEVELS]:
        for task in module.level_to_tasks(level, range(40)):
            position = module.task_to_input(task)["position"]
            played = module.play(position, best_answer(game, position))
            assert (played.solved, played.bad_moves) == (True, 0)


@each_game
def test_transcripts_are_the_same_for_the_same_seed_and_hold_good_bad_and_unreadable_answers(game: str) -> None:
    rows = list(itertools.islice(transcripts(game, Teacher(0)), 300))
    assert rows == list(itertools.islice(transcripts(game, Teacher(0)), 300))
    module = GAMES[game]
    endings = {question.rsplit("\n", 1)[1] for question, _ in rows}
    assert endings == {module.GAME.writer.question, module.GAME.planner.question}
    draw = Teacher(1)
    task = next(module.level_to_tasks(module.LEVELS[0], [5]))
    position = module.task_to_input(task)["position"]
    played = [module.play(position, teacher_answer(game, position, draw)) for _ in range(300)]
    assert 0.02 < sum(each.solved for each in played) / 300 < 0.8
    assert 0.01 < sum(not each.readable for each in played) / 300 < 0.2
    draw.clean = True
    assert all(module.play(position, teacher_answer(game, position, draw)).solved for _ in range(20))


@each_game
def test_no_transcript_is_of_a_task_that_a_benchmark_has(game: str) -> None:
    module = GAMES[game]
    level = module.LEVELS[0]

    def shown(task: dict[str, Any]) -> str:
        return module.GAME.describe(module.task_to_input(task)["position"])

    own = {shown(task) for task in module.level_to_tasks(level, range(module.TASKS))}
    others = {shown(task) for task in transcript_tasks(game, level)}
    assert len(own) > 200
    assert len(others) > 200
    assert own.isdisjoint(others)


def test_a_word_is_a_token_and_only_answers_are_learned() -> None:
    tokenizer = make_tokenizer()
    rows = [row for game in GAMES for row in itertools.islice(transcripts(game, Teacher(2)), 30)]
    for question, answer in rows:
        assert tokenizer.unk_token_id not in tokenizer(f"{question} {answer}")["input_ids"]
        if answer:
            read = tokenizer.decode(tokenizer(answer)["input_ids"])
            for module in GAMES.values():  # spaces between tokens change no answer
                position = module.task_to_input(next(module.level_to_tasks(module.LEVELS[0], [0])))["position"]
                assert module.play(position, read)._replace(note="") == module.play(position, answer)._replace(note="")
    assert tokenizer.unk_token_id not in tokenizer(f"0 {MAX_NUMBER}")["input_ids"]
    ids, labels = make_batch(rows[:8], tokenizer)
    learned_tokens = labels != -100
    assert (ids[learned_tokens] == labels[learned_tokens]).all()
    starts = [int((row == tokenizer.convert_tokens_to_ids(ANSWER)).nonzero()[0]) for row in ids]
    assert [int(row.nonzero()[0]) for row in learned_tokens] == [start + 1 for start in starts]


def test_the_model_is_a_folder_that_a_server_takes_and_reads_the_last_message_alone(tmp_path: Path) -> None:
    folder = check_model_dir(pretrain(tmp_path / "model", steps=2))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "You are"}, {"role": "user", "content": "r1 c2\nMoves?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["r", "1", "c", "2", "Moves", "?", ANSWER]


# -- Python as the tool -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("print('R', 'D')", "R D"),
        ("print(1 / 0)", "ZeroDivisionError: division by zero"),
        ("open('/etc/hostname').read()", "FileNotFoundError"),
        ("", ""),
    ],
)
def test_a_program_of_the_writer_runs_in_the_sandbox(source: str, printed: str) -> None:
    assert asyncio.run(python_tool.run_program(source)).startswith(printed)


class Recording(SaysNext):
    """Keeps the options of its calls."""

    options: list[dict[str, Any]] = Field(default_factory=list)

    def _generate(self, messages: list[Any], *arguments: Any, **options: Any) -> Any:
        self.options.append(options)
        return super()._generate(messages, *arguments, **options)


@each_game
def test_a_graph_of_the_published_setting_runs_its_writers_program_without_thinking(game: str) -> None:
    module = GAMES[game]
    task = next(module.level_to_tasks(module.LEVELS[0], [0]))
    best = best_answer(game, module.task_to_input(task)["position"])
    model = Recording(answers=[AIMessage(f"```python\nprint({best!r})\n```"), AIMessage(f"So.\n#### {best}")])
    result = asyncio.run(getattr(python_tool, game)(model).ainvoke(module.task_to_input(task)))
    assert result["turns"][-1]["solved"]
    assert result["trials"] == [result["turns"][-1]["team"]]
    assert [each["extra_body"] for each in model.options] == [python_tool.WITHOUT_THINKING] * 2
