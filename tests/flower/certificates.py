"""A certificate and node keys for tests, made here and thrown away."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PRIVATE = serialization.NoEncryption()


def make_certificate(folder: Path) -> Path:
    """server.crt, which vouches for itself, and server.key in a folder."""
    folder.mkdir()
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    (folder / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, PRIVATE))
    return folder


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A node's private and public key, as ssh-keygen writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    openssh = serialization.PrivateFormat.OpenSSH
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, openssh, PRIVATE))
    form = serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, form) + b"\n")
    return private, public
