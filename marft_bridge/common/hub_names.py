"""A model's name on the Hugging Face Hub, as `Qwen/Qwen2.5-0.5B-Instruct@main` -> its directory in the local cache.

Wherever a model directory can stand, such a name can, with or without a revision; a directory of that name goes first.
Invariant: nothing is downloaded and no connection is made: what is not in the cache is refused, with the command that
fetches it. `huggingface_hub` (of the extra `train`) knows where the cache is: HF_HUB_CACHE, HF_HOME.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from marft_bridge.common.errors import ConfigError
from marft_bridge.common.extras import install_command, is_installed

REPOSITORY = r"[A-Za-z0-9][\w.-]*/\w[\w.-]*"  # a pattern: owner/name
_HUB_NAME = re.compile(rf"({REPOSITORY})(?:@([\w][\w./-]*))?", re.ASCII)
_SNAPSHOTS = "snapshots"  # models--<owner>--<name>/snapshots/<commit>: the layout of the cache


class HubName(NamedTuple):
    """A repository of the Hub, and a branch, tag or commit of it; None is its main branch."""

    repository: str
    revision: str | None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def download_command(self) -> str:
        """What fetches it into the cache."""
        return f"hf download {self.repository}" + ("" if self.revision is None else f" --revision {self.revision}")


def text_to_hub_name(text: str) -> HubName | None:
    """The name of a model on the Hub; None for what has another form, and for a directory that exists."""
    match = _HUB_NAME.fullmatch(text)
    return HubName(match[1], match[2]) if match is not None and not Path(text).is_dir() else None


def model_to_directory(text: str) -> Path:
    """The directory of a model: a name's in the Hub's cache, or the path itself, of which nothing is checked.

    Raises:
        ConfigError: the name is in no directory and not in the cache, or `huggingface_hub` is not installed.
    """
    name = text_to_hub_name(text)
    if name is None:
        return Path(text)
    if not is_installed("huggingface_hub"):
        raise ConfigError(
            f"{text!r} is no directory here, and a name of the Hugging Face Hub needs huggingface_hub: "
            f"{install_command('train')}"
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise ConfigError(
            f"{text!r} is neither a directory here nor in the Hugging Face cache {constants.HF_HUB_CACHE}: "
            f"{name.download_command}"
        ) from None


def directory_to_hub_name(directory: Path) -> HubName | None:
    """The name, with the commit, of a directory in the Hub's cache; None for any other directory."""
    repository = directory.parent.parent.name.split("--")
    if directory.parent.name != _SNAPSHOTS or len(repository) != 3 or repository[0] != "models":
        return None
    return HubName("/".join(repository[1:]), directory.name)


def model_to_pinned(text: str) -> str:
    """What a record says: a name with the commit that it stands for today; what is not in the cache as it is."""
    try:
        name = directory_to_hub_name(model_to_directory(text)) if text_to_hub_name(text) is not None else None
    except ConfigError:
        return text
    return text if name is None else str(name)
