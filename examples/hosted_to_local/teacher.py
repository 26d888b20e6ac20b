"""Right answers to the desk's own prompts -> a model that knows the desk: the hosted model where there is no key.

    python -m examples.hosted_to_local.teacher runs/teacher

It is SmolLM2-135M-Instruct, taught by this project's own commands: runs of the desk that an oracle answers are recorded
(`lessons.duckdb`), exported, imitated by one adapter for all nodes (`train` without a round), and the adapter is merged
(`export --merged`) into a Hugging Face folder, `model`. So it is no larger than the local model, and knows more.

Invariant: the lessons are other sentences than the app's tasks; the same seed, runs and passes make the same lessons.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from examples.hosted_to_local import app, orders
from examples.hosted_to_local.record import record

CONFIG = Path(__file__).with_name("teacher.toml")
NODE = "extractor"  # any: all nodes share the adapter


class OracleModel(BaseChatModel):
    """The oracle as a chat model."""

    oracle: orders.Oracle
    model_config = {"arbitrary_types_allowed": True}  # noqa: RUF012 - pydantic's own way

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        profile, text = (str(message.content) for message in messages)
        answer = AIMessage(
            self.oracle.answer(profile, text), response_metadata={"finish_reason": "stop", "model_name": "oracle"}
        )
        return ChatResult(generations=[ChatGeneration(message=answer)])

    @property
    def _llm_type(self) -> str:
        return "oracle"


def record_lessons(folder: Path, runs: int) -> Path:
    """The store with so many runs of the desk as the oracle answers it."""
    tasks = orders.lessons()[:runs]
    store = folder / "lessons.duckdb"
    done = record(app.make_graph(OracleModel(oracle=orders.Oracle(tasks))), tasks, store, run_id="lessons", in_flight=1)
    assert done.mean("correct") == 1.0, "the oracle was wrong"
    return store


def commands(folder: Path, store: Path, config: Path) -> list[list[str]]:
    """What turns the store into the model, as arguments of `marft-bridge`."""
    run, lessons = str(folder / "run"), str(folder / "lessons")
    return [
        ["traces", "export", lessons, "--store", str(store)],
        ["train", "--config", str(config), "--run", run],
        ["export", NODE, str(folder / "model"), "--config", str(config), "--run", run, "--merged"],
    ]


def write_config(folder: Path, epochs: int, model: str | None) -> Path:
    """teacher.toml with this folder's lessons and so many passes over them."""
    text = CONFIG.read_text(encoding="utf-8").replace("runs/teacher/lessons", str(folder / "lessons"))
    text = text.replace("epochs = 3", f"epochs = {epochs}")
    path = folder / "bridge.toml"
    path.write_text(text if model is None else text.replace("smollm2-135m", model), encoding="utf-8")
    return path


def make_teacher(folder: Path, *, runs: int, epochs: int, model: str | None) -> Path:
    """The model's folder. Raises CalledProcessError where a command fails, which says why itself."""
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder, epochs, model)
    for command in commands(folder, record_lessons(folder, runs), config):
        print("marft-bridge", *command, flush=True)
        subprocess.run([sys.executable, "-m", "marft_bridge", *command], check=True, env=os.environ)
    return folder / "model"


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
