"""An authority that nobody knows -> its certificate, and a stand-in for vLLM with one that it signed."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.fake_vllm import FakeVllm, running

_ONE_DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _begin(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    """A certificate of one day, by the authority."""
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_name(subject)).issuer_name(_name("authority"))
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _ONE_DAY).not_valid_after(now + _ONE_DAY)


def _to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@contextmanager
def vllm_of_private_authority(folder: Path) -> Iterator[tuple[str, Path]]:
    """The server's address, and the file with the authority's certificate."""
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _begin("authority", authority_key).add_extension(x509.BasicConstraints(True, None), critical=True)
    authority = authority.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False
    )
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    authority = authority.add_extension(usage, critical=True)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    server = _begin("server", server_key).add_extension(x509.SubjectAlternativeName([address]), critical=False)
    server = server.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
    )
    authority_file, server_file = folder / "authority.pem", folder / "server.pem"
    authority_file.write_bytes(_to_pem(authority.sign(authority_key, hashes.SHA256())))
    key_pem = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    server_file.write_bytes(key_pem + _to_pem(server.sign(authority_key, hashes.SHA256())))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server_file)
    fake = FakeVllm()
    fake.socket = context.wrap_socket(fake.socket, server_side=True)
    with running(fake):
        yield fake.url.replace("http://", "https://"), authority_file
