"""Tokens as the bytes they stand for, for the tokenizers that spell them so (most do)."""

from __future__ import annotations

import json
import re
from typing import Protocol

import tokenizers


class Pieces(Protocol):
    """Tokens as bytes. `stripped`: the text of a whole session loses one leading space."""

    stripped: bool

    def __getitem__(self, token: int, /) -> bytes: ...


def _byte_alphabet() -> dict[str, int]:
    """The characters by which GPT-2's vocabulary spells the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


class ByteLevelPieces(dict[int, bytes]):
    """GPT-2's spelling: a character a byte. Added tokens are spelled as they are."""

    stripped = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._added = frozenset(backend.get_added_tokens_decoder())

    def __missing__(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token) or ""
        if token in self._added or not all(character in BYTE_ALPHABET for character in piece):
            made = piece.encode()
        else:
            made = bytes(BYTE_ALPHABET[character] for character in piece)
        self[token] = made
        return made


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class MetaspacePieces(dict[int, bytes]):
    """SentencePiece's spelling: `▁` for a space, `<0xE2>` for a byte."""

    def __init__(self, backend: tokenizers.Tokenizer, *, stripped: bool, byte_tokens: bool) -> None:
        super().__init__()
        self._backend = backend
        self._byte_tokens = byte_tokens
        self.stripped = stripped

    def __missing__(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token) or ""
        if self._byte_tokens and _BYTE_TOKEN.fullmatch(piece):
            made = bytes([int(piece[3:5], 16)])
        else:
            made = piece.replace("▁", " ").encode()
        self[token] = made
        return made


PROBES = (
    "Hello, world: 1 + 2 = 3.",
    "  two\n\nlines\t‘quoted’ naïve 日本語 🎉👩‍👩‍👧",
    "def f(x):\n    return x\n",
)


def pieces_of(backend: tokenizers.Tokenizer) -> ByteLevelPieces | MetaspacePieces | None:
    """The spelling that a tokenizer's decoder declares, if it agrees with the decoder itself."""
    pieces = _declared_pieces(backend)
    if pieces is None:
        return None
    for probe in PROBES:
        tokens = backend.encode(probe, add_special_tokens=False).ids
        text = b"".join(pieces[token] for token in tokens).decode("utf-8", "replace")
        if pieces.stripped and text.startswith(" "):
            text = text[1:]
        if text != backend.decode(tokens, skip_special_tokens=False):
            return None
    return pieces


def _declared_pieces(backend: tokenizers.Tokenizer) -> ByteLevelPieces | MetaspacePieces | None:
    if backend.decoder is None:
        return None
    declared = json.loads(backend.decoder.__getstate__())
    steps = declared["decoders"] if declared["type"] == "Sequence" else [declared]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return ByteLevelPieces(backend) if kinds <= {"ByteLevel", "Fuse"} else None
    if not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    if not kinds & {"Replace", "Metaspace"}:
        return None
    stripped = any(
        step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in steps
    )
    return MetaspacePieces(backend, stripped=stripped, byte_tokens="ByteFallback" in kinds)
