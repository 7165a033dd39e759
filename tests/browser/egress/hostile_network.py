"""A network in which every address is this machine, a name server, and one browser with hostile pages.

It runs in a network and mount namespace of its own (test_hostile_network.py). Every address is routed to the loopback
interface (`ip route add local default`), so a packet to a forbidden address would arrive, and a raw socket sees it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import Page

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress.egress_policy import Endpoint, NetworkAccess
from megatron_webrl.browser.egress.egress_proxy import EgressProxy
from megatron_webrl.config.browser import BrowserConfig
from tests.browser.egress.ssrf_corpus import DENIED, FORBIDDEN_IPV4, OWN, PUBLIC, corpus

NAME_SERVER = "127.0.0.53"
CHUNK = 40  # URLs tried from one page at a time
WAYS = ("navigation", "redirect", "sub-resource", "fetch", "form", "websocket")
NAVIGATION_MS, BATCH_MS = 2000, 25_000
TRY_ALL = """([way, urls, redirector, limit]) => Promise.race([
  new Promise(done => setTimeout(done, limit)),
  Promise.allSettled(urls.map(url => new Promise(done => {
    if (way == 'fetch') return fetch(url, {mode: 'no-cors', cache: 'no-store'}).then(done, done);
    if (way == 'redirect')
      return fetch(redirector + encodeURIComponent(url), {mode: 'no-cors', cache: 'no-store'}).then(done, done);
    if (way == 'sub-resource') {
      const image = new Image(); document.body.append(image);
      image.onload = image.onerror = done; image.src = url; return; }
    if (way == 'websocket') {
      const socket = new WebSocket(url.replace(/^http/i, 'ws')); socket.onopen = socket.onclose = done; return; }
    const frame = document.createElement('iframe'); frame.name = 'f' + Math.random();
    document.body.append(frame); frame.onload = done;  // its empty page has been loaded
    const form = document.createElement('form'); form.action = url; form.method = 'post'; form.target = frame.name;
    document.body.append(form); form.submit(); setTimeout(done, 6000);
  })))])"""


class PacketCounter:
    """Counts packets that are neither the page's with the public server, the browser's with the proxy, nor DNS."""

    def __init__(self) -> None:
        self.proxy_ports: set[int] = set()
        self.allowed, self.forbidden = 0, Counter[str]()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.2)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._count(self._socket.recv(256)[14:])
            except TimeoutError:
                if self._stopping.is_set():
                    return

    def _count(self, packet: bytes) -> None:
        if packet[0] >> 4 == 4:
            addresses: tuple[IPv4Address | IPv6Address, ...] = (IPv4Address(packet[12:16]), IPv4Address(packet[16:20]))
            protocol, rest = packet[9], packet[(packet[0] & 15) * 4 :]
        else:
            addresses = (IPv6Address(packet[8:24]), IPv6Address(packet[24:40]))
            protocol, rest = packet[6], packet[40:]
        ports = (int.from_bytes(rest[:2]), int.from_bytes(rest[2:4])) if protocol in (6, 17) else (0, 0)
        texts = [str(address) for address in addresses]
        local = all(address.is_loopback for address in addresses)
        # An answer that comes too late gets an ICMP message from this machine.
        dns_packet = local and NAME_SERVER in texts and (protocol == 1 or (protocol == 17 and 53 in ports))
        proxied = protocol == 6 and texts == ["127.0.0.1"] * 2 and bool(self.proxy_ports & set(ports))
        page = protocol == 6 and PUBLIC in texts and 80 in ports and set(texts) <= {PUBLIC, "127.0.0.1"}
        if dns_packet or proxied or page:
            self.allowed += 1
        else:
            self.forbidden[f"protocol {protocol}, {texts[0]}:{ports[0]} to {texts[1]}:{ports[1]}"] += 1


class NameServer(asyncio.DatagramProtocol):
    """Answers what a name says; rebind-ADDRESS-N is public first, and then by turns forbidden and public."""

    def __init__(self) -> None:
        self.asked = Counter[str]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text().lower()
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        found = self._addresses(name.removesuffix(".test."), question.rdtype == dns.rdatatype.AAAA)
        if found:
            kind = "AAAA" if question.rdtype == dns.rdatatype.AAAA else "A"
            response.answer.append(dns.rrset.from_text(question.name, 0, "IN", kind, *found))
        self._transport.sendto(response.to_wire(), source)

    def _addresses(self, name: str, six: bool) -> list[str]:
        kind, _, rest = name.partition("-")
        dotted = ".".join(rest.split("-")[:4])
        if kind == "six":
            return [rest.replace("_", ":")] if six else []
        if kind in ("mapped", "nat"):
            return [("::ffff:" if kind == "mapped" else "64:ff9b::") + dotted] if six else []
        if six:
            return []
        if kind == "ip" or name.startswith("intranet"):
            return [dotted if kind == "ip" else "10.0.0.9"]
        if kind == "mix":
            return [PUBLIC, dotted]
        if kind == "rebind":
            self.asked[name] += 1
            return [PUBLIC if self.asked[name] % 2 else dotted]
        return []


class RecordingProxy(EgressProxy):
    """Tells the packet counter its ports."""

    counter: PacketCounter

    async def open_port(
        self, declared: Mapping[Endpoint, Endpoint], listener: socket.socket | None = None
    ) -> NetworkAccess:
        network = await super().open_port(declared, listener)
        self.counter.proxy_ports.add(network.port)
        return network


async def serve_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A page at every address; /to?URL redirects to the URL."""
    try:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode()
        if path.startswith("/to?"):
            head = f"302 Found\r\nLocation: {unquote(path[4:])}".encode("latin-1", "replace")
        else:
            head = b"200 OK\r\nContent-Type: text/html"
        writer.write(b"HTTP/1.1 " + head + b"\r\nContent-Length: 4\r\nConnection: close\r\n\r\npage")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def attempt(pool: BrowserPool, way: str, urls: Sequence[str], refused: Counter[str]) -> None:
    """Try the URLs in one way from a page of the public server."""
    async with pool.session() as session:
        page = session.page
        await page.goto(f"http://{PUBLIC}/")
        if way == "navigation":
            for url in urls:
                await _navigate(page, url)
        else:
            await page.evaluate(TRY_ALL, [way, list(urls), f"http://{PUBLIC}/to?", BATCH_MS])
        refused.update(session.network.refused)


