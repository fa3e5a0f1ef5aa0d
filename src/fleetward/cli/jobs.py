"""`fleetward job …`: submit, look at, follow, fetch and cancel jobs.

Owns how jobs are shown. Refuses to know how they are carried out.
"""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final
from uuid import UUID

import msgspec
import typer

from fleetward.cli import fetch as fetching
from fleetward.cli.output import DONE, FAILED, counts, instant, size, visible
from fleetward.cli.settings import Settings, settings_of
from fleetward.cli.story import sentence
from fleetward.cli.watch import LogPrinter, copy_log, events, follow_events
from fleetward.cli.words import read_job_file
from fleetward.client import Client
from fleetward.domain.jobs import JobStatus, summary_line
from fleetward.wire import messages as m

PAGE: Final = 200

app = typer.Typer(no_args_is_help=True, help="Hand in jobs, follow them, fetch what they made.")

JobId = Annotated[UUID, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)]


@app.command(epilog="Example: fleetward job submit train.toml")
def submit(
    ctx: typer.Context, file: Annotated[str, typer.Argument(help="A job file, TOML or JSON; - reads it.")]
) -> None:
    """Hand in a job file; it says the same words as the API."""
    settings = settings_of(ctx)
    spec = read_job_file(file)
    made = settings.client().submit_job(spec, idempotency_key=secrets.token_hex(16))
    if settings.output.is_json:
        settings.output.document(made)
        return
    settings.output.line(str(made.id))
    settings.output.note(f"Follow it: fleetward job logs -f {made.id}")


