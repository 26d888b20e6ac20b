"""A model directory to policies: one frozen base in memory, LoRA adapters on it, log-probs of actions.

Invariant: base weights never change; adapter weights are float32 masters; the reference policy is the same base with
the adapters switched off. Log-probs are those of softmax(logits / T) at the temperature T that sampled the action,
so that ratios to the engine's log-probs are unbiased. Logits exist only at sampled positions, a chunk at a time.
It knows nothing of agents (an adapter has a name; who acts by it is said elsewhere), rewards, advantages or optimisers.
"""

# ruff: noqa: N803, N806 (shape suffixes)
from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from trainers.adapters import adapter_files
from trainers.common.files import weights_to_sha256
from trainers.common.free_memory import give_back_large_blocks
from trainers.config import LoraOptions
from trainers.errors import TrainError
from trainers.scoring.activation_checkpointing import recompute_layers
from trainers.scoring.adapter_switch import AdapterSwitch
from trainers.scoring.fast_layers import speed_up
from trainers.scoring.four_bit import compute_by_whole_weights, require_bitsandbytes, to_quantization_config
from trainers.scoring.hidden_states import hidden_at, rows_to_passes
from trainers.scoring.microbatch import MicroBatch, rows_to_rectangle
from trainers.scoring.packed import ON_TREE, find_packing
from trainers.scoring.sharded_base import gathered, shard_layers
from trainers.scoring.shared_prefix import can_share_prefixes
from trainers.scoring.token_logprobs import (
    hidden_to_logprobs,
    hidden_to_logprobs_and_entropy,
    hidden_to_logprobs_and_greedy,
)

Tick = Callable[[int], None]  # told how many actions or sequences have just been processed

_HEAD_TOLERANCE = 1e-2  # relative; a scaled or soft-capped output layer is off by far more


