"""Prompts whose right answers are known -> SmolLM2-135M-Instruct that gives them, as a Hugging Face folder.

This project's own commands do it: runs that an oracle answers are recorded, exported, imitated by one adapter (`train`
without a round), and the adapter is merged (`export --merged`). Invariant: only what the oracle said is imitated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult


class OracleModel(BaseChatModel):
    """A function of system message and user message as a chat model."""

    answer: Callable[[str, str], str]

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        profile, text = (str(message.content) for message in messages)
        answer = AIMessage(
            self.answer(profile, text), response_metadata={"finish_reason": "stop", "model_name": "oracle"}
        )
        return ChatResult(generations=[ChatGeneration(message=answer)])

    @property
    def _llm_type(self) -> str:
        return "oracle"


def write_config(template: Path, folder: Path, changes: Mapping[str, str]) -> Path:
    """A configuration with other texts in it. Raises ValueError for one that it does not hold exactly once."""
    text = template.read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{template} holds {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    path = folder / "bridge.toml"
    path.write_text(text, encoding="utf-8")
    return path


def teach(folder: Path, store: Path, config: Path, *, node: str) -> Path:
    """The recorded runs of a store to a model in `folder`.

    Args:
        config: names `folder`/lessons as its traces.
        node: whose adapter is merged; where all share one, any.

    Raises:
        CalledProcessError: a command failed, which says why itself.
    """
    run, lessons, model = (str(folder / name) for name in ("run", "lessons", "model"))
    for command in (
        ["traces", "export", lessons, "--store", str(store)],
        ["train", "--config", str(config), "--run", run],
        ["export", node, model, "--config", str(config), "--run", run, "--merged"],
    ):
        print("marft-bridge", *command, flush=True)
        subprocess.run([sys.executable, "-m", "marft_bridge", *command], check=True, env=os.environ)
    return folder / "model"
