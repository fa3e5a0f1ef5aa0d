"""Every endpoint, wrongly asked: the right problem, never a fault of ours, and nothing of the inside shown."""

import json
from typing import Any
from urllib.parse import quote

import pytest
from asking import Answer, Api

from fleetward.domain import errors
from fleetward.domain.errors import Fault, Refusal
from fleetward.wire.endpoints import ENDPOINTS, Access, Body, Endpoint
from fleetward.wire.problem import MEDIA_TYPE

ID = "0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"
CODES = {
    kind.code: kind.status
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Refusal | Fault)
}


def named(endpoint: Endpoint) -> str:
    return endpoint.name


def path_of(endpoint: Endpoint) -> str:
    return endpoint.path.replace("{id}", ID).replace("{name}", "node-1").replace("{sha256}", "0" * 64)


def needing(*kinds: Access) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.access in kinds], ids=named)


def taking(*kinds: Body) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.request_body in kinds], ids=named)


def assert_problem(answer: Answer, *codes: str) -> None:
    assert answer.headers["content-type"] == MEDIA_TYPE, answer
    document = json.loads(answer.content)
    assert document["code"] in codes, document
    assert document["status"] == answer.status == CODES[document["code"]]
    assert document["type"] == f"urn:fleetward:problem:{document['code']}"
    assert document["detail"]
    assert answer.status < 500


def ask(api: Api, endpoint: Endpoint, *, credential: str | None = None, query: str = "", **more: Any) -> Answer:
    if credential is None:
        credential = api.credential_for(endpoint.access)
    return api.ask(endpoint.method, path_of(endpoint) + query, credential=credential, **more)


def json_of(endpoint: Endpoint) -> dict[str, Any]:
    return {"content_type": "application/json", "body": b"{}"} if endpoint.request_body is Body.JSON else {}


@needing(Access.NODE, Access.USER)
@pytest.mark.parametrize(
    "authorization", ["", "Basic b3duZXI6", "Bearer", "Bearer ", "Bearer fwt_", "Bearer a.b", "Bearer fwt_é", "fwt_x"]
)
def test_without_a_credential_that_proves_somebody_nothing_is_done(
    api: Api, endpoint: Endpoint, authorization: str
) -> None:
    answer = api.ask(endpoint.method, path_of(endpoint), authorization=authorization)
    assert_problem(answer, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"


@needing(Access.NODE, Access.USER)
def test_a_users_key_is_no_nodes_token_nor_the_other_way_round(api: Api, endpoint: Endpoint) -> None:
    other = Access.USER if endpoint.access is Access.NODE else Access.NODE
    assert_problem(ask(api, endpoint, credential=api.credential_for(other)), "unauthenticated")


@needing(Access.USER)
def test_a_key_without_the_endpoints_scope_is_refused(api: Api, endpoint: Endpoint) -> None:
    kind = json_of(endpoint)
    assert_problem(ask(api, endpoint, credential=api.key("trail:read"), **kind), "forbidden")


@needing(Access.USER)
def test_a_key_with_the_endpoints_scope_alone_is_let_in(api: Api, endpoint: Endpoint) -> None:
    kind = json_of(endpoint)
    answer = ask(api, endpoint, credential=api.key(endpoint.scope), **kind)
    assert answer.status not in {401, 403}
    assert answer.status < 500


@taking(Body.JSON)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"{}{}", b'{"nope": 1}', b"[" * 100_000, b'{"a":' * 100_000, b"\x00"],
    ids=range(11),
)
def test_a_body_that_is_not_the_endpoints_document_is_refused(api: Api, endpoint: Endpoint, body: bytes) -> None:
    assert_problem(ask(api, endpoint, body=body, content_type="application/json"), "malformed_request")


@taking(Body.JSON)
def test_a_body_of_another_type_is_refused(api: Api, endpoint: Endpoint) -> None:
    assert_problem(ask(api, endpoint, body=b"{}", content_type="text/plain"), "malformed_request")


@taking(Body.JSON)
def test_a_json_body_beyond_the_limit_is_refused(api: Api, endpoint: Endpoint) -> None:
    body = b" " * (endpoint.body_bytes_max + 1)
    assert_problem(ask(api, endpoint, body=body, content_type="application/json"), "request_too_large")
    chunked = ask(api, endpoint, body=iter([body]), content_type="application/json")
    assert_problem(chunked, "request_too_large")


