"""TLS towards the browser during replay.

The browser trusts the certificate by its key (Chromium's --ignore-certificate-errors-spki-list). A browser that ignores
the errors of a certificate instead caches nothing that comes with it.
"""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

# The key is public and protects nothing: browsers that replay reach no network, and others do not trust it.
_KEY = """
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgB2yRY242wYs3BZci5S6uAN6o3Y1++/ZkHvRZZjf8DVihRANCAAQy
zyRgZoYzqSQRq7P7GRdVTipJlYVcA9c/A32FJmGH5gytrGWrT1HxUYOqp5MZeBTHXNEi0r26v/aJNIcw6Ymt
"""
_CERTIFICATE = """
MIIBiTCCAS+gAwIBAgIUYMrx1CVU+2BpHVPJq4+Iwtb5QoowCgYIKoZIzj0EAwIwGTEXMBUGA1UEAwwOYnJvd3Nlci5yZXBsYXkw
IBcNMjYxMTIzMTIxOTE3WhgPMjEyNjEwMzAxMjE5MTdaMBkxFzAVBgNVBAMMDmJyb3dzZXIucmVwbGF5MFkwEwYHKoZIzj0CAQYI
KoZIzj0DAQcDQgAEMs8kYGaGM6kkEauz+xkXVU4qSZWFXAPXPwN9hSZhh+YMraxlq09R8VGDqqeTGXgUx1zRItK9ur/2iTSHMOmJ
raNTMFEwHQYDVR0OBBYEFIpRxu6LEmfJl50WewYryUHh9GkEMB8GA1UdIwQYMBaAFIpRxu6LEmfJl50WewYryUHh9GkEMA8GA1Ud
EwEB/wQFMAMBAf8wCgYIKoZIzj0EAwIDSAAwRQIhAPjZk1HRaXFGGDC6lmjMaaW3dYDkcUQoVh2iZ+snuTG2AiBAKYg+5KHTkNXs
EdR+Xm+gksFkq2trxplXbF6GIwWnOw==
"""
KEY_DIGEST = "i2oH2xULBVQnNxTqxMFR883dI4ogkNAdCtHai8/u4RA="  # base64 of the SHA-256 of SubjectPublicKeyInfo


def server_context() -> ssl.SSLContext:
    """The server's side of TLS, for every host, with HTTP/1.1 only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        for kind, text in (("PRIVATE KEY", _KEY), ("CERTIFICATE", _CERTIFICATE)):
            file.write(f"-----BEGIN {kind}-----{text}-----END {kind}-----\n")
        file.flush()
        context.load_cert_chain(Path(file.name))
    return context
