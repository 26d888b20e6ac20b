"""A model's config.json and training options -> the bytes that training will take, by part, before anything is loaded.

Counted layer by layer from what our code and autograd keep of a pass (`fast_layers.py`): a norm keeps its input, an
adapter its input and R numbers, attention its query, keys, values and output, a gated block gate and up; frozen layers
keep nothing, and who sees whom is kept once for all layers. Numbers are float32 on the CPU and bfloat16 on a GPU.

Invariant: an architecture whose layers are not made of these parts has no estimate (None), never a guess. It knows
nothing of what is free, nor of what to do about it.

Sizes are numbers per position: H width, I inner width of the gated block, R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainers.common.byte_text import bytes_to_text
from trainers.config import LoraOptions, TrainerOptions
from trainers.scoring.activation_checkpointing import decoder_layers
from trainers.scoring.prefix_tree import RECTANGLE
from trainers.scoring.token_logprobs import CHUNK_ELEMENTS

# Linear layers of a decoder layer, by what they read.
_READS = {
    "q_proj": "normed",
    "k_proj": "normed",
    "v_proj": "normed",
    "o_proj": "attended",
    "gate_proj": "normed again",
    "up_proj": "normed again",
    "down_proj": "gated",
}
_BLOCK, _BLOCK_OF_SCALES = 64, 256  # of NF4 with double quantisation: numbers of one scale, and scales of one scale
# Sharded layers that are whole at a time: the one that is computed, the next one, and the message that it came in.
_WHOLE_LAYERS = 3
_RUNTIME = {"cpu": 64 * 2**20, "cuda": 128 * 2**20}  # classes of the model, buffers of threads, workspaces of libraries


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer, in numbers per position."""

    normed: int  # what norms read, and one number for each row of it
    read: int  # what adapted layers read; several that read the same count it once, attention's output is kept anyway
    low: int  # R for each adapted layer
    query: int
    keys: int  # keys and values
    heads: int  # how many, of the query
    inner: int
    plain_silu: bool  # a gated block whose activation is recomputed from its input
    adapter: int  # numbers of an adapter's matrices here
    linear: tuple[int, ...]  # numbers of each linear layer's weight, which `load_in_4bit` quantises


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A base model as config.json tells it."""

    weights: int  # how many; tied ones once
    vocabulary: int
    width: int
    layers: tuple[LayerShape, ...]

    @property
    def adapter(self) -> int:
        """How many numbers the matrices of one adapter hold."""
        return sum(layer.adapter for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Base:
    """A base model with the adapters on it."""

    shape: ModelShape
    trained: int
    frozen: int = 0


@dataclass(frozen=True, slots=True)
class Calls:
    """What is known of the calls to learn from; before there are any, nothing."""

    longest: int = 0  # tokens
    observed: int = 0  # positions whose features the critics see at a time


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one training process, by part."""

    weights: int  # of the base models
    adapters: int  # with their gradients and AdamW's moments
    runtime: int
    activations: int  # kept for backward by one micro-batch
    holes: int  # between them, in the heap of this process
    scratch: int  # the largest that is needed beside them at a time: logits, attention, gradients of a layer
    features: int  # of the critics; in host memory

    @property
    def total(self) -> int:
        """All of it."""
        return self.loaded + self.activations + self.holes + self.scratch + self.features

    @property
    def loaded(self) -> int:
        """What is taken once the models are loaded."""
        return self.weights + self.adapters + self.runtime

    def __str__(self) -> str:
        parts = {
            "base model": self.weights,
            "adapters": self.adapters,
            "activations": self.activations,
            "holes between them": self.holes,
            "features": self.features,
            "the rest": self.runtime + self.scratch,
        }
        return ", ".join(f"{name} {bytes_to_text(size)}" for name, size in parts.items() if size)


