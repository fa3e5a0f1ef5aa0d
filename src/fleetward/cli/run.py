"""`fleetward run`: a command line becomes a job, is followed, and ends as files on this disk.

Owns the way from flags to a job document, and the exit status. Refuses to cancel anything: who stops
watching leaves the job running.
"""

import hashlib
import secrets
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from fleetward.cli import fetch as fetching
from fleetward.cli.inputs import members_below
from fleetward.cli.jobs import give_up
from fleetward.cli.output import DONE, FAILED, INTERRUPTED, size, visible
from fleetward.cli.settings import Settings, settings_of
from fleetward.cli.watch import LogPrinter, Watcher, log_tail
from fleetward.cli.words import parse_duration, parse_pairs, parse_size
from fleetward.client import Client
from fleetward.domain.jobs import (
    ArtifactRule,
    JobInput,
    JobSpec,
    JobStatus,
    Resources,
    Timeouts,
    check_spec,
)
from fleetward.verify.archive import Member, pack
from fleetward.wire.messages import Job, JobSubmitted

ANSWER_LIMIT = timedelta(minutes=10)  # the controller hashes and syncs an input before it answers
PIECE = 1024 * 1024


def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.")],
    name: Annotated[str, typer.Option(help="A name; also of the output folder.")] = "",
    artifact: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Files that it must make.")] = None,
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", metavar="PATH", help="Files and folders to send along.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Only on nodes with the label.")] = None,
    cpus: Annotated[float, typer.Option(help="CPUs of one attempt.")] = 1.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one attempt, such as 4G.")] = "0",
    replicas: Annotated[int, typer.Option(help="Nodes that hold the job at once.")] = 1,
    quorum: Annotated[int, typer.Option(help="Verified attempts that must agree.")] = 1,
    max_attempts: Annotated[int, typer.Option(help="Failures after which the job fails.")] = 3,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="The command's own limit.")] = "1h",
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="An environment variable.")] = None,
    priority: Annotated[int, typer.Option(help="0 to 100; higher goes first.")] = 50,
    network: Annotated[Literal["on", "none"], typer.Option(help="Whether it may use the network.")] = "on",
    sandbox: Annotated[Literal["auto", "require", "none"], typer.Option(help="Whether it is boxed in.")] = "auto",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the id and do not wait.")] = False,
    output: Annotated[Path | None, typer.Option(help="The folder for the artifacts.")] = None,
) -> None:
    """Run a command on the fleet: submit, stream the log, wait, fetch the verified artifacts."""
    settings = settings_of(ctx)
    spec = JobSpec(
        command=command,
        name=name,
        env=parse_pairs(env or []),
        artifacts=[ArtifactRule(path=path) for path in artifact or []],
        resources=Resources(cpus=cpus, memory_bytes=parse_size(memory)),
        labels=parse_pairs(label or []),
        replicas=replicas,
        quorum=quorum,
        max_attempts=max_attempts,
        timeouts=Timeouts(run_seconds=int(parse_duration(timeout).total_seconds())),
        priority=priority,
        network=network,
        sandbox=sandbox,
    )
    # Refuse before anything is sent, and before hours of work would end at a folder that is taken.
    check_spec(spec)
    folder = output or (fetching.output_folder(name, None) if name else None)
    if folder is not None and not detach:
        fetching.check_free(folder, is_named=output is not None)
    client = settings.client(answer_limit=ANSWER_LIMIT)
    members = members_below(inputs or [], skipped=lambda why: settings.output.note(f"· left out: {visible(why)}"))
    made = submit(client, settings, spec, members=list(members))
    if detach:
        _say_submitted(settings, made)
        return
    try:
        status = _see_through(client, settings, made, folder=folder, is_named=output is not None)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"\nthe job runs on; follow it: fleetward job logs -f {made.id}\n"
            f"                  cancel it: fleetward job cancel {made.id}\n"
        )
        status = INTERRUPTED
    raise typer.Exit(status)


def submit(client: Client, settings: Settings, spec: JobSpec, *, members: Sequence[Member]) -> JobSubmitted:
    """Send the inputs along and hand the job in, once, whatever the network does."""
    if members:
        spec = msgspec.structs.replace(spec, inputs=[send_inputs(client, settings, members)])
    made = client.submit_job(spec, idempotency_key=secrets.token_hex(16))
    settings.output.note(f"· job {made.id}")
    return made


def send_inputs(client: Client, settings: Settings, members: Sequence[Member]) -> JobInput:
    """Pack the files as one archive and leave it with the controller."""
    with tempfile.TemporaryFile() as packed:
        pack(members, packed)
        count = packed.tell()
        packed.seek(0)
        digest = hashlib.file_digest(packed, "sha256").hexdigest()
        packed.seek(0)
        settings.output.note(f"· sending {len(members)} files, {size(count)}")
        client.store_blob(digest, size_bytes=count, content=iter(lambda: packed.read(PIECE), b""))
    return JobInput(sha256=digest)


def _say_submitted(settings: Settings, made: JobSubmitted) -> None:
    if settings.output.is_json:
        settings.output.document({"job_id": made.id, "name": made.name, "status": made.status})
    else:
        settings.output.line(str(made.id))


def _see_through(client: Client, settings: Settings, made: JobSubmitted, *, folder: Path | None, is_named: bool) -> int:
    printer = LogPrinter(to_stderr=settings.output.is_json)
    job = Watcher(client, output=settings.output, printer=printer).until_ended(made.id)
    if job.status != JobStatus.COMPLETED:
        status = give_up(settings, job)
        if settings.output.is_json:
            settings.output.document(_ending(job, log_tail=log_tail(client, job.id)))
        return status
    place = folder or fetching.output_folder("", job.id)
    fetched = fetching.fetch(client, job, folder=place, is_named=is_named)
    if fetched.folder is not None:
        settings.output.note(f"· completed; {len(fetched.paths)} verified artifacts in {visible(str(fetched.folder))}")
    else:
        settings.output.note("· completed")
    if settings.output.is_json:
        settings.output.document(_ending(job, fetched=fetched))
    return DONE if job.status == JobStatus.COMPLETED else FAILED


def _ending(
    job: Job, *, fetched: fetching.Fetched | None = None, log_tail: Sequence[str] | None = None
) -> dict[str, object]:
    ending: dict[str, object] = {"job_id": job.id, "name": job.name, "status": job.status, "error": job.error}
    if fetched is not None:
        ending |= {"output": None if fetched.folder is None else str(fetched.folder), "artifacts": fetched.paths}
    if log_tail is not None:
        ending["log_tail"] = log_tail
    return ending
