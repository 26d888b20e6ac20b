"""Owns: the study of docs/study.md, from its conditions to its figures.

- Every condition is a configuration that the tool accepts, and changes only what its table says.
- What the page claims of two conditions on a graph where each agent acts once holds: dr-mas computes what grpo does,
  and ippo's advantage has no other agent's value in it.
- Figures are those worked by hand; intervals are over seeds, differences seed by seed; what was not run is a dash.
- The page and the drawing in docs/ are what the runner's results in docs/study.json give.
- A run goes on where it was stopped, is never done twice, and does not mix with another configuration; on the whole
  path with a tiny model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import study_server
from support.estimator_tables import table_round
from support.paths import ROOT
from support.tiny_policy import save_tiny_llama

from examples.study import report, run
from examples.study.conditions import BASELINE, CONDITIONS, WITHOUT_OFFLINE
from examples.study.drawing import Panel, panels_to_svg
from examples.study.figures import area, curve, fresh_before, paired, reached, results_by_condition, seconds_a_round
from examples.study.page import results_to_page
from examples.study.results import HeldOut, Result, RoundResult, read_result, write_result
from marft_bridge.runs.run_folder import RunFolder, read_metrics
from trace_store.store import TraceStore
from trainers.advantages.recurrences import gae_along_dependencies

STUDY = ROOT / "examples/study/study.toml"
BASE = tomllib.loads(STUDY.read_text())


def result(
    condition: str,
    seed: int,
    earned: Sequence[float],
    *,
    episodes: Sequence[int] = (),
    after: float = 0.5,
    seconds: float | None = 60.0,
) -> Result:
    """A run that earned 0.1 untrained and `earned` in its rounds, each of 10 episodes unless said otherwise."""
    counts = episodes or [10] * len(earned)
    rounds = [RoundResult(0, 20, 0.1, 4.0, 8.0)]
    rounds += [RoundResult(i + 1, n, y, 2.0 + i, 6.0) for i, (n, y) in enumerate(zip(counts, earned, strict=True))]
    return Result(condition, seed, "0" * 64, tuple(rounds), HeldOut("correct", 4, 0.25, after), seconds, "c" * 64, 2)


# -- conditions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_condition_is_accepted_and_differs_from_the_common_configuration_in_its_changes_only(
    name: str, tmp_path: Path
) -> None:
    job = run.options_to_job(BASE, tmp_path, name, 7)
    written = tomllib.loads(job.text)
    assert (written.pop("name"), written.pop("seed")) == (f"study {name}", 7)
    for key, value in CONDITIONS[name].changes.items():
        at = written
        *tables, last = key.split(".")
        for table in tables:
            at = at[table]
        assert at[last] == value
        del at[last]
    common = {**BASE, "train": {**BASE["train"], "trainer": {**BASE["train"]["trainer"]}}}
    del common["name"]
    if name == WITHOUT_OFFLINE:
        common["train"]["trainer"]["offline"] = {}
    assert flat(written) == flat(common)


def flat(raw: dict[str, object], path: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in raw.items():
        leaves |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return leaves


def test_grpo_and_dr_mas_are_one_computation_where_each_agent_acts_once() -> None:
    """Two tasks of three episodes; the second agent acts in the same episodes, with the same return."""
    returns = np.repeat([0.0, 0.1, 1.0, 0.1, 0.1, 1.0], 2)
    tasks, agents = ["a"] * 6 + ["b"] * 6, ["reasoner", "actor"] * 6
    episodes = [number // 2 for number in range(12)]
    by_condition = {}
    for name, estimator in (("grpo", "grpo"), ("dr-mas", "dr_mas")):
        options = run.options_to_job(BASE, Path("unused"), name, 0).config.train.trainer
        assert options.advantage.estimator == estimator
        chosen = options.advantage.estimator_class(options.estimator_settings)
        data = table_round(tasks, agents, [0] * 12, episodes)
        by_condition[name] = chosen.baseline(returns, data).advantages(returns)  # type: ignore[attr-defined]
    np.testing.assert_allclose(by_condition["grpo"], by_condition["dr-mas"], rtol=1e-12)
    # task a: mean 1.1/3, deviation sqrt((0.1344 + 0.0711 + 0.4011) / 2) = 0.5508; the last earns 0.6333 more
    assert by_condition["dr-mas"][4] == pytest.approx(0.63333 / 0.55076, rel=1e-4)


def test_no_other_agents_value_is_in_the_advantage_of_ippo() -> None:
    options = run.options_to_job(BASE, Path("unused"), "ippo", 0).config.train.trainer
    assert (options.advantage.critic.sharing, options.objective.update) == ("agent", "simultaneous")
    values, reward = [0.3, 0.8], 1.0

    def advantages(lam: float) -> list[float]:
        gamma = options.advantage.gamma
        return gae_along_dependencies(values, [0.0, reward], [[1], []], [0.0, 0.0], gamma, lam).tolist()  # type: ignore[arg-type]

    assert advantages(options.advantage.gae_lambda) == pytest.approx([reward - 0.3, reward - 0.8])
    marft = run.options_to_job(BASE, Path("unused"), BASELINE, 0).config.train.trainer
    # delta of the first, then of the second
    assert advantages(marft.advantage.gae_lambda)[0] == pytest.approx(0.5 + 0.95 * 0.2)


# -- figures by hand --------------------------------------------------------------------------------------------------


def test_the_area_is_by_the_trapezoid_rule_over_fresh_rollouts() -> None:
    even, ragged = result("marft-a", 0, [0.2, 0.4, 0.6]), result("marft-a", 0, [0.2, 0.4, 0.6], episodes=[10, 30, 5])
    assert (fresh_before(even), fresh_before(ragged)) == ([0, 10, 20], [0, 10, 40])
    assert area(even) == pytest.approx((10 * 0.3 + 10 * 0.5) / 20)
    assert area(ragged) == pytest.approx((10 * 0.3 + 30 * 0.5) / 40)
    assert area(result("marft-a", 0, [0.7])) == 0.7


def test_a_level_is_reached_by_the_first_round_that_earns_it() -> None:
    wavering = result("marft-a", 0, [0.2, 0.4, 0.3, 0.5])
    assert [reached(wavering, level) for level in (0.2, 0.4, 0.45, 0.6)] == [0, 10, 30, None]


def test_intervals_are_over_seeds() -> None:
    runs = {seed: result("marft-a", seed, [0.1 * (seed + 1), 0.5]) for seed in range(3)}
    (x, first), (_, last) = curve(runs)
    # 0.1, 0.2, 0.3: deviation 0.1; t(0.975, 2) = 4.302653; 4.302653 * 0.1 / sqrt(3) = 0.248414
    assert (x, first.mean) == (0.0, pytest.approx(0.2))
    assert (first.low, first.high) == (pytest.approx(0.2 - 0.248414, abs=1e-6), pytest.approx(0.448414, abs=1e-6))
    assert (last.mean, last.low, last.high) == (0.5, None, None)  # three that agree say nothing of the spread
    assert curve({0: runs[0]})[0][1].low is None  # one seed says nothing of the others


def test_differences_are_taken_seed_by_seed_over_the_seeds_that_both_have() -> None:
    base, other = {0: 0.1, 1: 0.5, 2: 0.9, 4: 0.0}, {0: 0.2, 1: 0.7, 2: 1.2, 3: 0.0}
    difference = paired(base, other)  # 0.1, 0.2, 0.3: as above, however far apart the seeds are
    assert difference is not None
    assert difference.low == pytest.approx(0.2 - 0.248414, abs=1e-6)
    assert paired(base, {3: 1.0}) is None


def test_seconds_a_round_leave_out_round_0_and_what_was_not_measured() -> None:
    whole = result("grpo", 0, [0.1, 0.2])  # rollouts 2 and 3 s, updates 6 s
    stopped = replace(whole, rounds=tuple(replace(r, rollout_s=None, update_s=12.0) for r in whole.rounds))
    assert seconds_a_round([whole, stopped]) == (2.5, 9.0)
    assert seconds_a_round([]) == (None, None)


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="marft-a seed 0 is there twice"):
        results_by_condition([result("marft-a", 0, [0.1])] * 2)
    with pytest.raises(ValueError, match="different rounds"):
        results_by_condition([result("marft-a", 0, [0.1]), result("grpo", 0, [0.1, 0.2])])


# -- page and drawing -------------------------------------------------------------------------------------------------


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell -> the others."""
    section = page.split(f"## {heading}")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in re.findall(r"^\|.*", section, re.M)]
    return {row[0]: row[1:] for row in cells[2:]}


