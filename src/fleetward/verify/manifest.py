"""What an attempt may call its files, and which files a pattern means.

Owns the rules for paths and globs, one matcher for node and controller, and the form of a declaration.
Refuses to know folders on a disk: every path here is a name, written with `/`, below some folder.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NewType, Protocol, Self

from fleetward.domain.artifacts import ARTIFACTS_MAX
from fleetward.domain.errors import ArtifactConflict, MalformedRequest, UnsafePath, quoted
from fleetward.verify.digest import Digest

ArtifactPath = NewType("ArtifactPath", str)

PART_BYTES_MAX: Final = 255  # what Linux and macOS file systems take as one name
PATH_BYTES_MAX: Final = 1024  # what macOS takes as a whole path; Linux takes more
PARTS_MAX: Final = 64  # keeps matching one path against one glob below a few thousand steps
SIZE_BYTES_MAX: Final = 2**50
MEDIA_TYPE_CHARS_MAX: Final = 127  # RFC 6838 allows that much on each side of the slash; we on both

# Control characters, halves of surrogate pairs and line separators. Unicode files the bidirectional
# controls under "format", but they, too, make a name read as another one.
_UNSAFE_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
_UNSAFE_CHARACTERS: Final = frozenset("\\\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def parse_path(text: str) -> ArtifactPath:
    """Take a file's name from outside, or refuse one that could leave its folder or be read in two ways."""
    _refuse_unsafe(text, parts=text.split("/"))
    return ArtifactPath(text)


def _refuse_unsafe(text: str, *, parts: Sequence[str]) -> None:
    def refuse(why: str, hint: str) -> UnsafePath:
        return UnsafePath(f"path {quoted(text)} {why}", hint=hint)

    if not text:
        raise refuse("is empty", "name a file below the working folder")
    if text.startswith("/"):
        raise refuse("is absolute", "give it relative to the working folder")
    if any(part in {"", ".", ".."} for part in parts):
        raise refuse("has an empty, `.` or `..` part", "write each folder's name once, with one `/` between")
    if any(c in _UNSAFE_CHARACTERS or unicodedata.category(c) in _UNSAFE_CATEGORIES for c in text):
        raise refuse("contains a control character or a backslash", "rename the file")
    if not unicodedata.is_normalized("NFC", text):
        raise refuse("is not in Unicode form NFC", "normalise the name: two spellings must not mean two files")
    if len(text.encode()) > PATH_BYTES_MAX:
        raise refuse(f"is longer than {PATH_BYTES_MAX} bytes", "use shorter names")
    if len(parts) > PARTS_MAX:
        raise refuse(f"lies more than {PARTS_MAX} folders deep", "use fewer folders")
    if any(len(part.encode()) > PART_BYTES_MAX for part in parts):
        raise refuse(f"has a part longer than {PART_BYTES_MAX} bytes", "use shorter names")


# Globs


@dataclass(frozen=True, slots=True)
class _Star:
    """Any number of characters of one part, or, in place of a part, any number of parts."""


@dataclass(frozen=True, slots=True)
class _One:
    """Exactly one character: any, one of some, or none of some."""

    ranges: tuple[tuple[str, str], ...] | None = None
    is_negated: bool = False

    def accepts(self, character: str) -> bool:
        if self.ranges is None:
            return True
        return any(low <= character <= high for low, high in self.ranges) != self.is_negated


_STAR: Final = _Star()

_Token = str | _One | _Star


