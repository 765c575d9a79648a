"""Limits of the server. A request that exceeds one is refused with the reason in JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Each comment names the HTTP status of the refusal."""

    api_keys: tuple[str, ...] = ()
    """accepted API keys (403); if empty, no key is needed"""
    max_body_bytes: int = 1 << 20
    """size of a request body, checked while it is read (413)"""
    max_characters: int = 100_000
    """total characters of all texts of a request (413)"""
    max_trace_characters: int = 2_000
    """characters of a text to trace (413)"""
    max_trace_tokens: int = 512
    """tokens of a text to trace, and of a forced prefix: attention grows with the square of the length (413)"""
    inline_trace_bytes: int = 1 << 20
    """attention weights sent with the trace; larger ones must be fetched layer by layer"""
    trace_cache_bytes: int = 256 << 20
    """memory for recent traces; the newest one is kept whatever its size"""
    max_texts: int = 128
    """texts in one request (413)"""
    max_alternatives: int = 10
    """alternative translations of a text (400)"""
    max_beam: int = 20
    """beam size of a request (400)"""
    max_queued_sentences: int = 4096
    """sentences in the queue; a request that would exceed it is refused (429)"""
    timeout: float = 60.0
    """seconds to receive a request, and again to translate it (503)"""
    max_batch_characters: int = 16_384
    """characters in one batch, about 4,000 tokens of English"""
    batch_delay: float = 0.005
    """seconds that a sentence waits at most for others to share its batch"""
