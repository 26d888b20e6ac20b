"""A teacher's model directory and actions of a policy -> the teacher's log-probs of their decided tokens.

The teacher reads the very ids that the policy read and sampled, at the temperature that they were sampled at.
Invariants: nothing of it is trained; no forced token is scored; an id that it does not know is refused. That its ids
mean what the policy's mean is for whoever names it to check.

Shapes: _T one entry per decided token of an action.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainers.batch import ActionItem
from trainers.common.workers import Workers
from trainers.errors import TrainError
from trainers.scoring.fast_layers import speed_up
from trainers.scoring.hidden_states import hidden_at, rows_to_passes
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches
from trainers.scoring.model import Tick, check_output_layer, load_base
from trainers.scoring.packed import find_packing
from trainers.scoring.shared_prefix import can_share_prefixes
from trainers.scoring.token_logprobs import hidden_to_logprobs


class TeacherModel:
    """A frozen causal language model that scores what others sampled.

    Args:
        model_dir: a Hugging Face model directory with safetensors weights.
        device: where it computes; float32 on the CPU, bfloat16 on a card.

    Raises:
        TrainError: no such model, or an output layer that is not plain.
    """

    def __init__(self, model_dir: Path, device: torch.device) -> None:
        self.model_dir, self.device = model_dir, device
        base = load_base(model_dir, device)
        self._backbone: Any = getattr(base, base.base_model_prefix)
        self._head: Any = base.get_output_embeddings()
        check_output_layer(base, self._backbone, self._head, model_dir=model_dir)
        self.vocabulary: int = base.get_input_embeddings().num_embeddings
        self.context: int | None = getattr(base.config, "max_position_embeddings", None)  # tokens that it reads
        self._shares_prefixes = can_share_prefixes(self._backbone, device)
        speed_up(base)
        self._packing = find_packing(self._backbone, device)

    @torch.no_grad()
    def logprobs(self, items: Sequence[ActionItem], budget: int, *, workers: Workers, tick: Tick) -> list[Tensor]:
        """Its log-probs of each action's decided tokens, one tensor [T] each, on its device.

        Args:
            budget: tokens of one pass, see `rows_to_passes`.
            workers: the processes that share the work.
            tick: told how many actions each pass took.

        Raises:
            TrainError: an action holds an id that it does not know, or is longer than what it reads.
        """
        largest = max((max(*item.prompt_ids, *item.sampled_ids) for item in items), default=0)
        if largest >= self.vocabulary:
            raise TrainError(
                f"the teacher {self.model_dir} knows {self.vocabulary} token ids, and a call holds the id {largest}: "
                "name a model with the tokenizer of the model that is trained"
            )
        longest = max((len(item.input_ids) for item in items), default=0)
        if self.context is not None and longest > self.context:
            raise TrainError(
                f"the teacher {self.model_dir} reads {self.context} tokens, and a call has {longest}: name a teacher "
                "with a longer context, or shorten the calls"
            )
        scored: list[tuple[int, Tensor]] = []
        packs = self._packing is not None
        batches = items_to_microbatches(
            items, budget, None, rows_to_groups=lambda rows, size: rows_to_passes(rows, size, packs=packs)
        )
        for batch in workers.mine(batches):
            scored += zip(batch.items, torch.split(self._batch_logprobs(batch), list(batch.lengths)), strict=True)
            tick(len(batch.items))
        return workers.gather(scored, [len(item.decided) for item in items], self.device)

    def _batch_logprobs(self, batch: MicroBatch) -> Tensor:
        hidden_TH = hidden_at(
            self._backbone,
            batch.input_ids_BL,
            batch.row_T,
            column_N=batch.column_T,
            device=self.device,
            packing=self._packing,
            shares_prefixes=self._shares_prefixes,
        )
        return hidden_to_logprobs(
            hidden_TH,
            self._head.weight,
            getattr(self._head, "bias", None),
            token_T=batch.sampled_T.to(self.device),
            temperature_T=batch.temperature_T.to(self.device),
        )
