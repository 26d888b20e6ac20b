"""Makes the packages of the extras look as if they were not installed: `import support.light_core` at the start.

For a process of its own, as a user has it after `pip install marft-bridge` alone.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

EXTRAS = frozenset(
    {
        *("torch", "transformers", "peft", "accelerate", "safetensors", "scipy", "langchain_openai", "openai"),
        *("tokenizers", "huggingface_hub", "tiktoken", "sympy", "math_verify", "gguf", "vllm", "ray", "pyarrow"),
        *("reasoning_gym", "tensorboard", "wandb", "mlflow", "trackio", "anthropic", "litellm", "langchain"),
    }
)


class _Hiding(PathFinder):
    """Finds what is installed, but for those packages."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in EXTRAS else super().find_spec(fullname, path, target)


loaded_before = EXTRAS & set(sys.modules)
if loaded_before:
    sys.exit(f"too late to hide {', '.join(sorted(loaded_before))}")
sys.meta_path[sys.meta_path.index(PathFinder)] = _Hiding
