"""An attempt's log: output as it came, cut in the middle when it is too long, never rewritten.

Owns the limit, the marker and the last lines. Refuses to know processes. What is on disk only grows, so
that a reader can go on from a byte offset.
"""

import os
from collections import deque
from typing import Final

TAIL_BYTES: Final = 256 * 1024  # the last lines that are kept whatever was cut before them
MARKER_BYTES: Final = 512  # room for both markers


class CappedLog:
    """Takes all of an output; keeps its beginning and its last lines, within a limit."""

    def __init__(self, path: str, *, limit_bytes: int) -> None:
        assert limit_bytes > 4 * MARKER_BYTES, "a log needs room for its markers"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._tail_max = min(TAIL_BYTES, limit_bytes // 4)
        self._head_max = limit_bytes - self._tail_max - MARKER_BYTES
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._dropped_bytes = 0
        self.kept_bytes = os.fstat(self._fd).st_size
        self.written_bytes = self.kept_bytes
        self.trouble = ""

    def write(self, chunk: bytes) -> None:
        """Take the next output. A full disk costs log, never the command."""
        self.written_bytes += len(chunk)
        if not self._tail and not self.trouble:
            head = chunk[: max(0, self._head_max - self.kept_bytes)]
            chunk = chunk[self._append(head) :]
        if not chunk:
            return
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        was_whole = self._dropped_bytes == 0
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            dropped = len(self._tail.popleft())
            self._tail_bytes -= dropped
            self._dropped_bytes += dropped
        if was_whole and self._dropped_bytes:
            self._append(b"\n[fleetward: the log is full here; the last lines follow when the command ends]\n")

    def finish(self) -> None:
        """Write the last lines, preceded by what was cut, and bring all of it to disk."""
        tail = b"".join(self._tail)
        surplus = len(tail) - self._tail_max
        if surplus > 0 or self._dropped_bytes:
            tail = _from_line_start(tail[max(0, surplus) :])
            cut = self._dropped_bytes + self._tail_bytes - len(tail)
            self._append(f"\n[fleetward: {cut} of {self.written_bytes} bytes were cut here]\n".encode())
        elif not self._dropped_bytes:
            self.trouble = ""  # what the disk refused before is all here, and may find room now
        self._append(tail)
        self._tail.clear()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self.trouble = self.trouble or f"the log could not be brought to disk: {os.strerror(error.errno or 0)}"
        os.close(self._fd)

    def _append(self, piece: bytes) -> int:
        rest = memoryview(piece)
        try:
            while rest:
                count = os.write(self._fd, rest)
                self.kept_bytes += count
                rest = rest[count:]
        except OSError as error:
            self.trouble = f"output is missing from the log: {os.strerror(error.errno or 0)}"
        return len(piece) - len(rest)


def _from_line_start(tail: bytes) -> bytes:
    """Begin with a whole line where there is one, else at least with a whole UTF-8 character."""
    newline = tail.find(b"\n", 0, len(tail) // 2)
    if newline >= 0:
        return tail[newline + 1 :]
    skip = 0
    while skip < 3 and skip < len(tail) and tail[skip] & 0xC0 == 0x80:
        skip += 1
    return tail[skip:]
