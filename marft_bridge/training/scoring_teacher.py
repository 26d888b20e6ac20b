"""`train.teacher` -> the directory of the model that scores what trained nodes say, and a line on what it said.

Invariant: every token id of every trained node's base model means to it what it means to that model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.errors import ConfigError
from marft_bridge.config.bridge import BridgeConfig
from marft_bridge.serving.base_models import BaseModelSpec, prepare_directory


def config_to_teacher(
    config: BridgeConfig, bases: Sequence[BaseModelSpec], report: Callable[[str], None]
) -> Path | None:
    """The teacher's model directory; None where `train.teacher` names none.

    Args:
        report: gets a line when something takes long.

    Raises:
        ConfigError, ServingError: there is no such model, or its tokenizer is another one.
    """
    if config.train.teacher is None:
        return None
    teacher_dir = prepare_directory(config.train.teacher, config.model, report)
    teacher_ids = _model_to_ids(teacher_dir)
    for base in bases:
        if any(node in base.nodes for node in config.graph.nodes):
            _refuse_other_ids(teacher_dir, teacher_ids, base.directory)
    return teacher_dir


def round_to_distilled_text(metrics: Mapping[str, Any]) -> str:
    """A line about how far each node is from the teacher."""
    parts = [
        f"{node} {agent['teacher_kl_before']:.3f} before, {agent['teacher_kl']:.3f} after"
        for node, agent in metrics["agents"].items()
        if agent["teacher_kl"] is not None
    ]
    return f"KL to the teacher, nats a token: {'; '.join(parts) or 'nothing was scored'}"


def _model_to_ids(model_dir: Path) -> dict[str, int]:
    """Every token of a model's tokenizer, those that were added included, with its id."""
    from transformers import AutoTokenizer

    try:
        ids: dict[str, int] = AutoTokenizer.from_pretrained(model_dir, local_files_only=True).get_vocab()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"train.teacher: cannot read the tokenizer in {model_dir}: {reason[0]}") from None
    return ids


def _refuse_other_ids(teacher_dir: Path, teacher_ids: Mapping[str, int], base_dir: Path) -> None:
    base_ids = _model_to_ids(base_dir)
    differing = sorted((token_id, token) for token, token_id in base_ids.items() if teacher_ids.get(token) != token_id)
    if differing:
        token_id, token = differing[0]
        raise ConfigError(
            f"train.teacher: {teacher_dir} has another tokenizer than {base_dir}: {len(differing)} of {len(base_ids)} "
            f"tokens have not the same id, {token!r} ({token_id}) among them; name a larger model of the same family, "
            "or leave train.teacher out"
        )
