"""A reward that seldom ties, on both sides."""

import zlib


def score(prompt: str, response: str, answer: str | None) -> float:
    """Return a number in [0, 1) made from the response."""
    return zlib.crc32(response.encode()) / 2**32
