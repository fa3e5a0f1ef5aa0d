"""How a machine proves who it is: join strings, the pairing transcript, the session challenge.

Owns the exact bytes that are signed and the keys that a secret seeds. Refuses to know where keys are
kept, and the network.
"""

import base64
import binascii
import hashlib
import json
import zlib
from dataclasses import dataclass
from urllib.parse import urlsplit
from uuid import UUID

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleetward.domain.errors import MalformedJoinString, Unauthenticated
from fleetward.domain.ids import NodeId, PairingCodeId

SECRET_BYTES = 32
NONCE_BYTES = 16


def encode(raw: bytes) -> str:
    """Base64url without padding, the one form in which keys and signatures travel as text."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Read base64url without padding; raises ValueError when it is not."""
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if encode(raw) != text:
        raise ValueError("not base64url without padding")
    return raw


def pin_of(public_key_der: bytes) -> str:
    """The pin of a public key: base64url of the SHA-256 of its SubjectPublicKeyInfo."""
    return encode(hashlib.sha256(public_key_der).digest())


@dataclass(frozen=True, slots=True)
class JoinString:
    """All that a machine needs to pair: where, with whom, and the one-time secret. Shown once, kept nowhere."""

    url: str
    code_id: PairingCodeId
    secret: bytes
    pin: str

    def text(self) -> str:
        """Write it as the text a person copies; the last part tells a cut or mistyped copy apart."""
        body = f"{self.code_id.hex}.{encode(self.secret)}.{self.pin}"
        return f"{self.url}/join#{body}.{_checksum(self.url + body)}"

    @classmethod
    def parse(cls, text: str) -> "JoinString":
        """Read what a person pasted, or say that the copy is not whole."""
        url, mark, rest = text.strip().partition("/join#")
        parts = rest.split(".")
        if not mark or len(parts) != 4 or urlsplit(url).scheme not in {"http", "https"}:
            raise _malformed()
        code, secret, pin, checksum = parts
        if _checksum(url + f"{code}.{secret}.{pin}") != checksum:
            raise _malformed()
        try:
            return cls(url=url, code_id=PairingCodeId(UUID(hex=code)), secret=decode(secret), pin=pin)
        except (ValueError, binascii.Error) as error:
            raise _malformed() from error


def _malformed() -> MalformedJoinString:
    return MalformedJoinString(
        "the join string is not whole: it was cut or mistyped",
        hint="copy all of the line that `fleetward node pair` printed, in quotes",
    )


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def code_key(secret: bytes) -> Ed25519PrivateKey:
    """The key that a pairing secret seeds; the controller keeps only its public half."""
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"fleetward pairing code v1").derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def pairing_transcript(*, code_id: PairingCodeId, pin: str, node_key: bytes, name: str, mac: str) -> bytes:
    """What the code's key, the node's key and the controller's key sign when a machine pairs."""
    return _canonical(
        "pair",
        code_id=code_id.hex,
        pin=pin,
        node_key=encode(node_key),
        name=name,
        mac=mac,
    )


def session_transcript(*, node_id: NodeId, challenge: str, last_session: int, nonce: str) -> bytes:
    """What the node's key signs when an agent opens a session."""
    return _canonical("session", node_id=node_id.hex, challenge=challenge, last_session=str(last_session), nonce=nonce)


def _canonical(purpose: str, **fields: str) -> bytes:
    """One unambiguous encoding; the purpose keeps a signature for one thing from serving another."""
    return json.dumps({"fleetward": purpose, **fields}, sort_keys=True, separators=(",", ":")).encode()


def check_signature(*, public_key: bytes, signature: bytes, message: bytes) -> None:
    """Refuse unless the Ed25519 signature is the key's."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise Unauthenticated("the signature does not fit the key that it should be from") from error