def test_a_hand_made_study_becomes_the_figures_worked_by_hand(tmp_path: Path) -> None:
    made = [
        *(result(BASELINE, seed, [0.3, 0.4 + 0.1 * seed, 0.6], after=0.5 + 0.1 * seed) for seed in range(3)),
        result(WITHOUT_OFFLINE, 0, [0.1, 0.3, 0.4], after=0.4, seconds=None),
        result(WITHOUT_OFFLINE, 1, [0.1, 0.2, 0.35], after=0.5),
        result(WITHOUT_OFFLINE, 2, [0.1, 0.2, 0.2], after=0.6),
    ]
    for each in made:
        folder = tmp_path / "runs" / f"{each.condition}-{each.seed}"
        folder.mkdir(parents=True)
        write_result(folder, each)
    (tmp_path / "runs" / "grpo-0").mkdir()  # begun, not finished
    assert report.main(["--folder", str(tmp_path / "runs"), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "study.md").read_text()
    assert "**6 of 21 runs are done" in page
    assert "CPU cores for each run: 2." in page
    assert "4.30 standard errors to each side, 2.48 standard" in page

    curves = rows_of(page, "Learning curves")
    # areas of the seeds: (0.3/2 + 0.4 + 0.6/2) / 2 = 0.425, 0.475, 0.525; half of the interval 2.4841 * 0.05 = 0.124
    assert curves["`marft-a`"] == [
        "3",
        "0.300",
        "0.600",
        "0.475 (0.351 to 0.599)",
        "0.250",
        "0.600 (0.352 to 0.848)",
    ]
    assert curves["`grpo`"] == ["0", "–", "–", "–", "–", "–"]

    # areas without: (0.05 + 0.3 + 0.2) / 2 = 0.275, (0.05 + 0.2 + 0.175) / 2 = 0.2125, (0.05 + 0.2 + 0.1) / 2 = 0.175;
    # differences -0.15, -0.2625, -0.35: mean -0.2542, deviation 0.1003, half 2.4841 * 0.1003 = 0.249
    assert rows_of(page, "Against `marft-a`")["`marft-a-no-offline`"] == [
        "−0.254 (−0.503 to −0.005)",
        "below",
        "−0.100",
        "–",
    ]
    levels = rows_of(page, "Fresh rollouts until")
    assert levels["`marft-a`"] == ["0, 0, 0", "10, 10, 10", "20, 10, 10"]
    assert levels["`marft-a-no-offline`"] == ["10, 20, > 20", "20, > 20, > 20", "> 20, > 20, > 20"]
    saved = rows_of(page, "What the old traces saved")
    assert saved == {"0": ["10", "10", "≥ 0"], "1": ["20", "≥ 10", "≥ 10"], "2": ["≥ 20", "≥ 10", "≥ 10"]}
    assert "the traces are worth +0.200 of reward" in page
    times = rows_of(page, "Time")
    assert times["`marft-a-no-offline`"] == ["3", "6", "1.0"]  # rollouts 2, 3, 4 s; the stopped run has no wall time
    assert times["`grpo`"] == ["–", "–", "–"]

    read = report.read_results(tmp_path / "study.json")
    assert sorted(read, key=lambda r: (r.condition, r.seed)) == sorted(made, key=lambda r: (r.condition, r.seed))
    assert len(ET.fromstring((tmp_path / "study.svg").read_text()).findall("{*}g")) == 2  # noqa: S314 - our own


def test_a_difference_whose_interval_holds_zero_is_not_told_apart() -> None:
    ups = [0.0, 0.1, 0.2]
    made = [result(BASELINE, seed, [0.3, 0.3]) for seed in range(3)]
    made += [result("marft-t", seed, [0.3 + up, 0.3 + up]) for seed, up in enumerate(ups)]
    made += [result("ippo", seed, [0.5 + up / 10, 0.5 + up / 10]) for seed, up in enumerate(ups)]
    made += [result("grpo", 0, [0.9, 0.9])]
    rows = rows_of(results_to_page(made, report.read_config(STUDY)), "Against `marft-a`")
    assert rows["`marft-t`"][:2] == ["+0.100 (−0.148 to +0.348)", "not told apart"]
    assert rows["`ippo`"][:2] == ["+0.210 (+0.185 to +0.235)", "above"]
    assert rows["`grpo`"][:2] == ["+0.600", "–"]  # one seed: no interval, no verdict


def test_runs_of_different_programs_are_said_to_be() -> None:
    config, one = report.read_config(STUDY), result("grpo", 0, [0.1])
    assert "of one program (SHA-256 of its source cccccccccccc)" in results_to_page([one], config)
    for other, said in (("d" * 64, "2 versions of it, and 0 runs"), (None, "1 versions of it, and 1 runs")):
        page = results_to_page([one, replace(one, seed=1, code_sha256=other)], config)
        assert "**Not all runs are of one program" in page
        assert said in page
    assert "program" not in results_to_page([], config)


def test_a_curve_is_drawn_where_its_numbers_are_and_cut_at_the_edge_of_its_panel() -> None:
    panel = Panel("marft-a", [0.0, 100.0], [0.5, 1.0], [(-0.3, 1.4), None], {0: [0.0, 1.0]})
    drawing = panels_to_svg([panel, replace(panel, name="<b>")], "marft-a")
    first, second = ET.fromstring(drawing).findall("{*}g")  # noqa: S314 - our own
    lines = {line.get("class"): line.get("points") for line in first.findall("{*}polyline")}
    # a panel is 240 x 200; the frame spans x from 34 to 228 and y from 166 (reward 0) to 30 (reward 1)
    assert lines == {"seed": "34.0,166.0 228.0,30.0", "mean": "34.0,98.0 228.0,30.0"}
    (band,) = first.findall("{*}polygon")
    assert band.get("points") == "34.0,30.0 34.0,166.0"
    assert [line.get("class") for line in second.findall("{*}polyline")] == ["other", "seed", "mean"]
    assert second.findall("{*}text")[0].text == "<b>"


def test_the_page_in_docs_is_what_the_results_in_docs_give() -> None:
    results = report.read_results(ROOT / "docs/study.json")
    assert (ROOT / "docs/study.md").read_text() == results_to_page(results, report.read_config(STUDY))
    assert (ROOT / "docs/study.svg").read_text() == report.results_to_svg(results)


# -- the runner -------------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_the_plan_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = run.options_to_job(BASE, tmp_path, "grpo", 1)
    job.folder.create()
    done = replace(result("grpo", 1, [0.2], seconds=120.0), config_sha256=run.text_sha256(job.text))
    write_result(job.folder.path, done)
    arguments = ["--folder", str(tmp_path), "--only", "grpo,ippo", "--seeds", "1", "--dry-run"]
    assert run.main(arguments) == 0
    # collecting: 45 s for the server, 10 s for the command, 192 episodes of 0.23 s
    assert capsys.readouterr().out.splitlines() == [
        "collect seed 1: about 1.7 min",
        "grpo seed 1: done",
        "ippo seed 1: to run, about 2.0 min",
        "2 runs, 1 left: about 4 min, by finished runs",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["grpo-1"]


def test_a_run_takes_about_as_long_as_its_parts_were_measured_to() -> None:
    config = run.options_to_job(BASE, Path("unused"), BASELINE, 0).config
    # server 45, two commands 20, offline 192 * 0.26 = 49.9, 240 episodes * 1.01 = 242.4, comparison 96 * 0.23 = 22.1
    assert run.estimated_seconds(config) == pytest.approx(379.4, abs=0.1)
    without = run.options_to_job(BASE, Path("unused"), WITHOUT_OFFLINE, 0).config
    assert run.estimated_seconds(without) == pytest.approx(379.4 - 49.9, abs=0.1)


def test_a_folder_of_another_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--only", "grpo", "--seeds", "0"]
    job = run.options_to_job(BASE, tmp_path, "grpo", 0)
    job.folder.create()
    write_result(job.folder.path, result("grpo", 0, [0.2]))
    assert run.main(arguments) == 2
    assert "grpo-0 holds a run of another configuration" in capsys.readouterr().err
    (job.folder.path / "result.json").unlink()
    collected = tmp_path / "collected-0"
    collected.mkdir()
    (collected / "bridge.toml").write_text(job.text.replace("episodes = 192", "episodes = 96"))
    assert run.main(arguments) == 2
    assert "collected-0 was made with another configuration" in capsys.readouterr().err


@pytest.mark.parametrize(("broken", "runs"), [({"marft-a", "grpo"}, 4), ({"marft-t", "grpo"}, 3)])
def test_one_failed_run_does_not_end_the_study_and_two_in_a_row_do(
    broken: set[str], runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_job(job: run.Job, collected: RunFolder) -> Result:
        ran.append(job.condition)
        if job.condition in broken:
            raise run.StudyError("no memory")
        return result(job.condition, job.seed, [0.2])

    monkeypatch.setattr(run, "run_job", run_job)
    monkeypatch.setattr(run, "collect_once", lambda job: None)
    arguments = ["--folder", str(tmp_path), "--only", "marft-a,marft-t,grpo,ippo", "--seeds", "0"]
    assert run.main(arguments) == 2
    assert len(ran) == runs
    assert "study: marft-" in capsys.readouterr().err


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of a tiny model, and a model server that knows it."""
    folder = tmp_path_factory.mktemp("study")
    study_server.install(folder / "site")
    model = save_tiny_llama(folder / "model", vocabulary=257)
    (model / "tokenizer.json").write_text("{}")
    text = STUDY.read_text()
    for old, new in (
        ("smollm2-135m", str(model)),
        ("episodes = 192", "episodes = 12"),
        ("in_flight = 48", "in_flight = 4"),
        ("rounds = 5", "rounds = 3"),
        ("episodes_per_round = 48", "episodes_per_round = 8"),
        ("max_model_len = 512", "max_model_len = 2048"),
        ("tasks = 48", "tasks = 4"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "study.toml").write_text(text)
    return folder


def start(lab: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-m",
        "examples.study.run",
        "--config",
        str(lab / "study.toml"),
        "--folder",
        str(lab / "runs"),
    ]
    paths = [str(lab / "site"), str(ROOT / "tests"), str(ROOT)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MARFT_SEED": "99"}
    return subprocess.Popen(
        [*argv, *flags], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_stopped_run_goes_on_and_its_result_is_that_of_its_episodes(lab: Path) -> None:
    flags = ("--only", BASELINE, "--seeds", "0")
    folder = RunFolder(lab / "runs" / f"{BASELINE}-0")
    process = start(lab, *flags)
    while len(read_metrics(folder.metrics)) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[0]
    assert (process.returncode, said) == (130, "stopped; the same command goes on\n")
    assert not folder.server.exists()  # the model server ended in order,
    with folder.lock_for("test"):  # and the command before it
        pass
    assert read_result(folder.path) is None

    process = start(lab, *flags)
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert said.startswith("marft-a seed 0: done after an interruption; reward ")
    found = read_result(folder.path)
    assert found is not None
    assert (found.seconds, found.code_sha256, found.cores) == (None, None, None)
    assert [r.number for r in found.rounds] == [0, 1, 2, 3]
    with TraceStore.open(folder.store, read_only=True) as store:
        assert {episode.seed is not None for episode in store.episodes()} == {True}
        for each in found.rounds:
            command = "train" if each.number else "collect"
            rows = [t for t in store.trajectories(run_ids=[command]) if (t.episode.round or 0) == each.number]
            earned = [value for t in rows if (value := t.team_reward("reward")) is not None]
            assert (each.episodes, each.reward) == (len(earned), pytest.approx(fmean(earned)))
            assert len(earned) == (8 if each.number else 12)
        (config,) = [r.config for r in store.runs() if r.command == "train"][-1:]
    assert config["seed"] == 0  # not the environment's

    # a second condition starts from the same episodes; what is finished is left alone
    before = (folder.path / "result.json").stat().st_mtime_ns, (lab / "runs/collected-0/done").stat().st_mtime_ns
    process = start(lab, "--only", f"{BASELINE},grpo", "--seeds", "0")
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert re.fullmatch(r"grpo seed 0: done in [\d.]+ min; reward .*\n", said)
    assert before == (
        (folder.path / "result.json").stat().st_mtime_ns,
        (lab / "runs/collected-0/done").stat().st_mtime_ns,
    )
    collected = []
    for name in (f"{BASELINE}-0", "grpo-0"):
        with TraceStore.open(lab / "runs" / name / "store.duckdb", read_only=True) as store:
            collected.append(sorted(episode.episode_id for episode in store.episodes(run_id="collect")))
    assert collected[0] == collected[1]
    for node in ("reasoner", "actor"):  # and from the same adapters: the offline phase is one for all
        learned = [
            load_file(lab / "runs" / name / "adapters" / node / "1" / "adapter_model.safetensors")
            for name in (f"{BASELINE}-0", "grpo-0")
        ]
        assert learned[0].keys() == learned[1].keys()
        assert all(np.array_equal(learned[0][key], learned[1][key]) for key in learned[0])
        assert any(tensor.any() for key, tensor in learned[0].items() if "lora_B" in key)
    assert report.main(["--folder", str(lab / "runs"), "--config", str(lab / "study.toml"), "--out", str(lab)]) == 0
    assert "**2 of 21 runs are done" in (lab / "study.md").read_text()


def test_what_belongs_to_a_process_is_not_copied(tmp_path: Path) -> None:
    source, target = RunFolder(tmp_path / "collected-0"), RunFolder(tmp_path / "grpo-0")
    (source.adapters / "actor" / "0").mkdir(parents=True)
    source.journal.mkdir()
    for path in (source.store, source.server, source.server_log, source.path / "lock", source.path / "bridge.json"):
        path.write_text(path.name)
    (source.adapters / "actor" / "0" / "marft.json").write_text("{}")
    run._copy(source, target)
    names = sorted(path.name for path in target.path.iterdir())
    assert names == ["adapters", "bridge.json", "store.duckdb", "store.duckdb.journal"]
    assert (target.adapters / "actor" / "0" / "marft.json").exists()
    assert target.path.stat().st_mode & 0o777 == 0o700
