"""Calls that wait: answered at a hint, at the end of their time, or by a newer one."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asking import Answer, Api, Node, clock


def submit(api: Api, **document: object) -> str:
    body = json.dumps({"command": ["true"], **document}).encode()
    answer = api.ask("POST", "/api/v1/jobs", credential=api.owner, body=body, content_type="application/json")
    assert answer.status == 200, answer
    return str(json.loads(answer.content)["id"])


def events(api: Api, job_id: str, *, after: str = "", wait_seconds: float = 0) -> dict[str, Any]:
    cursor = f"&after={after}" if after else ""
    path = f"/api/v1/jobs/{job_id}/events?wait_seconds={wait_seconds}{cursor}"
    answer = api.ask("GET", path, credential=api.owner)
    assert answer.status == 200, answer
    return json.loads(answer.content)


def test_a_question_for_events_is_answered_when_the_job_changes_and_not_before(api: Api) -> None:
    job_id = submit(api, labels={"nowhere": "yes"})
    first = events(api, job_id, wait_seconds=10)
    assert [event["kind"] for event in first["items"]][:1] == ["job.submitted"]
    with ThreadPoolExecutor(1) as pool:
        began = clock()
        waiting = pool.submit(events, api, job_id, after=first["next"], wait_seconds=30)
        cancelled = api.ask(
            "POST", f"/api/v1/jobs/{job_id}/cancel", credential=api.owner, body=b"{}", content_type="application/json"
        )
        assert cancelled.status == 200, cancelled
        assert waiting.result()["items"], "the cancel is an event"
        assert clock() - began < 5


def test_a_question_for_events_is_answered_with_nothing_when_its_time_is_over(api: Api) -> None:
    job_id = submit(api, labels={"nowhere": "yes"})
    first = events(api, job_id, wait_seconds=10)
    began = clock()
    assert events(api, job_id, after=first["next"], wait_seconds=0.3) == {"items": [], "next": first["next"]}
    assert 0.3 <= clock() - began < 5


def test_a_question_for_a_log_waits_for_the_job_to_say_something_or_end(api: Api) -> None:
    job_id = submit(api, labels={"nowhere": "yes"})

    def log() -> Answer:
        return api.ask("GET", f"/api/v1/jobs/{job_id}/logs?wait_seconds=30", credential=api.owner)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(log)
        api.ask(
            "POST", f"/api/v1/jobs/{job_id}/cancel", credential=api.owner, body=b"{}", content_type="application/json"
        )
        assert json.loads(waiting.result().content)["ended"] is True


def test_many_questions_are_held_while_others_are_answered(api: Api) -> None:
    job_id = submit(api, labels={"nowhere": "yes"})
    first = events(api, job_id, wait_seconds=10)
    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(events, api, job_id, after=first["next"], wait_seconds=5) for _ in range(60)]
        began = clock()
        assert api.ask("GET", "/api/v1/status", credential=api.owner).status == 200
        assert clock() - began < 2
        api.ask(
            "POST", f"/api/v1/jobs/{job_id}/cancel", credential=api.owner, body=b"{}", content_type="application/json"
        )
        assert all(answer.result()["items"] for answer in waiting)


def test_a_nodes_call_is_held_until_there_is_work_for_it(api: Api, node: Node) -> None:
    assert node.sync().assignments == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.sync, wait_seconds=30)
        job_id = submit(api, labels={"who": node.name})
        waiting.result()
    orders = node.sync().assignments
    assert [(str(order.job_id), order.desired) for order in orders] == [(job_id, "run")]


def test_a_quiet_nodes_call_ends_with_its_wait(node: Node) -> None:
    node.sync()
    began = clock()
    assert node.sync(wait_seconds=0.3).assignments == []
    assert 0.3 <= clock() - began < 5
