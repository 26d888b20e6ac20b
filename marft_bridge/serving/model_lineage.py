"""Base models -> the lineage of their episodes: a SHA-256 of each part that prompts and samples depend on.

    base            weights of the base model (trainers.common.files.weights_to_sha256)
    tokenizer       the file that defines it, or the files
    template        text of the chat template
    base/<node>, tokenizer/<node>, template/<node>  the same of a node that runs on another base model

Tokens of an old episode mean the same today where these agree; `recording.tool_lineage` adds the tools of its calls.
Invariant: a part that cannot be known is absent, never hashed as empty.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marft_bridge.common.digests import canonical_json, text_sha256
from marft_bridge.common.errors import ConfigError

if TYPE_CHECKING:  # an app with a package `trainers` of its own is replayed, too, and a configuration needs ours
    from marft_bridge.serving.base_models import BaseModelSpec

# One file defines a fast tokenizer; without it, these do together.
_FAST_FILE = "tokenizer.json"
_SLOW_FILES = (
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
)
_DEFAULT_TEMPLATE = "default"  # the name of a template that has none


def model_to_lineage(model_dir: Path) -> dict[str, str]:
    """A model directory -> `tokenizer` and `template`, each where there is one.

    Raises:
        ConfigError: a file of the tokenizer cannot be read.
    """
    try:
        digests = {"tokenizer": _tokenizer_sha256(model_dir), "template": _template_sha256(model_dir)}
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # whatever shape the JSON has
        raise ConfigError(f"model.path: cannot read the tokenizer of {model_dir}: {error}") from None
    return {name: digest for name, digest in digests.items() if digest is not None}


def bases_to_lineage(bases: Sequence[BaseModelSpec], base_sha256: Sequence[str]) -> dict[str, str]:
    """Base models and the hashes of their weights -> the parts of the first, and those of the others by node.

    Raises as `model_to_lineage`.
    """
    lineages = [
        {"base": sha256, **model_to_lineage(base.directory)} for base, sha256 in zip(bases, base_sha256, strict=True)
    ]
    lineage = dict(lineages[0])
    for base, parts in zip(bases[1:], lineages[1:], strict=True):
        lineage |= {f"{part}/{node}": digest for node in base.nodes for part, digest in parts.items()}
    return lineage


def _tokenizer_sha256(model_dir: Path) -> str | None:
    fast = model_dir / _FAST_FILE
    if fast.is_file():
        return hashlib.sha256(fast.read_bytes()).hexdigest()
    parts = {name: path for name in _SLOW_FILES if (path := model_dir / name).is_file()}
    if not parts:
        return None
    return text_sha256(canonical_json({n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in parts.items()}))


def _template_sha256(model_dir: Path) -> str | None:
    """Of the template's text, whichever file holds it: `save_pretrained` of transformers changed the file over time."""
    templates: dict[str, str] = {}
    config = model_dir / "tokenizer_config.json"
    if config.is_file():
        chat_template = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(chat_template, str):
            templates[_DEFAULT_TEMPLATE] = chat_template
        elif isinstance(chat_template, list):
            templates |= {str(entry["name"]): str(entry["template"]) for entry in chat_template}
    # As transformers reads them: separate files override the configuration.
    template_file = model_dir / "chat_template.jinja"
    if template_file.is_file():
        templates = {_DEFAULT_TEMPLATE: template_file.read_text(encoding="utf-8")}
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if not templates:
        return None
    single_template = templates.get(_DEFAULT_TEMPLATE) if len(templates) == 1 else None
    return text_sha256(canonical_json(templates) if single_template is None else single_template)
