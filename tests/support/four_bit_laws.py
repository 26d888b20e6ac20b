"""What the process of tests/trainers/scoring/test_four_bit.py runs, where bitsandbytes is: one function per law.

python -m support.four_bit_laws FOLDER      prints {law: what was seen} as its last line
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from support.chat_rig import save_chat_tokenizer
from support.four_bit_base import save_dequantised
from support.saved_storages import saved_storages
from support.shared_update import NAME, UPDATES, leaves, updates
from support.snippets import snippets
from support.tiny_policy import AGENTS, both_low, play, save_tiny_llama
from support.trainer_options import trainer_options
from support.workers_rig import in_processes
from trace_store.records import Trajectory
from trainers import checkpoint
from trainers.batch import ActionItem
from trainers.checks.memory_plan import Base, Calls, model_to_shape, plan_memory
from trainers.common.workers import Workers
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.marft import MarftTrainer
from trainers.scoring.four_bit import scales
from trainers.scoring.microbatch import MicroBatch, items_to_microbatches
from trainers.scoring.model import PolicyModel

LORA = LoraOptions(rank=4, target_modules=("q_proj", "v_proj", "down_proj"))
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 20, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# NF4 as in the appendix E of the QLoRA paper (arXiv:2305.14314).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def save(folder: Path, kind: str) -> Path:
    """A random model of 20 layers, where queries are as wide as hidden states (Llama) or not (Qwen3)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if kind == "llama with biases":
            model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, initializer_range=0.2))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, initializer_range=0.2))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
        model.save_pretrained(folder)
    return folder


def batch_of(model: PolicyModel) -> MicroBatch:
    rows = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0)).tolist()
    items = [ActionItem("a", tuple(row[:-8]), tuple(row[-8:]), None, 0.7) for row in rows]
    (batch,) = items_to_microbatches(items, 4096, None, model.rows_to_groups)
    return batch


def policy(model_dir: Path, **options: Any) -> PolicyModel:
    """Two adapters, neither of which is 0."""
    model = PolicyModel(model_dir, AGENTS, LORA, "cpu", 0, **options)
    for agent in AGENTS:
        generator = torch.Generator().manual_seed(len(agent))
        with torch.no_grad():
            for parameter in model.parameters(agent).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def pass_of(model: PolicyModel) -> dict[str, Tensor]:
    """Log-probs by both adapters and the base, its hidden states, and the gradients of one adapter."""
    batch = batch_of(model)
    seen = {agent: model.logprobs(agent, batch) for agent in reversed(AGENTS)}  # the last is the active one
    seen["reasoner"].square().sum().backward()
    gradients = {name: p.grad for name, p in model.parameters("reasoner").items()}
    reference, hidden = model.logprobs_and_features(batch)
    return {**{k: v.detach() for k, v in seen.items()}, "base": reference, "hidden": hidden, **gradients}  # type: ignore[dict-item]


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, as a share of that tensor's largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max() / other[k].abs().max()) for k in one)


def equals_whole_weights(folder: Path) -> dict[str, Any]:
    seen = {}
    for kind in ("llama with biases", "qwen3"):
        plain_dir = save(folder / kind, kind)
        whole_dir, paths = save_dequantised(plain_dir, folder / f"{kind} whole")
        expected = pass_of(policy(whole_dir))
        computed = policy(plain_dir, load_in_4bit=True)
        base = computed.peft.get_base_model()
        unquantised = {
            "embedding": base.get_input_embeddings().weight,
            "head": base.get_output_embeddings().weight,
            "norm": base.model.layers[0].input_layernorm.weight,
            **{f"adapter {name}": p for name, p in computed.parameters("actor").items()},
        }
        recomputed = pass_of(policy(plain_dir, load_in_4bit=True, checkpointing=True))
        seen[kind] = {
            "packs": computed.packs,
            "gap": gap(pass_of(computed), expected),
            "gap_computed_again": gap(recomputed, expected),
            "gap_of_plain_base": gap(pass_of(policy(plain_dir)), expected),
            "layers": len(paths),
            "kept": sorted({str(tensor.dtype) for tensor in unquantised.values()}),
            "same_base": computed.base_sha256 == policy(plain_dir).base_sha256,
        }
    return seen


