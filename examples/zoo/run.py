"""A graph of the zoo -> recorded, trained and compared on the real model, and what came out in one line.

    python -m examples.zoo.run swarm debate          # one after another, into runs/zoo/<name>
    python -m examples.zoo.run swarm --write         # and the line becomes the `# Expected:` of examples/zoo/swarm.toml

The commands are those of any user; the line is read from what they leave behind, metrics.jsonl and report.json, for
Kuhn poker also from the games themselves. A run that was stopped is begun anew: a figure is of one uninterrupted run.
A configuration that begins from another one's run (`train.start_from`) has that one run first, where it was not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples.zoo.exploitability import Compared, folder_to_compared
from marft_bridge.comparison.records import Contrast, MarginOutcome, Report, Tournament
from marft_bridge.config.bridge import toml_to_config
from marft_bridge.runs.run_folder import RunFolder

HERE = Path(__file__).parent
EXPECTED = re.compile(r"^# Expected: .*$", re.MULTILINE)
AGAINST = re.compile(r"^# Against: .*\n", re.MULTILINE)
TWINS = {
    "coach_player": "coach_player-random",
    "coach_player-frozen": "coach_player",
    "coach_player-lesson": "coach_player",
    "prisma-two-stage": "prisma-joint",
    "social_dilemma": "social_dilemma-plain",
    "social_dilemma-shared": "social_dilemma-plain",
}
"""What `examples.zoo.twins` holds against what."""
_START = re.compile(r"^start_from = .*?(?=\s*(#.*)?$)", re.MULTILINE)
_EACH = """set -e
for c in collect train; do "$0" -m marft_bridge "$c" --config "$1" --run "$2"; done
"$0" -m marft_bridge compare --config "$1" --run "$2" ${3:+--opponents "$3"}"""
OPPONENTS = {
    "kuhn_poker": "1,newest,base",
    "negotiation": "base",
    "social_dilemma": "4,base",
    "social_dilemma-plain": "4,base",
    "social_dilemma-shared": "4,base",
    "tic_tac_toe": "1,newest,base",
}
"""Games that are judged by a tournament too: who plays the base model and the trained version, see `compare`.

