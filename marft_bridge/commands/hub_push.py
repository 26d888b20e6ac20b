"""`export --push`: an exported folder -> a repository of the Hugging Face Hub, through its own library.

Invariants: a repository that is made for it is private unless `--public` is said, and one that others can see is not
written to without it; what is refused is refused before anything is written or sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from marft_bridge.common.errors import ConfigError, ServingError
from marft_bridge.common.hub_names import REPOSITORY


@dataclass(frozen=True, slots=True)
class Destination:
    """A repository of the Hub that may be written to, as far as its form and a token tell."""

    repository: str
    public: bool
    token: str

    @classmethod
    def checked(cls, repository: str, public: bool) -> Destination:
        """The destination, with the token of this machine's user.

        Raises:
            ConfigError: no name of a repository, or no token.
        """
        if re.fullmatch(REPOSITORY, repository, re.ASCII) is None:
            raise ConfigError(f"export --push: {repository!r} is no repository; give owner/name")
        from huggingface_hub import get_token

        token = get_token()
        if token is None:
            raise ConfigError(
                "export --push: no token of the Hugging Face Hub on this machine: run `hf auth login`, or set HF_TOKEN"
            )
        return cls(repository, public, token)

    def push(self, folder: Path, title: str) -> str:
        """Sends the files of `folder` as one commit; returns the repository's address.

        Raises:
            ConfigError: the repository is public, and that was not said.
            ServingError: the Hub cannot be reached, or refuses.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=self.token, library_name="marft-bridge")
        try:
            address = str(api.create_repo(self.repository, private=not self.public, exist_ok=True))
            is_private = api.model_info(self.repository).private
            if is_private or self.public:
                api.upload_folder(repo_id=self.repository, folder_path=folder, commit_message=f"Add {title}")
        except Exception as error:  # noqa: BLE001 - those of the library, of whichever client it has, and bare ones
            reason = _first_line(error)
            raise ServingError(
                f"export --push: {api.endpoint} did not take {self.repository}: {reason}; {folder} is written"
            ) from None
        if not (is_private or self.public):
            raise ConfigError(
                f"export --push: {self.repository} is public; say --public, or name another. {folder} is written"
            )
        return address


def _first_line(error: BaseException) -> str:
    """What went wrong, with what caused it: a request id follows in later lines, and some have an empty first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return reason if error.__cause__ is None else f"{reason} ({_first_line(error.__cause__)})"
