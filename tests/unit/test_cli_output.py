"""How things are said, and the exit status of each kind of trouble."""

import errno
from datetime import UTC, datetime

import msgspec
import pytest

from fleetward.cli.output import Output, instant, report, size, visible, visible_log
from fleetward.domain.errors import Fault, InvalidJob, Refusal, Unreachable
from fleetward.wire.problem import Problem, error_of


def remote(status: int) -> Refusal | Fault:
    return error_of(Problem(code="some_code", status=status, title="t", detail="what and why", hint="do this"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidJob("command: a job needs a command"), 3),
        (remote(404), 3),
        (remote(503), 4),
        (Unreachable("no answer"), 4),
        (OSError(errno.EACCES, "Permission denied", "/somewhere"), 4),
    ],
)
def test_each_kind_of_error_has_its_exit_status(error: Refusal | Fault | OSError, status: int) -> None:
    assert report(error, is_json=False) == status


def test_an_error_is_told_with_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    report(InvalidJob("the job is wrong", hint="mend it"), is_json=False)
    assert capsys.readouterr() == ("", "fleetward: the job is wrong\n  mend it\n")


def test_an_error_in_json_is_a_problem_document_and_leaves_standard_output_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(InvalidJob("the job is wrong", hint="mend it", field="command"), is_json=True)
    out, err = capsys.readouterr()
    assert out == ""
    problem = msgspec.json.decode(err, type=Problem)
    assert (problem.code, problem.hint, problem.field) == ("invalid_job", "mend it", "command")


def test_a_message_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(InvalidJob("evil \x1b[2J\rname"), is_json=False)
    assert capsys.readouterr().err == "fleetward: evil \\x1b[2J\\rname\n"


def test_a_log_keeps_its_lines_and_loses_its_commands() -> None:
    assert visible_log(b"a\tb\r\n\x1b[31mred\xff\n") == "a\tb\n\\x1b[31mred\\xff\n"
    assert visible("ä\u202e") == "ä\\u202e"


def test_columns_are_as_wide_as_their_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=False, is_quiet=False).table(("id", "name"), [("1", "long name"), ("22", "b\n")])
    assert capsys.readouterr().out == "ID  NAME\n1   long name\n22  b\\n\n"


def test_a_table_without_rows_still_has_its_titles(capsys: pytest.CaptureFixture[str]) -> None:
    Output(is_json=False, is_quiet=False).table(("id",), [])
    assert capsys.readouterr().out == "ID\n"


def test_quiet_silences_notes_and_not_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(is_json=False, is_quiet=True)
    output.note("meanwhile")
    output.line("the answer")
    assert capsys.readouterr() == ("the answer\n", "")


def test_sizes_and_instants_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 1024**3, 1024**5)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]
    assert instant(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02 03:04:05Z"
    assert instant(None) == ""
