"""The client believes a server by its pin or by a certificate authority, and sends nothing to any other."""

import ipaddress
import socket
import ssl
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from loopback_server import Answer, serve

from fleetward.client import Client
from fleetward.domain.errors import Unreachable, WrongPin
from fleetward.wire import messages as m
from fleetward.wire.handshake import pin_of

READY = Answer(body=msgspec.json.encode(m.Health(status="ready")))


@dataclass(frozen=True)
class Identity:
    """A server's key and certificate, on disk, and the pin of the key."""

    certificate: Path
    context: ssl.SSLContext
    pin: str


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return make_identity(tmp_path)


def make_identity(folder: Path) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleetward")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert_file, key_file)
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Identity(certificate=cert_file, context=context, pin=pin_of(public))


def test_the_key_that_the_pin_names_is_believed_whoever_signed_it(identity: Identity) -> None:
    with serve([READY], context=identity.context) as server, Client(server.url, pin=identity.pin) as client:
        assert client.readyz().status == "ready"
        assert client.readyz().status == "ready"


def test_another_key_gets_not_one_byte_of_the_request_and_both_pins_are_named(identity: Identity) -> None:
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def take() -> None:
        raw, _ = listener.accept()
        with identity.context.wrap_socket(raw, server_side=True) as tls:
            received.append(tls.recv(1024))

    thread = threading.Thread(target=take)
    thread.start()
    wrong = "A" * 43
    with pytest.raises(WrongPin) as caught:
        Client(f"https://127.0.0.1:{listener.getsockname()[1]}", token="secret", pin=wrong).readyz()
    thread.join()
    listener.close()
    assert received == [b""]
    assert identity.pin in caught.value.message
    assert wrong in caught.value.message


def test_without_a_pin_an_unknown_signer_is_not_believed(identity: Identity) -> None:
    with serve([READY], context=identity.context) as server, Client(server.url, repeat_max=0) as client:
        with pytest.raises(Unreachable, match="its certificate is not trusted"):
            client.readyz()
        assert server.asked == []


def test_without_a_pin_a_known_signer_is_believed(identity: Identity) -> None:
    with serve([READY], context=identity.context) as server, Client(server.url, ca=identity.certificate) as client:
        assert client.readyz().status == "ready"


def test_without_a_pin_the_name_in_the_certificate_counts(identity: Identity) -> None:
    with serve([READY], context=identity.context) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        refused = pytest.raises(Unreachable, match="its certificate is not trusted")
        with Client(url, ca=identity.certificate, repeat_max=0) as client, refused:
            client.readyz()