def bits_by_hand(folder: Path) -> float:
    """A weight from its bits by the paper's table; the largest difference to what the pass multiplies with."""
    from trainers.scoring.four_bit import four_bit_layers, to_weight

    model = PolicyModel(save_tiny_llama(folder / "bits", hidden=192), ["a"], LORA, "cpu", 0, load_in_4bit=True)
    largest = 0.0
    for layer in four_bit_layers(model.peft):
        state = layer.weight.quant_state
        codes = torch.stack([layer.weight.data.flatten() >> 4, layer.weight.data.flatten() & 15], 1).flatten().long()
        blocks = state.state2.absmax.repeat_interleave(256)[: len(state.absmax)]
        scale = state.state2.code[state.absmax.long()] * blocks + state.offset
        by_hand = torch.tensor(NF4)[codes] * scale.repeat_interleave(64)[: len(codes)]
        largest = max(largest, float((by_hand.view(state.shape) - to_weight(layer)).abs().max()))
    return largest


def memory(folder: Path) -> dict[str, float]:
    """Held over planned: the base's bytes, and what a pass keeps for backward."""
    plain_dir = save(folder / "memory", "qwen3")
    model = policy(plain_dir, load_in_4bit=True)
    weights = [p for name, p in model.peft.named_parameters() if "lora_" not in name]
    held_scales = [t for name, t in scales(model.peft).items() if not name.endswith("offset")]
    batch = batch_of(model)
    with saved_storages([*model.peft.parameters(), *held_scales]) as held:
        loss = model.logprobs("actor", batch).sum()  # keeps the graph alive, so that no storage is used twice
    assert loss.requires_grad
    options = trainer_options(lora=LORA, load_in_4bit=True, tokens_per_microbatch=4 * 32)
    shape = model_to_shape(plain_dir, LORA)
    assert shape is not None
    plan = plan_memory(options, [Base(shape, 1)], Calls(longest=32), "cpu", leaves_holes=False)
    return {
        "weights": sum(t.nbytes for t in (*weights, *held_scales)) / plan.weights,
        "activations": sum(held.values()) / plan.activations,
        "of_float32": plan.weights / (4 * shape.weights),
    }


def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """Every way to update, on the bits and on the weights that they stand for."""
    model = save_tiny_llama(folder / "ways" / "plain", hidden=64)
    dequantised, _ = save_dequantised(model, folder / "ways" / "whole")
    save_tiny_llama(folder / "ways" / "teacher", seed=7)
    fixed = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.005, "kl_stop": None}

    def run_on(folder: Path, **own: Any) -> dict[str, Any]:
        options = {name: (what, 7, fixed | fields | own) for name, (what, fields) in UPDATES.items()}
        return updates(Workers.alone(), {"model": str(folder), "options": options})

    expected, computed, plain = run_on(dequantised), run_on(model, load_in_4bit=True), run_on(model)

    def values(results: dict[str, Any], name: str) -> Tensor:
        return torch.tensor([x for part in ("values", "critics") for row in results[name][part] for x in row])

    return {
        name: {
            "gap": float((values(computed, name) - values(expected, name)).abs().max()),
            "gap_of_plain_base": float((values(plain, name) - values(expected, name)).abs().max()),
            "same": torch.allclose(values(computed, name), values(expected, name), atol=1e-4, rtol=1e-3)
            and leaves(computed[name]["metrics"]).keys() == leaves(expected[name]["metrics"]).keys()
            and computed[name]["order"] == expected[name]["order"],
        }
        for name in UPDATES
    }


def trainer_of(model: Path, seed: int = 0, **fields: Any) -> MarftTrainer:
    options = {"device": "cpu", "lr": 0.02, "engine_tolerance": 9.0, "load_in_4bit": True} | fields
    return MarftTrainer(trainer_options(**options), model, AGENTS, seed)


def games_of(trainer: MarftTrainer, seed: int = 0) -> list[Trajectory]:
    return play(trainer, 12, torch.Generator().manual_seed(seed), both_low)


def weights_of(trainer: MarftTrainer) -> list[list[float]]:
    return [p.flatten().tolist() for agent in AGENTS for p in trainer.policies.parameters(agent).values()]


def resume(folder: Path) -> dict[str, Any]:
    """A saved and loaded trainer against the one that was not; and its adapter, read by a plain trainer."""
    model = save_tiny_llama(folder / "resume", hidden=64)
    games = [games_of(trainer_of(model), seed) for seed in range(2)]
    original, loaded = trainer_of(model), trainer_of(model, seed=99)
    original.update(games[0])
    checkpoint.save(original, folder / "checkpoint")
    checkpoint.load(loaded, folder / "checkpoint")
    for one in (original, loaded):
        one.update(games[1])
    original.policies.check_frozen()
    plain = trainer_of(model, seed=99, load_in_4bit=False)
    for agent in AGENTS:
        original.policies.save_adapter(agent, folder / "adapters" / agent)
        plain.policies.load_adapter(agent, folder / "adapters" / agent)
    config = json.loads((folder / "adapters" / AGENTS[0] / "adapter_config.json").read_text())
    return {
        "resumed": weights_of(original) == weights_of(loaded),
        "adapter": weights_of(original) == weights_of(plain),
        "quantised": [key for key in config if "quant" in key and config[key]],
    }


