"""`[serve]` of bridge.toml: how the base model is served, and how the CPU build of vLLM uses the machine.

Invariant: an option that would have no effect is refused. It does not import vLLM.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CpuOptions(BaseModel):
    """How the CPU build of vLLM uses the machine. What is left out is chosen for the machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    threads: int | None = Field(default=None, ge=1)
    """Threads of the engine's arithmetic; None is one for each physical core that this process may use."""
    worker: Literal["auto", "in_engine", "own_process"] = "auto"
    """Where the arithmetic runs. In a process of its own, the engine's spins on a core while it waits for it. `auto`:
    in the engine's, unless the cores belong to several memory nodes or VLLM_CPU_OMP_THREADS_BIND is set."""
    lora: Literal["auto", "grouped", "vllm"] = "auto"
    """How adapters are added to a layer's output: for all tokens at once (`auto`), or as vLLM does, token by token."""
    preload: tuple[str, ...] | None = None
    """Libraries that the server loads first. None: Intel's OpenMP, which comes with vLLM, and tcmalloc where the
    machine has it, unless LD_PRELOAD names one of their kind."""


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
        given_options = self.model_fields_set - {"attach", "api_key_env", "lora_target_modules", "hang_s"}
        if self.attach is not None and given_options:
            raise ValueError(f"{', '.join(sorted(given_options))} cannot be set on a server that runs already (attach)")
        if self.attach is None and self.api_key_env is not None:
            raise ValueError("api_key_env applies to attach only; a server that is started here gets a random key")
        if self.kv_cache_gib is not None and self.gpu_memory_utilization is not None:
            raise ValueError("kv_cache_gib and gpu_memory_utilization both size the KV cache; give one")
        return self
