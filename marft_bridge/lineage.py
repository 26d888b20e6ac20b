"""What an episode's prompts and samples depend on, besides the app -> its lineage: names and SHA-256.

    base            weights of the base model (trainers.files.weights_to_sha256)
    tokenizer       the file that defines it, or the files
    template        text of the chat template
    base/<node>, tokenizer/<node>, template/<node>  the same of a node that runs on another base model
    tools/<node>    schemas of the tools that the node's calls offered to the model
    tool/<node>/<tool>  the schema of one of them, so that a difference can be named

Tokens of an old episode mean the same today, and its prompts are those that today's graph would build, where these
agree. Invariant: equal content has an equal hash, wherever it stands and however its JSON is laid out; what cannot be
known is absent, never hashed as empty. It knows nothing of spans, servers or of what a difference is to change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.bases import Base
from marft_bridge.errors import ConfigError
from trace_store.records import ONE_TOOL_OF, TOOLS_OF

# One file says all of a fast tokenizer; without it, these do together.
_FAST = "tokenizer.json"
_SLOW = ("tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
_DEFAULT = "default"  # the name of a template that has none


def model_to_lineage(model_dir: Path) -> dict[str, str]:
    """A model directory -> `tokenizer` and `template`, each where there is one.

    Raises:
        ConfigError: a file of the tokenizer cannot be read.
    """
    try:
        found = {"tokenizer": _tokenizer_sha256(model_dir), "template": _template_sha256(model_dir)}
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # whatever shape the JSON has
        raise ConfigError(f"model.path: cannot read the tokenizer of {model_dir}: {error}") from None
    return {name: digest for name, digest in found.items() if digest is not None}


def bases_to_lineage(bases: Sequence[Base], base_sha256: Sequence[str]) -> dict[str, str]:
    """Base models and the hashes of their weights -> the parts of the first, and those of the others by node.

    Raises as `model_to_lineage`.
    """
    of_each = [
        {"base": sha256, **model_to_lineage(base.directory)} for base, sha256 in zip(bases, base_sha256, strict=True)
    ]
    lineage = dict(of_each[0])
    for base, parts in zip(bases[1:], of_each[1:], strict=True):
        lineage |= {f"{part}/{node}": digest for node in base.nodes for part, digest in parts.items()}
    return lineage


def request_to_tools(asked: Mapping[str, Any]) -> set[str]:
    """The parameters of a call, as LangChain tells them -> the tools that it offers, each as canonical JSON."""
    tools: set[str] = set()
    for name in ("tools", "functions"):
        offered = asked.get(name) or ()
        tools.update(map(_canonical, offered if isinstance(offered, (list, tuple)) else [offered]))
    return tools


def tools_to_lineage(offered: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Node -> the different tools that its calls offered, as canonical JSON -> `tools/<node>`; one with none is absent.

    The order of the tools, and which call offered which, make no difference: a loop that ends early offers the same.
    """
    return {f"{TOOLS_OF}{node}": _text_sha256(_canonical(sorted(tools))) for node, tools in offered.items() if tools}


def tools_to_names(offered: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The same -> `tool/<node>/<tool>` for each tool; one without a usable name is called by its hash.

    Where one name had several schemas, they are hashed together.
    """
    found: dict[str, list[str]] = {}
    for node, tools in offered.items():
        for tool in sorted(tools):
            found.setdefault(f"{ONE_TOOL_OF}{node}/{_tool_name(tool)}", []).append(tool)
    return {name: _text_sha256(tools[0] if len(tools) == 1 else _canonical(tools)) for name, tools in found.items()}


def _tool_name(tool: str) -> str:
    """Of a tool as canonical JSON. A slash would make it a node's."""
    parsed = json.loads(tool) if tool.startswith("{") else {}
    described = parsed.get("function", parsed)
    name = described.get("name") if isinstance(described, dict) else None
    return name if isinstance(name, str) and name and "/" not in name else f"#{_text_sha256(tool)[:12]}"


def _tokenizer_sha256(model_dir: Path) -> str | None:
    fast = model_dir / _FAST
    if fast.is_file():
        return hashlib.sha256(fast.read_bytes()).hexdigest()
    parts = {name: path for name in _SLOW if (path := model_dir / name).is_file()}
    if not parts:
        return None
    return _text_sha256(_canonical({n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in parts.items()}))


def _template_sha256(model_dir: Path) -> str | None:
    """Of the template's text, whichever file it stands in: `save_pretrained` moved it over time."""
    templates: dict[str, str] = {}
    config = model_dir / "tokenizer_config.json"
    if config.is_file():
        said = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(said, str):
            templates[_DEFAULT] = said
        elif isinstance(said, list):
            templates |= {str(part["name"]): str(part["template"]) for part in said}
    # As transformers reads them: files of their own override the configuration.
    alone = model_dir / "chat_template.jinja"
    if alone.is_file():
        templates = {_DEFAULT: alone.read_text(encoding="utf-8")}
    for path in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if not templates:
        return None
    only = templates.get(_DEFAULT) if len(templates) == 1 else None
    return _text_sha256(_canonical(templates) if only is None else only)


def _canonical(value: Any) -> str:
    """A value as JSON that is the same for equal values; what JSON does not know counts by its name."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_name)
    except (TypeError, ValueError, RecursionError):
        return _name(value)


def _name(value: Any) -> str:
    """Of a class or a function its own, of anything else its type's: its text may hold an address in memory."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