def changed_scale(folder: Path) -> str | None:
    """What is said where one scale of a frozen weight has changed."""
    trainer = trainer_of(save_tiny_llama(folder / "scale", hidden=64))
    trainer.policies.check_frozen()
    state = scales(trainer.policies.model.peft)
    next(iter(state.values()))[3] += 1
    return said_by(trainer.policies.check_frozen)


def engines(folder: Path) -> dict[str, Any]:
    """What an update says to actions that the plain base sampled, and to those of the dequantised one."""
    model = save_tiny_llama(folder / "engines" / "plain", hidden=64)
    dequantised, _ = save_dequantised(model, folder / "engines" / "whole")
    plain_games = games_of(trainer_of(model, load_in_4bit=False))
    same_games = games_of(trainer_of(dequantised, load_in_4bit=False))
    metrics = trainer_of(model).update(plain_games)
    engine: dict[str, Any] = {"proximal": "engine", "mismatch": "none"}
    return {
        "gap": [agent["engine_logprob_gap"] for agent in metrics["agents"].values()],
        "corrected": said_by(lambda: trainer_of(model, mismatch="truncate").update(plain_games)),
        "far": said_by(lambda: trainer_of(model, engine_tolerance=0.01).update(plain_games)),
        "uncorrected": said_by(lambda: trainer_of(model, mismatch="none").update(plain_games)),
        "not quantised": said_by(lambda: trainer_of(model, mismatch="none", load_in_4bit=False).update(plain_games)),
        "engine": said_by(lambda: trainer_of(model, **engine).update(plain_games)),
        "same": said_by(lambda: trainer_of(model, mismatch="none").update(same_games)),
        "same, engine": said_by(lambda: trainer_of(model, **engine).update(same_games)),
    }


def processes(folder: Path) -> dict[str, Any]:
    """The update of two learners against that of one."""
    model = save_tiny_llama(folder / "processes", hidden=64)
    fixed = {"device": "cpu", "tokens_per_microbatch": 64, "lr": 0.02, "threads": 1, "load_in_4bit": True}
    argument = {"model": str(model), "options": {"action": ("update", 7, fixed | {"kl_stop": None})}}
    ended = {}
    for count in (1, 2):
        (folder / str(count)).mkdir()
        ended[count] = [
            one["action"]["values"] for one in in_processes(count, [NAME], folder / str(count), argument)[NAME]
        ]
    (alone,), (first, second) = ended[1], ended[2]
    pairs = zip(alone, first, strict=True)
    return {
        "equal": first == second,
        "gap": max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs),
    }


def page(folder: Path) -> dict[str, Any]:
    """The Python of docs/gpus.md, run as it stands but for its folders; what it writes against that in 4 bits."""
    (text,) = [found.text for found in snippets() if found.page == "docs/gpus.md" and found.kind == "python"]
    assert text.count('"models/large"') == text.count('"models/large-nf4"') == 1
    model = save_chat_tokenizer(save_tiny_llama(folder / "page", vocabulary=340, hidden=64))
    dequantised = folder / "nf4"
    exec(text.replace('"models/large"', repr(str(model))).replace('"models/large-nf4"', repr(str(dequantised))), {})  # noqa: S102
    return {
        "gap": gap(pass_of(policy(dequantised)), pass_of(policy(dequantised, load_in_4bit=True))),
        "gap_of_plain_base": gap(pass_of(policy(model)), pass_of(policy(dequantised, load_in_4bit=True))),
        "files": sorted(path.name for path in dequantised.iterdir()),
    }


def uneven_width(folder: Path) -> str | None:
    """What is said of a layer whose rows are cut by blocks."""
    model = save_tiny_llama(folder / "uneven", hidden=96)
    return said_by(lambda: PolicyModel(model, ["a"], LORA, "cpu", 0, load_in_4bit=True))


def said_by(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except TrainError as error:
        return str(error)
    return None


LAWS = (equals_whole_weights, bits_by_hand, memory, ways, resume, changed_scale, engines, processes, page, uneven_width)


def main(folder: Path) -> None:
    seen = {}
    for law in LAWS:
        (folder / law.__name__).mkdir()
        seen[law.__name__] = law(folder / law.__name__)
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