def plan_memory(
    options: TrainerOptions,
    bases: Sequence[Base],
    calls: Calls,
    device: str,
    leaves_holes: bool,
    *,
    learners: int = 1,
) -> MemoryPlan:
    """What one process takes that trains these adapters; each base model is in memory, and one pass at a time.

    Args:
        device: "cpu" (float32 base) or "cuda" (bfloat16 base).
        leaves_holes: see `trainers.common.free_memory`; layers that are computed again leave none.
        learners: processes over which `system.shard_base` deals layers out.
    """
    size = _number_bytes(device)
    positions = max(options.system.tokens_per_microbatch, calls.longest)
    observed = calls.observed if options.uses_critic else 0
    activations = positions * (
        max(_count_kept_bytes(base.shape, options, size) for base in bases) + size * calls.longest
    )
    holes = device == "cpu" and leaves_holes and not options.system.activation_checkpointing
    return MemoryPlan(
        weights=sum(_base_to_bytes(base.shape, options, size, learners=learners) for base in bases),
        # weight, gradient and two moments in float32; a frozen one has its weight only
        adapters=4 * sum((4 * base.trained + base.frozen) * base.shape.adapter for base in bases),
        runtime=_RUNTIME[device],
        activations=activations,
        holes=activations if holes else 0,  # measured: 0.8 to 1.1 times
        scratch=max(
            _scratch(base.shape, options, positions, longest=calls.longest, size=size)
            + (largest_whole_weight(base.shape, size) if options.system.load_in_4bit else 0)
            + (_WHOLE_LAYERS * size * _largest_layer(base.shape) if options.system.shard_base else 0)
            for base in bases
        ),
        # once in the cache of the round, once laid end to end for a critic
        features=8 * observed * max(base.shape.width for base in bases),
    )


def _count_kept_bytes(shape: ModelShape, options: TrainerOptions, size: int) -> int:
    """Bytes for each position that wait for backward when a pass has reached the last layer."""
    layer_bytes = [_count_kept_bytes_of_layer(layer, size) for layer in shape.layers]
    end = size * (shape.width + 1)  # the last norm
    if options.system.activation_checkpointing:
        return end + size * shape.width * len(layer_bytes) + max(layer_bytes)
    return end + sum(layer_bytes)


def _count_kept_bytes_of_layer(layer: LayerShape, size: int) -> int:
    inner = 2 * layer.inner if layer.plain_silu else 3 * layer.inner
    attention = 2 * layer.query + layer.keys  # with its output, and the float32 sums that backward needs
    return size * (layer.normed + layer.read + layer.low + attention + inner) + 4 * layer.heads


