"""Transfers: they go on where they were cut, give up only what is refused for good, and can be called off."""

import io
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from threading import Event
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import msgspec
import pytest
from loopback_server import Answer, Loopback, serve

from fleetward.agent.transfers import CalledOff, Line, Uploads, fetch_input, log_shipper, persist
from fleetward.client import Client
from fleetward.domain.errors import (
    DigestMismatch,
    Fault,
    Refusal,
    SessionStale,
    StorageFailed,
    StorageFull,
    Unreachable,
)
from fleetward.wire.endpoints import CHUNK_BYTES_MAX, LOG_BYTES_MAX
from fleetward.wire.messages import DeclaredArtifact, DeclareReply, LogState, UploadState
from fleetward.wire.problem import MEDIA_TYPE, Problem, RemoteRefusal

ID = UUID(int=1)
NO_TIME = timedelta(0)


def document(reply: msgspec.Struct) -> Answer:
    return Answer(body=msgspec.json.encode(reply))


def refusal(code: str, status: int = 409) -> Answer:
    problem = Problem(code=code, status=status, title=code, detail=f"refused: {code}")
    return Answer(status=status, body=msgspec.json.encode(problem), content_type=MEDIA_TYPE)


def line_to(server: Loopback) -> Line:
    return Line(Client(server.url, repeat_max=0))


def offsets(server: Loopback, path: str) -> list[int]:
    """From where each call on that path went on."""
    return [int(parse_qs(urlsplit(asked.target).query)["offset"][0]) for asked in server.asked if path in asked.target]


# Repeating


