"""A graph of the zoo -> recorded, trained and compared on the real model, and what came out in one line.

    python -m examples.zoo.run swarm debate          # one after another, into runs/zoo/<name>
    python -m examples.zoo.run swarm --write         # and the line becomes the `# Expected:` of examples/zoo/swarm.toml

The commands are those of any user; the line is read from what they leave behind, metrics.jsonl and report.json.
A run that was stopped is begun anew: a figure is of one uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from marft_bridge.comparison.records import Report
from marft_bridge.runs.run_folder import RunFolder

HERE = Path(__file__).parent
EXPECTED = re.compile(r"^# Expected: .*$", re.MULTILINE)
_EACH = 'set -e; for c in collect train compare; do "$0" -m marft_bridge "$c" --config "$1" --run "$2"; done'


def config_to_line(config: Path, folder: Path, seed: int) -> str:
    """Runs the three commands on one model server, which takes minutes; gives back what the report says.

    Raises:
        subprocess.CalledProcessError: a command failed; it has said why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    bridge = [sys.executable, "-m", "marft_bridge"]
    where = ["--config", str(config), "--run", str(folder)]
    argv = [*bridge, "serve", *where, "--", "sh", "-c", _EACH, sys.executable, str(config), str(folder)]
    subprocess.run(argv, check=True, env=os.environ | {"MARFT_SEED": str(seed)})
    report = Report.model_validate_json((RunFolder(folder).path / "report.json").read_text(encoding="utf-8"))
    return report_to_line(report, (time.monotonic() - began) / 60)


def report_to_line(report: Report, minutes: float) -> str:
    """The figures that a reader who runs the same should see, by and large."""
    (contrast,) = report.contrasts
    low, high = contrast.ci95
    rounds = [point.reward_mean for point in report.learning_curve if point.phase == "online"]
    rewards = ", ".join("-" if mean is None else f"{mean:.2f}" for mean in rounds)
    return (
        f"{contrast.metric} {contrast.mean_a:.3f} -> {contrast.mean_b:.3f} on {contrast.clusters} held-out tasks "
        f"({contrast.diff:+.3f}, 95 % {low:+.3f} to {high:+.3f}); reward by round {rewards}; "
        f"seed {report.setup.seed}, {minutes:.0f} min"
    )


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
            config.write_text(EXPECTED.sub(f"# Expected: {line}", config.read_text(), count=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
