"""Input archives: one form of tar that we write, and a strict reader for what others send us.

Owns the format and its limits. Refuses to know folders on a disk: it takes and gives names, sizes and bytes.
Everything that is neither a plain file nor a folder is refused, and so is every name that could mean two things.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

from fleetward.domain.errors import UnsafeArchive, UnsafePath, quoted
from fleetward.verify.manifest import ArtifactPath, parse_path

BLOCK: Final = 512
ENTRIES_MAX: Final = 100_000
TOTAL_BYTES_MAX: Final = 64 * 1024**3
HEADER_BYTES_MAX: Final = 64 * 1024  # one extended header; a path takes at most 1 KiB of it
CHUNK: Final = 1024 * 1024

_FILE: Final = frozenset({b"0", b"\0"})
_FOLDER: Final = b"5"
_KINDS: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a named pipe",
    b"7": "a contiguous file",
    b"S": "a sparse file",
    b"K": "a long link",
}
# Extended headers that say nothing we must heed (a link is refused whatever it points to); any other may change
# what an entry means.
_HARMLESS: Final = frozenset({"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "linkpath"})


class Readable(Protocol):
    """Something that bytes come from."""

    def read(self, size: int, /) -> bytes:
        """Give at most so many bytes; none at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What an archive may hold before it is taken for an attack."""

    entries: int = ENTRIES_MAX
    total_bytes: int = TOTAL_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Member:
    """A file to be packed; `open` gives its bytes, from the start, once."""

    path: str
    size_bytes: int
    is_executable: bool
    open: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of an archive."""

    path: ArtifactPath


@dataclass(frozen=True, slots=True)
class File:
    """A file of an archive. Its bytes must be read before the next entry is asked for; what is left is skipped."""

    path: ArtifactPath
    size_bytes: int
    is_executable: bool
    chunks: Iterator[bytes]


# Writing


def pack(members: Iterable[Member], target: BinaryIO) -> None:
    """Write files as tar: same files, same bytes. Neither times nor owners are kept."""
    seen: set[str] = set()
    for member in sorted(members, key=lambda member: member.path.encode()):
        path = parse_path(member.path)
        if path in seen:
            raise UnsafeArchive(f"{quoted(path)} is given twice", hint="name each file once")
        seen.add(path)
        _write_header(path, member, target)
        _write_content(member, target)
    target.write(b"\0" * (2 * BLOCK))


def _write_header(path: ArtifactPath, member: Member, target: BinaryIO) -> None:
    records = b""
    if len(path.encode()) > 100 or not path.isascii():
        records += _pax_record("path", path)
    if member.size_bytes >= 8**11:
        records += _pax_record("size", str(member.size_bytes))
    if records:
        target.write(_header(b"././@PaxHeader", size_bytes=len(records), mode=0o644, kind=b"x"))
        target.write(_padded(records))
    mode = 0o755 if member.is_executable else 0o644
    size = member.size_bytes if member.size_bytes < 8**11 else 0
    target.write(_header(path.encode()[:100], size_bytes=size, mode=mode, kind=b"0"))


def _write_content(member: Member, target: BinaryIO) -> None:
    left = member.size_bytes
    with member.open() as source:
        while left and (chunk := source.read(min(CHUNK, left))):
            target.write(chunk)
            left -= len(chunk)
        if left or source.read(1):
            raise UnsafeArchive(
                f"{quoted(member.path)} changed its size while it was packed", hint="pack it while nobody writes to it"
            )
    target.write(b"\0" * (-member.size_bytes % BLOCK))


def _pax_record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    size = len(body) + 1
    # A record's length counts its own digits, so one more digit may be needed than first thought.
    while len(str(size)) + len(body) != size:
        size = len(str(size)) + len(body)
    return str(size).encode() + body


def _header(name: bytes, *, size_bytes: int, mode: int, kind: bytes) -> bytes:
    header = bytearray(BLOCK)
    header[0 : len(name)] = name
    header[100:108] = b"%07o\0" % mode
    header[108:124] = b"0000000\0" * 2
    header[124:136] = b"%011o\0" % size_bytes
    header[136:148] = b"00000000000\0"
    header[148:156] = b" " * 8
    header[156:157] = kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % BLOCK)


# Reading


def read(source: Readable, *, limits: Limits | None = None) -> Iterator[Folder | File]:
    """Give an archive's entries in order, each checked; refuse the whole at the first that is not safe."""
    return _Reader(source, limits or Limits()).entries()


