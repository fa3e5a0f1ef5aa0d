"""The keyring: made once, private, recognised again, and refused with a reason when it is not whole."""

import ipaddress
import os
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from fleetward.controller.keyring import Keyring
from fleetward.domain.errors import HomeUnusable
from fleetward.wire.handshake import check_signature, pin_of
from tests.needs import needs

NAMES = [
    "api_key_hmac",
    "encryption_key",
    "identity_key",
    "session_hmac",
    "tls_key.pem",
    "trail_key",
]


def test_a_keyring_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "keyring"
    made = Keyring.open(folder)
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert [path.name for path in tmp_path.iterdir()] == ["keyring"]

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = Keyring.open(folder)
    assert again.fingerprint() == made.fingerprint()
    assert (again.identity_pin, again.tls_pin) == (made.identity_pin, made.tls_pin)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_every_key_is_another_and_every_one_counts_in_the_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "keyring"
    made = Keyring.open(folder)
    assert len({path.read_bytes() for path in folder.iterdir()}) == len(NAMES)
    other = tmp_path / "other"
    Keyring.open(other)
    for name in NAMES:
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes((other / name).read_bytes())
        assert Keyring.open(folder).fingerprint() != made.fingerprint(), name
        (folder / name).write_bytes(kept)
    assert Keyring.open(folder).fingerprint() == made.fingerprint()


def test_no_key_shows_in_its_text(tmp_path: Path) -> None:
    made = Keyring.open(tmp_path / "keyring")
    assert repr(made) == f"Keyring({tmp_path / 'keyring'}, {made.fingerprint()})"


def test_of_two_that_make_it_at_once_both_have_the_same(tmp_path: Path) -> None:
    for round_number in range(20):
        folder = tmp_path / f"keyring{round_number}"
        gate = threading.Barrier(3)
        found: list[str] = []

        def make(folder: Path = folder, gate: threading.Barrier = gate, found: list[str] = found) -> None:
            gate.wait()
            found.append(Keyring.open(folder).fingerprint())

        threads = [threading.Thread(target=make) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3
        assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("bit", [0o040, 0o004, 0o020])
def test_keys_that_others_may_read_are_refused(tmp_path: Path, name: str, bit: int) -> None:
    folder = tmp_path / "keyring"
    Keyring.open(folder)
    path = folder / name
    path.chmod(stat.S_IMODE(path.stat().st_mode) | bit)
    with pytest.raises(HomeUnusable, match=f"{path} is open to other users") as refused:
        Keyring.open(folder)
    assert "chmod go=" in refused.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_missing_cut_or_a_link_is_named_and_not_made_anew(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "keyring"
    Keyring.open(folder)
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if name != "tls_key.pem" else whole[:40])
    with pytest.raises(HomeUnusable, match=f"the keyring cannot be used because of {path}"):
        Keyring.open(folder)
    path.unlink()
    with pytest.raises(HomeUnusable, match=f"{path}: it is missing"):
        Keyring.open(folder)
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HomeUnusable, match=f"{path}: it is no plain file"):
        Keyring.open(folder)


def test_the_controller_signs_with_the_key_that_its_pin_names(tmp_path: Path) -> None:
    keyring = Keyring.open(tmp_path / "keyring")
    public = load_der_public_key(keyring.identity_public)
    raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
    check_signature(public_key=raw, signature=keyring.sign(b"words"), message=b"words")
    assert keyring.identity_pin == pin_of(keyring.identity_public)


def test_a_certificate_names_the_hosts_and_keeps_the_pin_when_they_change(tmp_path: Path) -> None:
    keyring = Keyring.open(tmp_path / "keyring")
    first = keyring.ensure_certificate(["lab.example", "127.0.0.1", "::1", "127.0.0.1"])
    made = x509.load_pem_x509_certificate(first.certificate_path.read_bytes())
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["lab.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    spki = made.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert first.pin == keyring.tls_pin == pin_of(spki)

    assert keyring.ensure_certificate(["lab.example", "127.0.0.1", "::1"]) == first
    assert x509.load_pem_x509_certificate(first.certificate_path.read_bytes()).serial_number == made.serial_number
    moved = keyring.ensure_certificate(["lab2.example"])
    assert moved.pin == first.pin
    assert x509.load_pem_x509_certificate(moved.certificate_path.read_bytes()).serial_number != made.serial_number


def test_a_tls_server_and_a_client_that_trusts_it_take_the_certificate(tmp_path: Path) -> None:
    made = Keyring.open(tmp_path / "keyring").ensure_certificate(["lab.example"])
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(made.certificate_path, made.key_path)
    asking = ssl.create_default_context(cafile=str(made.certificate_path))
    there, here = (ssl.MemoryBIO(), ssl.MemoryBIO())
    server = serving.wrap_bio(there, here, server_side=True)
    client = asking.wrap_bio(here, there, server_hostname="lab.example")
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.getpeercert(binary_form=True) is not None
    assert client.version() == "TLSv1.3"


def test_another_users_keyring_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "keyring"
    Keyring.open(folder)
    if os.geteuid() != 0:
        needs("root", "a folder is to be given to another user")
    os.chown(folder, 12345, 12345)
    with pytest.raises(HomeUnusable, match="belongs to user id 12345"):
        Keyring.open(folder)
