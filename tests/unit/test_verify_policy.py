"""The judgement: a promise, a claim and our own measurement, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetward.domain.artifacts import RECEIPT_PATH, Verdict
from fleetward.domain.errors import MalformedDigest, UnsafePath
from fleetward.domain.jobs import ArtifactCheck, ArtifactRule
from fleetward.verify.digest import Digest, Measured, measure
from fleetward.verify.manifest import Entry, parse_path
from fleetward.verify.policy import (
    ERROR_LINES_MAX,
    CheckResult,
    Judgement,
    asked_for,
    judge,
    media_type_for,
    parse_rules,
)

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 10


def claim(path: str, content: bytes, media_type: str = "text/plain") -> Entry:
    return Entry(parse_path(path), len(content), Digest.of(content), media_type)


RECEIPT = claim(RECEIPT_PATH, b"{}", "application/json")


def judged(rules: list[ArtifactRule], files: dict[str, bytes], media_type: str = "text/plain") -> Judgement:
    """Judge an honest attempt that hands in these files and a receipt."""
    entries = [RECEIPT, *(claim(path, content, media_type) for path, content in files.items())]
    measured = {path: measure([content]) for path, content in files.items()}
    return judge(parse_rules(rules), entries, {RECEIPT_PATH: measure([b"{}"]), **measured})


def test_an_honest_attempt_is_verified_and_every_check_is_told() -> None:
    rule = ArtifactRule(path="out.txt", min_bytes=1, max_bytes=9, media_type="text/plain", sha256=Digest.of(b"hi").hex)
    judgement = judged([rule], {"out.txt": b"hi"})
    digest = Digest.of(b"hi").hex
    receipt = Digest.of(b"{}").hex
    assert judgement == Judgement(
        verdict=Verdict.VERIFIED,
        checks=(
            CheckResult("receipt", RECEIPT_PATH, passed=True, message="the receipt was handed in"),
            CheckResult("size", RECEIPT_PATH, passed=True, message=f"{RECEIPT_PATH!r} has 2 bytes"),
            CheckResult("digest", RECEIPT_PATH, passed=True, message=f"{RECEIPT_PATH!r} has sha256 {receipt}"),
            CheckResult("size", "out.txt", passed=True, message="'out.txt' has 2 bytes"),
            CheckResult("digest", "out.txt", passed=True, message=f"'out.txt' has sha256 {digest}"),
            CheckResult("required", "out.txt", passed=True, message="'out.txt' is there"),
            CheckResult("min_bytes", "out.txt", passed=True, message="'out.txt' has 2 bytes; at least 1 are asked for"),
            CheckResult("max_bytes", "out.txt", passed=True, message="'out.txt' has 2 bytes; at most 9 are allowed"),
            CheckResult("sha256", "out.txt", passed=True, message="'out.txt' has the sha256 that the job asks for"),
            CheckResult("media_type", "out.txt", passed=True, message="'out.txt' is text/plain"),
        ),
    )
    assert judgement.error == ""
    assert judgement.checks_json()[0] == {
        "check": "receipt",
        "path": RECEIPT_PATH,
        "passed": True,
        "message": "the receipt was handed in",
    }


def test_a_job_without_artifacts_still_needs_its_receipt() -> None:
    assert judged([], {}).verdict is Verdict.VERIFIED
    assert judge((), (), {}).error == f"the attempt handed in no receipt ({RECEIPT_PATH!r})"


def test_an_empty_file_is_an_artifact_like_any_other() -> None:
    assert judged([ArtifactRule(path="empty")], {"empty": b""}).verdict is Verdict.VERIFIED


@pytest.mark.parametrize(
    ("rule", "files", "error"),
    [
        (ArtifactRule(path="out.txt"), {}, "required artifact 'out.txt' is missing"),
        (
            ArtifactRule(path="out/*.txt"),
            {},
            "required artifact 'out/*.txt' is missing: it matches none of the files handed in",
        ),
        (ArtifactRule(path="a", min_bytes=3), {"a": b"hi"}, "'a' has 2 bytes; at least 3 are asked for"),
        (ArtifactRule(path="a", max_bytes=1), {"a": b"hi"}, "'a' has 2 bytes; at most 1 are allowed"),
        (
            ArtifactRule(path="a", sha256=Digest.of(b"").hex),
            {"a": b"hi"},
            f"'a' has sha256 {Digest.of(b'hi').hex}; the job asks for {Digest.of(b'').hex}",
        ),
        (
            ArtifactRule(path="a", media_type="image/png"),
            {"a": b"hi"},
            "'a' was declared as text/plain; the job asks for image/png",
        ),
        (
            ArtifactRule(path="a", required=False),
            {"b": b"hi"},
            "'b' was handed in, but no artifact rule of the job asks for it",
        ),
        (
            ArtifactRule(path="a", check=ArtifactCheck(command=["true"])),
            {"a": b"hi"},
            "the check of 'a' was not run, so nothing vouches for its content",
        ),
    ],
)
def test_a_broken_promise_rejects_and_names_the_file(rule: ArtifactRule, files: dict[str, bytes], error: str) -> None:
    judgement = judged([rule], files)
    assert (judgement.verdict, judgement.error) == (Verdict.REJECTED, error)


def test_an_optional_artifact_may_be_missing() -> None:
    assert judged([ArtifactRule(path="a", required=False)], {}).verdict is Verdict.VERIFIED


def test_a_glob_speaks_of_each_of_its_files() -> None:
    judgement = judged([ArtifactRule(path="out/**", min_bytes=1)], {"out/a": b"1", "out/b/c": b""})
    assert judgement.error == "'out/b/c' has 0 bytes; at least 1 are asked for"
    assert "'out/**' matches 2 of the files handed in" in [check.message for check in judgement.checks]


def test_a_claim_whose_bytes_never_came_is_rejected() -> None:
    judgement = judge(
        parse_rules([ArtifactRule(path="a")]), [RECEIPT, claim("a", b"hi")], {RECEIPT_PATH: measure([b"{}"])}
    )
    assert judgement.error == "'a' was declared but its bytes never came"


def test_other_bytes_than_declared_are_rejected_and_both_are_named() -> None:
    entries = [RECEIPT, claim("a", b"hello")]
    measured = {RECEIPT_PATH: measure([b"{}"]), "a": measure([b"hi"])}
    assert judge(parse_rules([ArtifactRule(path="a")]), entries, measured).error == (
        "'a' has 2 bytes, not the 5 that were declared; "
        f"'a' has sha256 {Digest.of(b'hi').hex}, not {Digest.of(b'hello').hex} as declared"
    )


def test_the_fleets_own_files_are_outside_the_rules() -> None:
    rules = parse_rules([ArtifactRule(path=".fleetward/*"), ArtifactRule(path="**/.*/*.json")])
    assert not asked_for(rules, RECEIPT_PATH)
    judgement = judged([ArtifactRule(path=".fleetward/*")], {})
    assert judgement.error == "required artifact '.fleetward/*' is missing: it matches none of the files handed in"


def test_an_error_tells_the_first_failures_and_counts_the_rest() -> None:
    judgement = judged([ArtifactRule(path=f"a{n}") for n in range(ERROR_LINES_MAX + 2)], {})
    assert judgement.error.count("is missing") == ERROR_LINES_MAX
    assert judgement.error.endswith("; and 2 more failed checks")


@pytest.mark.parametrize(
    ("asked", "declared", "content", "passes"),
    [
        ("image/png", "image/png", PNG, True),
        ("image/*", "image/png", PNG, True),
        ("IMAGE/PNG; q=1", "image/png", PNG, True),
        ("image/png", "image/png", b"no picture", False),
        ("image/*", "text/plain", b"hi", False),
        ("application/gzip", "application/gzip", b"\x1f\x8b\x08", True),
        ("text/plain", "text/plain; charset=utf-8", b"hi", True),
        ("text/plain", "text/plain", b"\xff\xfe latin or worse", True),
        ("text/plain", "text/plain", b"a\0b", False),
        ("application/json", "application/json", b"\0", False),
        ("application/vnd.x+json", "application/vnd.x+json", b"{}", True),
        ("application/x-unheard-of", "application/x-unheard-of", b"\0", True),
    ],
)
def test_a_media_type_is_compared_and_looked_at(asked: str, declared: str, content: bytes, *, passes: bool) -> None:
    judgement = judged([ArtifactRule(path="a", media_type=asked)], {"a": content}, media_type=declared)
    assert judgement.verdict is (Verdict.VERIFIED if passes else Verdict.REJECTED)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("named", "application/x-ours"),
        ("wild.png", "image/png"),
        ("a.TXT", "text/plain"),
        ("a.unheard-of", "application/octet-stream"),
        ("a.b/plain", "application/octet-stream"),
    ],
)
def test_a_node_declares_the_type_the_job_names_or_the_endings(path: str, expected: str) -> None:
    rules = parse_rules(
        [
            ArtifactRule(path="wild.*", media_type="image/*"),
            ArtifactRule(path="x"),
            ArtifactRule(path="named", media_type="application/x-ours"),
        ]
    )
    assert media_type_for(rules, path) == expected


@pytest.mark.parametrize(
    ("rule", "refusal", "field"),
    [
        (ArtifactRule(path="../*"), UnsafePath, "artifacts[1].path"),
        (ArtifactRule(path="a", sha256="zz"), MalformedDigest, "artifacts[1].sha256"),
    ],
)
def test_a_bad_rule_is_refused_by_its_field(
    rule: ArtifactRule, refusal: type[UnsafePath | MalformedDigest], field: str
) -> None:
    with pytest.raises(refusal) as refused:
        parse_rules([ArtifactRule(path="fine"), rule])
    assert refused.value.field == field


RULES = st.builds(
    ArtifactRule,
    path=st.sampled_from(["a", "b", "*", "**", "d/*"]),
    required=st.booleans(),
    min_bytes=st.integers(0, 3),
    max_bytes=st.none() | st.integers(0, 3),
)
FILES = st.dictionaries(st.sampled_from(["a", "b", "d/a", "d/e/f"]), st.binary(max_size=4))


@given(st.lists(RULES, max_size=3), FILES, FILES)
def test_verified_means_that_all_bytes_are_as_declared_and_every_promise_is_kept(
    rules: list[ArtifactRule], claimed: dict[str, bytes], stored: dict[str, bytes]
) -> None:
    parsed = parse_rules(rules)
    entries = [RECEIPT, *(claim(path, content) for path, content in claimed.items())]
    measured: dict[str, Measured] = {RECEIPT_PATH: measure([b"{}"])}
    measured |= {path: measure([content]) for path, content in stored.items()}
    judgement = judge(parsed, entries, measured)
    holds = all(stored.get(path) == content for path, content in claimed.items())
    holds = holds and all(asked_for(parsed, path) for path in claimed)
    for rule in parsed:
        sizes = [len(content) for path, content in claimed.items() if rule.covers(path)]
        limit = 99 if rule.promise.max_bytes is None else rule.promise.max_bytes
        holds = holds and (bool(sizes) or not rule.promise.required)
        holds = holds and all(rule.promise.min_bytes <= size <= limit for size in sizes)
    assert (judgement.verdict is Verdict.VERIFIED) == holds == (judgement.error == "")