One that is the trained version itself is no further player, so one alone might leave the base as the only opponent; not
in the dilemmas, where the newest of eight versions is the trained one.
"""
SHOWN = {"compression": "reasoner_tokens"}
"""What is told besides the deciding metric: another one that the comparison measured."""
_MARGIN_WORDS: dict[MarginOutcome, str] = {
    "better": "better",
    "non-inferior": "not inferior by {margin:g}",
    "worse by more than the margin": "worse by more than {margin:g}",
    "not told": "not shown to be not inferior by {margin:g}",
}


def config_to_line(config: Path, folder: Path, seed: int) -> str:
    """Runs the three commands on one model server, which takes minutes; gives back what the report says.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why.
    """
    first_folder = _run_first(config, folder, seed)
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    used = config if first_folder is None else config_to_moved(config, first_folder, folder.with_suffix(".toml"))
    bridge = [sys.executable, "-m", "marft_bridge"]
    where = ["--config", str(used), "--run", str(folder)]
    opponents = OPPONENTS.get(config.stem, "")
    argv = [*bridge, "serve", *where, "--", "sh", "-c", _EACH, sys.executable, str(used), str(folder), opponents]
    subprocess.run(argv, check=True, env=os.environ | {"MARFT_SEED": str(seed)})
    minutes = (time.monotonic() - began) / 60
    report = Report.model_validate_json((RunFolder(folder).path / "report.json").read_text(encoding="utf-8"))
    compared = folder_to_compared(folder) if config.stem == "kuhn_poker" else None
    return report_to_line(report, minutes, exploitability=compared, shown=SHOWN.get(config.stem))


def _run_first(config: Path, folder: Path, seed: int) -> Path | None:
    """The folder of the run that a configuration begins from, after it has run to its end; None where there is none."""
    start = toml_to_config(config).train.start_from
    if start is None:
        return None
    first_config, first_folder = config.with_name(f"{Path(start).name}.toml"), folder.with_name(Path(start).name)
    if not (first_folder / "report.json").exists():
        print(f"{first_config.stem}: {config_to_line(first_config, first_folder, seed)}", flush=True)
    return first_folder


def config_to_moved(config: Path, first_folder: Path, moved: Path) -> Path:
    """Writes a configuration to `moved` that begins from the run in `first_folder`, and is otherwise the same."""
    text, count = _START.subn(lambda _: f"start_from = {json.dumps(str(first_folder))}", config.read_text("utf-8"))
    assert count == 1, f"{config.name} has not one line `start_from = ...`"
    moved.parent.mkdir(parents=True, exist_ok=True)
    moved.write_text(text, "utf-8")
    return moved


def report_to_line(
    report: Report,
    minutes: float,
    exploitability: Compared | None = None,
    shown: str | None = None,
    gain: Contrast | None = None,
    further: Sequence[str] = (),
) -> str:
    """The figures that a reader who runs the same should see, by and large.

    Args:
        exploitability: of the base model and of the trained version, in Kuhn poker.
        shown: a metric besides the deciding one.
        gain: what training brought, where that is not the first contrast of the report.
        further: what is told besides, in parts.
    """
    contrast = gain or report.contrasts[0]
    low, high = contrast.ci95
    rounds = [point.reward_mean for point in report.learning_curve if point.phase == "online"]
    rewards = ", ".join("-" if mean is None else f"{mean:.2f}" for mean in rounds)
    more = contrast_to_parts(contrast, None if shown is None else report.contrast(contrast.variant, shown))
    if exploitability is not None:
        more.append(exploitability.text)
    if report.tournament is not None:
        more += tournament_to_parts(report.tournament, report.base, contrast.variant)
    parts = [
        f"{contrast.metric} {contrast.mean_a:.3f} -> {contrast.mean_b:.3f} on {contrast.clusters} held-out tasks "
        f"({contrast.diff:+.3f}, 95 % {low:+.3f} to {high:+.3f})",
        f"reward by round {rewards}",
        *more,
        *further,
        f"seed {report.setup.seed}, {minutes:.0f} min",
    ]
    return "; ".join(parts)


def contrast_to_parts(contrast: Contrast, shown: Contrast | None) -> list[str]:
    """Another metric of the trained version, and what the deciding one says about its margin, where there is one."""
    parts = []
    if shown is not None:
        low, high = shown.ci95
        parts.append(
            f"{shown.metric} {shown.mean_a:.1f} -> {shown.mean_b:.1f} a run "
            f"({shown.diff:+.1f}, 95 % {low:+.1f} to {high:+.1f})"
        )
    if contrast.non_inferiority is not None and contrast.margin_outcome is not None:
        words = _MARGIN_WORDS[contrast.margin_outcome].format(margin=contrast.non_inferiority.margin)
        parts.append(f"{contrast.metric} {words}")
    return [", ".join(parts)] if parts else []


def tournament_to_parts(tournament: Tournament, base: str, trained: str) -> list[str]:
    """The trained version's Elo, where the base model has 0, by how many opponents; what both earned on both seats."""
    (rated,) = [row for row in tournament.ratings if row.variant == trained]
    interval = "" if rated.low is None else f" (95 % {rated.low:+.0f} to {rated.high:+.0f})"
    games = [match for match in tournament.matches if {match.first, match.second} == {base, trained}]
    pairs = [
        (m.payoff_first, m.payoff_second) if m.first == trained else (m.payoff_second, m.payoff_first) for m in games
    ]
    own, others = (sum(payoffs) / len(games) for payoffs in zip(*pairs, strict=True))
    opponents = len(tournament.ratings) - 1
    return [
        f"Elo {rated.elo:+.0f}{interval} against the base at 0, by {opponents} opponent{'s' if opponents > 1 else ''}",
        f"payoff against the base {own:+.3f}, the base's {others:+.3f}",
    ]


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.zoo.run", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="a file of examples/zoo without .toml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/zoo"), help="where the run folders go")
    parser.add_argument("--write", action="store_true", help="put the line into the configuration")
    flags = parser.parse_args(argv)
    configs = [HERE / f"{name}.toml" for name in flags.names]
    if missing := [path.stem for path in configs if not path.exists()]:
        parser.error(
            f"{missing[0]}: not in the zoo; there are {', '.join(sorted(p.stem for p in HERE.glob('*.toml')))}"
        )
    for config in configs:
        line = config_to_line(config, flags.folder / config.stem, flags.seed)
        print(f"{config.stem}: {line}", flush=True)
        if flags.write:
            write_expected(config, line)
    return 0


def write_expected(config: Path, line: str) -> None:
    """Puts a run's line into its configuration, and takes out what an earlier run was to its twins."""
    config.write_text(EXPECTED.sub(lambda _: f"# Expected: {line}", config.read_text(encoding="utf-8"), count=1))
    for name, twin in TWINS.items():
        path = config.with_name(f"{name}.toml")
        if config.stem in (name, twin) and path.exists():
            path.write_text(AGAINST.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
