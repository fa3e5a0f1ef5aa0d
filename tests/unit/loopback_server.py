"""A real HTTP server on loopback whose answers a test writes down beforehand, and that remembers what it was asked."""

import ssl
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """One answer; `cut_after` sends only so many bytes of the body and hangs up."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str = "application/json"
    cut_after: int | None = None


@dataclass
class Loopback:
    """The running server: where it is, and what it was asked."""

    url: str
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def serve(answers: Sequence[Answer], *, context: ssl.SSLContext | None = None) -> Generator[Loopback]:
    """Answer the requests in order; the last answer serves all that follow."""
    left = list(answers)
    loopback = Loopback(url="")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def take(self) -> None:
            loopback.asked.append(
                Asked(
                    method=self.command,
                    target=self.path,
                    headers={key.lower(): value for key, value in self.headers.items()},
                    body=self._body(),
                )
            )
            answer = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(answer.status)
            self.send_header("content-type", answer.content_type)
            self.send_header("content-length", str(len(answer.body)))
            self.end_headers()
            if answer.cut_after is None:
                self.wfile.write(answer.body)
            else:
                self.wfile.write(answer.body[: answer.cut_after])
                self.close_connection = True

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") == "chunked":
                return b"".join(iter(self._chunk, b""))
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def _chunk(self) -> bytes:
            size = int(self.rfile.readline(), 16)
            content = self.rfile.read(size)
            self.rfile.readline()
            return content

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Be quiet."""

    for method in ("GET", "POST", "PUT"):
        setattr(Handler, f"do_{method}", Handler.take)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    loopback.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield loopback
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
