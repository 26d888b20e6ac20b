"""Rollouts on the engine against the reference design: one `transformers.generate` call per agent, batch = threads.

That is how MARFT's own code rolls out: a fixed chain of agents, one adapter each on one base model, and all episodes of
a batch in step, so that each call lasts as long as its longest answer. Written here in its best case: a batch as large
as what the engine has in flight, no second pass for log-probs, no recording.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rollout_app
from benchmarks.harness import Measurement, bench
from benchmarks.rollout_rig import IN_FLIGHT, MAX_TOKENS, TEMPERATURE, Rate, rollouts

EPISODES = 64


class Reference:
    """The base model with an adapter for each agent, in this process."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        torch.manual_seed(0)
        first, *others = adapters
        self._model: Any = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
        for agent in others:
            self._model.load_adapter(adapters[agent], adapter_name=agent)
        self._model.eval()
        self.lengths: list[int] = []  # of the answers, in tokens

    def run(self, tasks: Sequence[dict[str, Any]], batch: int) -> Rate:
        """All tasks once, `batch` at a time."""
        sampled, began = len(self.lengths), time.perf_counter()
        for start in range(0, len(tasks), batch):
            together = tasks[start : start + batch]
            questions = [task["question"] for task in together]
            facts = self._answers("reader", questions)
            self._answers("writer", [rollout_app.writer_prompt(*pair) for pair in zip(questions, facts, strict=True)])
        return Rate(sum(self.lengths[sampled:]), time.perf_counter() - began)

    def _answers(self, agent: str, prompts: Sequence[str]) -> list[str]:
        self._model.set_adapter(agent)
        chats = [
            [{"role": "system", "content": rollout_app.PROFILES[agent]}, {"role": "user", "content": prompt}]
            for prompt in prompts
        ]
        inputs = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        import torch

        end = self._tokenizer.eos_token_id
        with torch.inference_mode():
            made = self._model.generate(
                **inputs,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TOKENS,
                pad_token_id=end,
            )
        answers = []
        for row in made[:, inputs["input_ids"].shape[1] :].tolist():
            answer = row[: row.index(end) + 1] if end in row else row
            self.lengths.append(len(answer))
            answers.append(self._tokenizer.decode(answer, skip_special_tokens=True).strip())
        return answers


@bench
def rollout_vs_hf_generate(folder: Path) -> Iterator[Measurement]:
    """Sampled tokens/s of the graph path over those of the reference design. It should be 2.5 at least on two cores.

    64 episodes of two agents, 32 at a time on both sides; prompts of 40 to 400 tokens, answers that end by themselves.
    """
    with rollouts(folder, EPISODES) as graph:
        engine = graph.engine
        adapters = {node: Path(engine.registry.get(node, 1).path) for node in rollout_app.NODES}
        reference = Reference(engine.models.bases[0].directory, adapters)
        tasks = list(rollout_app.tasks())[:EPISODES]
        graph.run(fresh=True)
        while True:
            ours, theirs = graph.run(fresh=True), reference.run(tasks, IN_FLIGHT)
            yield Measurement(ours.per_s, "tok/s", theirs.per_s, ours.per_s / theirs.per_s)
