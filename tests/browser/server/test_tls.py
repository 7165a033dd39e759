"""Browser servers with TLS: the client checks their certificates."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pytest
import trustme

from megatron_webrl.browser.server.client import BrowserClient, ServerUnreachable
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.access import client_context, server_context
from tests.browser.server.conftest import LIMIT, browser_server
from tests.browser.server.servers import click_task


class TlsFiles(NamedTuple):
    certificate: Path
    key: Path


def authority(folder: Path, name: str = "127.0.0.1") -> tuple[Path, TlsFiles]:
    """A new certificate authority and a certificate of it."""
    folder.mkdir()
    ca = trustme.CA()
    issued = ca.issue_cert(name)
    files = TlsFiles(folder / "certificate.pem", folder / "key.pem")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(files.key)
    return folder / "ca.pem", files


async def test_a_server_works_with_tls_and_refuses_clients_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, files = authority(tmp_path / "server")
    tls = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    environment = {"WEBRL_BROWSERS_TOKEN": secrets.token_urlsafe(24), "WEBRL_BROWSERS_CA": str(ca)}
    with browser_server(*tls, sessions=1, **environment) as server:
        assert urlsplit(server.url).scheme == "https"
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        async with BrowserClient(server.url) as browsers:
            await browsers.wait_until_ready(LIMIT)
            async with browsers.session() as session:
                assert (await session.reset(click_task())).instruction
        other, _ = authority(tmp_path / "other")
        monkeypatch.setenv("WEBRL_BROWSERS_CA", str(other))
        async with BrowserClient(server.url) as browsers:
            with pytest.raises(ServerUnreachable, match="certificate"):
                await browsers.wait_until_ready(0.5)
        port = urlsplit(server.url).port
        async with aiohttp.ClientSession() as plain:
            with pytest.raises(aiohttp.ClientError):
                await plain.get(f"http://127.0.0.1:{port}/healthz")


async def test_stalled_tls_handshakes_delay_nobody(tmp_path: Path) -> None:
    ca, files = authority(tmp_path / "server")
    tls = ("--tls-certificate", str(files.certificate), "--tls-key", str(files.key))
    with browser_server(*tls, WEBRL_BROWSERS_TOKEN="") as server:
        stalled = [await asyncio.open_connection("127.0.0.1", urlsplit(server.url).port) for _ in range(2)]
        context = ssl.create_default_context(cafile=ca)
        async with aiohttp.ClientSession() as client, client.get(f"{server.url}/metrics", ssl=context) as answer:
            assert answer.status == 200
        for _, writer in stalled:
            writer.close()


def test_unusable_files_are_named(tmp_path: Path) -> None:
    _, files = authority(tmp_path / "server")
    _, others = authority(tmp_path / "other")
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    server_context(*files)
    for certificate, key in ((files.certificate, others.key), (broken, files.key), (tmp_path / "none", files.key)):
        with pytest.raises(ConfigError, match=f"--tls-certificate={certificate} with --tls-key={key} cannot be used"):
            server_context(certificate, key)
    with pytest.raises(ConfigError, match=f"WEBRL_BROWSERS_CA={broken} cannot be used"):
        client_context(str(broken), "WEBRL_BROWSERS_CA")