@taking(Body.BYTES)
def test_bytes_beyond_the_limit_are_refused_before_they_are_sent(api: Api, endpoint: Endpoint) -> None:
    more = {"content-length": str(endpoint.body_bytes_max + 1)}
    assert_problem(ask(api, endpoint, body=b"", headers=more, content_type=""), "request_too_large")


@taking(Body.NONE)
def test_a_body_where_none_belongs_is_refused(api: Api, endpoint: Endpoint) -> None:
    assert_problem(ask(api, endpoint, body=b"{}", content_type="application/json"), "malformed_request")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=named)
@pytest.mark.parametrize("query", ["?nope=1", "?limit=x&nope", "?a=%ff", "?" + "a=1&" * 100])
def test_a_query_that_the_endpoint_does_not_take_is_refused(api: Api, endpoint: Endpoint, query: str) -> None:
    assert_problem(ask(api, endpoint, query=query), "malformed_request")


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if e.query], ids=named)
@pytest.mark.parametrize("text", ["", "-1", "x", "99999999999999999999", "%00", "%f0%9f", "9" * 5000])
def test_a_parameter_beyond_its_bounds_is_refused_and_never_breaks(api: Api, endpoint: Endpoint, text: str) -> None:
    for name in endpoint.query:
        answer = ask(api, endpoint, query=f"?{name}={text}")
        # A list of names goes on after any text at all.
        is_a_name = (endpoint.name, name) == ("list_nodes", "after")
        assert (is_a_name and answer.status == 200) or 400 <= answer.status < 500, (name, text, answer)


@pytest.mark.parametrize("endpoint", [e for e in ENDPOINTS if "{" in e.path], ids=named)
@pytest.mark.parametrize("word", ["x", "%00", "%ff", "a" * 600, "..", "0" * 64, "%2e%2e%2f", "'; --", "💥"])
def test_a_path_with_a_strange_word_is_refused_and_never_breaks(api: Api, endpoint: Endpoint, word: str) -> None:
    path = endpoint.path
    for name in ("{id}", "{name}", "{sha256}"):
        path = path.replace(name, word)
    kind = json_of(endpoint)
    answer = api.ask(endpoint.method, path, credential=api.credential_for(endpoint.access), **kind)
    assert 400 <= answer.status < 500, answer


@pytest.mark.parametrize("path", ["/", "/nope", "/api/v1", "/api/v1/jobs/", "/api/v2/jobs", "/healthz/", "/%00"])
def test_an_unknown_path_is_a_problem_too(api: Api, path: str) -> None:
    assert_problem(api.ask("GET", path), "unknown_route")


