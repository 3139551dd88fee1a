"""The server's certificate and the nodes' keys.

python -m workbench.federation.keys server FOLDER HOST ...
python -m workbench.federation.keys node FILE
"""

import datetime
import ipaddress
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = datetime.timedelta(days=365)


def make_certificate(folder: Path, *hosts: str) -> None:
    """Write server.key and server.pem, signed by itself: machines that have the file trust it."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)  # clocks differ
    of_key = key.public_key(), x509.random_serial_number()
    builder = x509.CertificateBuilder(name, name, *of_key, start, start + DAYS)
    extensions: tuple[x509.ExtensionType, ...] = (
        x509.SubjectAlternativeName([general_name(host) for host in hosts]),
        x509.BasicConstraints(ca=True, path_length=0),
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    certificate = builder.sign(key, hashes.SHA384()).public_bytes(to.Encoding.PEM)
    write_private(folder / "server.key", key, to.PrivateFormat.PKCS8)
    (folder / "server.pem").write_bytes(certificate)


def make_node_key(path: Path) -> None:
    """Write a node's private key, and beside it the public one, which is registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key, to.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def general_name(host: str) -> x509.GeneralName:
    """An address or a name as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: to.PrivateFormat) -> None:
    """Write a private key that its owner alone can read."""
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(to.Encoding.PEM, form, to.NoEncryption()))


if __name__ == "__main__":
    kind, file, *names = sys.argv[1:]
    if kind == "server":
        make_certificate(Path(file), *names)
    else:
        make_node_key(Path(file))
