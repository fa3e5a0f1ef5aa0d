"""What the client puts on the wire, and what it makes of what comes back."""

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import pytest
from loopback_server import Answer, serve

from fleetward.client import Client
from fleetward.domain.errors import InvalidSetting, Unreachable
from fleetward.domain.jobs import JobSpec
from fleetward.wire import messages as m
from fleetward.wire.problem import MEDIA_TYPE, Problem, RemoteFault, RemoteRefusal, code_of

JOB = UUID("0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
READY = Answer(body=msgspec.json.encode(m.Health(status="ready")))


def problem(status: int, code: str = "job_not_found") -> Answer:
    body = Problem(code=code, status=status, title="t", detail="no job has that id", hint="look at `job ls`")
    return Answer(status=status, body=msgspec.json.encode(body), content_type=MEDIA_TYPE)


def test_a_call_carries_token_and_escaped_parameters_below_the_urls_own_path() -> None:
    with serve([Answer(body=b"abc", content_type="application/octet-stream")]) as server:
        client = Client(server.url + "/fleet/", token="fwt_1_2_3")
        with client, client.read_artifact(JOB, path="out/a b&c.txt", offset=7) as download:
            assert b"".join(download) == b"abc"
            assert download.size_bytes == 3
    asked = server.asked[0]
    assert asked.method == "GET"
    assert asked.target == f"/fleet/api/v1/jobs/{JOB}/artifacts/content?path=out%2Fa+b%26c.txt&offset=7"
    assert asked.headers["authorization"] == "Bearer fwt_1_2_3"


def test_a_client_with_another_token_shares_the_url_and_not_the_token() -> None:
    with serve([READY]) as server, Client(server.url, token="one") as client:
        client.with_token("two").healthz()
        client.healthz()
    assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer two", "Bearer one"]


def test_parameters_that_were_not_given_are_not_sent() -> None:
    with serve([Answer(body=b'{"items": [], "next": null}')]) as server, Client(server.url) as client:
        assert client.list_jobs(status="running") == m.JobList(items=[], next=None)
    assert server.asked[0].target == "/api/v1/jobs?status=running"
    assert "authorization" not in server.asked[0].headers


def test_a_submission_carries_its_key_and_its_document() -> None:
    made = m.JobSubmitted(id=JOB, name="n", status="queued", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    with serve([Answer(body=msgspec.json.encode(made))]) as server, Client(server.url) as client:
        assert client.submit_job(JobSpec(command=["true"]), idempotency_key="k1") == made
    asked = server.asked[0]
    assert asked.headers["idempotency-key"] == "k1"
    assert msgspec.json.decode(asked.body, type=JobSpec) == JobSpec(command=["true"])


def test_bytes_travel_in_pieces_and_say_beforehand_how_many_they_are() -> None:
    stored = m.BlobStored(sha256="ab", size_bytes=6)
    with serve([Answer(body=msgspec.json.encode(stored))]) as server, Client(server.url) as client:
        assert client.store_blob("ab", size_bytes=6, content=iter([b"abc", b"def"])) == stored
    assert server.asked[0].body == b"abcdef"
    assert server.asked[0].headers["content-length"] == "6"


def test_a_problem_document_comes_back_as_a_refusal_with_its_code_and_hint() -> None:
    with serve([problem(404)]) as server, Client(server.url) as client, pytest.raises(RemoteRefusal) as caught:
        client.show_job(JOB)
    assert code_of(caught.value) == "job_not_found"
    assert (caught.value.message, caught.value.hint) == ("no job has that id", "look at `job ls`")
    assert len(server.asked) == 1, "a refusal is an answer; asking again changes nothing"


@pytest.mark.parametrize("answer", [Answer(status=404, body=b"<html>", content_type="text/html"), Answer(body=b"<")])
def test_what_is_no_controller_is_told_apart(answer: Answer) -> None:
    refused = pytest.raises((RemoteRefusal, RemoteFault), match="is no controller of this version")
    with serve([answer]) as server, Client(server.url, repeat_max=0) as client, refused as caught:
        client.version()
    assert code_of(caught.value) == "unexpected_answer"


def test_a_read_is_repeated_until_it_succeeds() -> None:
    with serve([problem(503), problem(503), READY]) as server, Client(server.url) as client:
        assert client.readyz().status == "ready"
    assert len(server.asked) == 3


def test_a_write_without_a_key_is_never_repeated() -> None:
    with serve([problem(503, "database_unavailable"), READY]) as server, Client(server.url) as client:
        with pytest.raises(RemoteFault):
            client.sync(m.SyncRequest(sequence=1))
        assert len(server.asked) == 1


def test_a_write_with_a_key_is_repeated_with_the_same_key() -> None:
    made = m.JobSubmitted(id=JOB, name="n", status="queued", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    with serve([problem(503), Answer(body=msgspec.json.encode(made))]) as server, Client(server.url) as client:
        client.submit_job(JobSpec(command=["true"]), idempotency_key="k1")
    assert [asked.headers["idempotency-key"] for asked in server.asked] == ["k1", "k1"]
    assert server.asked[0].body == server.asked[1].body


def test_a_download_that_is_cut_off_is_not_taken_for_whole() -> None:
    answer, cut_off = Answer(body=b"x" * 1000, cut_after=10), pytest.raises(Unreachable)
    with serve([answer]) as server, Client(server.url, repeat_max=0) as client, cut_off:
        b"".join(client.read_artifact(JOB, path="a"))


def test_nobody_there_says_where_and_what_to_do() -> None:
    with serve([READY]) as server:
        url = server.url
    with pytest.raises(Unreachable) as caught:
        Client(url, repeat_max=0).healthz()
    assert caught.value.message == f"no answer from the controller at {url}: connection refused"
    assert "fleetward up" in caught.value.hint


def test_a_refused_connection_is_told_by_its_own_cause_also_inside_another_errors_handling() -> None:
    with serve([READY]) as server:
        url = server.url
    try:
        int("unrelated")
    except ValueError:
        with pytest.raises(Unreachable, match="connection refused"):
            Client(url, repeat_max=0).healthz()


@pytest.mark.parametrize("url", ["", "127.0.0.1:7400", "ftp://host", "http://", "http://host/?x=1", "https://h/#join"])
def test_what_is_no_url_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(InvalidSetting, match="is no controller URL"):
        Client(url)
