"""A feature -> the extra of this package that it needs, or one line that says how to install it.

`pip install marft-bridge` records, stores, shows and ingests; the extras of pyproject.toml bring the rest. Invariants:
a module of an extra is imported where it is used, never at the top of what the light core imports; looking whether one
is installed imports nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from marft_bridge.common.errors import ConfigError

_EXTRA_TO_MODULES = {
    "train": (
        *("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors", "scipy", "langchain_openai"),
        "huggingface_hub",
    ),
    "math": ("math_verify", "sympy"),
    "ray": ("ray",),
    "otlp": ("opentelemetry.exporter", "requests"),
    "reasoning-gym": ("reasoning_gym",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "demo": ("gguf",),
    "qlora": ("bitsandbytes",),
}
_MODULE_TO_EXTRA = {module: extra for extra, modules in _EXTRA_TO_MODULES.items() for module in modules}
_TRAINER = "trainers"


def require_extra(extra: str, feature: str) -> None:
    """Raises ConfigError, which names the extra and the feature, where a module of the extra is not installed."""
    for module in _EXTRA_TO_MODULES[extra]:
        if not is_installed(module):
            raise ConfigError(f"{feature} needs {module}: {install_command(extra)}")


def is_installed(module: str) -> bool:
    """Whether a module can be imported. Imports nothing but the packages that it lies in."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def install_command(extra: str) -> str:
    """What installs an extra."""
    return f"pip install 'marft-bridge[{extra}]'"


def missing_module_to_line(module: str | None) -> str | None:
    """The line for the user where a module was not found; None for a module that no extra brings.

    Our trainer counts as missing where the app has put a package of that name into its place.
    """
    parts = (module or "").split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    extra = next((_MODULE_TO_EXTRA[name] for name in names if name in _MODULE_TO_EXTRA), None)
    if extra is not None:
        return f"{names[-1]} is not installed: {install_command(extra)}"
    if names[-1] == "fcntl":
        return "marft-bridge locks its files with fcntl, which Windows has not: run it under WSL"
    return _CLASH if names[-1] == _TRAINER else None


_CLASH = (
    f"the app has a package {_TRAINER!r}, which is also the name of marft-bridge's own, and one process can have but "
    "one of them: give the app's another name (recording, traces, view and init work with it)"
)


def require_trainer(command: str) -> None:
    """Refuses to train where the trainer's libraries are missing, or the app's folder has a `trainers` of its own.

    Raises:
        ConfigError: which extra is missing, or whose package is in the way.
    """
    require_extra("train", command)
    if other_trainers() is not None:
        raise ConfigError(f"{command}: {_CLASH}")


def other_trainers() -> Path | None:
    """The package `trainers` of the working folder, where the app's modules come from; None where that is ours."""
    package = Path.cwd() / _TRAINER
    is_ours = package.resolve() == Path(__file__).resolve().parents[2] / _TRAINER
    return package if not is_ours and any(package.glob("*.py")) else None
