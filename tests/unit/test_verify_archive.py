"""Input archives: what we write, what we take from others, and what we refuse."""

import io
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import given, strategies

from fleetward.domain.errors import Refusal, UnsafeArchive
from fleetward.verify.archive import BLOCK, File, Folder, Limits, Member, pack, read


def member(path: str, content: bytes = b"", *, is_executable: bool = False) -> Member:
    return Member(path, len(content), is_executable, lambda: io.BytesIO(content))


def packed(*members: Member) -> bytes:
    target = io.BytesIO()
    pack(members, target)
    return target.getvalue()


def entries(archive: bytes, limits: Limits | None = None) -> list[tuple[str, bytes | None, bool]]:
    found: list[tuple[str, bytes | None, bool]] = []
    for entry in read(io.BytesIO(archive), limits=limits):
        match entry:
            case Folder(path):
                found.append((path, None, False))
            case File(path, _, is_executable, chunks):
                found.append((path, b"".join(chunks), is_executable))
    return found


def tar(*infos: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for info, content in infos:
            info.size = len(content) or info.size
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def info(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **pax: str) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.pax_headers = kind, link, pax
    return made, b""


LONG = "/".join(["d" * 60] * 6) + "/" + "é" * 100
FILES = [member("b/c", b"x" * 700), member("a", b"", is_executable=True), member(LONG, b"long"), member("ü", b"1")]


def test_what_is_packed_is_read_back_in_order_of_names() -> None:
    found = entries(packed(*FILES))
    assert [("a", b"", True), ("b/c", b"x" * 700, False), (LONG, b"long", False), ("ü", b"1", False)] == found


def test_the_same_files_make_the_same_bytes_in_any_order() -> None:
    assert packed(*FILES) == packed(*reversed(FILES))


def test_other_programs_can_read_what_we_pack() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed(*FILES))) as archive:
        assert ["a", "b/c", LONG, "ü"] == archive.getnames()
        assert [0o755, 0o644, 0o644, 0o644] == [each.mode for each in archive]
        content = archive.extractfile("b/c")
        assert content is not None
        assert b"x" * 700 == content.read()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_plain_archives_of_other_programs_are_taken(form: int) -> None:
    made = tarfile.TarInfo("folder/" + "n" * 99)
    made.mode, made.mtime = 0o4777, 1.0
    archive = tar(info("./", tarfile.DIRTYPE), info("./folder", tarfile.DIRTYPE), (made, b"content"), form=form)
    assert [("folder", None, False), ("folder/" + "n" * 99, b"content", True)] == entries(archive)


