"""What the session commands about attempts, done: start, renew, stop, collect, upload, forget.

Owns the threads in which that happens and the way to each supervisor. Refuses to decide anything: every
outcome is told as an event. For one attempt things happen in the order in which they were commanded; a
stop overtakes a start that is still fetching, and forgetting calls off what is under way.
"""

import logging
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final
from uuid import UUID

from fleetward.agent import sandbox, supervised
from fleetward.agent.collect import Collected as AllCollected
from fleetward.agent.collect import CollectedFile, collect, open_collected, write_receipt
from fleetward.agent.commands import Collect, JournalEntry, Renew, Start, Stop, Upload
from fleetward.agent.events import Collected, Event, HandInFailed, Observed, StartFailed, Uploaded
from fleetward.agent.home import minding
from fleetward.agent.session import INLINE_FILE_BYTES
from fleetward.agent.supervised import AttemptFolder, Changes, Supervised
from fleetward.agent.transfers import CalledOff, Line, LogShipper, Uploads, fetch_input, log_shipper, persist
from fleetward.agent.unpack import unpack
from fleetward.domain.artifacts import INLINE_BYTES_MAX, INLINE_SYNC_BYTES_MAX, RECEIPT_PATH
from fleetward.domain.errors import Fault, Refusal
from fleetward.domain.jobs import JobSpec, cpus_milli
from fleetward.verify.digest import Digest
from fleetward.verify.manifest import ArtifactPath
from fleetward.verify.policy import parse_rules
from fleetward.wire.messages import DeclaredArtifact, InlineArtifact

WORKERS: Final = 8  # starts and hand-ins at once; each mostly waits for the network or the disk
LOOK_AGAIN: Final = timedelta(seconds=2)  # hints may be lost; what is true stands on disk
SHIP_AGAIN: Final = 1.0  # seconds
SHIP_PAUSE_MAX: Final = 15.0
REMOVAL_MAX: Final = timedelta(seconds=30)  # a folder that takes longer is removed by the next start

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Hand:
    """One attempt, as far as there is anything to do for it."""

    id: UUID
    supervised: Supervised | None = None
    shipper: LogShipper | None = None
    is_unwanted: threading.Event = field(default_factory=threading.Event)  # ends a start that still fetches
    is_called_off: threading.Event = field(default_factory=threading.Event)  # ends a handing in
    stop_grace: float | None = None
    deadline: float = 0.0
    looking: threading.Lock = field(default_factory=threading.Lock)
    working: threading.Lock = field(default_factory=threading.Lock)
    seen: Observed | None = None
    ship_at: float = 0.0
    ship_pause: float = 0.0


