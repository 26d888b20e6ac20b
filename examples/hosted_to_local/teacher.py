"""Right answers to the desk's own prompts -> a model that knows the desk: the hosted model where there is no key.

    python -m examples.hosted_to_local.teacher runs/teacher

It is SmolLM2-135M-Instruct, taught on runs of the desk that an oracle answers (`taught_model`), one adapter for all
nodes, and lies in the folder `model`. So it is no larger than the local model, and knows more.

Invariant: the lessons are other sentences than the app's tasks; the same seed, runs and passes make the same lessons.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.hosted_to_local import app, orders
from examples.hosted_to_local.record import record
from examples.hosted_to_local.taught_model import OracleModel, teach, write_config

CONFIG = Path(__file__).with_name("teacher.toml")
NODE = "extractor"  # any: all nodes share the adapter


def record_lessons(folder: Path, runs: int) -> Path:
    """The store with so many runs of the desk as the oracle answers it."""
    tasks = orders.lessons()[:runs]
    store = folder / "lessons.duckdb"
    done = record(
        app.make_graph(OracleModel(answer=orders.Oracle(tasks).answer)), tasks, store, run_id="lessons", in_flight=1
    )
    assert done.mean("correct") == 1.0, "the oracle was wrong"
    return store


def make_teacher(folder: Path, *, runs: int, epochs: int, model: str | None) -> Path:
    """The model's folder. Raises CalledProcessError where a command fails, which says why itself."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {"runs/teacher/lessons": str(folder / "lessons"), "epochs = 3": f"epochs = {epochs}"}
    config = write_config(CONFIG, folder, changes | ({} if model is None else {"smollm2-135m": model}))
    return teach(folder, record_lessons(folder, runs), config, node=NODE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes it, where it is not there yet."""
    parser = argparse.ArgumentParser(prog="python -m examples.hosted_to_local.teacher", description=__doc__)
    parser.add_argument("folder", type=Path, help="where lessons, run and model go")
    parser.add_argument("--runs", type=int, default=120, help="lessons; fewer are quicker and teach less")
    parser.add_argument("--epochs", type=int, default=3, help="passes over them, at most")
    parser.add_argument("--model", help="another model folder to start from than SmolLM2-135M-Instruct")
    given = parser.parse_args(arguments)
    if (given.folder / "model").exists():
        print(f"{given.folder / 'model'} is there already")
        return
    if given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} holds an unfinished teacher; remove it first")
    print(make_teacher(given.folder, runs=given.runs, epochs=given.epochs, model=given.model))


if __name__ == "__main__":
    main()
