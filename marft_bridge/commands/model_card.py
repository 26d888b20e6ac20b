"""What a run folder says of a trained adapter -> the model card that travels with it: README.md for the Hub.

Invariants: numbers come from the run folder's records, and a section whose records are missing is left out; no text of
a task, a prompt or an answer is in it, of a path only its last part, and of options only those that decide what is
learned; a name breaks out of no cell and no line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from marft_bridge.common.hub_names import HubName
from marft_bridge.comparison.markdown import code
from marft_bridge.comparison.numbers import counted, number, p_value, signed, signed_interval
from marft_bridge.comparison.records import Contrast, Report, Variant
from marft_bridge.comparison.wording import headline
from marft_bridge.config.bridge import SamplingOptions, TrainOptions
from marft_bridge.runs.run_folder import TRAIN, RunFolder, bridge_version

_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those that --max-lora-rank of vLLM takes
OPTIONS_OF_TRAINING = (
    *("sampling", "train.rounds", "train.episodes_per_round", "train.samples_per_task", "train.stop_early"),
    *("train.evaluation_episodes", "train.refill", "train.trees", "train.league", "train.progress"),
    *("train.teacher", "train.teacher_rounds", "train.hosted_answers", "train.max_staleness"),
    *("train.trainer.reward", "train.trainer.truncated_reward", "train.trainer.shaping", "train.trainer.granularity"),
    *("train.trainer.lora", "train.trainer.agents", "train.trainer.sides", "train.trainer.advantage"),
    *("train.trainer.objective", "train.trainer.importance", "train.trainer.optimizer", "train.trainer.offline"),
    *("train.trainer.replay", "train.trainer.system.load_in_4bit", "train.trainer.experimental"),
    "graph.limit_reward",
)
"""Options and tables that decide what is learned. A card has no others: they are of whoever trained, such as folders,
cards and where figures are sent to."""
_TAGS = ["langgraph", "lora", "marft", "multi-agent", "reinforcement-learning"]


@dataclass(frozen=True, slots=True)
class CardSubject:
    """What a card is of."""

    node: str
    version: int
    merged: bool
    base_name: str  # as adapter_config.json has it: a name of the Hub, or a relative path
    base_on_hub: HubName | None
    location: str  # where whoever reads the card finds the files: a repository of the Hub, or a folder's name
    rank: int
    license: str | None


def write_card(subject: CardSubject, folder: RunFolder, report: Report | None) -> str:
    """The text of README.md; `report` is the run folder's newest comparison."""
    config = read_training_config(folder)
    app_name = str(config.get("name") or folder.path.name)
    blocks = [
        f"# {code(subject.node)} of {code(_last_part(app_name))}, version {subject.version}",
        _summary(subject, config),
        *_tasks(config),
        *_training(subject, config),
        *_comparison(subject, report),
        "## How to load it",
        _merged_use(subject) if subject.merged else _adapter_use(subject),
    ]
    return f"---\n{_front_matter(subject)}\n---\n\n" + "\n\n".join(blocks) + "\n"


