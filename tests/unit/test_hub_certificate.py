from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from potluck.errors import ConfigurationError
from potluck.hub.server.certificate import HubCertificates, ca_hash, der_hash, prepare_certificates

DAY_SECONDS = 24 * 3600
NOW = 1_800_000_000.0


class FixedClock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now


def prepare(folder: Path, *hosts: str, after_days: float = 0.0) -> HubCertificates:
    clock = FixedClock(NOW + after_days * DAY_SECONDS)
    return prepare_certificates(folder / "identity", folder / "tls", hosts, clock)


def shown(certificates: HubCertificates) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(certificates.chain_file.read_bytes())


def test_the_chain_holds_the_server_and_the_authority_that_signed_it(tmp_path: Path) -> None:
    certificates = prepare(tmp_path, "Hub.example.org", "192.0.2.7", "2001:db8::1", "0.0.0.0", "localhost")
    server, authority = shown(certificates)
    server.verify_directly_issued_by(authority)
    assert authority == x509.load_pem_x509_certificate(certificates.ca_pem.encode())
    assert certificates.ca_file.read_text() == certificates.ca_pem
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "2001:db8::1", "127.0.0.1"]
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_keys_are_private(tmp_path: Path) -> None:
    prepare(tmp_path)
    for path in (tmp_path / "identity" / "authority.pem", tmp_path / "tls" / "server.pem"):
        assert "PRIVATE KEY" in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "PRIVATE KEY" not in (tmp_path / "tls" / "ca.pem").read_text()


def test_the_hash_is_short_and_the_same_from_pem_and_handshake(tmp_path: Path) -> None:
    certificates = prepare(tmp_path)
    assert len(certificates.ca_hash) == 32
    assert set(certificates.ca_hash) <= set("abcdefghijklmnopqrstuvwxyz234567")
    assert certificates.ca_hash == der_hash(ssl.PEM_cert_to_DER_cert(certificates.ca_pem))
    assert certificates.ca_hash != prepare(tmp_path / "other").ca_hash
    with pytest.raises(ConfigurationError, match="not a certificate"):
        ca_hash("nonsense")


def test_nothing_changes_while_nothing_has_to(tmp_path: Path) -> None:
    before = shown(prepare(tmp_path, "hub.example.org"))
    assert shown(prepare(tmp_path, "hub.example.org", after_days=5 * 365 - 31)) == before


@pytest.mark.parametrize(
    ("hosts", "after_days"),
    [(("other.example.org",), 0.0), ((), 0.0), (("hub.example.org",), 5 * 365 - 29), (("hub.example.org",), 6 * 365)],
    ids=["another host", "a host less", "ends soon", "has ended"],
)
def test_the_server_is_renewed_and_the_authority_stays(
    tmp_path: Path, hosts: tuple[str, ...], after_days: float
) -> None:
    old_server, authority = shown(prepare(tmp_path, "hub.example.org"))
    certificates = prepare(tmp_path, *hosts, after_days=after_days)
    new_server, same_authority = shown(certificates)
    assert new_server != old_server
    assert same_authority == authority
    new_server.verify_directly_issued_by(authority)
    assert new_server.not_valid_after_utc.timestamp() > NOW + (after_days + 30) * DAY_SECONDS
    assert new_server.not_valid_after_utc <= authority.not_valid_after_utc


def test_a_damaged_server_certificate_is_made_anew(tmp_path: Path) -> None:
    for damage in (
        lambda text: "nonsense",
        lambda text: text[: len(text) // 2],
        lambda text: text[text.index("-----BEGIN C") :],
    ):
        certificates = prepare(tmp_path)
        certificates.chain_file.write_text(damage(certificates.chain_file.read_text()))
        server, authority = shown(prepare(tmp_path))
        server.verify_directly_issued_by(authority)


def test_a_server_certificate_of_another_authority_is_made_anew(tmp_path: Path) -> None:
    foreign = prepare(tmp_path / "other")
    ours = prepare(tmp_path)
    ours.chain_file.write_text(foreign.chain_file.read_text())
    server, authority = shown(prepare(tmp_path))
    assert ca_hash(ours.ca_pem) == ours.ca_hash
    server.verify_directly_issued_by(authority)
    assert authority == x509.load_pem_x509_certificate(ours.ca_pem.encode())


@pytest.mark.parametrize("part", ["nonsense", "half", "foreign key"])
def test_a_damaged_authority_is_an_error_that_names_file_and_remedy(tmp_path: Path, part: str) -> None:
    prepare(tmp_path)
    prepare(tmp_path / "other")
    path = tmp_path / "identity" / "authority.pem"
    text, foreign = path.read_text(), (tmp_path / "other" / "identity" / "authority.pem").read_text()
    split = text.index("-----BEGIN C")
    damaged = {
        "nonsense": "x",
        "half": text[:split],
        "foreign key": foreign[: foreign.index("-----BEGIN C")] + text[split:],
    }
    path.write_text(damaged[part])
    with pytest.raises(ConfigurationError) as caught:
        prepare(tmp_path)
    assert str(path) in str(caught.value)
    assert "backup" in str(caught.value)
    assert path.read_text() == damaged[part]