class PolicyModel:
    """The policies on one base model, and their reference.

    Args:
        model_dir: a Hugging Face causal language model with safetensors weights.
        adapters: their names, of any characters.
        device: "cpu" (float32 base) or "cuda" (bfloat16 base).
        seed: of the A matrices. Each adapter's depends on the seed and its name only; B is 0, so that an untrained
            adapter is the base model exactly.
        checkpointing: whether decoder layers compute their activations again in backward (`activation_checkpointing`).
        load_in_4bit: whether the base's linear layers are held in 4 bits (`four_bit`).
        is_sharded: whether its layers are dealt out over torch's default process group (`sharded_base`). Every process
            must then build the model, and make its passes in step with the others.

    Raises:
        TrainError: not a model directory, bitsandbytes missing, target modules that the model lacks, an output layer
            that is not plain, or layers that cannot be computed again or dealt out.
    """

    def __init__(
        self,
        model_dir: Path,
        adapters: Sequence[str],
        lora: LoraOptions,
        device: str,
        seed: int,
        checkpointing: bool = False,
        load_in_4bit: bool = False,
        is_sharded: bool = False,
    ) -> None:
        self.model_dir = model_dir
        self.adapters = tuple(adapters)
        self.lora = lora
        self.device = torch.device(device)
        if not self.adapters or len(set(self.adapters)) != len(self.adapters):
            raise TrainError(f"adapters must be one or more different names, not {list(self.adapters)}")
        self.is_sharded = is_sharded
        base = load_base(model_dir, self.device, load_in_4bit, moves=not is_sharded)
        self._backbone: Any = getattr(base, base.base_model_prefix)
        sharded = shard_layers(base, self._backbone, self.device, model_dir=model_dir) if is_sharded else []
        self._head: Any = base.get_output_embeddings()
        self.vocabulary: int = base.get_input_embeddings().num_embeddings
        check_output_layer(base, self._backbone, self._head, model_dir=model_dir)
        # A layer that is computed again would add to the cache a second time; and where layers are dealt out every pass
        # must go through them once, whatever its rows begin with.
        self._shares_prefixes = not (checkpointing or is_sharded) and can_share_prefixes(self._backbone, self.device)
        _check_targets(base, lora, model_dir)
        # peft builds module names from adapter names, which must not contain dots; node names may
        self._slots = {adapter: f"slot{i}" for i, adapter in enumerate(self.adapters)}
        self.peft = _add_adapters(base, lora, list(self._slots.values()))
        self._parameters = {adapter: self._find_parameters(slot) for adapter, slot in self._slots.items()}
        for adapter in self.adapters:
            _initialise(self._parameters[adapter], seed, adapter)
        self._switch = AdapterSwitch(
            self.peft, {slot: self._parameters[adapter].values() for adapter, slot in self._slots.items()}
        )
        self._active: str | None = None
        for layer in sharded:
            with gathered(layer):
                speed_up(layer)
        speed_up(self.peft, but=sharded)
        self.packing = find_packing(self._backbone, self.device)
        if checkpointing:
            self._recompute_layers()

    @cached_property
    def base_sha256(self) -> str:
        """SHA-256 over the base model's weight files; read once."""
        return weights_to_sha256(self.model_dir)

    @property
    def packs(self) -> bool:
        """Whether what rows begin with alike goes through the model once."""
        return self.packing is not None

    def slow_attention(self) -> str | None:
        """A line where a GPU computes this model's attention in a slow way; None where it does not."""
        if self.device.type != "cuda" or self.packing == ON_TREE:
            return None
        how = "gathers the beginning of every row" if self.packs else "computes every row whole"
        return f"attention of {self.model_dir.name} {how}: no kernel could be compiled for it on this card"

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self._head.weight.shape[1])

    def parameters(self, adapter: str) -> dict[str, torch.nn.Parameter]:
        """The LoRA matrices by their name in a plain peft file (without the adapter's name), sorted."""
        return self._parameters[adapter]

    def adapter_norm(self, adapter: str) -> float:
        """Frobenius norm of the adapter's whole weight update, sqrt(sum over modules of |alpha / r * B A|^2).

        From the r x r Gram matrices, |B A|^2 = sum((B^T B) * (A A^T)), so no full-size update is formed.
        """
        total = 0.0
        parameters = self._parameters[adapter]
        with torch.no_grad():
            for name, a in parameters.items():
                if "lora_A" in name:
                    b = parameters[name.replace("lora_A", "lora_B")]
                    total += float(((b.T @ b) * (a @ a.T)).sum())
        return float(self.lora.alpha / self.lora.rank * max(total, 0.0) ** 0.5)

    def use(self, adapter: str) -> None:
        """Switches the forward pass to an adapter; nothing to do when it is active already."""
        self._switch.use(self._slots[adapter])
        self._active = adapter

    def logprobs(self, adapter: str | None, batch: MicroBatch) -> Tensor:
        """log pi(token) of every decided token of the batch, shape [T]; `adapter` None is the reference policy.

        Differentiable with respect to the adapter, unless called under `torch.no_grad()`.
        """
        return hidden_to_logprobs(*self._head_inputs(adapter, batch))

    def logprobs_and_entropy(self, adapter: str, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `logprobs`, and the entropy of the distribution that each token was drawn from, both shape [T]."""
        return hidden_to_logprobs_and_entropy(*self._head_inputs(adapter, batch))

    def logprobs_and_greedy(self, adapter: str, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `logprobs`, without a gradient, and whether greedy decoding would take each token, both shape [T]."""
        with torch.no_grad():
            return hidden_to_logprobs_and_greedy(*self._head_inputs(adapter, batch))

    def logprobs_and_features(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `logprobs` by the reference policy, and the hidden states that it read: `features_at` those columns."""
        inputs = self._head_inputs(None, batch)
        return hidden_to_logprobs(*inputs), inputs[0].float().cpu()

    def idle_pass(self, adapter: str | None, *, backwards: int = 0) -> Tensor:
        """A pass over one token, for a process that has none of its own while others go through a base's layers.

        Where layers are not dealt out nobody waits for it, and nothing is computed.

        Args:
            backwards: how many backward passes the others make of theirs at once.

        Returns:
            What `idle_backward` goes back from.
        """
        if not self.is_sharded:
            return torch.zeros((), device=self.device)
        first = torch.tensor([0])
        idle = self._hidden_at(adapter, torch.tensor([[0]]), first, column_N=first).sum()
        for _ in range(backwards):
            self.idle_backward(idle, adapter)
        return idle

    def idle_backward(self, idle: Tensor, adapter: str | None) -> None:
        """The backward pass of an `idle_pass`; its gradients go nowhere."""
        if self.is_sharded and adapter is not None:
            torch.autograd.grad(idle, list(self._parameters[adapter].values()), retain_graph=True)

    def word_counts(self, sequences: Sequence[tuple[int, ...]]) -> list[int]:
        """How many words, split at white space, the text of each token sequence has; at least 1.

        Raises:
            TrainError: the model directory has no tokenizer.
        """
        return [max(1, len(self._tokenizer.decode(ids).split())) for ids in sequences]

    def features(self, sequences: Sequence[tuple[int, ...]], budget: int, tick: Tick | None = None) -> Tensor:
        """Token sequences to the base model's last hidden state (after the final norm) at their last token.

        For a prompt this is what the critic sees of a rollout observation (paper, section 4.2.1). Shape [N, H],
        float32 on the CPU. `budget`: see `rows_to_groups`; `tick` is told how many sequences each pass took.
        """
        last = [range(len(sequence) - 1, len(sequence)) for sequence in sequences]
        return torch.cat([torch.empty(0, self.width), *self.features_at(sequences, last, budget, tick=tick)])

    @torch.no_grad()
    def features_at(
        self,
        sequences: Sequence[tuple[int, ...]],
        columns: Sequence[Sequence[int]],
        budget: int,
        tick: Tick | None = None,
    ) -> list[Tensor]:
        """Token sequences to the base model's last hidden states at some columns of each.

        Column c has seen the tokens 0..c, so it is what a critic sees before token c + 1 is sampled.

        Args:
            sequences: N sequences of token ids.
            columns: for each, one or more columns that it has.
            budget: tokens per pass, see `rows_to_groups`.
            tick: told how many sequences each pass took.

        Returns:
            N tensors [columns, H], float32 on the CPU.
        """
        result = [torch.empty(0)] * len(sequences)
        for group in self.rows_to_groups(sequences, budget):
            features = self.features_in_one_pass([sequences[i] for i in group], [columns[i] for i in group])
            for i, hidden_CH in zip(group, features, strict=True):
                result[i] = hidden_CH
            if tick is not None:
                tick(len(group))
        return result

    @torch.no_grad()
    def features_in_one_pass(
        self, sequences: Sequence[tuple[int, ...]], columns: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """As `features_at`, of sequences that are together one of the groups of `rows_to_groups`."""
        counts_B = torch.tensor([len(part) for part in columns])
        row_N = torch.repeat_interleave(torch.arange(len(sequences)), counts_B)
        column_N = torch.tensor([column for part in columns for column in part])
        hidden_NH = self._hidden_at(None, rows_to_rectangle(sequences), row_N, column_N=column_N).float().cpu()
        return list(torch.split(hidden_NH, counts_B.tolist()))

    def rows_to_groups(self, rows: Sequence[tuple[int, ...]], budget: int) -> list[list[int]]:
        """Token rows to groups of their positions that each fit into one pass of `budget` tokens.

        Distinct tokens where rows are packed; else those of the padded rectangle.
        """
        return rows_to_passes(rows, budget, packs=self.packs)

    def save_adapter(self, adapter: str, folder: Path) -> None:
        """Writes an adapter as a plain peft folder, whole or not at all; an existing one is replaced."""
        adapter_files.write(
            folder, self._parameters[adapter], self.lora, model_dir=self.model_dir, base_sha256=self.base_sha256
        )

    def load_adapter(self, adapter: str, folder: Path) -> None:
        """Reads an adapter folder into an adapter's weights.

        Raises:
            TrainError: not an adapter, or one for another base model, shape or set of target modules.
        """
        adapter_files.read_into(
            folder, self._parameters[adapter], self.lora, model_dir=self.model_dir, base_sha256=self.base_sha256
        )

    def _head_inputs(
        self, adapter: str | None, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        return (
            self._hidden_at(adapter, batch.input_ids_BL, batch.row_T, column_N=batch.column_T),
            self._head.weight,
            getattr(self._head, "bias", None),
            batch.sampled_T.to(self.device),
            batch.temperature_T.to(self.device),
        )

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise TrainError(f"logprob_norm 'word' needs a tokenizer in {self.model_dir}: {reason[0]}") from None

    def _hidden_at(self, adapter: str | None, input_ids_BL: Tensor, row_N: Tensor, column_N: Tensor) -> Tensor:
        """Last hidden states at the given positions, shape [N, H].

        What rows begin with alike, such as a node's profile, goes through the model once; gradients flow back through
        it, so the result is that of the plain pass. Architectures whose rows cannot be packed share the beginning
        that all rows have, if they can do that.
        """
        if adapter is not None:
            self.use(adapter)
        with self._switch.off() if adapter is None else nullcontext():
            return hidden_at(
                self._backbone,
                input_ids_BL,
                row_N,
                column_N=column_N,
                device=self.device,
                packing=self.packing,
                shares_prefixes=self._shares_prefixes,
            )

    def _recompute_layers(self) -> None:
        if self.device.type == "cpu":
            give_back_large_blocks()  # else most of what is saved would stay with this process as holes
        first = self.adapters[0]
        trial_BL = rows_to_rectangle([(1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 5, 4, 3), (1, 2, 0)])
        row_N, column_N = torch.tensor([0, 1, 2]), torch.tensor([4, 7, 2])
        recompute_layers(
            self._backbone,
            adapter=lambda: self._active,
            hidden=lambda: self._hidden_at(first, trial_BL, row_N, column_N=column_N),
            parameters=list(self._parameters[first].values()),
            model_dir=self.model_dir,
        )

    def _find_parameters(self, slot: str) -> dict[str, torch.nn.Parameter]:
        marker = f".{slot}."
        parameter_by_name = {
            n.replace(marker, "."): p for n, p in self.peft.named_parameters() if "lora_" in n and marker in n
        }
        return dict(sorted(parameter_by_name.items()))


def base_dtype(device: torch.device) -> torch.dtype:
    """What the frozen weights are held in: bfloat16 where it is computed with at full speed, so not on the CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def load_base(model_dir: Path, device: torch.device, load_in_4bit: bool = False, *, moves: bool = True) -> Any:
    """The frozen weights of a model directory on a device, in `base_dtype` or its linear layers in 4 bits.

    Args:
        moves: whether they go to the device; else they stay in main memory, where weights that the files hold in
            the device's type are pages of these files.

    Raises:
        TrainError: not a causal language model, or bitsandbytes missing.
    """
    if not (model_dir / "config.json").is_file():
        raise TrainError(f"{model_dir} is not a Hugging Face model directory (it has no config.json)")
    dtype = base_dtype(device)
    how: dict[str, Any] = {}
    if load_in_4bit:  # each weight is quantised on the device as it comes from the file, so that none is there whole
        require_bitsandbytes()
        how = {"quantization_config": to_quantization_config(dtype), "device_map": {"": device}}
    shows_bars = transformers_logging.is_progress_bar_enabled()
    # a library does not draw on its caller's terminal
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True, **how
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainError(f"{model_dir} cannot be loaded as a causal language model: {reason[0]}") from None
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    base, report = loaded
    if report["missing_keys"]:
        raise TrainError(f"{model_dir} lacks weights, for example {sorted(report['missing_keys'])[0]}: save it again")
    if load_in_4bit:
        compute_by_whole_weights(base)
    elif moves:
        base.to(device)
    return base.requires_grad_(False).eval()


@torch.no_grad()
def check_output_layer(base: Any, backbone: Any, head: Any, model_dir: Path) -> None:
    """Refuses models whose logits are not head(hidden), which we compute at sampled positions only.

    Raises:
        TrainError: names the directory.
    """
    if backbone is base or head is None or not hasattr(head, "weight"):
        raise TrainError(f"{model_dir} has no separate backbone and output layer; this architecture is not supported")
    probe = torch.tensor([[0, 1, 2, 3]], device=head.weight.device) % len(head.weight)
    expected = base(input_ids=probe, use_cache=False).logits.float()
    ours = head(backbone(input_ids=probe, use_cache=False)[0]).float()
    if float((expected - ours).abs().max()) > _HEAD_TOLERANCE * float(expected.abs().max()):
        raise TrainError(f"{model_dir} scales or caps its logits after the output layer; this is not supported")


def _check_targets(base: Any, lora: LoraOptions, model_dir: Path) -> None:
    output = base.get_output_embeddings()
    names = {name.rpartition(".")[2]: m for name, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
    for target in lora.target_modules:
        if names.get(target) is output:
            raise TrainError(f"lora.target_modules: {target!r} is the output layer, which stays frozen; remove it")
        if target not in names:
            layer_names = ", ".join(sorted(name for name, module in names.items() if module is not output))
            raise TrainError(f"lora.target_modules: {model_dir} has no linear layer {target!r}; it has {layer_names}")


def _add_adapters(base: Any, lora: LoraOptions, slots: Sequence[str]) -> PeftModel:
    devices = [base.device] if base.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):  # peft draws from the global generator; `_initialise` overwrites it
        peft = get_peft_model(base, adapter_files.lora_config(lora), adapter_name=slots[0])
        for slot in slots[1:]:
            peft.add_adapter(slot, adapter_files.lora_config(lora))
    assert isinstance(peft, PeftModel)
    return peft.eval()


def _initialise(parameters: dict[str, torch.nn.Parameter], seed: int, adapter: str) -> None:
    """A from peft's default distribution (Kaiming uniform, a = sqrt 5), drawn on the CPU; B = 0."""
    digest = hashlib.sha256(f"{seed}:{adapter}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_A" in name:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.zero_()
