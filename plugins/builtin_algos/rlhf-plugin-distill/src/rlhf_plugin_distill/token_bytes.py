"""Bytes of text that tokens stand for, for tokenizers that keep texts. Imports no torch."""

from __future__ import annotations

import json
import re
from typing import Any

from rlhf_host import UserError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PROBE = 'If 12 + 3 = 15,\n  then "so it is" (a-b_c).'


def _byte_level() -> dict[str, int]:
    """Returns the characters that byte-level tokenizers write for bytes: printable bytes as themselves, others from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


class TokenBytes:
    """The bytes of each token of a tokenizer. Special tokens have none.

    Args:
        tokenizer: a fast one of transformers.
        who: whose it is, for messages.

    Raises ``UserError`` for a tokenizer whose tokens are not pieces of the text.
    """

    def __init__(self, tokenizer: Any, who: str):
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(f"{who}: its tokenizer is not a fast one of transformers, so its tokens have no known bytes")
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        decoder = backend.get("decoder") or {"type": "none"}
        self._steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        known = {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace", "Replace"}
        if other := [step["type"] for step in self._steps if step["type"] not in known]:
            raise UserError(
                f"{who}: its tokenizer joins tokens by {other[0]}, and only tokens that are pieces of the text can be aligned: give"
                " a model with a byte-level or SentencePiece tokenizer"
            )
        added = tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special} | {*tokenizer.all_special_ids}
        self._names = dict(zip(tokenizer.convert_ids_to_tokens([*self.special]), self.special, strict=True))
        texts = {number: token for token, number in tokenizer.get_vocab().items() if number not in self.special}
        self._bytes = {number: self._of(token) for number, token in texts.items()}
        self._in_order = sorted(texts, key=lambda number: (bool(_BYTE.fullmatch(texts[number])), number))
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        read = b"".join(self._bytes.get(number, b"") for number in ids).decode(errors="replace")
        kept = "".join(sign for sign in _PROBE if sign in read)
        if read.removeprefix(" ") not in (_PROBE, kept):
            raise UserError(
                f"{who}: its tokenizer does not keep texts, and reads {_PROBE!r} as {read!r}: they cannot be aligned;"
                " take a model whose tokenizer does, or leave own_tokens out where all have one tokenizer"
            )

    def __len__(self) -> int:
        """Returns the number of tokens, special ones included."""
        return len(self._bytes) + len(self.special)

    def __call__(self, token: int) -> bytes | None:
        """Returns a token's bytes; ``None``: it is special, or unknown."""
        return self._bytes.get(token)

    def ids(self) -> dict[bytes | str, list[int]]:
        """Returns the tokens of each piece of text, single bytes to fall back to last; special tokens under their names."""
        found: dict[bytes | str, list[int]] = {}
        for number in self._in_order:
            found.setdefault(self._bytes[number], []).append(number)
        return {**found, **{name: [number] for name, number in self._names.items()}}

    def _of(self, token: str) -> bytes:
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel" and all(sign in BYTE_LEVEL for sign in token):
                return bytes(BYTE_LEVEL[sign] for sign in token)
            if kind == "ByteFallback" and (byte := _BYTE.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            if kind == "Metaspace":
                token = token.replace(step["replacement"], " ")
            if kind == "Replace" and "String" in step["pattern"]:
                token = token.replace(step["pattern"]["String"], step["content"])
        return token.encode()