class Hands:
    """All attempts of this node."""

    def __init__(
        self,
        *,
        attempts: Path,
        hidden: Sequence[Path],
        node_name: str,
        line: Line,
        features: sandbox.Features,
        rng: random.Random,
        tell: Callable[[Event], None],
    ) -> None:
        self._attempts = attempts
        self._hidden = hidden
        self._node_name = node_name
        self._line = line
        self._features = features
        self._rng = rng
        self._tell = tell
        self._hands: dict[UUID, _Hand] = {}
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._log_news = threading.Event()
        self._removals: list[threading.Event] = []
        self._changes = Changes(attempts)

    def take_up(self) -> None:
        """Find what an earlier run left, tell how it stands, and begin to work."""
        for found in supervised.find(self._attempts):
            hand = self._hands[found.assignment_id] = _Hand(found.assignment_id)
            self._attach(hand, found)
            self._look(hand)
        for target in (self._watch, self._ship_logs, *(self._labour for _ in range(WORKERS))):
            threading.Thread(target=target, daemon=True).start()

    # The commands

    def start(self, command: Start) -> None:
        """Fetch and start an attempt."""
        hand = self._hands.setdefault(command.entry.id, _Hand(command.entry.id))
        hand.deadline = max(hand.deadline, command.deadline)
        self._do(hand, lambda: self._start(hand, command))

    def renew(self, command: Renew) -> None:
        """Hand a later deadline on."""
        hand = self._hands.get(command.id)
        if hand is not None:
            hand.deadline = max(hand.deadline, command.deadline)
            if hand.supervised is not None:
                hand.supervised.renew(hand.deadline)

    def stop(self, command: Stop) -> None:
        """End an attempt, or keep it from starting."""
        hand = self._hands.get(command.id)
        if hand is not None:
            hand.stop_grace = command.grace_seconds
            if hand.supervised is not None:
                hand.supervised.stop(command.grace_seconds)
            else:
                hand.is_unwanted.set()

    def collect(self, command: Collect) -> None:
        """Gather what an ended attempt hands in."""
        hand = self._hands[command.entry.id]
        self._do(hand, lambda: self._hand_in(hand, lambda: self._collect(hand, command)))

    def upload(self, command: Upload) -> None:
        """Store the large files with the controller."""
        hand = self._hands[command.entry.id]
        self._do(hand, lambda: self._hand_in(hand, lambda: self._upload(hand, command)))

    def forget(self, assignment_id: UUID) -> None:
        """Remove what is left, once nothing works on it any more."""
        hand = self._hands.pop(assignment_id, _Hand(assignment_id))
        hand.is_unwanted.set()
        hand.is_called_off.set()
        is_removed = threading.Event()
        self._removals = [each for each in self._removals if not each.is_set()] + [is_removed]

        def remove() -> None:
            try:
                self._forget(hand)
            finally:
                is_removed.set()

        self._do(hand, remove)

    def leave(self) -> None:
        """Finish removing what was forgotten; whatever else is under way is taken up by the next agent."""
        until = supervised.boottime() + REMOVAL_MAX.total_seconds()
        for is_removed in self._removals:
            is_removed.wait(max(0.0, until - supervised.boottime()))

    # The threads

    def _do(self, hand: _Hand, act: Callable[[], None]) -> None:
        def alone() -> None:
            with hand.working:
                act()

        self._work.put(alone)

    def _labour(self) -> None:
        while True:
            act = self._work.get()
            try:
                act()
            except Exception:
                log.exception("a piece of work failed in a way that nothing here expects")

    def _watch(self) -> None:
        look_at = supervised.boottime()
        while True:
            news = self._changes.wait(LOOK_AGAIN)
            is_round = supervised.boottime() >= look_at
            if is_round:
                look_at = supervised.boottime() + LOOK_AGAIN.total_seconds()
            for hand in list(self._hands.values()):
                if hand.supervised is not None and (is_round or str(hand.id) in news):
                    self._look(hand)
            if news:
                self._log_news.set()

    def _look(self, hand: _Hand) -> None:
        """Tell how a supervisor stands, in the order in which it was seen."""
        assert hand.supervised is not None, "only what was started can be looked at"
        with hand.looking:
            try:
                found = hand.supervised.observe()
                if found.phase == "orphaned":
                    hand.supervised.sweep()
                    found = hand.supervised.observe()
            except (Fault, OSError) as error:
                log.warning("attempt %s cannot be looked at: %s", hand.id, error)
                return
            seen = Observed(
                id=hand.id,
                is_running=found.phase in {"running", "ended"},
                is_gone=found.is_released,
                ended_by=found.ended_by,
                exit_code=found.exit_code,
                message=found.message,
            )
            if hand.seen is None or (seen != hand.seen and not hand.seen.is_gone):
                hand.seen = seen
                self._tell(seen)

    def _ship_logs(self) -> None:
        while True:
            self._log_news.wait(SHIP_AGAIN)
            self._log_news.clear()
            # Each in its turn, so that one attempt's flood does not hold up another's lines.
            while sum(self._ship_piece(hand) for hand in list(self._hands.values())) > 0:
                pass

    def _ship_piece(self, hand: _Hand) -> bool:
        if hand.shipper is None or supervised.boottime() < hand.ship_at:
            return False
        try:
            is_shipped = hand.shipper.ship_piece()
        except (Refusal, Fault, OSError) as error:
            hand.ship_pause = min(SHIP_PAUSE_MAX, max(SHIP_AGAIN, hand.ship_pause * 2))
            hand.ship_at = supervised.boottime() + hand.ship_pause
            log.info("the log of %s waits: %s", hand.id, error)
            return False
        hand.ship_pause = 0.0
        return is_shipped

    # The work

    def _attach(self, hand: _Hand, found: Supervised) -> None:
        hand.shipper = log_shipper(self._line, hand.id, fence=found.fence, source=found)
        hand.supervised = found

    def _start(self, hand: _Hand, command: Start) -> None:
        if hand.supervised is None:
            try:
                found = self._launch(hand, command)
            except CalledOff:
                self._tell(StartFailed(hand.id, "stopped before it started"))
                return
            except Refusal as refusal:
                self._tell(StartFailed(hand.id, refusal.message))
                return
            except Fault as fault:
                self._tell(StartFailed(hand.id, fault.message, "lost"))
                return
            except Exception as error:
                log.exception("attempt %s could not be started", hand.id)
                self._tell(StartFailed(hand.id, f"the agent failed: {error}", "lost"))
                return
            self._attach(hand, found)
            # What was commanded meanwhile found no supervisor to tell.
            found.renew(hand.deadline)
            if hand.stop_grace is not None:
                found.stop(hand.stop_grace)
        self._look(hand)

    def _launch(self, hand: _Hand, command: Start) -> Supervised:
        entry = command.entry
        with minding(f"the folder of attempt {entry.id} cannot be made"):
            folder = supervised.prepare(self._attempts, entry.id)
        self._fetch_inputs(hand, entry.spec, folder)
        plan = sandbox.plan(
            entry.spec.sandbox,
            network=entry.spec.network,
            features=self._features,
            folder=folder,
            hidden=self._hidden,
        )
        if hand.is_unwanted.is_set():
            raise CalledOff
        return supervised.launch(
            folder,
            supervised.Order(
                assignment_id=entry.id,
                fence=entry.fence,
                command=tuple(entry.spec.command),
                env=environment(entry),
                plan=plan,
                deadline=max(hand.deadline, command.deadline),
                run_seconds=float(entry.spec.timeouts.run_seconds),
                working_dir=entry.spec.working_dir,
                margin_seconds=command.margin_seconds,
                memory_bytes=entry.spec.resources.memory_bytes,
                cpus_milli=cpus_milli(entry.spec),
            ),
        )

    def _fetch_inputs(self, hand: _Hand, spec: JobSpec, folder: AttemptFolder) -> None:
        patience = timedelta(seconds=spec.timeouts.start_seconds)
        for index, archive in enumerate(spec.inputs):
            kept = folder.path / f"input-{index}"

            def fetch(sha256: str = archive.sha256, kept: Path = kept) -> None:
                fetch_input(self._line, sha256, kept)

            persist(fetch, called_off=hand.is_unwanted, patience=patience, rng=self._rng)
            with minding(f"the input {archive.sha256} cannot be unpacked"), kept.open("rb") as source:
                unpack(source, folder.work)
                kept.unlink()

    def _hand_in(self, hand: _Hand, act: Callable[[], Event]) -> None:
        if hand.is_called_off.is_set():
            return
        try:
            told = act()
        except CalledOff:
            return
        except Refusal as refusal:
            told = HandInFailed(hand.id, refusal.message)
        except Fault as fault:
            told = HandInFailed(hand.id, fault.message, "lost")
        except Exception as error:
            log.exception("attempt %s could not be handed in", hand.id)
            told = HandInFailed(hand.id, f"the agent failed: {error}", "lost")
        self._tell(told)

    def _collect(self, hand: _Hand, command: Collect) -> Event:
        assert hand.supervised is not None, "only what has run is collected"
        assert hand.shipper is not None, "what has run has a log"
        spec, found, shipper = command.entry.spec, hand.supervised, hand.shipper
        patience = timedelta(seconds=spec.timeouts.upload_seconds)
        shipper.ship_all(called_off=hand.is_called_off, patience=patience, rng=self._rng)

        def gather() -> tuple[CollectedFile, ...]:
            with minding(f"what attempt {hand.id} made cannot be read"):
                rules = parse_rules(spec.artifacts)
                files = collect(found.folder.work, rules) if command.wants_files else AllCollected((), ())
                receipt = write_receipt(found, found.observe(), files, node={"name": self._node_name})
                return (receipt, *files.files)

        files = persist(gather, called_off=hand.is_called_off, patience=patience, rng=self._rng)
        return self._sorted(hand, found.folder, files)

    def _sorted(self, hand: _Hand, folder: AttemptFolder, files: Sequence[CollectedFile]) -> Collected:
        """Small files travel inside the report while they are few; the receipt comes first."""
        inline: list[InlineArtifact] = []
        large: list[DeclaredArtifact] = []
        room = INLINE_SYNC_BYTES_MAX
        for file in files:
            size = file.size_bytes + INLINE_FILE_BYTES
            if file.size_bytes > INLINE_BYTES_MAX or size > room:
                large.append(_declared(file))
                continue
            room -= size
            inline.append(
                InlineArtifact(
                    path=file.path,
                    size_bytes=file.size_bytes,
                    sha256=file.digest.hex,
                    media_type=file.media_type,
                    content=_read(folder, file),
                )
            )
        return Collected(hand.id, tuple(inline), tuple(large))

    def _upload(self, hand: _Hand, command: Upload) -> Event:
        assert hand.supervised is not None, "only what has run is uploaded"
        folder, spec = hand.supervised.folder, command.entry.spec
        Uploads(
            line=self._line,
            assignment_id=hand.id,
            fence=command.entry.fence,
            open=lambda file: _open(folder, _collected(file)),
            called_off=hand.is_called_off,
            patience=timedelta(seconds=spec.timeouts.upload_seconds),
            rng=self._rng,
        ).run(command.files)
        return Uploaded(hand.id)

    def _forget(self, hand: _Hand) -> None:
        try:
            if hand.supervised is not None:
                hand.supervised.forget()
            else:
                path = self._attempts / str(hand.id)
                if path.exists():
                    supervised.remove_folder(path)
        except (OSError, shutil.Error) as error:
            # It is tried again at the next start, which finds it on disk and not in the journal.
            log.warning("what is left of attempt %s cannot be removed: %s", hand.id, error)


def environment(entry: JournalEntry) -> dict[str, str]:
    """What a command finds in its environment beside its search path, its home and its language."""
    return {
        "TMPDIR": str(Path("/", "tmp")),
        **entry.spec.env,
        "FLEETWARD_JOB_ID": str(entry.job_id),
        "FLEETWARD_ATTEMPT": str(entry.attempt),
    }


def _open(folder: AttemptFolder, file: CollectedFile) -> BinaryIO:
    if file.path == RECEIPT_PATH:
        with minding(f"the receipt {folder.receipt} cannot be read"):
            return folder.receipt.open("rb")
    return open_collected(folder.work, file)


def _read(folder: AttemptFolder, file: CollectedFile) -> bytes:
    with _open(folder, file) as stream:
        return stream.read(INLINE_BYTES_MAX + 1)


def _declared(file: CollectedFile) -> DeclaredArtifact:
    return DeclaredArtifact(
        path=file.path, size_bytes=file.size_bytes, sha256=file.digest.hex, media_type=file.media_type
    )


def _collected(file: DeclaredArtifact) -> CollectedFile:
    return CollectedFile(ArtifactPath(file.path), file.size_bytes, Digest.parse(file.sha256), file.media_type)
