"""The controller's keys: one folder of the home, to be copied with a backup.

Owns how keys are made, kept and named. Refuses to know what is signed, sealed or hashed with them. The folder appears
whole or not at all, and is never written again but for the certificate, which is no secret and is made anew when
the names it must carry change.
"""

import hashlib
import ipaddress
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetward.controller.clusterfiles import minding, sync, write_durably
from fleetward.domain.errors import HomeUnusable
from fleetward.wire.handshake import encode, pin_of

SECRET_BYTES: Final = 32  # of HMAC-SHA-256 and of AES-256
TLS_KEY: Final = "tls_key.pem"
CERTIFICATE: Final = "tls_certificate.pem"
IDENTITY_KEY: Final = "identity_key"
TRAIL_KEY: Final = "trail_key"
API_KEY_HMAC: Final = "api_key_hmac"
SESSION_HMAC: Final = "session_hmac"
ENCRYPTION_KEY: Final = "encryption_key"
RAW: Final = (IDENTITY_KEY, TRAIL_KEY, API_KEY_HMAC, SESSION_HMAC, ENCRYPTION_KEY)
# The pin is what clients check, so the certificate's own dates only must never be in the way: a machine whose clock
# is wrong still serves. RFC 5280 gives the last one as the date of a certificate without an end.
VALID_FROM: Final = datetime(2020, 1, 1, tzinfo=UTC)
VALID_TO: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The two files that a TLS server loads, and the pin by which clients know it."""

    certificate_path: Path
    key_path: Path
    pin: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Keyring:
    """The keys, read and checked. Its repr shows none of them."""

    folder: Path
    identity: Ed25519PrivateKey
    trail: Ed25519PrivateKey
    api_key_hmac: bytes
    session_hmac: bytes
    encryption_key: bytes
    tls_key: ec.EllipticCurvePrivateKey

    @classmethod
    def open(cls, folder: Path) -> "Keyring":
        """Read the keyring in this folder; made, once, where there is none."""
        with minding(folder):
            if not folder.exists():
                _make(folder)
            return _read(folder)

    def __repr__(self) -> str:
        return f"Keyring({self.folder}, {self.fingerprint()})"

    @property
    def identity_public(self) -> bytes:
        """The controller's public key as SubjectPublicKeyInfo; its pin is `identity_pin`."""
        return _spki(self.identity)

    @property
    def identity_pin(self) -> str:
        """The pin of the controller's identity, for those who reach it without TLS."""
        return pin_of(self.identity_public)

    @property
    def tls_pin(self) -> str:
        """The pin of the key that the controller's own certificate carries."""
        return pin_of(_spki(self.tls_key))

    def sign(self, message: bytes) -> bytes:
        """Sign as the controller."""
        return self.identity.sign(message)

    def fingerprint(self) -> str:
        """A name for exactly these keys, safe to show and to keep in the database."""
        digest = hashlib.sha256(b"fleetward keyring v1")
        for part in (
            self.identity_public,
            _spki(self.trail),
            _spki(self.tls_key),
            # A digest of a digest: a secret of full strength cannot be guessed back from it.
            *(hashlib.sha256(key).digest() for key in (self.api_key_hmac, self.session_hmac, self.encryption_key)),
        ):
            digest.update(hashlib.sha256(part).digest())
        return encode(digest.digest())

    def ensure_certificate(self, hosts: Sequence[str]) -> Certificate:
        """Have a self-signed certificate for these names and addresses; the key, and so the pin, stays."""
        path = self.folder / CERTIFICATE
        wanted = [_general_name(host) for host in dict.fromkeys(hosts)]
        with minding(path):
            if _names_in(path) != wanted:
                certificate = _certificate(self.tls_key, wanted)
                write_durably(path, certificate.public_bytes(serialization.Encoding.PEM).decode(), mode=0o600)
        return Certificate(certificate_path=path, key_path=self.folder / TLS_KEY, pin=self.tls_pin)


def _make(folder: Path) -> None:
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.new-", dir=folder.parent))
    try:
        tls = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        for name, content in {**{name: secrets.token_bytes(SECRET_BYTES) for name in RAW}, TLS_KEY: tls}.items():
            with os.fdopen(os.open(staging / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync(staging)
        try:
            staging.rename(folder)
        except OSError:
            # Of two that make it at once one wins: a folder with something in it is not replaced.
            if not folder.is_dir():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read(folder: Path) -> Keyring:
    _check_private(folder, is_folder=True)
    raw = {name: _key_bytes(folder / name) for name in RAW}
    path = folder / TLS_KEY
    _check_private(path, is_folder=False)
    try:
        tls_key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except ValueError as error:
        raise _damaged(path, "it is no PEM key") from error
    if not isinstance(tls_key, ec.EllipticCurvePrivateKey):
        raise _damaged(path, "it is no EC key")
    return Keyring(
        folder=folder,
        identity=Ed25519PrivateKey.from_private_bytes(raw[IDENTITY_KEY]),
        trail=Ed25519PrivateKey.from_private_bytes(raw[TRAIL_KEY]),
        api_key_hmac=raw[API_KEY_HMAC],
        session_hmac=raw[SESSION_HMAC],
        encryption_key=raw[ENCRYPTION_KEY],
        tls_key=tls_key,
    )


def _key_bytes(path: Path) -> bytes:
    _check_private(path, is_folder=False)
    content = path.read_bytes()
    if len(content) != SECRET_BYTES:
        raise _damaged(path, f"it has {len(content)} bytes where {SECRET_BYTES} are due")
    return content


def _check_private(path: Path, *, is_folder: bool) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
        raise _damaged(path, f"it is no plain {'folder' if is_folder else 'file'}")
    if found.st_uid != os.geteuid():
        raise HomeUnusable(
            f"{path} belongs to user id {found.st_uid}, and the controller runs as user id {os.geteuid()}",
            hint="start the controller as its owner, or hand it over with chown",
        )
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise HomeUnusable(
            f"{path} is open to other users (mode {mode:04o}), so its keys may be known to them",
            hint=f"close it with `chmod go= {path}` if you are sure that nobody read them",
        )


def _damaged(path: Path, why: str) -> HomeUnusable:
    return HomeUnusable(
        f"the keyring cannot be used because of {path}: {why}",
        hint="restore the keyring from its backup; a new one would not fit the database",
    )


def _spki(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host.encode("idna").decode() if not host.isascii() else host)


def _names_in(path: Path) -> list[x509.GeneralName]:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except (FileNotFoundError, ValueError, x509.ExtensionNotFound):
        return []


def _certificate(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fleetward controller")])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_TO)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
