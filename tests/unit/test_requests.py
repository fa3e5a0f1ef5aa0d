"""The form that every request must have before any service sees it."""

import asyncio
import json

import msgspec
import pytest

from fleetward.controller.api import requests
from fleetward.controller.api.requests import Message, Query, Receive
from fleetward.controller.api.routes import Router
from fleetward.domain.errors import MalformedRequest, MethodNotAllowed, RequestTooLarge, UnknownRoute
from fleetward.domain.jobs import JobSpec
from fleetward.wire.endpoints import BY_NAME, ENDPOINTS, Endpoint

ROUTER = Router(ENDPOINTS)
ID = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"


def path_of(template: str) -> str:
    return template.replace("{id}", ID).replace("{name}", "node-1").replace("{sha256}", "0" * 64)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[endpoint.name for endpoint in ENDPOINTS])
def test_every_endpoint_is_found_by_its_own_method_and_path(endpoint: Endpoint) -> None:
    assert ROUTER.find(method=endpoint.method, path=path_of(endpoint.path)).endpoint is endpoint


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/api",
        "/api/v1",
        "/api/v1/jobs/",
        "//api/v1/jobs",
        "/api/v1/nodes/",
        "/api/v2/jobs",
        "/" * 2000,
        "/api/v1/nodes/\0",
    ],
)
def test_a_path_that_no_endpoint_has_is_unknown(path: str) -> None:
    with pytest.raises(UnknownRoute):
        ROUTER.find(method="GET", path=path)


def test_another_method_is_refused_with_the_methods_that_the_path_takes() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        ROUTER.find(method="DELETE", path="/api/v1/jobs")
    assert caught.value.hint == "it takes GET, POST"


def test_a_query_is_read_by_its_endpoints_parameters() -> None:
    read = requests.read_query(BY_NAME["upload_artifact"], b"fence=7&offset=12&path=out%2Fa%20b.txt")
    assert read == Query(fence=7, offset=12, path="out/a b.txt")
    assert requests.read_query(BY_NAME["job_log"], f"assignment={ID}".encode()).assignment is not None


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("list_jobs", b"nope=1"),
        ("list_jobs", b"limit=0"),
        ("list_jobs", b"limit=1001"),
        ("list_jobs", b"limit=-1"),
        ("list_jobs", b"limit=1&limit=2"),
        ("list_jobs", b"limit"),
        ("list_jobs", b"after="),
        ("list_jobs", b"after=%00"),
        ("list_jobs", b"after=%ff"),
        ("list_jobs", b"after=\xff"),
        ("list_jobs", b"after=" + b"x" * 4097),
        ("show_job", b"limit=1"),
        ("job_log", b"assignment=x"),
        ("job_log", b"offset=9223372036854775808"),
        ("job_events", b"wait_seconds=inf"),
        ("job_events", b"wait_seconds=-1"),
    ],
)
def test_a_query_with_anything_else_is_refused(name: str, raw: bytes) -> None:
    with pytest.raises(MalformedRequest):
        requests.read_query(BY_NAME[name], raw)


def test_a_wait_is_cut_to_the_longest_hold() -> None:
    assert requests.read_query(BY_NAME["job_events"], b"wait_seconds=999999").wait_seconds == requests.WAIT_SECONDS_MAX


@pytest.mark.parametrize("depth", [1, 2, requests.DEPTH_MAX - 1, requests.DEPTH_MAX, requests.DEPTH_MAX + 1, 5000])
def test_the_depth_of_a_document_is_measured_outside_its_texts(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    assert requests.depth(nested) == depth
    text = json.dumps({"a": '[{"\\' * 200, "b": "]" * 200}).encode()
    assert requests.depth(b"[" * (depth - 1) + text + b"]" * (depth - 1)) <= max(depth, requests.DEPTH_MAX)


JOB = msgspec.json.Decoder(JobSpec)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b'{"command": ["x"], "nope": 1}', ""),
        (b'{"command": "x"}', "command"),
        (b'{"command": ["x", 1]}', "command[1]"),
        (b'{"command": ["\\u0000"]}', ""),
        (b'{"command": ["\x00"]}', ""),
        (b'{"command": ["\\\\\\u0000"]}', ""),
        (b'{"command": ["\\ud800"]}', ""),
        (b'{"command": ["\xff"]}', ""),
        (b'{"command": ["x"], "priority": 1e400}', "priority"),
        (b'{"command": ["x"], "array": NaN}', ""),
        (b'{"command": ["x"], "artifacts": [{"path": "a", "check": {"json_schema": ' + b'{"a":' * 100_000, ""),
        (
            b'{"command": ["x"], "artifacts": [{"path": "a", "check": {"json_schema": '
            + b'{"a":' * 40
            + b"1"
            + b"}" * 43,
            "",
        ),
    ],
)
def test_a_document_that_does_not_fit_is_refused_where_it_does_not(body: bytes, field: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        requests.decode(JOB, body)
    assert caught.value.field == field


def test_a_backslash_before_a_u_is_text_and_no_nul() -> None:
    spec = requests.decode(JOB, b'{"command": ["printf", "\\\\u0000"]}')
    assert isinstance(spec, JobSpec)
    assert spec.command == ["printf", "\\u0000"]


def body_of(*pieces: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    arriving = iter(messages)

    async def receive() -> Message:
        return next(arriving)

    return receive


def test_a_body_is_counted_as_it_arrives_whatever_its_headers_say() -> None:
    endpoint = BY_NAME["pair"]
    half = b"x" * (endpoint.body_bytes_max // 2)
    assert len(asyncio.run(requests.read_body(endpoint, body_of(half, half)))) == endpoint.body_bytes_max
    with pytest.raises(RequestTooLarge):
        asyncio.run(requests.read_body(endpoint, body_of(half, half, b"x")))


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("list_jobs", {"content-length": "1"}),
        ("list_jobs", {"transfer-encoding": "chunked"}),
        ("submit_job", {"content-length": "2"}),
        ("submit_job", {"content-length": "2", "content-type": "text/plain"}),
        ("append_log", {"content-length": "2", "content-type": "application/x-www-form-urlencoded"}),
        ("submit_job", {"content-length": "9999999999", "content-type": "application/json"}),
        ("submit_job", {"content-length": "x", "content-type": "application/json"}),
    ],
)
def test_a_body_is_refused_by_its_headers_before_it_is_read(name: str, headers: dict[str, str]) -> None:
    def check() -> None:
        requests.check_size(BY_NAME[name], headers)
        requests.check_kind(BY_NAME[name], headers)

    with pytest.raises((MalformedRequest, RequestTooLarge)):
        check()


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256, "\t"])
def test_an_idempotency_key_of_another_form_is_refused(key: str) -> None:
    with pytest.raises(MalformedRequest):
        requests.idempotency_key({"idempotency-key": key})