def test_an_entry_that_is_not_read_is_skipped() -> None:
    assert ["a", "b/c"] == [entry.path for entry in read(io.BytesIO(packed(*FILES[:2])))]


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "absolute": (lambda: tar(info("/etc/cron.d/x")), "is absolute"),
    "climbing": (lambda: tar(info("a/../../x")), r"`\.\.` part"),
    "climbing after dot": (lambda: tar(info("./../x")), r"`\.\.` part"),
    "backslash": (lambda: tar(info("a\\b")), "backslash"),
    "control": (lambda: tar(info("a\nb")), "control character"),
    "decomposed": (lambda: tar(info("e\u0301")), "NFC"),
    "symbolic link": (lambda: tar(info("link", tarfile.SYMTYPE, "/etc")), "'link' is a symbolic link"),
    "file through a link": (
        lambda: tar(info("d", tarfile.SYMTYPE, "/etc"), info("d/passwd")),
        "'d' is a symbolic link",
    ),
    "hard link": (lambda: tar(info("a"), info("b", tarfile.LNKTYPE, "a")), "'b' is a hard link"),
    # CVE-2025-4517 and 4330: chains of links whose expansion passes PATH_MAX, then a hard link through them.
    "link chain": (
        lambda: tar(
            *[info("/".join(["d" * 200] * depth), tarfile.DIRTYPE) for depth in range(1, 5)],
            info("a" * 200, tarfile.SYMTYPE, "d" * 200),
            info("escape", tarfile.SYMTYPE, "/".join(["a" * 200] * 20) + "/../" * 16 + "etc"),
            info("flag", tarfile.LNKTYPE, "escape/passwd"),
        ),
        "is a symbolic link",
    ),
    "character device": (lambda: tar(info("null", tarfile.CHRTYPE)), "'null' is a character device"),
    "block device": (lambda: tar(info("disk", tarfile.BLKTYPE)), "'disk' is a block device"),
    "pipe": (lambda: tar(info("pipe", tarfile.FIFOTYPE)), "'pipe' is a named pipe"),
    "unknown kind": (lambda: tar(info("x", b"Z")), "unknown kind"),
    "gnu sparse": (lambda: tar(info("x", b"S")), "a sparse file"),
    "twice": (lambda: tar(info("a"), info("a")), "'a' comes twice"),
    "twice by spelling": (lambda: tar(info("a"), info("./a")), "'a' comes twice"),
    "folder over file": (lambda: tar(info("a"), info("a", tarfile.DIRTYPE)), "'a' comes twice"),
    "file over folder": (lambda: tar(info("a/b"), info("a")), "'a' comes twice"),
    "below a file": (lambda: tar(info("a"), info("a/b")), "lies below a file"),
    "pax sparse": (lambda: tar(info("x", GNU__sparse__major="1")), "GNU__sparse__major"),
    "pax size of the moon": (lambda: tar(info("x", size="9" * 30)), "no sensible size"),
    "pax path that climbs": (lambda: tar(info("x", path="../x")), r"`\.\.` part"),
    "long pax name": (lambda: tar(info("x", path="n" * 60_000)), "longer than"),
    "huge extended header": (lambda: tar(info("x", comment="c" * 70_000)), "larger than"),
    "no tar": (lambda: b"PK\x03\x04" + b"x" * 2000, "no tar archive"),
    "cut in a header": (lambda: packed(*FILES)[:300], "cut short"),
    "cut in a file": (lambda: packed(*FILES)[: BLOCK * 2 + 10], "ends within"),
    "empty": (lambda: b"", "cut short"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_with_the_entry_and_the_reason(name: str) -> None:
    make, said = HOSTILE[name]
    with pytest.raises(UnsafeArchive, match=said):
        entries(make())


def test_a_file_that_claims_to_be_huge_is_refused_before_a_byte_of_it_is_read() -> None:
    made, _ = info("huge")
    made.size = 2**45
    archive = made.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(UnsafeArchive, match="unpacks to more than"):
        entries(archive)


def test_limits_on_entries_and_bytes_hold() -> None:
    archive = packed(*[member(str(number), b"12345") for number in range(10)])
    assert 10 == len(entries(archive, Limits(entries=10, total_bytes=50)))
    with pytest.raises(UnsafeArchive, match="more than 9 entries"):
        entries(archive, Limits(entries=9))
    with pytest.raises(UnsafeArchive, match="more than 49 bytes at '9'"):
        entries(archive, Limits(total_bytes=49))


def test_a_file_that_grows_while_it_is_packed_is_refused() -> None:
    growing = Member("log", 3, is_executable=False, open=lambda: io.BytesIO(b"1234"))
    with pytest.raises(UnsafeArchive, match="'log' changed its size"):
        packed(growing)


def test_a_file_given_twice_is_refused() -> None:
    with pytest.raises(UnsafeArchive, match="'a' is given twice"):
        packed(member("a"), member("a"))


@given(strategies.binary(max_size=3000), strategies.integers(0, 4000))
def test_no_damage_makes_the_reader_fail_in_any_other_way(noise: bytes, at: int) -> None:
    sound = packed(*FILES)
    damaged = sound[:at] + noise + sound[at + len(noise) :]
    try:
        found = entries(damaged)
    except Refusal:
        return
    assert all(path and not path.startswith("/") and ".." not in path.split("/") for path, _, _ in found)
