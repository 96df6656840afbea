"""The hub's own certificate authority and the certificate that the server shows.

A volunteer's hub has no name that a public authority would certify. So each hub makes an authority of its own on first
start, and the join link pins it by hash (`ca_hash`). The server shows its certificate and the authority's together, so
that a joiner can take the authority out of the handshake and compare.

Each is one file with key and certificates, so that a crash can never leave half a pair:

    identity/authority.pem   the authority; it stays for the life of the run
    tls/server.pem           the server's key, its certificate, the authority's certificate; renewed at need
    tls/ca.pem               the authority's certificate alone, for checking the other hubs of a cluster
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from potluck.clock import Clock, SystemClock
from potluck.errors import ConfigurationError
from potluck.hub.privatefiles import make_private_folder, read_private, write_private

logger = logging.getLogger(__name__)

CA_HASH_CHARACTERS = 32  # base32, so 160 bits: nobody finds a second authority with the same hash
AUTHORITY_FILE = "authority.pem"
CHAIN_FILE = "server.pem"
CA_FILE = "ca.pem"

_AUTHORITY_LIFETIME = timedelta(days=20 * 365)
_SERVER_LIFETIME = timedelta(days=5 * 365)
_RENEW_BEFORE = timedelta(days=30)
# Volunteers' clocks are wrong by years at times (an empty CMOS battery). The pinned hash is what makes the certificate
# trustworthy, not its dates, so they leave room for that.
_BACKDATE = timedelta(days=5 * 365)
_ALWAYS_HOSTS = ("localhost", "127.0.0.1")
_UNSPECIFIED_HOSTS = ("0.0.0.0", "::")  # where a server listens, never where it is reached


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCertificates:
    """What the server's configuration and the joiners need."""

    ca_pem: str
    chain_file: Path
    """Key, server certificate and authority, in one file."""
    ca_file: Path

    @property
    def ca_hash(self) -> str:
        """What join links pin."""
        return ca_hash(self.ca_pem)


@dataclass(frozen=True, slots=True)
class _Pair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def ca_hash(ca_pem: str) -> str:
    """A short fingerprint of an authority: 32 characters a-z, 2-7."""
    try:
        certificate = x509.load_pem_x509_certificate(ca_pem.encode())
    except ValueError as error:
        raise ConfigurationError(f"this is not a certificate in PEM form: {error}") from error
    return der_hash(certificate.public_bytes(serialization.Encoding.DER))


def der_hash(der: bytes) -> str:
    """The same for a certificate as it comes from a handshake."""
    return base64.b32encode(hashlib.sha256(der).digest()).decode("ascii").lower()[:CA_HASH_CHARACTERS]


def prepare_certificates(
    identity_folder: Path, tls_folder: Path, hosts: Iterable[str], clock: Clock | None = None
) -> HubCertificates:
    """The authority in `identity_folder` and a server certificate for `hosts` in `tls_folder`, made where missing.

    The server's certificate is made anew when the hosts change, when it nears its end, or when it is damaged. A damaged
    authority is a ConfigurationError: links that pin it are in the hands of others.
    """
    now = datetime.fromtimestamp((clock or SystemClock()).wall(), UTC)
    wanted = _names(hosts)
    authority = _load_or_create_authority(make_private_folder(identity_folder) / AUTHORITY_FILE, now)
    ca_pem = _certificate_pem(authority.certificate)
    chain_file = make_private_folder(tls_folder) / CHAIN_FILE
    reason = _why_renew(chain_file, authority, wanted, now)
    if reason:
        logger.info("making a new server certificate for %s: %s", ", ".join(wanted), reason)
        server = _create_server(authority, wanted, now)
        write_private(chain_file, _key_pem(server.key) + _certificate_pem(server.certificate) + ca_pem)
    ca_file = tls_folder / CA_FILE
    if read_private(ca_file) != ca_pem:
        write_private(ca_file, ca_pem)
    return HubCertificates(ca_pem=ca_pem, chain_file=chain_file, ca_file=ca_file)


def _names(hosts: Iterable[str]) -> list[str]:
    """The names and addresses to certify, each once, the fixed ones last."""
    given = [host.lower() for host in hosts if host not in _UNSPECIFIED_HOSTS]
    return list(dict.fromkeys([*given, *_ALWAYS_HOSTS]))


def _load_or_create_authority(path: Path, now: datetime) -> _Pair:
    text = read_private(path)
    if text is None:
        authority = _create_authority(now)
        write_private(path, _key_pem(authority.key) + _certificate_pem(authority.certificate))
        return authority
    try:
        return _parse_pair(text)
    except ValueError as error:
        raise ConfigurationError(
            f"the hub's certificate authority in {path} is damaged ({error}): restore the file from a backup, or "
            "delete it to make a new one, after which every join link made so far is refused"
        ) from error


def _parse_pair(text: str) -> _Pair:
    """Key and first certificate of a file; ValueError when they are unreadable or do not belong together."""
    key = serialization.load_pem_private_key(text.encode(), password=None)
    certificate = x509.load_pem_x509_certificates(text.encode())[0]
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("its key is not of the expected kind")  # noqa: TRY004 - the file's fault, not the caller's
    if key.public_key() != certificate.public_key():
        raise ValueError("its key and its certificate do not belong together")
    return _Pair(certificate, key)


def _why_renew(chain_file: Path, authority: _Pair, wanted: list[str], now: datetime) -> str:
    """Why the server's certificate cannot go on as it is; empty when it can."""
    text = read_private(chain_file)
    if text is None:
        return "there is none yet"
    try:
        certificate = _parse_pair(text).certificate
        certificate.verify_directly_issued_by(authority.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        return f"the old one is damaged or from another authority ({error!r})"
    if not text.endswith(_certificate_pem(authority.certificate)):
        return "the old file lacks the authority"
    if set(names) != set(_alternative_names(wanted)):
        return "the hosts have changed"
    if certificate.not_valid_after_utc - now < _RENEW_BEFORE:
        return f"the old one ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    return ""


def _create_authority(now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Potluck hub authority")])
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    certificate = (
        _builder(name, name, key, now, _AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Pair(certificate, key)


def _create_server(authority: _Pair, hosts: list[str], now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Potluck hub")])
    issuer = authority.certificate.subject
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    # Both usages: towards the other hubs of a cluster a server is a client too.
    usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    # An authority's certificate that outlives its server's is what clients expect.
    lifetime = min(_SERVER_LIFETIME, authority.certificate.not_valid_after_utc - now)
    certificate = (
        _builder(subject, issuer, key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(usages, critical=False)
        .add_extension(issuer_key, critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternative_names(hosts)), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return _Pair(certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    """What both certificates have in common."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode("ascii")
