"""The client has a method for every row of the endpoint table, and no other."""

import inspect
import re
from typing import get_type_hints

import pytest

from fleetward.client import Client, Download
from fleetward.wire.endpoints import ENDPOINTS, Access, Body, Endpoint

HOUSEKEEPING = {"close", "with_token", "url"}


def test_every_endpoint_has_its_method_and_there_is_no_other() -> None:
    public = {name for name in vars(Client) if not name.startswith("_")}
    assert public - HOUSEKEEPING == {endpoint.name for endpoint in ENDPOINTS}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_a_method_takes_and_gives_what_the_table_says(endpoint: Endpoint) -> None:
    method = getattr(Client, endpoint.name)
    hints = get_type_hints(method)
    assert hints.pop("return") is (Download if endpoint.reply_body is Body.BYTES else endpoint.reply)
    expected = set(_path_parameters(endpoint)) | set(endpoint.query)
    if endpoint.request is not None:
        expected.add("request")
        assert hints["request"] is endpoint.request
    elif endpoint.request_body is Body.BYTES:
        expected.add("content")
    if endpoint.name == "store_blob":
        expected.add("size_bytes")
    if endpoint.access is Access.USER and endpoint.method == "POST":
        expected.add("idempotency_key")
    assert hints.keys() == expected


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_what_stands_in_the_query_is_given_by_name(endpoint: Endpoint) -> None:
    parameters = inspect.signature(getattr(Client, endpoint.name)).parameters
    for name in endpoint.query:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def _path_parameters(endpoint: Endpoint) -> list[str]:
    owner = {"jobs": "job_id", "assignments": "assignment_id"}
    named = re.findall(r"/(\w+)/\{(\w+)\}", endpoint.path)
    return [owner[noun] if name == "id" else name for noun, name in named]