async def _navigate(page: Page, url: str) -> None:
    with suppress(PlaywrightError):  # refused, or no URL at all
        await page.goto(url, timeout=NAVIGATION_MS, wait_until="commit")


async def run(quick: bool) -> dict[str, object]:
    urls = corpus()
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(NameServer, local_addr=(NAME_SERVER, 53))
    server = await asyncio.start_server(serve_page, ["0.0.0.0", "::"], 80)
    control, counter = await count_control(), PacketCounter()
    settings = BrowserConfig(
        width=400,
        height=300,
        open_web=True,
        deny=[f"{DENIED.rpartition('.')[0]}.0/24"],
        ports=[80],
        max_requests=100_000,
    )
    pool = BrowserPool(settings, {}, 1)
    proxy = RecordingProxy(settings)
    proxy.counter, pool.egress_proxy = counter, proxy
    refused: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    tried = urls[::8] if quick else urls
    async with pool:
        for way in WAYS:
            for start in range(0, len(tried), CHUNK):
                await attempt(pool, way, tried[start : start + CHUNK], refused[way])
    await asyncio.to_thread(counter.stop)
    server.close()
    return {
        "urls": len(urls), "tried by each of six ways": len(tried), "allowed packets": counter.allowed,
        "forbidden packets": counter.forbidden.total(), "forbidden": dict(counter.forbidden.most_common(10)),
        "packets of the control": control, "refused": {way: dict(count) for way, count in refused.items()},
    }  # fmt: skip


async def count_control() -> int:
    """Forbidden packets that the counter sees when some are sent."""
    counter = PacketCounter()
    for address in ("10.0.0.1", OWN, "fd00::1"):
        with socket.create_connection((address, 80), timeout=5):
            pass
    await asyncio.to_thread(counter.stop)
    text = str(counter.forbidden)
    return counter.forbidden.total() if "10.0.0.1:80" in text and f"{OWN}:80" in text and "fd00::1:80" in text else 0


def main(result: str, quick: str) -> int:
    folder = Path(result).parent
    (folder / "resolv.conf").write_text(
        f"nameserver {NAME_SERVER}\nsearch intranet.test\noptions timeout:5 attempts:1\n"
    )
    (folder / "hosts").write_text("10.0.0.1 broadcasthost\n127.0.0.1 localhost vm\n::1 ip6-localhost\n")
    for line in (
        "ip link set lo up", f"ip address add {OWN}/32 dev lo", "ip route add local default dev lo",
        "ip -6 route add local default dev lo", f"mount --bind {folder}/resolv.conf /etc/resolv.conf",
        f"mount --bind {folder}/hosts /etc/hosts",
    ):  # fmt: skip
        subprocess.run(line.split(), check=True)
    assert ip_address(PUBLIC) not in map(ip_address, FORBIDDEN_IPV4)
    Path(result).write_text(json.dumps(asyncio.run(run(quick == "quick"))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