def read_training_config(folder: RunFolder) -> dict[str, Any]:
    """The configuration that `train` noted in the run folder; empty where there is none."""
    try:
        config = json.loads((folder.path / "bridge.json").read_text(encoding="utf-8"))[TRAIN]["config"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return config if isinstance(config, dict) else {}


def read_report(folder: RunFolder) -> Report | None:
    """The run folder's newest comparison; None where there is none, or none of this version."""
    try:
        return Report.model_validate_json((folder.path / "report.json").read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _front_matter(subject: CardSubject) -> str:
    from huggingface_hub import ModelCardData  # of the extra `train`, as all that exports

    base: dict[str, Any] = {}
    if subject.base_on_hub is not None:  # the Hub refuses a base model that is none of its own
        relation = "finetune" if subject.merged else "adapter"
        base = {"base_model": subject.base_on_hub.repository, "base_model_relation": relation}
    data = ModelCardData(
        library_name="transformers" if subject.merged else "peft",
        license=subject.license,
        pipeline_tag="text-generation",
        tags=_TAGS,
        **base,
    )
    return str(data.to_yaml())


def _summary(subject: CardSubject, config: Mapping[str, Any]) -> str:
    kind = "A model with a LoRA adapter merged in" if subject.merged else "A LoRA adapter"
    graph = config.get("graph") or {}
    partners = [code(name) for name in graph.get("nodes", ()) if name != subject.node]
    together = f", together with those of {', '.join(partners)}" if partners else ""
    return (
        f"{kind} for one agent of a LangGraph app: the node {code(subject.node)}, which was trained{together} by "
        f"multi-agent reinforcement learning (MARFT) with marft-bridge {bridge_version()}. "
        f"Its base model is {code(subject.base_name)}{_revision(subject)}. It was trained on this node's prompts, in "
        "the base model's chat template; what it does with others was not measured."
    )


def _revision(subject: CardSubject) -> str:
    name = subject.base_on_hub
    return "" if name is None or name.revision is None else f" at {code(name.revision)}"


def _tasks(config: Mapping[str, Any]) -> Iterator[str]:
    graph = config.get("graph") or {}
    if not graph:
        return
    yield "## Tasks"
    lines = [f"- tasks: {_value_to_text(graph['tasks'])}"]
    if graph.get("heldout") is not None:
        lines.append(f"- kept for comparison, and never learned from: {graph['heldout']:.0%} of them")
    if graph.get("reward") is not None:
        lines.append(f"- reward: the function {_value_to_text(graph['reward'])}")
    lines += [
        f"- reward {code(str(reward.get('name')))}: {code(str(reward.get('kind')))}"
        for reward in config.get("rewards") or ()
    ]
    yield "\n".join(lines)


def _training(subject: CardSubject, config: Mapping[str, Any]) -> Iterator[str]:
    train = config.get("train") or {}
    if not train:
        return
    trainer = train.get("trainer") or {}
    rounds = subject.version - 1
    fresh = f"{train.get('episodes_per_round')} fresh ones" + (
        ", or forks of as many tokens" if train.get("trees") else ""
    )
    yield "## Training"
    yield (
        f"Version {subject.version} was made from stored episodes"
        + (f" and {counted(rounds, 'round')} of {fresh}" if rounds else "")
        + f", of {train.get('rounds')} rounds that were planned. Advantages by "
        f"{code(str((trainer.get('advantage') or {}).get('estimator')))}, one action a "
        f"{'token' if trainer.get('granularity') == 'token' else 'call'}, agents updated "
        f"{'in turn' if (trainer.get('objective') or {}).get('update') == 'sequential' else 'at once'}; "
        f"the reward that counts is {code(str(trainer.get('reward')))}."
    )
    defaults: dict[str, dict[str, Any]] = {
        "train": TrainOptions().model_dump(mode="json"),
        "sampling": SamplingOptions().model_dump(mode="json"),
        "graph": {"limit_reward": None},
    }
    rows = [
        f"| {code(key)} | {_value_to_text(value)} | {_value_to_text(default)} |"
        for table, options in defaults.items()
        for key, value, default in _changed(config.get(table) or {}, options, table)
        if any(f"{key}.".startswith(f"{option}.") for option in OPTIONS_OF_TRAINING)
    ]
    if rows:
        yield "Options of training that differ from the defaults:"
        yield "\n".join(["| option | value | default |", "| --- | --- | --- |", *rows])
    else:
        yield "All options of training had their defaults."


def _changed(options: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, default) of every option that is not at its default."""
    for key, value in options.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            yield from _changed(value, default, f"{prefix}.{key}")
        elif value != default:
            yield f"{prefix}.{key}", value, default


def _value_to_text(value: Any) -> str:
    return code(json.dumps(_without_folders(value), ensure_ascii=False).strip('"'))


def _without_folders(value: Any) -> Any:
    """A value with the folders of its paths taken out, which are nobody else's business."""
    if isinstance(value, str):
        return _last_part(value)
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    return [_without_folders(part) for part in value] if isinstance(value, list) else value


def _last_part(text: str) -> str:
    return text.rstrip("/").rsplit("/", 1)[-1]


# -- the comparison -------------------------------------------------------------------------------------------


def _comparison(subject: CardSubject, report: Report | None) -> Iterator[str]:
    variants = [] if report is None else [v for v in report.candidates if _runs(v, subject)]
    if report is None or not variants:
        return
    names = {variant.name for variant in variants}
    rows = [row for row in (*report.contrasts, *report.secondary) if row.variant in names]
    yield "## Comparison"
    claims = headline(report.model_copy(update={"contrasts": tuple(r for r in report.contrasts if r in rows)}), code)
    yield (
        f"{claims} in {code(report.metric)}, on {counted(report.setup.tasks, 'held-out task')} with "
        f"{report.setup.samples_per_task} runs each and the same seeds, {report.setup.date:%d %B %Y}. A score is "
        "of the whole graph, all agents together:"
    )
    yield "\n".join(f"- {code(variant.name)}: {_team(variant)}" for variant in (report.variants[0], *variants))
    header = f"| variant | metric | {code(report.base)} | variant | change | 95% interval | p |"
    yield "\n".join([header, "| --- | --- | ---: | ---: | ---: | ---: | ---: |", *map(_contrast, rows)])
    yield "Intervals and p-values hold together for all variants, or for all other metrics of one."


def _runs(variant: Variant, subject: CardSubject) -> bool:
    is_of_this_app = variant.graph is None and variant.model is None
    return is_of_this_app and variant.adapters.get(subject.node) == subject.version


def _team(variant: Variant) -> str:
    if variant.model is not None or variant.graph is not None:
        return "another graph or model"
    trained = [code(f"{node}@{version}") for node, version in variant.adapters.items() if version]
    return f"the adapters {', '.join(trained)}" if trained else "every agent on the base model, unchanged"


def _contrast(row: Contrast) -> str:
    cells = (
        *(code(row.variant), code(row.metric), number(row.mean_a), number(row.mean_b), signed(row.diff)),
        *(signed_interval(row.simultaneous), p_value(row.p_adjusted)),
    )
    return f"| {' | '.join(cells)} |"


# -- how to load it -------------------------------------------------------------------------------------------


def _adapter_use(subject: CardSubject) -> str:
    rank = next((rank for rank in _LORA_RANKS if rank >= subject.rank), subject.rank)
    name = subject.base_on_hub
    revision = "" if name is None or name.revision is None else f", revision={name.revision!r}"
    served_revision = "" if name is None or name.revision is None else f" --revision {shlex.quote(name.revision)}"
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({subject.base_name!r}{revision})
model = PeftModel.from_pretrained(base, {subject.location!r})
```

```sh
vllm serve {shlex.quote(subject.base_name)}{served_revision} --enable-lora --max-lora-rank {rank} \\
  --lora-modules adapter={shlex.quote(subject.location)}
```"""


def _merged_use(subject: CardSubject) -> str:
    return f"""```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({subject.location!r})
```

```sh
vllm serve {shlex.quote(subject.location)}
```"""
