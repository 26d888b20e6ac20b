"""Token ids -> the text that each stands for, by the tokenizer of its node's base model.

Invariant: the pieces are as many as the ids, and together they are the text; an id that only begins a letter has an
empty piece, and the letter is in the piece of the id that completes it. Nothing is re-tokenised. Without a tokenizer
there is a reason instead of pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class TextsByNode:
    """The token texts of every node: by the tokenizer of the base model that it runs on.

    Args:
        paths: of the tokenizers' files; under "" that of the nodes which have none of their own.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        files = {path: TokenTexts(path) for path in {*paths.values()}}
        self._of_node = {node: files[path] for node, path in paths.items()}
        self._unknown = self._of_node.get("") or TokenTexts(None)

    def of(self, node: str) -> TokenTexts:
        """Those of one node."""
        return self._of_node.get(node, self._unknown)


class TokenTexts:
    """A tokenizer's file, read when it is first needed. `why_not` says what is missing, once that is known."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokenizer: Any = None
        self.why_not: str | None = None if path is not None else "no command noted which base model this was"

    def ids_to_pieces(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each id; None where there is no tokenizer, see `why_not`."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        known = tokenizer.get_vocab_size()
        stream: Any = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            if not 0 <= token < known:
                pieces.append(f"<{token}>")
                stream = DecodeStream(skip_special_tokens=False)
                continue
            try:
                pieces.append(stream.step(tokenizer, token) or "")
            except Exception:  # noqa: BLE001 - the library raises bare ones for bytes that never become a letter
                pieces.append(f"<{token}>")
                stream = DecodeStream(skip_special_tokens=False)
        return pieces

    def _loaded(self) -> Any:
        if self._tokenizer is None and self.why_not is None:
            assert self._path is not None
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(self._path))
            except ImportError:
                self.why_not = "the package `tokenizers` is not installed"
            except Exception as error:  # noqa: BLE001 - the library raises bare ones for a file that it cannot read
                self.why_not = f"{self._path} cannot be read: {error}"
        return self._tokenizer