@pytest.mark.parametrize("method", ["PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_another_method_is_a_problem_that_names_the_right_ones(api: Api, method: str) -> None:
    answer = api.ask(method, "/api/v1/jobs")
    assert_problem(answer, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "[::2]:1", "127.0.0.1.evil.example"])
def test_on_loopback_another_host_name_is_refused(api: Api, host: str) -> None:
    assert_problem(api.ask("GET", "/healthz", headers={"host": host}), "forbidden")


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_an_idempotency_key_of_another_form_is_refused(api: Api, key: str) -> None:
    answer = api.ask(
        "POST",
        "/api/v1/jobs",
        credential=api.owner,
        body=b'{"command": ["true"]}',
        content_type="application/json",
        headers={"idempotency-key": key},
    )
    assert_problem(answer, "malformed_request")


def test_the_same_key_and_document_make_one_job_and_another_document_is_refused(api: Api) -> None:
    def submit(command: str) -> Answer:
        return api.ask(
            "POST",
            "/api/v1/jobs",
            credential=api.owner,
            body=json.dumps({"command": [command], "labels": {"nowhere": "yes"}}).encode(),
            content_type="application/json",
            headers={"idempotency-key": "the-same-key"},
        )

    first, again = submit("true"), submit("true")
    assert (first.status, first.content) == (again.status, again.content)
    assert first.status == 200
    assert_problem(submit("false"), "idempotency_key_reused")


JOBS = [
    {"command": []},
    {"command": [""]},
    {"command": ["x"], "replicas": 0},
    {"command": ["x"], "replicas": -(2**70)},
    {"command": ["x"], "max_attempts": 2**62},
    {"command": ["x"], "priority": 2**40},
    {"command": ["x"], "resources": {"cpus": -1}},
    {"command": ["x"], "resources": {"cpus": 1e300}},
    {"command": ["x"], "resources": {"memory_bytes": 2**70}},
    {"command": ["x"], "artifacts": [{"path": "../up"}]},
    {"command": ["x"], "artifacts": [{"path": "/abs"}]},
    {"command": ["x"], "artifacts": [{"path": ""}]},
    {"command": ["x"], "inputs": [{"sha256": "zz"}]},
    {"command": ["x"], "inputs": [{"sha256": "0" * 64}]},
    {"command": ["x"], "name": "a\u0001b"},
    {"command": ["x"], "labels": {"a": "b" * 5000}},
    {"command": ["x"], "timeouts": {"run_seconds": -5}},
    {"command": ["x"], "not_before": "yesterday"},
    {"command": ["x"], "nope": 1},
]


@pytest.mark.parametrize("document", JOBS, ids=range(len(JOBS)))
def test_a_job_that_cannot_be_run_is_refused_at_once(api: Api, document: dict[str, object]) -> None:
    body = json.dumps(document).encode()
    answer = api.ask("POST", "/api/v1/jobs", credential=api.owner, body=body, content_type="application/json")
    assert 400 <= answer.status < 500, answer
    assert json.loads(answer.content)["code"] in CODES


@pytest.mark.parametrize("cursor", ["x", "9" * 19, "9" * 19 + ".0.0", "0.0." + "9" * 19, "1.2", "-1.0.0", "💥"])
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/nodes", f"/api/v1/jobs/{ID}/events"])
def test_a_cursor_that_no_list_gave_never_breaks(api: Api, path: str, cursor: str) -> None:
    assert api.ask("GET", f"{path}?after={quote(cursor)}", credential=api.owner).status < 500


@pytest.mark.parametrize("cursor", ["9" * 19 + ".0.0", "0." + "9" * 19 + ".0", "0.0." + "9" * 19])
def test_a_cursor_beyond_all_events_of_a_job_is_refused(api: Api, cursor: str) -> None:
    body = json.dumps({"command": ["true"], "labels": {"nowhere": "yes"}}).encode()
    made = api.ask("POST", "/api/v1/jobs", credential=api.owner, body=body, content_type="application/json")
    path = f"/api/v1/jobs/{json.loads(made.content)['id']}/events?after={cursor}"
    assert_problem(api.ask("GET", path, credential=api.owner), "malformed_request")


SESSION = {"node_id": ID, "challenge": "c", "last_session": 0, "nonce": "n", "signature": "s"}
INVENTORY = {
    "cpus_milli": 1,
    "memory_bytes": 1,
    "disk_bytes": 1,
    "os": "linux",
    "arch": "x86_64",
    "agent_version": "0.1.0",
    "boot_id": "b",
}


@pytest.mark.parametrize(
    ("path", "document", "field"),
    [
        ("pairing-codes", {"expires_seconds": 10**23}, "expires_seconds"),
        ("agent/sync", {"sequence": 2**63}, "sequence"),
        (f"agent/assignments/{ID}/artifacts", {"fence": 2**63, "artifacts": []}, "fence"),
        ("agent/session", SESSION | {"inventory": INVENTORY, "last_session": 2**63}, "last_session"),
        ("agent/session", SESSION | {"inventory": INVENTORY | {"cpus_milli": 2**31}}, "inventory.cpus_milli"),
        ("agent/session", SESSION | {"inventory": INVENTORY | {"memory_bytes": 2**63}}, "inventory.memory_bytes"),
        ("agent/session", SESSION | {"inventory": INVENTORY | {"disk_bytes": -1}}, "inventory.disk_bytes"),
    ],
)
def test_a_number_that_nothing_can_count_is_refused_by_its_name(
    api: Api, path: str, document: dict[str, object], field: str
) -> None:
    [endpoint] = [e for e in ENDPOINTS if e.method == "POST" and path_of(e) == f"/api/v1/{path}"]
    answer = ask(api, endpoint, body=json.dumps(document).encode(), content_type="application/json")
    assert_problem(answer, "malformed_request")
    assert json.loads(answer.content)["field"] == field
