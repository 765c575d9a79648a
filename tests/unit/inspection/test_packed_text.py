"""Bytes as text in a UTF-16 file."""

import zlib

import numpy as np
from hypothesis import given, strategies as st

from regard.inspection.packed_text import deflate, pack

EVERY_PAIR = np.arange(65536, dtype="<u2").tobytes()


def unpack(text: str) -> bytes:
    """The reverse, character by character, written from the description."""
    data = b""
    for character in map(ord, text):
        number = character - 0x10000
        if number < 0:
            data += character.to_bytes(2, "little")
        elif number < 0x800:
            data += (0xD800 + number).to_bytes(2, "little")
        elif number < 0x803:
            data += (0, 13, 60)[number - 0x800].to_bytes(2, "little")
        else:
            data += bytes([number - 0x803])
    return data


@given(st.binary() | st.just(EVERY_PAIR) | st.just(EVERY_PAIR + b"\xff"))
def test_bytes_survive(data: bytes) -> None:
    assert unpack(pack(data)) == data


def test_an_html_parser_changes_no_character() -> None:
    text = pack(EVERY_PAIR)
    assert not {"\0", "\r", "<"} & set(text)
    text.encode("utf-16")  # no lone surrogate


def test_random_bytes_take_little_more_space() -> None:
    data = np.random.default_rng(1).bytes(1_000_000)
    assert len(pack(data).encode("utf-16-le")) / len(data) < 1.032


def test_compressed_bytes_have_no_header() -> None:
    data = b"The dog sleeps. " * 100
    assert zlib.decompress(deflate(data), -zlib.MAX_WBITS) == data
    assert len(deflate(data)) < len(deflate(data, zlib.Z_HUFFMAN_ONLY)) < len(data)
