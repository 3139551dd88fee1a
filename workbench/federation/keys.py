"""The server's certificate and the nodes' keys: `python -m workbench.federation.keys --help`."""

import argparse
import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = datetime.timedelta(days=365)


def make_certificate(folder: Path, *hosts: str, replace: bool = False) -> None:
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
    private = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())
    write_pair(folder / "server.key", private, folder / "server.pem", certificate, replace)


def make_node_key(path: Path) -> Path:
    """Write a node's private key and, beside it, the public one, which is registered: its path."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption())
    content = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH)
    public = path.with_name(f"{path.name.removesuffix('.key')}.pub")
    write_pair(path, private, public, content)
    return public


def general_name(host: str) -> x509.GeneralName:
    """An address or a name as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_pair(
    private: Path, secret: bytes, public: Path, content: bytes, replace: bool = False
) -> None:
    """Write a private key that its owner alone can read, and a public file."""
    for path in (private, public):
        if replace:
            path.unlink(missing_ok=True)
        elif os.path.lexists(path):
            raise FileExistsError(f"{path} exists: only `server --replace` replaces its files")
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the mask of this process
        file.write(secret)
    with public.open("xb") as file:
        file.write(content)


def main(arguments: list[str] | None = None) -> None:
    """Make what the command line asks for; an error is one line."""
    parser = argparse.ArgumentParser("keys", description="Make a certificate, or a node's key.")
    kinds = parser.add_subparsers(dest="kind", metavar="server|node", required=True)
    server = kinds.add_parser("server", help="write server.key and server.pem in FOLDER")
    server.add_argument("--replace", action="store_true", help="replace those that are there")
    server.add_argument("path", metavar="FOLDER", type=Path)
    server.add_argument("hosts", metavar="HOST", nargs="+", help="a name or address of the server")
    node = kinds.add_parser("node", help="write a private key and, beside it, a public one, .pub")
    node.add_argument("path", metavar="FILE", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.kind == "server":
            make_certificate(given.path, *given.hosts, replace=given.replace)
        else:
            make_node_key(given.path)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
