"""What a rollout through the graph costs over the bare engine, and what adapters cost the engine.

All on the real server, in one run, in turns. A figure of tokens per second counts sampled tokens only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from support.lora_files import write_adapter

from benchmarks import rollout_app
from benchmarks.harness import Measurement, bench
from benchmarks.rollout_rig import (
    IN_FLIGHT,
    Rate,
    adapter_layers,
    add_adapter,
    bench_model,
    calls_to_rate,
    rollouts,
)
from marft_bridge.config.serve import ServeOptions
from marft_bridge.serving.adapter_registry import AdapterRegistry, publish, retire
from marft_bridge.serving.vllm_server import ModelServer
from trainers.common.files import weights_to_sha256
from trainers.config import LoraOptions

EPISODES, TURNS = 64, 2
DECODED, DECODE_TURNS = 48, 7
VERSIONS = 8


@bench
def rollout_vs_raw_vllm(folder: Path) -> Iterator[Measurement]:
    """Sampled tokens/s of the whole graph path over those of a bare load generator. It should be 0.9 at least.

    The same server, adapters, prompts, seeds and order of calls within an episode, 32 episodes in flight; both find the
    prompts' prefixes in the cache.
    """
    with rollouts(folder, EPISODES) as graph:
        chains = graph.recorded()
        address, key = graph.chat.openai_api_base, graph.chat.openai_api_key.get_secret_value()
        asyncio.run(calls_to_rate(address, key, chains))
        while True:
            through = raw = Rate(0, 0.0)
            for _ in range(TURNS):
                through += graph.run()
                raw += asyncio.run(calls_to_rate(address, key, chains))
            yield Measurement(through.per_s, "tok/s", raw.per_s, through.per_s / raw.per_s)


@bench
def lora_decode_vs_base(folder: Path) -> Iterator[Measurement]:
    """Tokens/s through two adapters over those of the base model, 32 requests in flight. It should be 0.8 at least.

    Short prompts, 48 tokens each, end-of-text ignored: what is measured is decoding. Medians over pairs of turns.
    """
    model_dir = bench_model()
    options = ServeOptions(max_model_len=512, max_loras=4, lora_target_modules=("q_proj", "v_proj"), dtype="float32")
    with ModelServer.start(options, model_dir, adapters=folder / "adapters", log=folder / "server.log") as server:
        at = server.endpoint
        registry = AdapterRegistry(folder / "adapters", weights_to_sha256(model_dir))
        for node in rollout_app.NODES:
            add_adapter(registry, model_dir, node, 1)
        names = [publish(server, registry, node, 1) for node in rollout_app.NODES]

        def decoding(models: list[str]) -> Rate:
            bodies = [
                {
                    "model": models[number % len(models)],
                    "messages": [{"role": "user", "content": f"Tell a story about {number} cups."}],
                    "max_tokens": DECODED,
                    "ignore_eos": True,
                    "seed": number,
                    "logprobs": True,
                    "return_token_ids": True,
                }
                for number in range(IN_FLIGHT)
            ]
            chains = [[json.dumps(body).encode()] for body in bodies]
            return asyncio.run(calls_to_rate(at.base_url, at.api_key, chains))

        for models in ([at.model], names):
            decoding(models)
        while True:
            turns = [(decoding([at.model]).per_s, decoding(names).per_s) for _ in range(DECODE_TURNS)]
            base, through = (median(rates) for rates in zip(*turns, strict=True))
            ratio = median(with_it / without for without, with_it in turns)
            yield Measurement(through, "tok/s", base, ratio)


@bench
def adapter_publish_ms(folder: Path) -> Iterator[Measurement]:
    """From trained weights in memory to the first token through them, on an idle server. It should be under 500 ms.

    As `train` publishes: a folder written whole, registered with its hashes, loaded, confirmed by the server; then a
    request for one token. The baseline is that request on an adapter that was in use before.
    """
    from trainers.adapters import adapter_files

    model_dir = bench_model()
    options = ServeOptions(max_model_len=512, max_loras=4, lora_target_modules=("q_proj", "v_proj"), dtype="float32")
    base_sha256 = weights_to_sha256(model_dir)
    registry = AdapterRegistry(folder / "adapters", base_sha256)
    weights = _weights_in_memory(folder / "made", model_dir)
    ask = {"messages": [{"role": "user", "content": "Say a number."}], "max_tokens": 1}
    with ModelServer.start(options, model_dir, adapters=folder / "adapters", log=folder / "server.log") as server:
        at = server.endpoint

        def first_token(name: str) -> float:
            began = time.perf_counter()
            asyncio.run(calls_to_rate(at.base_url, at.api_key, [[json.dumps(ask | {"model": name}).encode()]]))
            return time.perf_counter() - began

        def published(version: int) -> tuple[float, float]:
            began = time.perf_counter()
            adapter_files.write(registry.new_folder("node", version), weights, LoraOptions(), model_dir, base_sha256)
            registry.register("node", version, None, {})
            name = publish(server, registry, "node", version)
            first_token(name)
            new = time.perf_counter() - began
            known = first_token(name)
            retire(server, "node", version)
            return new, known

        published(1)
        version = 1
        while True:
            times = []
            for _ in range(VERSIONS):
                version += 1
                times.append(published(version))
            new, known = (1e3 * median(each) for each in zip(*times, strict=True))
            yield Measurement(new, "ms", known, new / known)


def _weights_in_memory(folder: Path, model_dir: Path) -> dict[str, Any]:
    """LoRA matrices as a trainer holds them."""
    from safetensors.torch import load_file

    write_adapter(folder, adapter_layers(model_dir), scale=0.002)
    return load_file(folder / "adapter_model.safetensors")
