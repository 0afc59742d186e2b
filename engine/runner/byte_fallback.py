"""Byte fallback: pieces <0x00> to <0xFF> spell what a vocabulary has no piece for."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any

Decode = Callable[[list[int]], str]

HALF = "\ufffd"  # what decoders put for bytes that are no character (yet)


class ByteFallback:
    """The 256 tokens of a tokenizer that spell single bytes (Llama 2, Mistral, Gemma, Phi 3).

    A decoder takes a run of them together: if it is UTF-8 it becomes its characters, and if not,
    one replacement sign a byte. So one wrong byte changes all the characters of its run.
    """

    def __init__(self, decode: Decode, byte_of: dict[int, int]):
        """`byte_of` gives the byte of each such token; all 256, or none."""
        self.byte_of = byte_of
        self._decode = decode
        token_of = {byte: token for token, byte in byte_of.items()}
        self._accent = [token_of[byte] for byte in "é".encode()] if byte_of else []
        self._skips: dict[int, bool] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> ByteFallback:
        """Those of a `tokenizers.Tokenizer`; none if its decoder does not treat them so."""
        tokens = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        falls_back = None not in tokens and all(
            tokenizer.decode([token, tokens[-1]]) == 2 * HALF for token in tokens)
        byte_of = {token: byte for byte, token in enumerate(tokens)} if falls_back else {}
        return cls(tokenizer.decode, byte_of)

    def skips(self, token: int) -> bool:
        """True if a run goes on over `token`, which has no text (special or unknown tokens)."""
        if token not in self._skips:
            first, second = self._accent
            self._skips[token] = self._decode([first, token, second]) == "é"
        return self._skips[token]


class ByteRun:
    """Byte tokens in a row, with what their bytes are by the rules of UTF-8."""

    def __init__(self, at: int, given_if_broken: int):
        self.at = at  # where it begins in the window
        self.given_if_broken = given_if_broken  # characters given out, counted in signs a byte
        self.whole: list[str] = []  # the output's whole characters so far
        self.broken = False  # it is no UTF-8 whatever follows
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: int) -> None:
        try:
            if character := self._utf8.decode(bytes([byte])):
                self.whole.append(character)
        except UnicodeDecodeError:
            self.broken = True

    @property
    def num_unfinished(self) -> int:
        """Bytes of a character that has begun and is not whole."""
        return len(self._utf8.getstate()[0])
