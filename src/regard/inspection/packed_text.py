"""Bytes as text in an HTML file with the encoding UTF-16.

UTF-16 has one character for almost every pair of bytes, so that 16 bits of data take 16.5 bits of the file. Base64
takes 21.3, and no encoding in UTF-8 takes less than 17.9. The file begins with a byte order mark, which decides its
encoding even if a server declares another one. ``web/packed_text.js`` reads the text.
"""

from __future__ import annotations

import zlib

import numpy as np

ENCODING = "utf-16"
"""of the whole file"""
_SURROGATES = 0xD800
_RESERVED = (0x0000, 0x000D, 0x003C)
"""characters that an HTML parser replaces or interprets: NUL, carriage return, ``<``"""
_FIRST_RESERVED = 0x800
_FIRST_BYTE = _FIRST_RESERVED + len(_RESERVED)
"""numbers of escaped characters: surrogates come first, then reserved characters, then bytes"""


def pack(data: bytes) -> str:
    """One character for each pair of bytes, and one for an odd last byte."""
    odd = len(data) % 2
    pairs = np.frombuffer(data, dtype="<u2", count=len(data) // 2).astype(np.int32)
    # Surrogates, reserved characters and an odd last byte are numbered, and written as characters above U+FFFF. Those
    # take two units.
    numbers = np.where(pairs >> 11 == _SURROGATES >> 11, pairs - _SURROGATES, -1)
    for number, reserved in enumerate(_RESERVED, _FIRST_RESERVED):
        numbers[pairs == reserved] = number
    if odd:
        pairs, numbers = np.append(pairs, 0), np.append(numbers, _FIRST_BYTE + data[-1])
    escaped = numbers >= 0
    first = np.where(escaped, 0xD800 + (numbers >> 10), pairs)
    second = 0xDC00 + (numbers & 0x3FF)
    used = np.stack([np.ones_like(escaped), escaped], axis=1)
    units = np.stack([first, second], axis=1)[used].astype("<u2")
    return units.tobytes().decode("utf-16-le")


def deflate(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    """Compress; the result has no header, as ``DecompressionStream("deflate-raw")`` reads it."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return compressor.compress(data) + compressor.flush()
