"""The log of an attempt: whole while it fits, cut in the middle when it does not, and patient with a full disk."""

from pathlib import Path

import pytest
from hypothesis import given, strategies

from fleetward.agent.attempt_log import CappedLog

LIMIT = 8192


def written(path: Path, chunks: list[bytes], limit: int = LIMIT) -> bytes:
    path.unlink(missing_ok=True)
    log = CappedLog(str(path), limit_bytes=limit)
    for chunk in chunks:
        log.write(chunk)
    log.finish()
    assert "" == log.trouble
    content = path.read_bytes()
    assert len(content) == log.kept_bytes
    return content


def test_output_that_fits_is_kept_byte_for_byte(tmp_path: Path) -> None:
    chunks = [b"a" * 3000, b"\n", b"\xff" * 4000]
    assert b"".join(chunks) == written(tmp_path / "log", chunks)


def test_the_tail_begins_with_a_whole_line(tmp_path: Path) -> None:
    content = written(tmp_path / "log", [b"line %04d\n" % number for number in range(3000)])
    head, marker, tail = content.partition(b" of 30000 bytes were cut here]\n")
    assert marker
    assert head.startswith(b"line 0000\n")
    assert tail.startswith(b"line ")
    assert tail.endswith(b"line 2999\n")


def test_a_tail_without_a_line_end_begins_with_a_whole_character(tmp_path: Path) -> None:
    content = written(tmp_path / "log", [b"x" + "é".encode() * 10_000])
    _, _, tail = content.partition(b"were cut here]\n")
    assert {"é"} == set(tail.decode())


def test_bytes_kept_and_bytes_cut_make_up_all_that_was_written(tmp_path: Path) -> None:
    @given(strategies.lists(strategies.binary(min_size=1, max_size=9000), max_size=12))
    def holds(chunks: list[bytes]) -> None:
        total = b"".join(chunks)
        content = written(tmp_path / "log", chunks)
        assert len(content) <= LIMIT
        if len(total) <= LIMIT - 512:
            assert total == content
        else:
            assert content.endswith(total[-100:]) or b"\n" in total[-2048:]
            assert b"bytes were cut here]\n" in content or total == content

    holds()


def test_a_full_disk_costs_log_and_nothing_else() -> None:
    log = CappedLog("/dev/full", limit_bytes=LIMIT)
    for _ in range(100):
        log.write(b"x" * 1000)
    log.finish()
    assert "output is missing from the log: No space left on device" == log.trouble
    assert (0, 100_000) == (log.kept_bytes, log.written_bytes)


def test_a_log_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        CappedLog(str(tmp_path / "log"), limit_bytes=LIMIT)
