"""Token ids -> a piece of text for each, by the tokenizer of the node's base model.

Invariant: there are as many pieces as ids, and joined they are the text; an id that only begins a letter has an empty
piece, and the letter is in the piece of the id that completes it. Nothing is re-tokenised. Without a tokenizer there
is a reason instead of pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_bridge.common.extras import missing_module_to_line


class TextsByNode:
    """The token texts of every node, by the tokenizer of the base model that it runs on.

    Args:
        paths: node -> its tokenizer.json; under "" that of all nodes without an entry.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        files = {path: TokenTexts(path) for path in {*paths.values()}}
        self._of_node = {node: files[path] for node, path in paths.items()}
        self._default = self._of_node.get("") or TokenTexts(None)

    def for_node(self, node: str) -> TokenTexts:
        """The token texts of one node."""
        return self._of_node.get(node, self._default)


class TokenTexts:
    """A tokenizer's file, read on first use. `unavailable_reason`: why there are no texts, once that is known."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tokenizer: Any = None
        self.unavailable_reason: str | None = None
        if path is None:
            self.unavailable_reason = "no command noted which base model this was"

    def ids_to_pieces(self, ids: Sequence[int]) -> list[str] | None:
        """A text for each id; None where there is no tokenizer, see `unavailable_reason`."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        vocabulary_size = tokenizer.get_vocab_size()
        stream: Any = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            if not 0 <= token < vocabulary_size:
                pieces.append(f"<{token}>")
                stream = DecodeStream(skip_special_tokens=False)
                continue
            try:
                pieces.append(stream.step(tokenizer, token) or "")
            except Exception:  # noqa: BLE001 - the library raises bare ones for bytes that never become a letter
                pieces.append(f"<{token}>")
                stream = DecodeStream(skip_special_tokens=False)
        return pieces

    def _load(self) -> Any:
        if self._tokenizer is None and self.unavailable_reason is None:
            assert self._path is not None
            try:
                from tokenizers import Tokenizer

                self._tokenizer = Tokenizer.from_file(str(self._path))
            except ImportError:
                self.unavailable_reason = f"{missing_module_to_line('tokenizers')}, or that package alone"
            except Exception as error:  # noqa: BLE001 - the library raises bare ones for a file that it cannot read
                self.unavailable_reason = f"{self._path} cannot be read: {error}"
        return self._tokenizer
