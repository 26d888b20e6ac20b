"""The trainer's optimiser step against that of TRL's GRPOTrainer on the same actions.

TRL gets the recorded completions where it would have sampled some, and everything that makes it faster here: float32
(bfloat16 is its default), no gradient checkpointing (on by default), no KL term, so no second model. Its loss is set to
that of the trainer's defaults: GRPO with ratios per sequence, which is MARFT-A with normalised log-probs. The norms
of both gradients must agree. TRL is installed at the first run, into a folder of its own, from requirements/bench.txt.
"""

# ruff: noqa: N806 (shape suffixes)
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Measurement, bench
from benchmarks.train_step import REPEATS, model_folder
from marft_bridge.common.errors import ServingError

if TYPE_CHECKING:
    from benchmarks.train_work import Work
    from trainers.scoring.model import PolicyModel

PINS = Path(__file__).resolve().parents[2] / "requirements" / "bench.txt"
PER_STEP = 11  # rows of one pass; twice that is the batch


def install_trl() -> None:
    """Puts TRL and what it needs on the path, behind what is installed; installed once for these pins."""
    digest = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    target = Path(os.environ.get("MARFT_CACHE") or ".cache") / f"bench-{digest}"
    if not target.exists():
        fresh = target.with_name(f".{target.name}")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "--target",
            str(fresh),
            "-r",
            str(PINS),
        ]
        if subprocess.run(command, check=False).returncode != 0:
            raise ServingError(
                f"TRL could not be installed: pip install --no-deps --require-hashes -r {PINS.name} says why"
            )
        fresh.rename(target)
    if str(target) not in sys.path:
        sys.path.append(str(target))


class TrlUpdate:
    """GRPOTrainer, fed with recorded completions; one adapter, since it knows one."""

    def __init__(self, model_dir: Path, work: Work, weights: PolicyModel, folder: Path) -> None:
        install_trl()
        import torch
        from datasets import Dataset  # type: ignore[import-not-found]
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

        from benchmarks.train_work import OPTIONS, TEMPERATURE, advantages

        class Fed(GRPOTrainer):  # type: ignore[misc]
            """Takes a finished batch where prompts would come in and completions be sampled."""

            def _prepare_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
                return batch

        lora = OPTIONS.lora
        config = GRPOConfig(
            str(folder), per_device_train_batch_size=PER_STEP, gradient_accumulation_steps=2, num_generations=2,
            max_completion_length=24, temperature=TEMPERATURE, beta=0.0, loss_type="grpo",
            importance_sampling_level="sequence", epsilon=OPTIONS.clip_low, epsilon_high=OPTIONS.clip_high,
            learning_rate=0.0, max_grad_norm=OPTIONS.max_grad_norm, bf16=False, use_cpu=True,
            gradient_checkpointing=False, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        self.trainer = Fed(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True),
            reward_funcs=lambda **_: [],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "-"}] * (2 * PER_STEP)),
            processing_class=AutoTokenizer.from_pretrained(model_dir, local_files_only=True),
            peft_config=LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
            ),
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 2
        self.weights = weights
        named = self.trainer.model.named_parameters()
        self.parameters = {n.replace(".default.", "."): p for n, p in named if ".default." in n}
        self.batches = {
            agent: [
                self._batch(items[first : first + PER_STEP], advantages(len(items))[first : first + PER_STEP])
                for first in range(0, len(items), PER_STEP)
            ]
            for agent, items in work.items()
        }

    @staticmethod
    def _batch(items: list[Any], values: list[float]) -> dict[str, Any]:
        """As TRL's own: prompts padded on the left, completions on the right."""
        import torch

        def padded(rows: list[tuple[int, ...]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
            longest = max(len(row) for row in rows)
            ids_BL, mask_BL = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
            for i, row in enumerate(rows):
                place = slice(longest - len(row), None) if left else slice(len(row))
                ids_BL[i, place], mask_BL[i, place] = torch.tensor(row), 1
            return ids_BL, mask_BL

        prompt_ids, prompt_mask = padded([item.prompt_ids for item in items], True)
        completion_ids, completion_mask = padded([item.sampled_ids for item in items], False)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor(values),
            "num_items_in_batch": completion_mask.sum(),
        }

    def step(self) -> dict[str, float]:
        """One optimiser step for every agent's actions; the norms of their gradients."""
        import torch

        norms = {}
        trainer, parameters = self.trainer, list(self.parameters.values())
        trainer.model.train()
        for agent, batches in self.batches.items():
            with torch.no_grad():
                for name, parameter in self.weights.parameters(agent).items():
                    self.parameters[name].copy_(parameter)
            for batch in batches:
                trainer.training_step(trainer.model, batch, None)
            norms[agent] = float(torch.nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm))
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        return norms


@bench
def train_vs_trl(folder: Path) -> Iterator[Measurement]:
    """Sampled tokens a second over those of TRL's GRPOTrainer on the demo's batches; should be at least 2."""
    from benchmarks.train_work import OurUpdate, demo_work, sampled_tokens

    work = demo_work()
    ours = OurUpdate(model_folder(), work)
    theirs = TrlUpdate(model_folder(), work, ours.model, folder)
    expected, found = theirs.step(), ours.step()
    for agent, norm in expected.items():
        assert abs(found[agent] - norm) <= 1e-3 * norm, f"{agent}: gradient norm {found[agent]}, TRL's {norm}"
    while True:
        times: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            for update, seconds in zip((ours, theirs), times, strict=True):
                began = time.perf_counter()
                update.step()
                seconds.append(time.perf_counter() - began)
        mine, other = (sampled_tokens(work) / median(seconds) for seconds in times)
        yield Measurement(mine, "tok/s", other, mine / other)
