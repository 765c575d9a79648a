"""Every limit of the server in one place. A request beyond one is refused, with the reason in JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    api_keys: tuple[str, ...] = ()
    """a request needs one of these; none: all are served"""
    body_bytes: int = 1 << 20
    """of one request; counted while it is read (413)"""
    characters: int = 100_000
    """of all texts of one request (413)"""
    trace_characters: int = 2_000
    """of a text to be traced (413)"""
    trace_tokens: int = 512
    """of it, and of how its translation must begin: attention grows with the square (413)"""
    trace_bytes: int = 1 << 20
    """of attention that go into a trace's answer; where there is more, each layer is asked for"""
    traces_bytes: int = 256 << 20
    """of the last traces, kept to be asked for; the newest stays whatever its size"""
    texts: int = 128
    """in one request (413)"""
    alternatives: int = 10
    """beside the best translation (400)"""
    beam: int = 20
    """hypotheses a request may ask for (400)"""
    queue_sentences: int = 4096
    """waiting to be translated; a request that does not fit in is refused (429)"""
    seconds: float = 60.0
    """a request may take to arrive, and then to be translated (503)"""
    batch_characters: int = 16_384
    """translated at once: some 4,000 tokens of English"""
    batch_wait: float = 0.005
    """seconds a sentence waits, at most, for others to be translated with it"""
