"""Whether what an attempt handed in is what its job promised.

Owns the judgement: rules, claims and our own measurements in, check results and a verdict out. Refuses
to know where bytes lie, who asks and what follows from the verdict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleetward.domain.artifacts import RECEIPT_PATH, Verdict
from fleetward.domain.errors import Refusal, quoted
from fleetward.domain.jobs import ArtifactRule
from fleetward.verify.digest import Digest, Measured
from fleetward.verify.manifest import ArtifactPath, Entry, Glob

HOUSE_FOLDER: Final = RECEIPT_PATH.partition("/")[0] + "/"  # the fleet's own files; no rule reaches into it
MEDIA_TYPE_UNKNOWN: Final = "application/octet-stream"
ERROR_LINES_MAX: Final = 5  # failed checks that an attempt's error repeats; all of them are in the verification

# Our own table, because the system's differs from machine to machine and node and controller must agree.
_MEDIA_TYPES: Final = {
    "csv": "text/csv",
    "gif": "image/gif",
    "gz": "application/gzip",
    "html": "text/html",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "json": "application/json",
    "log": "text/plain",
    "md": "text/markdown",
    "pdf": "application/pdf",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain",
    "webp": "image/webp",
    "xml": "application/xml",
    "zip": "application/zip",
    "zst": "application/zstd",
}

_SIGNATURES: Final = {
    "application/gzip": (b"\x1f\x8b",),
    "application/pdf": (b"%PDF-",),
    "application/zip": (b"PK\x03\x04", b"PK\x05\x06"),
    "application/zstd": (b"\x28\xb5\x2f\xfd",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/webp": (b"RIFF",),
}
_TEXTUAL: Final = frozenset({"application/json", "application/xml", "image/svg+xml"})


@dataclass(frozen=True, slots=True)
class Rule:
    """One promise of a job, in checked form."""

    glob: Glob
    promise: ArtifactRule
    sha256: Digest | None

    def covers(self, path: str) -> bool:
        """Whether the promise speaks of this file."""
        return not path.startswith(HOUSE_FOLDER) and self.glob.matches(path)


def parse_rules(promises: Sequence[ArtifactRule]) -> tuple[Rule, ...]:
    """Check the artifact rules of a job document, or refuse the first bad one, naming its field."""
    return tuple(_parse_rule(promise, field=f"artifacts[{index}]") for index, promise in enumerate(promises))


def _parse_rule(promise: ArtifactRule, *, field: str) -> Rule:
    try:
        glob = Glob.parse(promise.path)
    except Refusal as refusal:
        refusal.field = f"{field}.path"
        raise
    try:
        sha256 = None if promise.sha256 is None else Digest.parse(promise.sha256)
    except Refusal as refusal:
        refusal.field = f"{field}.sha256"
        raise
    return Rule(glob=glob, promise=promise, sha256=sha256)


def asked_for(rules: Iterable[Rule], path: str) -> bool:
    """Whether the job wants this file of its working folder."""
    return any(rule.covers(path) for rule in rules)


def media_type_for(rules: Iterable[Rule], path: str) -> str:
    """Choose the media type to declare: the one that the job names, else by the name's ending."""
    for rule in rules:
        named = rule.promise.media_type
        if named is not None and "*" not in named and rule.covers(path):
            return named
    _, dot, ending = path.rpartition("/")[2].rpartition(".")
    return _MEDIA_TYPES.get(ending.lower(), MEDIA_TYPE_UNKNOWN) if dot else MEDIA_TYPE_UNKNOWN


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was looked at. `message` says what was found, also where it passed."""

    check: str
    path: str
    passed: bool
    message: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one attempt and everything it rests on."""

    verdict: Verdict
    checks: tuple[CheckResult, ...]

    @property
    def error(self) -> str:
        """The failed checks as text for people; empty when the attempt is verified."""
        failed = [result.message for result in self.checks if not result.passed]
        lines = failed[:ERROR_LINES_MAX]
        if len(failed) > ERROR_LINES_MAX:
            lines.append(f"and {len(failed) - ERROR_LINES_MAX} more failed checks")
        return "; ".join(lines)

    def checks_json(self) -> list[dict[str, str | bool]]:
        """Give the checks as the plain values that are kept with the verdict."""
        return [
            {"check": result.check, "path": result.path, "passed": result.passed, "message": result.message}
            for result in self.checks
        ]


def judge(rules: Sequence[Rule], entries: Sequence[Entry], measured: Mapping[str, Measured]) -> Judgement:
    """Compare promise, claim and measurement. A file without a measurement is one whose bytes never came."""
    covered = [(rule, [entry for entry in entries if rule.covers(entry.path)]) for rule in rules]
    wanted = {entry.path for _, matches in covered for entry in matches}
    checks: list[CheckResult] = [_receipt(entries)]
    for entry in entries:
        checks += _bytes_are_as_declared(entry, measured.get(entry.path))
        if entry.path not in wanted and not entry.path.startswith(HOUSE_FOLDER):
            checks.append(_was_not_asked_for(entry))
    for rule, matches in covered:
        checks += _promise_is_kept(rule, matches, measured)
    verdict = Verdict.VERIFIED if all(result.passed for result in checks) else Verdict.REJECTED
    return Judgement(verdict=verdict, checks=tuple(checks))