class NeverSet(Event):
    """Remembers for how long it was waited, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return False


def failing(*errors: Exception) -> Callable[[], str]:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_while_nobody_can_be_reached_it_goes_on_for_as_long_as_it_takes() -> None:
    pauses = NeverSet()
    errors = [Unreachable("no answer") for _ in range(50)]
    assert persist(failing(*errors), called_off=pauses, patience=NO_TIME, rng=random.Random(1)) == "done"
    assert len(pauses.waited) == 50
    assert pauses.waited[0] < 0.3
    assert max(pauses.waited) <= 15.0


def test_trouble_on_either_disk_is_borne_for_as_long_as_the_job_says() -> None:
    errors = [StorageFull("full") for _ in range(500)]
    pauses = NeverSet()
    with pytest.raises(StorageFull):
        persist(failing(*errors), called_off=pauses, patience=timedelta(seconds=60), rng=random.Random(1))
    assert 60 <= sum(pauses.waited) <= 75


def test_a_refusal_ends_it_at_once_but_a_session_that_is_being_renewed_does_not() -> None:
    pauses = NeverSet()
    with pytest.raises(Refusal, match="no"):
        persist(failing(Refusal("no")), called_off=pauses, patience=timedelta(hours=1), rng=random.Random(1))
    assert pauses.waited == []
    stale = [SessionStale("old") for _ in range(3)]
    assert persist(failing(*stale), called_off=pauses, patience=NO_TIME, rng=random.Random(1)) == "done"


def test_it_can_be_called_off_while_it_waits() -> None:
    called_off = Event()
    began = Event()

    def call() -> str:
        began.set()
        raise Unreachable("no answer")

    ended: list[type[BaseException]] = []

    def persisting() -> None:
        with pytest.raises(CalledOff) as caught:
            persist(call, called_off=called_off, patience=NO_TIME, rng=random.Random(1))
        ended.append(caught.type)

    thread = threading.Thread(target=persisting)
    thread.start()
    assert began.wait(10)
    called_off.set()
    thread.join(10)
    assert ended == [CalledOff]


# Inputs

CONTENT = bytes(range(256)) * 1000
DIGEST = sha256(CONTENT).hexdigest()


def test_an_input_that_was_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    target = tmp_path / "input"
    cut = Answer(body=CONTENT, cut_after=100_000, content_type="application/octet-stream")
    with serve([cut, Answer(body=CONTENT[100_000:], content_type="application/octet-stream")]) as server:
        line = line_to(server)
        with pytest.raises(Unreachable):
            fetch_input(line, DIGEST, target)
        kept = target.stat().st_size
        assert kept == 100_000
        fetch_input(line, DIGEST, target)
    assert target.read_bytes() == CONTENT
    assert offsets(server, DIGEST) == [0, kept]


def test_other_bytes_than_the_digest_says_are_thrown_away(tmp_path: Path) -> None:
    target = tmp_path / "input"
    with serve([Answer(body=b"other")]) as server:
        with pytest.raises(DigestMismatch, match=DIGEST):
            fetch_input(line_to(server), DIGEST, target)
    assert not target.exists()


def test_an_input_that_cannot_be_kept_says_so(tmp_path: Path) -> None:
    with serve([Answer(body=CONTENT)]) as server:
        with pytest.raises(StorageFailed, match=f"the input {DIGEST} cannot be kept"):
            fetch_input(line_to(server), DIGEST, tmp_path / "nowhere" / "input")


# Logs


@dataclass
class Written:
    """A log on disk."""

    content: bytes

    def read_log(self, *, offset: int, limit_bytes: int) -> bytes:
        return self.content[offset : offset + limit_bytes]


def test_a_log_goes_in_pieces_from_wherever_the_controller_has_got_to() -> None:
    written = Written(b"x" * (LOG_BYTES_MAX + 10))
    answers = [LogState(received_bytes=LOG_BYTES_MAX - 5), LogState(received_bytes=LOG_BYTES_MAX + 10)]
    with serve([document(each) for each in answers]) as server:
        shipper = log_shipper(line_to(server), ID, fence=7, source=written)
        shipper.ship_all(called_off=Event(), patience=NO_TIME, rng=random.Random(1))
        assert not shipper.ship_piece()
        written.content += b"more"
        assert shipper.ship_piece()
    assert offsets(server, "log") == [0, LOG_BYTES_MAX - 5, LOG_BYTES_MAX + 10]
    assert [len(asked.body) for asked in server.asked] == [LOG_BYTES_MAX, 15, 4]


def test_a_controller_that_has_less_than_it_said_gets_the_log_from_the_start() -> None:
    answers = [document(LogState(received_bytes=3)), refusal("upload_offset"), document(LogState(received_bytes=6))]
    with serve(answers) as server:
        written = Written(b"abc")
        shipper = log_shipper(line_to(server), ID, fence=7, source=written)
        assert shipper.ship_piece()
        written.content = b"abcdef"
        with pytest.raises(RemoteRefusal):
            shipper.ship_piece()
        assert shipper.ship_piece()
    assert offsets(server, "log") == [0, 3, 0]


def test_a_log_that_is_refused_for_good_ends_nothing_else() -> None:
    with serve([refusal("forbidden", 403)]) as server:
        shipper = log_shipper(line_to(server), ID, fence=7, source=Written(b"abc"))
        shipper.ship_all(called_off=Event(), patience=NO_TIME, rng=random.Random(1))
    assert len(server.asked) == 1


# Files


def declared(content: bytes, path: str = "big") -> DeclaredArtifact:
    return DeclaredArtifact(path=path, size_bytes=len(content), sha256=sha256(content).hexdigest())


def uploads(server: Loopback, content: bytes, *, called_off: Event | None = None) -> Uploads:
    return Uploads(
        line=line_to(server),
        assignment_id=ID,
        fence=7,
        open=lambda _: io.BytesIO(content),
        called_off=called_off or Event(),
        patience=NO_TIME,
        rng=random.Random(1),
    )


def state(received_bytes: int, *, stored: bool = False) -> UploadState:
    return UploadState(path="big", received_bytes=received_bytes, stored=stored)


def test_a_file_goes_in_chunks_from_where_an_earlier_agent_ended() -> None:
    content = bytes(2 * CHUNK_BYTES_MAX + 1)
    answers = [
        document(DeclareReply(uploads=[state(1)])),
        document(state(CHUNK_BYTES_MAX + 1)),
        document(state(len(content), stored=True)),
    ]
    with serve(answers) as server:
        uploads(server, content).run([declared(content)])
    assert offsets(server, "offset=") == [1, CHUNK_BYTES_MAX + 1]
    assert [len(asked.body) for asked in server.asked[1:]] == [CHUNK_BYTES_MAX, CHUNK_BYTES_MAX]


def test_what_the_controller_has_already_is_not_sent_again() -> None:
    with serve([document(DeclareReply(uploads=[state(3, stored=True)]))]) as server:
        uploads(server, b"abc").run([declared(b"abc")])
    assert len(server.asked) == 1


def test_an_offset_that_does_not_fit_is_asked_for_again() -> None:
    answers = [
        document(DeclareReply(uploads=[state(2)])),
        refusal("upload_offset"),
        document(DeclareReply(uploads=[state(0)])),
        document(state(3, stored=True)),
    ]
    with serve(answers) as server:
        uploads(server, b"abc").run([declared(b"abc")])
    assert offsets(server, "offset=") == [2, 0]


def test_a_file_that_became_shorter_is_named() -> None:
    with serve([document(DeclareReply(uploads=[state(3)]))]) as server:
        with pytest.raises(StorageFailed, match=r"'big' ends before its 5 bytes"):
            uploads(server, b"abc").run([declared(b"abcde")])


def test_a_refused_file_ends_it_with_the_controllers_words() -> None:
    with serve([refusal("artifact_conflict")]) as server:
        with pytest.raises(RemoteRefusal, match="refused: artifact_conflict"):
            uploads(server, b"abc").run([declared(b"abc")])


def test_a_file_that_nobody_wants_any_more_is_not_sent() -> None:
    called_off = Event()
    called_off.set()
    with serve([document(DeclareReply(uploads=[state(0)]))]) as server:
        with pytest.raises(CalledOff):
            uploads(server, b"abc", called_off=called_off).run([declared(b"abc")])
    assert len(server.asked) == 1


@pytest.mark.parametrize(("code", "status"), [("storage_full", 507), ("storage_failed", 503), ("unexpected", 500)])
def test_a_fault_that_stays_is_told_as_one(code: str, status: int) -> None:
    with serve([refusal(code, status)]) as server:
        with pytest.raises(Fault, match=code):
            uploads(server, b"abc").run([declared(b"abc")])
