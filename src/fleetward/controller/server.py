"""The HTTP server: one thread with an event loop, from a bound socket to its last reply.

Owns the listening socket, the loop and how held calls end at a stop. Refuses to know what is served.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from uvicorn import Config
from uvicorn import Server as Uvicorn

from fleetward.domain.errors import InvalidSetting
from fleetward.wire.handshake import pin_of

STOP_SECONDS: Final = 1  # what replies under way get; the database needs the rest of the three seconds
KEEP_ALIVE_SECONDS: Final = 75  # longer than the longest hold, so that agents keep their connections


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its key, as PEM files, and the pin by which clients know the key."""

    certificate: Path
    key: Path
    pin: str


def given_tls(certificate: Path, key: Path) -> TlsFiles:
    """Take the certificate that an administrator gave, or say why it cannot serve."""
    # Loaded only for those who bring a certificate: it takes a good part of a start.
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        public_key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    except (OSError, ValueError) as error:
        raise InvalidSetting(
            f"settings tls_cert and tls_key cannot be {certificate} and {key}: {error}",
            hint="both must be PEM files that this user can read; the key the certificate's own, without a password",
            field="tls_cert",
        ) from error
    pin = pin_of(public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    return TlsFiles(certificate=certificate, key=key, pin=pin)


class _Uvicorn(Uvicorn):
    """The server of the library, which tells when it answers."""

    def __init__(self, config: Config, *, is_up: threading.Event) -> None:
        super().__init__(config)
        self._is_up = is_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._is_up.set()


class Server:
    """An ASGI application on a socket, in a thread of its own."""

    def __init__(
        self,
        application: Any,
        bound: socket.socket,
        *,
        tls: TlsFiles | None,
        attach: Callable[[asyncio.AbstractEventLoop], None],
        ended: Callable[[], None],
    ) -> None:
        """Make it ready. `attach` is told the loop before the first call, `ended` when all is over."""
        self._bound = bound
        self._is_up = threading.Event()
        self._attach = attach
        self._ended = ended
        self._uvicorn = _Uvicorn(
            Config(
                application,
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
                ssl_certfile=None if tls is None else str(tls.certificate),
                ssl_keyfile=None if tls is None else str(tls.key),
            ),
            is_up=self._is_up,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> None:
        """Serve; returns once calls are answered."""
        self._thread.start()
        self._is_up.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self, *, release: Callable[[], None]) -> None:
        """Answer what is under way and stop. `release` lets held calls end; it runs on the loop."""
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            return
        loop.call_soon_threadsafe(release)
        self._uvicorn.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._is_up.set()
            self._ended()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._attach(self._loop)
        await self._uvicorn.serve(sockets=[self._bound])