class _Reader:
    def __init__(self, source: Readable, limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._count = 0
        self._total_bytes = 0
        self._left = 0  # of the current file's bytes
        self._padding = 0

    def entries(self) -> Iterator[Folder | File]:
        while (header := self._next_header()) is not None:
            pax: dict[str, str] = {}
            while header[156:157] in {b"x", b"g", b"L"}:
                pax |= self._extended(header)
                following = self._next_header()
                if following is None:
                    raise UnsafeArchive("the archive ends after an extended header")
                header = following
            if header[156:157] == _FOLDER and (pax.get("path") or _name(header)) in {".", "./"}:
                continue  # the packed folder itself
            yield self._entry(header, pax)
            self._skip_rest()

    def _entry(self, header: bytes, pax: dict[str, str]) -> Folder | File:
        name = pax.get("path") or _name(header)
        kind = header[156:157]
        if kind not in _FILE and kind != _FOLDER:
            said = _KINDS.get(kind, f"an entry of the unknown kind {kind!r}")
            raise UnsafeArchive(
                f"archive entry {quoted(name)} is {said}", hint="pack plain files and folders; replace links by files"
            )
        is_folder = kind == _FOLDER or name.endswith("/")
        path = _safe_path(name)
        size = _pax_size(pax, name) if "size" in pax else _number(header[124:136], "size", name)
        self._account(path, 0 if is_folder else size, is_folder=is_folder)
        if is_folder:
            if size:
                raise UnsafeArchive(f"archive entry {quoted(name)} is a folder with content")
            return Folder(path)
        self._left, self._padding = size, -size % BLOCK
        mode = _number(header[100:108], "mode", name)
        return File(path, size, is_executable=bool(mode & 0o100), chunks=self._chunks(name))

    def _account(self, path: ArtifactPath, size: int, *, is_folder: bool) -> None:
        """Keep count, and refuse a name that was used before in another way, or for a file at all."""
        self._count += 1
        self._total_bytes += size
        if self._count > self._limits.entries:
            raise UnsafeArchive(f"the archive has more than {self._limits.entries} entries")
        if self._total_bytes > self._limits.total_bytes:
            raise UnsafeArchive(f"the archive unpacks to more than {self._limits.total_bytes} bytes at {quoted(path)}")
        parts = path.split("/")
        uppers = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if path in self._files or (path in self._folders and not is_folder):
            raise UnsafeArchive(f"archive entry {quoted(path)} comes twice")
        if not uppers.isdisjoint(self._files):
            raise UnsafeArchive(f"archive entry {quoted(path)} lies below a file")
        self._folders |= uppers
        (self._folders if is_folder else self._files).add(path)

    def _chunks(self, name: str) -> Iterator[bytes]:
        while self._left:
            chunk = self._source.read(min(CHUNK, self._left))
            if not chunk:
                raise UnsafeArchive(f"the archive ends within {quoted(name)}")
            self._left -= len(chunk)
            yield chunk

    def _skip_rest(self) -> None:
        for _ in self._chunks("an entry that was skipped"):
            pass
        self._exactly(self._padding)
        self._padding = 0

    def _next_header(self) -> bytes | None:
        header = self._exactly(BLOCK)
        if header == b"\0" * BLOCK:
            return None
        stated = header[148:156].strip(b" \0")
        if not stated.isdigit() or int(stated) != int(f"{sum(header[:148]) + 8 * 0x20 + sum(header[156:]):o}"):
            raise UnsafeArchive("the archive is damaged, or is no tar archive: a header's checksum is wrong")
        return header

    def _exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            chunk = self._source.read(size - len(content))
            if not chunk:
                raise UnsafeArchive("the archive was cut short")
            content += chunk
        return content

    def _extended(self, header: bytes) -> dict[str, str]:
        self._count += 1
        size = _number(header[124:136], "size", _name(header))
        if size > HEADER_BYTES_MAX or self._count > self._limits.entries:
            raise UnsafeArchive(f"an extended header of {size} bytes is larger than {HEADER_BYTES_MAX}")
        content = self._exactly(size)
        self._exactly(-size % BLOCK)
        if header[156:157] == b"L":
            return {"path": _text(content.rstrip(b"\0"))}
        records = _pax_records(content)
        if header[156:157] == b"g" and not records.keys() <= _HARMLESS:
            raise UnsafeArchive("a global header renames or resizes entries", hint="pack it without global headers")
        return {key: value for key, value in records.items() if key not in _HARMLESS}


def _pax_records(content: bytes) -> dict[str, str]:
    records: dict[str, str] = {}
    while content:
        digits, space, _ = content[:16].partition(b" ")
        if not space or not digits.isdigit() or not len(digits) + 3 <= int(digits) <= len(content):
            raise UnsafeArchive("an extended header does not have the form `length key=value`")
        record, content = content[len(digits) + 1 : int(digits)], content[int(digits) :]
        key, equals, value = record.partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise UnsafeArchive("an extended header does not have the form `length key=value`")
        name = _text(key)
        # File attributes of other tars (SCHILY.xattr…) are dropped; sparse maps and links change the meaning.
        if name not in _HARMLESS | {"path", "size"} and not name.startswith(("SCHILY.", "LIBARCHIVE.")):
            raise UnsafeArchive(f"an extended header says {quoted(name)}, which only special files need")
        if name in _HARMLESS | {"path", "size"}:
            records[name] = "" if name in _HARMLESS else _text(value[:-1])
    return records


def _pax_size(pax: dict[str, str], name: str) -> int:
    text = pax["size"]
    if not text.isdecimal() or not text.isascii() or len(text) > 18:
        raise UnsafeArchive(f"archive entry {quoted(name)} has no sensible size: {quoted(text)}")
    return int(text)


def _safe_path(name: str) -> ArtifactPath:
    plain = name.removesuffix("/")
    while plain.startswith("./"):
        plain = plain[2:]
    try:
        return parse_path(plain)
    except UnsafePath as refusal:
        raise UnsafeArchive(f"archive entry refused: {refusal.message}", hint=refusal.hint) from refusal


def _name(header: bytes) -> str:
    name = _text(header[:100].partition(b"\0")[0])
    prefix = _text(header[345:500].partition(b"\0")[0]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UnsafeArchive(f"archive entry {quoted(raw)} has a name that is not UTF-8") from error


def _number(field: bytes, what: str, name: str) -> int:
    """Read an octal field, or GNU's binary one for large sizes."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    text = field.strip(b" \0")
    if not text or not text.isdigit() or any(digit > ord("7") for digit in text):
        if not text:
            return 0
        raise UnsafeArchive(f"archive entry {quoted(name)} has no sensible {what}: {quoted(field)}")
    return int(text, 8)