def _scratch(shape: ModelShape, options: TrainerOptions, positions: int, longest: int, size: int) -> int:
    """The larger of what logits take at the end of forward, and what the last layer's gradients take after them."""
    rows = min(positions, max(1, CHUNK_ELEMENTS // shape.vocabulary))
    copies = 3 if options.experimental.entropy_coef > 0 else 2
    chunk = rows * shape.vocabulary * (4 * copies + (0 if size == 4 else 2 * size))
    head = size * shape.vocabulary * shape.width if size == 4 else 0  # oneDNN lays the weight out anew for each product
    logits = chunk + head + copies * positions * size * shape.width  # with the hidden states and their slopes
    layer = max(shape.layers, key=lambda layer: layer.inner)
    gradients = positions * size * (3 * layer.inner + 3 * shape.width)
    return max(logits, gradients, positions * 2 * size * shape.width + _attention(layer, positions, longest, size=size))


def _attention(layer: LayerShape, positions: int, longest: int, size: int) -> int:
    """What attention gathers for one group of rows, keys and values of whole paths, and as much for their gradients."""
    path_positions = RECTANGLE * positions if longest < positions else longest  # rows x longest row
    return 2 * size * (path_positions * layer.keys + 2 * positions * layer.query)


def weights_to_bytes(shape: ModelShape, device: str) -> int:
    """What the frozen weights take: float32 on the CPU ("cpu"), bfloat16 on a card ("cuda")."""
    return _number_bytes(device) * shape.weights


def four_bit_weights_to_bytes(shape: ModelShape, size: int) -> int:
    """What the weights take where the linear layers are in NF4 with double quantisation, the others `size` each.

    A number takes half a byte, a block of 64 of them a scale of one byte, and 256 scales one in float32: 0.516 in all.
    """
    total = size * shape.weights
    for numbers in (numbers for layer in shape.layers for numbers in layer.linear):
        scales = -(-numbers // _BLOCK)
        total += -(-numbers // 2) + scales + 4 * -(-scales // _BLOCK_OF_SCALES) - size * numbers
    return total


def largest_whole_weight(shape: ModelShape, size: int) -> int:
    """Bytes of the largest linear layer's weight, and its scales in float32, while it is made whole for a product."""
    numbers = max(numbers for layer in shape.layers for numbers in layer.linear)
    return size * numbers + 4 * -(-numbers // _BLOCK)


def _base_to_bytes(shape: ModelShape, options: TrainerOptions, size: int, *, learners: int) -> int:
    if options.system.shard_base:
        dealt_out = sum(sum(layer.linear) for layer in shape.layers)  # norms are a few thousand numbers a layer
        return size * (shape.weights - dealt_out + -(-dealt_out // learners))
    return four_bit_weights_to_bytes(shape, size) if options.system.load_in_4bit else size * shape.weights


def _largest_layer(shape: ModelShape) -> int:
    return max(sum(layer.linear) for layer in shape.layers)


def _number_bytes(device: str) -> int:
    return 4 if device == "cpu" else 2


def model_to_shape(model_dir: Path, lora: LoraOptions) -> ModelShape | None:
    """A model directory to its sizes, from config.json alone; None where its layers are made of other parts."""
    try:
        text = (model_dir / "config.json").read_text(encoding="utf-8")
    except OSError:
        return None  # who loads the model says what is wrong with it
    return _text_to_shape(text, model_dir, lora.rank, targets=lora.target_modules)


@lru_cache(maxsize=32)
def _text_to_shape(_text: str, model_dir: Path, rank: int, targets: tuple[str, ...]) -> ModelShape | None:
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # the meta device has shapes and no numbers
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError):
        return None
    backbone, head, embedding = model.base_model, model.get_output_embeddings(), model.get_input_embeddings()
    layers = [_layer_to_shape(layer, config, rank, targets=targets) for layer in decoder_layers(backbone)]
    known_layers = [layer for layer in layers if layer is not None]
    if backbone is model or head is None or not known_layers or len(known_layers) < len(layers):
        return None
    weights = sum(weight.numel() for weight in model.parameters())  # tied ones come once
    vocabulary, width = embedding.weight.shape
    return ModelShape(weights, vocabulary, width, layers=tuple(known_layers))


def _layer_to_shape(layer: torch.nn.Module, config: Any, rank: int, targets: tuple[str, ...]) -> LayerShape | None:
    linear_modules = [
        (path.rpartition(".")[2], m) for path, m in layer.named_modules() if isinstance(m, torch.nn.Linear)
    ]
    linear = dict(linear_modules)
    if linear.keys() != _READS.keys() or len(linear_modules) > len(linear):
        return None  # other parts, or several of a kind, as experts are
    query, key, value = (linear[f"{name}_proj"].out_features for name in "qkv")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    adapted = {name: linear[name] for name in targets if name in linear}
    by_input = {_READS[name]: module.in_features for name, module in adapted.items()}
    normed = 0
    for path, module in layer.named_modules():
        if type(module).__name__.endswith("Norm"):
            over_heads = {"q_norm": query, "k_norm": key}.get(path.rpartition(".")[2])
            normed += config.hidden_size + 1 if over_heads is None else over_heads + over_heads // head_dim
    return LayerShape(
        normed=normed,
        read=sum(size for source, size in by_input.items() if source != "attended"),
        low=rank * len(adapted),
        query=query,
        keys=key + value,
        heads=query // head_dim,
        inner=linear["gate_proj"].out_features,
        plain_silu=getattr(config, "hidden_act", None) == "silu",
        adapter=sum(rank * (module.in_features + module.out_features) for module in adapted.values()),
        linear=tuple(module.weight.numel() for module in linear.values()),
    )