@app.command("ls", epilog="Example: fleetward job ls --status running")
def listing(
    ctx: typer.Context,
    status: Annotated[JobStatus | None, typer.Option(help="Only jobs that stand so.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="How many, newest first.")] = 50,
) -> None:
    """List jobs, newest first."""
    settings = settings_of(ctx)
    jobs = list(_all_jobs(settings.client(), limit=limit, status=None if status is None else status.value))
    if settings.output.is_json:
        settings.output.document(jobs)
        return
    settings.output.table(
        ("id", "name", "status", "created", "command"),
        ((str(job.id), job.name, job.status, instant(job.created_at), summary_line(job.spec.command)) for job in jobs),
    )


@app.command(epilog="Example: fleetward job show 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
def show(ctx: typer.Context, job_id: JobId) -> None:
    """Show one job with all its attempts."""
    settings = settings_of(ctx)
    client = settings.client()
    job = client.show_job(job_id)
    attempts = client.list_assignments(job_id).items
    if settings.output.is_json:
        settings.output.document(msgspec.to_builtins(job) | {"assignments": msgspec.to_builtins(attempts)})
        return
    settings.output.fields(
        (
            ("id", str(job.id)),
            ("name", job.name),
            ("status", job.status),
            ("why", job.why),
            ("error", job.error or ""),
            ("command", summary_line(job.spec.command)),
            ("replicas", f"{job.replicas}, of which {job.quorum} must agree" if job.replicas > 1 else ""),
            ("charged", counts({"failures": job.failures, "losses": job.losses})),
            ("created", instant(job.created_at)),
            ("started", instant(job.started_at)),
            ("cancel asked", instant(job.cancel_requested_at)),
            ("finished", instant(job.finished_at)),
        )
    )
    if attempts:
        settings.output.line("")
        settings.output.table(
            ("node", "attempt", "state", "verified", "released", "lease", "error"),
            (_attempt_row(attempt, winner=job.winning_assignment_id) for attempt in attempts),
        )


def _attempt_row(attempt: m.Assignment, *, winner: UUID | None) -> tuple[str, ...]:
    state = attempt.state if attempt.outcome in {None, attempt.state} else f"{attempt.state} ({attempt.outcome})"
    return (
        attempt.node,
        str(attempt.attempt),
        state + (" (winner)" if attempt.id == winner else ""),
        instant(attempt.artifacts_verified_at),
        instant(attempt.released_at),
        instant(attempt.lease_expires_at),
        attempt.error or "",
    )


@app.command(epilog="Example: fleetward job logs -f 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
def logs(
    ctx: typer.Context,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the log has ended.")] = False,
    assignment: Annotated[UUID | None, typer.Option(help="One attempt's log; else the winner's or the latest.")] = None,
) -> None:
    """Print what an attempt wrote."""
    settings = settings_of(ctx)
    client = settings.client()
    if settings.output.is_json:
        _log_documents(settings, client, job_id, assignment, is_followed=follow)
        return
    printer = LogPrinter(to_stderr=False)
    if follow:
        copy_log(client, job_id, assignment, printer=printer)
        return
    offset = 0
    while True:
        piece = client.job_log(job_id, assignment=assignment, offset=offset)
        printer.write(piece.content, source="log")
        if piece.ended or not piece.content:
            return
        offset = piece.next_offset


def _log_documents(
    settings: Settings, client: Client, job_id: UUID, assignment: UUID | None, *, is_followed: bool
) -> None:
    offset = 0
    while True:
        wait_seconds = 20.0 if is_followed else 0.0
        piece = client.job_log(job_id, assignment=assignment, offset=offset, wait_seconds=wait_seconds)
        text = piece.content.decode(errors="replace")
        settings.output.document(
            {
                "assignment_id": piece.assignment_id,
                "offset": piece.offset,
                "next_offset": piece.next_offset,
                "text": text,
                "ended": piece.ended,
            }
        )
        if piece.ended or (not is_followed and not piece.content):
            return
        offset = piece.next_offset


@app.command("events", epilog="Example: fleetward job events 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
def list_events(
    ctx: typer.Context,
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print the trail of a job: every recorded change, one a line."""
    settings = settings_of(ctx)
    client = settings.client()
    for event in follow_events(client, job_id) if follow else events(client, job_id):
        if settings.output.is_json:
            settings.output.document(event)
        else:
            settings.output.line(f"{instant(event.at)}  {event.kind.ljust(22)}  {visible(sentence(event))}")


@app.command(epilog="Example: fleetward job artifacts 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a")
def artifacts(ctx: typer.Context, job_id: JobId) -> None:
    """List the files that a job's attempts handed in."""
    settings = settings_of(ctx)
    files = settings.client().list_artifacts(job_id).items
    if settings.output.is_json:
        settings.output.document(files)
        return
    settings.output.table(
        ("path", "state", "size", "sha256", "assignment"),
        ((file.path, file.state, size(file.size_bytes), file.sha256, str(file.assignment_id)) for file in files),
    )


@app.command(epilog="Example: fleetward job fetch 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a --output results")
def fetch(
    ctx: typer.Context,
    job_id: JobId,
    output: Annotated[Path | None, typer.Option(help="The folder; else one named like the job.")] = None,
) -> None:
    """Fetch a completed job's verified artifacts; goes on where a cut-off fetch ended, overwrites nothing."""
    settings = settings_of(ctx)
    client = settings.client()
    job = client.show_job(job_id)
    folder = output or fetching.output_folder(job.name, job.id)
    fetched = fetching.fetch(client, job, folder=folder, is_named=output is not None)
    if settings.output.is_json:
        settings.output.document({"job_id": job.id, "output": _text(fetched.folder), "artifacts": fetched.paths})
        return
    for path in fetched.paths:
        settings.output.line(visible(str(folder / path)))
    if not fetched.paths:
        settings.output.note(f"Job {job.id} promised no artifacts; there is nothing to fetch.")


@app.command(epilog="Example: fleetward job cancel 0193a5c0-4f7e-7a31-9c55-2f1c8d3e6b7a --reason 'wrong data'")
def cancel(
    ctx: typer.Context,
    job_id: JobId,
    reason: Annotated[str, typer.Option(help="Why; kept in the trail.")] = "",
    expect_status: Annotated[JobStatus | None, typer.Option(help="Only while the job stands so.")] = None,
) -> None:
    """Ask for a job to be cancelled; an attempt that is done before it hears of it still counts."""
    settings = settings_of(ctx)
    request = m.CancelRequest(reason=reason, expect_status=None if expect_status is None else expect_status.value)
    job = settings.client().cancel_job(job_id, request, idempotency_key=secrets.token_hex(16))
    if settings.output.is_json:
        settings.output.document(job)
    elif JobStatus(job.status).is_ended:
        settings.output.line(
            f"{job.id} {'' if job.status == JobStatus.CANCELLED else 'had ended before: '}{job.status}"
        )
    else:
        settings.output.line(f"{job.id} {job.status}; it is cancelled when its nodes have stopped")
    raise typer.Exit(FAILED if job.status in {JobStatus.COMPLETED, JobStatus.FAILED} else DONE)


def _all_jobs(client: Client, *, limit: int, status: str | None) -> Iterator[m.Job]:
    after: str | None = None
    while limit > 0:
        page = client.list_jobs(limit=min(limit, PAGE), after=after, status=status)
        yield from page.items[:limit]
        limit -= len(page.items)
        after = page.next
        if after is None:
            return


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def give_up(settings: Settings, job: m.Job) -> int:
    """Say why a job did not complete and what to do, and return the exit status."""
    if not settings.output.is_json:
        sys.stderr.write(f"fleetward: job {job.id} {job.status}{': ' + visible(job.error) if job.error else ''}\n")
        sys.stderr.write(f"  its attempts: fleetward job show {job.id}\n")
    return FAILED