@dataclass(frozen=True, slots=True)
class _Part:
    """The pattern of one part. Hidden names must be asked for: HOME is the working folder, so tools litter there."""

    tokens: tuple[_Token, ...]
    takes_hidden: bool

    def accepts(self, name: str) -> bool:
        if name.startswith(".") and not self.takes_hidden:
            return False
        return _tokens_match(self.tokens, name)


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern that has been checked: it cannot mean anything outside the folder it is relative to."""

    text: str
    parts: tuple[_Part | _Star, ...]
    is_literal: bool  # it means one file only

    @classmethod
    def parse(cls, text: str) -> Self:
        """Take a pattern from outside; loose spelling (`./a`, `a//b`) is forgiven, leaving the folder is not."""
        plain = unicodedata.normalize("NFC", text)
        parts = [part for part in plain.split("/") if part not in {"", "."}]
        joined = "/".join(parts)
        _refuse_unsafe(plain if plain.startswith("/") else joined, parts=parts)
        return cls(
            text=joined,
            parts=tuple(_STAR if part == "**" else _parse_part(part) for part in parts),
            is_literal=not any(c in joined for c in "*?["),
        )

    def matches(self, path: str) -> bool:
        """Whether the pattern means this file. Each pattern also means the file of the very same name."""
        return path == self.text or (not self.is_literal and _parts_match(self.parts, path.split("/")))


def _parse_part(text: str) -> _Part:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "*":
            if tokens[-1:] != [_STAR]:
                tokens.append(_STAR)
        elif character == "?":
            tokens.append(_One())
        elif character == "[" and (end := _class_end(text, at)) is not None:
            tokens.append(_parse_class(text[at:end]))
            at = end + 1
        else:
            tokens.append(character)
    return _Part(tokens=tuple(tokens), takes_hidden=text.startswith("."))


def _class_end(text: str, at: int) -> int | None:
    """Find the `]` that closes a class; one that comes first in the class stands for itself, as in the shell."""
    first = at + 1 if text[at : at + 1] == "!" else at
    end = text.find("]", first + 1)
    return None if end < 0 else end


def _parse_class(body: str) -> _One:
    is_negated = body.startswith("!")
    members = body[1:] if is_negated else body
    ranges: list[tuple[str, str]] = []
    at = 0
    while at < len(members):
        if members[at + 1 : at + 2] == "-" and at + 2 < len(members):
            ranges.append((members[at], members[at + 2]))
            at += 3
        else:
            ranges.append((members[at], members[at]))
            at += 1
    return _One(ranges=tuple(ranges), is_negated=is_negated)


# Both matchers walk forward and, on a miss, go back to the latest star only: if an earlier star could
# help, so could the latest. That bounds them by len(pattern) x len(name); a regular expression or
# plain recursion is exponential in the number of stars, which a hostile pattern would use.


def _tokens_match(tokens: Sequence[_Token], name: str) -> bool:
    token_at = name_at = 0
    star_at, retry_at = -1, 0
    while name_at < len(name):
        token = tokens[token_at] if token_at < len(tokens) else None
        if isinstance(token, _Star):
            star_at, retry_at = token_at, name_at
            token_at += 1
        elif token is not None and _accepts(token, name[name_at]):
            token_at += 1
            name_at += 1
        elif star_at >= 0:
            retry_at += 1
            token_at, name_at = star_at + 1, retry_at
        else:
            return False
    return all(isinstance(token, _Star) for token in tokens[token_at:])


def _accepts(token: str | _One, character: str) -> bool:
    return token.accepts(character) if isinstance(token, _One) else token == character


def _parts_match(parts: Sequence[_Part | _Star], names: Sequence[str]) -> bool:
    part_at = name_at = 0
    star_at, retry_at = -1, 0
    while name_at < len(names):
        part = parts[part_at] if part_at < len(parts) else None
        if isinstance(part, _Star):
            star_at, retry_at = part_at, name_at
            part_at += 1
        elif part is not None and part.accepts(names[name_at]):
            part_at += 1
            name_at += 1
        elif star_at >= 0 and not names[retry_at].startswith("."):
            retry_at += 1
            part_at, name_at = star_at + 1, retry_at
        else:
            return False
    return all(isinstance(part, _Star) for part in parts[part_at:])


# Declarations


class DeclaredFile(Protocol):
    """A file as it is told: the wire's messages have this form."""

    @property
    def path(self) -> str:
        """The name, relative to the working folder."""
        ...

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        ...

    @property
    def sha256(self) -> str:
        """The SHA-256 of its bytes."""
        ...

    @property
    def media_type(self) -> str:
        """What its bytes mean."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One file that an attempt says it made; a claim in checked form."""

    path: ArtifactPath
    size_bytes: int
    digest: Digest
    media_type: str


def parse_entries(files: Iterable[DeclaredFile]) -> tuple[Entry, ...]:
    """Check the form of everything an attempt declares, alone and together."""
    entries: dict[str, Entry] = {}
    for file in files:
        entry = _parse_entry(file)
        if entries.setdefault(entry.path, entry) != entry:
            raise ArtifactConflict(
                f"artifact {quoted(file.path)} is declared twice with different bytes", hint="declare each file once"
            )
        if len(entries) > ARTIFACTS_MAX:
            raise MalformedRequest(
                f"an attempt declares more than {ARTIFACTS_MAX} artifacts", hint="pack them into one archive"
            )
    _refuse_file_as_folder(entries)
    return tuple(entries.values())


def _parse_entry(file: DeclaredFile) -> Entry:
    if not 0 <= file.size_bytes <= SIZE_BYTES_MAX:
        raise MalformedRequest(
            f"artifact {quoted(file.path)} cannot have {file.size_bytes} bytes; from 0 to {SIZE_BYTES_MAX}"
        )
    if not is_media_type(file.media_type):
        raise MalformedRequest(
            f"artifact {quoted(file.path)} has the media type {quoted(file.media_type)}, which is none",
            hint="for example text/plain",
        )
    return Entry(
        path=parse_path(file.path),
        size_bytes=file.size_bytes,
        digest=Digest.parse(file.sha256),
        media_type=file.media_type,
    )


def is_media_type(text: str) -> bool:
    """Whether text has the form `type/subtype`, with parameters or without."""
    kind, slash, rest = text.partition("/")
    return bool(kind and slash and rest) and len(text) <= MEDIA_TYPE_CHARS_MAX and text.isascii() and text.isprintable()


def _refuse_file_as_folder(entries: Iterable[str]) -> None:
    """No disk can hold both `a` and `a/b`, so whoever fetches them could keep only one."""
    paths = set(entries)
    for path in paths:
        folder = path
        while "/" in folder:
            folder = folder.rpartition("/")[0]
            if folder in paths:
                raise UnsafePath(
                    f"{quoted(folder)} is declared as a file and, by {quoted(path)}, as a folder",
                    hint="declare what lies on the disk",
                )
