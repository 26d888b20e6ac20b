"""An adapter folder -> its real path, once it is safe and right to send to the model server.

vLLM accepts any absolute path, downloads a relative one, falls back to pickle weights, drops the weights of layers
that it does not wrap, and pads weights of a wrong shape, all without a message. Invariant: a folder that passes lies
inside the adapter root and has safetensors weights that fit the base model layer by layer. Only headers are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from marft_bridge.common.errors import ServingError

_NAME_PATTERN = re.compile(r"[A-Za-z0-9._@-]+")
_PICKLES = {".bin", ".pt", ".pth", ".pkl"}
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

LayerShapes = Mapping[str, set[tuple[int, ...]]]
"""Name of a linear layer from "layers.N." on -> the (outputs, inputs) found under it."""


def check_adapter_name(name: str) -> str:
    """Returns `name` unchanged; ServingError when it has characters that the server may read as more than a name."""
    if not _NAME_PATTERN.fullmatch(name):
        raise ServingError(f"adapter name {name!r} may hold only letters, digits and . _ @ -")
    return name


def check_adapter_folder(folder: Path, root: Path, served: tuple[str, ...] | None, base: LayerShapes | None) -> Path:
    """The real path of an adapter folder that may be sent.

    Args:
        root: the folder that adapters must lie in, symbolic links followed.
        served: the linear layers that the server wraps, None for all.
        base: shapes of the base model; None when its files are not at hand.

    Raises:
        ServingError: the folder may not be served; the message is the reason.
    """
    real_root, real_folder = root.resolve(), folder.resolve()
    if real_folder == real_root or not real_folder.is_relative_to(real_root):
        raise ServingError(f"adapter path {str(real_folder)!r} is not inside the adapter root {str(real_root)!r}")
    if not real_folder.is_dir():
        raise ServingError(f"adapter path {str(real_folder)!r} does not exist")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = (real_folder / name).resolve()
        if not file.is_file():
            raise ServingError(f"adapter {str(real_folder)!r} has no {name}")
        if not file.is_relative_to(real_root):
            raise ServingError(f"{name} of adapter {str(real_folder)!r} points outside the adapter root")
    pickles = sorted(file.name for file in real_folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ServingError(f"adapter {str(real_folder)!r} holds {pickles[0]}: pickle files are not served; remove it")
    layers = adapter_layers(real_folder / WEIGHTS_FILE)
    unserved = {_module(layer) for layer in layers} - set(served) if served else set()
    if served and unserved:
        raise ServingError(
            f"adapter {str(real_folder)!r} changes {', '.join(sorted(unserved))}, but the server was started for "
            f"{', '.join(served)} only; add them to lora_target_modules"
        )
    if base is not None:
        _check_fit(real_folder, layers, base)
    return real_folder


def folder_to_hashes(folder: Path, names: Collection[str] = (CONFIG_FILE, WEIGHTS_FILE)) -> dict[str, str]:
    """File name -> SHA-256 in hex digits, of the files that exist. The default two decide what an adapter computes."""
    hashes = {}
    for name in names:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def check_files(folder: Path, hashes: Mapping[str, str]) -> None:
    """Raises ServingError when a file in an adapter folder no longer has its hash."""
    current_hashes = folder_to_hashes(folder, hashes.keys())
    for name, sha256 in hashes.items():
        if current_hashes.get(name) != sha256:
            raise ServingError(
                f"{str(folder / name)!r} is not what was registered (its SHA-256 changed): it is damaged or was "
                "written over; put the file back from a copy, or train that version again in another run folder"
            )


def adapter_layers(weights: Path) -> dict[str, tuple[int, int]]:
    """Layer name from "layers.N." on -> (outputs, inputs) of its LoRA product B A."""
    shapes = {name: shape for name, shape in weight_shapes(weights).items() if ".lora_A." in name or ".lora_B." in name}
    outputs = {name.split(".lora_B.")[0]: shape[0] for name, shape in shapes.items() if ".lora_B." in name}
    inputs = {name.split(".lora_A.")[0]: shape[-1] for name, shape in shapes.items() if ".lora_A." in name}
    if not outputs or outputs.keys() != inputs.keys():
        raise ServingError(f"{str(weights)!r} does not hold pairs of lora_A and lora_B")
    return {_strip_prefix(name): (outputs[name], inputs[name]) for name in outputs}


def model_layers(model_dir: Path) -> LayerShapes:
    """Shapes of the two-dimensional weights of a model directory, all its safetensors files together."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        for name, shape in weight_shapes(file).items():
            if name.endswith(".weight") and len(shape) == 2:
                shapes.setdefault(_strip_prefix(name.removesuffix(".weight")), set()).add(shape)
    return shapes


def _check_fit(adapter: Path, layers: Mapping[str, tuple[int, int]], base: LayerShapes) -> None:
    base_modules = {_module(layer) for layer in base}
    for layer, shape in layers.items():
        if layer not in base and _module(layer) in base_modules:  # a model may store its layers under names of its own
            raise ServingError(f"adapter {str(adapter)!r} changes {layer}, which the base model has not")
        if layer in base and not {shape, shape[::-1]} & base[layer]:  # GPT-2's Conv1D stores the transpose
            base_shapes = " or ".join(f"{rows} x {columns}" for rows, columns in sorted(base[layer]))
            raise ServingError(
                f"adapter {str(adapter)!r} belongs to another base model: {layer} is {base_shapes} here, "
                f"{shape[0]} x {shape[1]} in the adapter"
            )


def weight_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape in a safetensors file, from its header. Raises ServingError for any other file."""
    from safetensors import SafetensorError, safe_open  # of the extra `train`; the viewer and `status` need none

    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ServingError(f"{str(file)!r} is not a safetensors file ({error})") from error


def _strip_prefix(name: str) -> str:
    """Prefixes differ between a checkpoint, an adapter and a running model; from "layers.N." on they agree."""
    start = name.find("layers.")
    return name[start:] if start >= 0 else _module(name)


def _module(name: str) -> str:
    """The last part of a layer's name, such as q_proj."""
    return name.rpartition(".")[2]
