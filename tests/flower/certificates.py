"""Certificates and node keys for tests, made here and thrown away."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PRIVATE = serialization.NoEncryption()


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, PRIVATE)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey, ca: bool
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )
    if not ca:
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(here), critical=False)
    else:
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_certificates(folder: Path) -> Path:
    """ca.crt, server.crt and server.key in a folder."""
    folder.mkdir()
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    (folder / "ca.crt").write_bytes(_certificate("test", authority, "test", authority, ca=True))
    (folder / "server.crt").write_bytes(_certificate("localhost", server, "test", authority, ca=False))
    (folder / "server.key").write_bytes(_pem(server, serialization.PrivateFormat.PKCS8))
    return folder


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A node's private and public key, as ssh-keygen writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(_pem(key, serialization.PrivateFormat.OpenSSH))
    form = serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, form) + b"\n")
    return private, public
