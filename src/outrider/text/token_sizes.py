"""An upper bound on the characters per token, so that over-long prompts are rejected untokenized.

Tokenizing takes time that grows with the text. A text with more characters than its tokens could
ever cover can be rejected without it. The bound must hold for every text: a tokenizer that may drop
or join characters without limit has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from outrider.text.tokenizer import Tokenizer

_Part: TypeAlias = Mapping[str, Any]

# Canonical decompositions have up to four characters, and no text is longer than its
# decomposition, which composing does not change.
_COMPOSED_CHARS = 4
_BLANKS = frozenset(letter for letter in map(chr, range(0x3001)) if letter.isspace())
_KEEPING_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_KEEPING_SPLITTERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """`max_chars` bounds the characters that one token covers, not counting `free` ones: the
    tokenizer may drop any number of those."""

    max_chars: int
    free: frozenset[str]

    def min_tokens(self, text: str) -> int:
        """A lower bound on the text's tokens."""
        if len(text) <= self.max_chars:
            return 0
        num_chars = len(text) - sum(map(text.count, self.free))
        return -(-num_chars // self.max_chars)


def token_sizes(tokenizer: Tokenizer) -> TokenSizes | None:
    """None if no bound is known to hold."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts: _Part = json.loads(backend.to_str())
    shrinkage, dropped = _shrinkage(parts["normalizer"]), _dropped(parts)
    if shrinkage is None or dropped is None or not _keeps_all(parts["pre_tokenizer"]):
        return None
    # Some special tokens absorb the whitespace beside them.
    strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    longest = max(map(len, tokenizer.get_vocab()))
    return TokenSizes(longest * shrinkage, dropped | _BLANKS if strips else dropped)


def _shrinkage(normalizer: _Part | None) -> int | None:
    """How many original characters one normalized character may have had; None if unbounded."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            each = [_shrinkage(part) for part in normalizer["normalizers"]]
            known = [size for size in each if size is not None]
            return math.prod(known) if len(known) == len(each) else None
        case "NFC" | "NFKC":
            return _COMPOSED_CHARS
        case "Replace":
            pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
            is_solid = content.isprintable() and bool(content.strip())
            return -(-len(pattern) // len(content)) if pattern and is_solid else None
        case kind:
            return 1 if kind in _KEEPING_NORMALIZERS else None


def _keeps_all(splitter: _Part | None) -> bool:
    """Whether the pre-tokenizer keeps every character."""
    if splitter is None:
        return True
    match splitter["type"]:
        case "Sequence":
            return all(_keeps_all(part) for part in splitter["pretokenizers"])
        case "Split" | "Punctuation":
            return bool(splitter["behavior"] != "Removed")
        case kind:
            return kind in _KEEPING_SPLITTERS


def _dropped(parts: _Part) -> frozenset[str] | None:
    """Characters without a token; None if any may be dropped, or a run of them may become one
    token."""
    model = parts["model"]
    if model["type"] != "BPE":
        return None
    vocabulary = model["vocab"]
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return frozenset()
    if model["unk_token"] is not None:
        return None if model["fuse_unk"] else frozenset()
    if not (_is_byte_level(parts["pre_tokenizer"]) or _is_byte_level(parts["normalizer"])):
        return None
    letters = _byte_letters()
    missing = {byte for byte, letter in letters.items() if letter not in vocabulary}
    # Every multi-byte character has one of these, so only ASCII characters can be dropped.
    if missing & set(range(0x80, 0xC0)):
        return None
    return frozenset(chr(byte) for byte in missing if byte < 0x80)


def _byte_letters() -> dict[int, str]:
    """The character for each byte in byte-level vocabularies: itself if printable, else the next
    one from 256 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: shifted.get(byte, chr(byte)) for byte in range(256)}


def _is_byte_level(part: _Part | None) -> bool:
    if part is None:
        return False
    inner = part.get("pretokenizers") or part.get("normalizers") or ()
    return part["type"] == "ByteLevel" or any(map(_is_byte_level, inner))
