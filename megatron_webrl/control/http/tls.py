"""TLS of an HTTP service and of its clients. The standard library's defaults: TLS 1.2 or later, names are checked."""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.setting import ConfigError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of a service: its certificate with those of its issuers, and the private key."""

    certificate: Path
    key: Path


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `TlsFiles` to the parser of a service."""
    for option, text in (
        ("--tls-certificate", "certificate for https, with those of its issuers"),
        ("--tls-key", "private key"),
    ):
        parser.add_argument(option, type=Path, metavar="FILE", help=f"PEM file with the {text}")


def tls_files(options: argparse.Namespace) -> TlsFiles | None:
    """The files that the options name; None without them. Raises ConfigError for one of them alone."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key belong together; give both, or neither")
    return None if options.tls_certificate is None else TlsFiles(options.tls_certificate, options.tls_key)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The TLS settings of a service. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    named = f"--tls-certificate={files.certificate} with --tls-key={files.key}"
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(f"{named} cannot be used: {error}; give PEM files without a password") from None
    return context


def client_context(ca: str, origin: str) -> ssl.SSLContext:
    """The TLS settings of a client. `ca`: PEM file of the issuers to trust, from the setting `origin`; empty: those of
    the system. Raises ConfigError.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}={ca} cannot be used: {error}; give a PEM file of certificates") from None


def _refuse_password() -> str:
    raise ValueError("the key has a password")
