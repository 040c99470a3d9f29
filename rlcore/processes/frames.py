"""Frames: messages between a process and its parent, with a limit of size.

A frame is HEADER, which has the message's number and the length of its body in bytes, and then the body.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

HEADER = struct.Struct("!QQ")


class FrameError(Exception):
    """The header of a frame names a body longer than the limit, or far more bytes came than one frame may have."""


def frame(body: bytes, number: int = 0) -> bytes:
    """Return the frame of a message."""
    return HEADER.pack(number, len(body)) + body


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Return the number and the body of a stream's next frame; None at its end, also within one.

    For frames of a parent, or of a process of its own: no limit.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    number, length = HEADER.unpack(header)
    body = stream.read(length)
    return (number, body) if len(body) == length else None


class FrameBuffer:
    """The bytes that came from a process, until they are whole frames."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the longest body."""
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def add(self, part: bytes) -> None:
        """Append bytes that came. Raises FrameError when more than two of the longest frames wait to be taken."""
        self._bytes += part
        if len(self._bytes) > 2 * (HEADER.size + self._max_bytes):
            raise FrameError(f"{len(self._bytes)} bytes came; the most in a message are {self._max_bytes}")

    def take(self) -> tuple[int, bytes] | None:
        """Remove the first frame and return its number and body; None while it is not whole.

        Raises FrameError as soon as a header names a body of more than `max_bytes`.
        """
        if len(self._bytes) < HEADER.size:
            return None
        number, length = HEADER.unpack_from(self._bytes)
        if length > self._max_bytes:
            raise FrameError(f"a message of {length} bytes; the most are {self._max_bytes}")
        end = HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        return number, body

    def __len__(self) -> int:
        return len(self._bytes)