def _receipt(entries: Sequence[Entry]) -> CheckResult:
    is_there = any(entry.path == RECEIPT_PATH for entry in entries)
    message = "the receipt was handed in" if is_there else f"the attempt handed in no receipt ({RECEIPT_PATH!r})"
    return CheckResult("receipt", RECEIPT_PATH, is_there, message)


def _bytes_are_as_declared(entry: Entry, found: Measured | None) -> list[CheckResult]:
    name = quoted(entry.path)
    if found is None:
        return [
            CheckResult("stored", entry.path, passed=False, message=f"{name} was declared but its bytes never came")
        ]
    size_agrees = found.size_bytes == entry.size_bytes
    digest_agrees = found.digest == entry.digest
    size = f"{name} has {found.size_bytes} bytes"
    digest = f"{name} has sha256 {found.digest.hex}"
    if not size_agrees:
        size += f", not the {entry.size_bytes} that were declared"
    if not digest_agrees:
        digest += f", not {entry.digest.hex} as declared"
    return [
        CheckResult("size", entry.path, size_agrees, size),
        CheckResult("digest", entry.path, digest_agrees, digest),
    ]


def _was_not_asked_for(entry: Entry) -> CheckResult:
    message = f"{quoted(entry.path)} was handed in, but no artifact rule of the job asks for it"
    return CheckResult("asked_for", entry.path, passed=False, message=message)


def _promise_is_kept(rule: Rule, covered: Sequence[Entry], measured: Mapping[str, Measured]) -> list[CheckResult]:
    checks: list[CheckResult] = []
    if rule.promise.required:
        checks.append(_required(rule, count=len(covered)))
    for entry in covered:
        found = measured.get(entry.path)
        if found is not None:
            checks += _sizes(rule.promise, entry.path, found)
            checks += _sha256(rule, entry.path, found)
            checks += _media_type(rule.promise, entry, found)
        if rule.promise.check is not None:
            message = f"the check of {quoted(entry.path)} was not run, so nothing vouches for its content"
            checks.append(CheckResult("check", entry.path, passed=False, message=message))
    return checks


def _required(rule: Rule, *, count: int) -> CheckResult:
    text = quoted(rule.glob.text)
    if count:
        message = f"{text} is there" if rule.glob.is_literal else f"{text} matches {count} of the files handed in"
    elif rule.glob.is_literal:
        message = f"required artifact {text} is missing"
    else:
        message = f"required artifact {text} is missing: it matches none of the files handed in"
    return CheckResult("required", rule.glob.text, count > 0, message)


def _sizes(promise: ArtifactRule, path: ArtifactPath, found: Measured) -> list[CheckResult]:
    checks: list[CheckResult] = []
    size = f"{quoted(path)} has {found.size_bytes} bytes"
    if promise.min_bytes:
        message = f"{size}; at least {promise.min_bytes} are asked for"
        checks.append(CheckResult("min_bytes", path, found.size_bytes >= promise.min_bytes, message))
    if promise.max_bytes is not None:
        message = f"{size}; at most {promise.max_bytes} are allowed"
        checks.append(CheckResult("max_bytes", path, found.size_bytes <= promise.max_bytes, message))
    return checks


def _sha256(rule: Rule, path: ArtifactPath, found: Measured) -> list[CheckResult]:
    if rule.sha256 is None:
        return []
    agrees = found.digest == rule.sha256
    message = f"{quoted(path)} has the sha256 that the job asks for"
    if not agrees:
        message = f"{quoted(path)} has sha256 {found.digest.hex}; the job asks for {rule.sha256.hex}"
    return [CheckResult("sha256", path, agrees, message)]


def _media_type(promise: ArtifactRule, entry: Entry, found: Measured) -> list[CheckResult]:
    if promise.media_type is None:
        return []
    name = quoted(entry.path)
    claim = _bare(entry.media_type)
    if not _media_type_fits(asked=promise.media_type, claim=claim):
        message = f"{name} was declared as {entry.media_type}; the job asks for {promise.media_type}"
        return [CheckResult("media_type", entry.path, passed=False, message=message)]
    looks_right = looks_like(found.head, media_type=claim)
    message = f"{name} is {claim}" if looks_right else f"{name} was declared as {claim}, but its first bytes are not"
    return [CheckResult("media_type", entry.path, looks_right, message)]


def _bare(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower()


def _media_type_fits(*, asked: str, claim: str) -> bool:
    wanted = _bare(asked)
    kind, _, rest = wanted.partition("/")
    return claim == wanted or (rest == "*" and claim.startswith(kind + "/"))


def looks_like(head: bytes, *, media_type: str) -> bool:
    """Whether first bytes can be those of a media type; a type we know no mark of is believed."""
    if media_type.startswith("text/") or media_type in _TEXTUAL or media_type.endswith(("+json", "+xml")):
        return b"\0" not in head
    return media_type not in _SIGNATURES or head.startswith(_SIGNATURES[media_type])
