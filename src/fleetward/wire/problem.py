"""The one envelope in which an error travels (RFC 9457).

Owns the form of a problem document and the way back from it to an exception. Refuses to know which
errors exist: it carries codes.
"""

from msgspec import Struct

from fleetward.domain.errors import Fault, Refusal

MEDIA_TYPE = "application/problem+json"


class Problem(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document: `code` is permanent, `detail` is for the person, `hint` says what to do next."""

    code: str
    status: int
    title: str
    detail: str
    hint: str = ""
    field: str = ""

    @property
    def type(self) -> str:
        """The identifier of this kind of problem; a page of the reference describes it."""
        return f"urn:fleetward:problem:{self.code}"


class RemoteRefusal(Refusal):
    """A refusal that came over the wire, with the code and status the other side gave it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, hint=problem.hint, field=problem.field)
        self.problem = problem


class RemoteFault(Fault):
    """A fault of the other side."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, hint=problem.hint)
        self.problem = problem


def problem_of(error: Refusal | Fault) -> Problem:
    """Write an error as a problem document."""
    return Problem(
        code=error.code,
        status=error.status,
        title=error.code.replace("_", " "),
        detail=error.message,
        hint=error.hint,
        field=error.field if isinstance(error, Refusal) else "",
    )


def error_of(problem: Problem) -> RemoteRefusal | RemoteFault:
    """Read a problem document as an exception: 4xx is a refusal, the rest a fault."""
    return RemoteRefusal(problem) if problem.status < 500 else RemoteFault(problem)


def code_of(error: Refusal | Fault) -> str:
    """The permanent code of an error, wherever it arose."""
    if isinstance(error, RemoteRefusal | RemoteFault):
        return error.problem.code
    return error.code
