"""No packet of a hostile page leaves for a forbidden address.

At least 500 URLs, each by navigation, redirect, sub-resource, fetch, form and WebSocket, from a page of the open web in
real Chromium, which has no sandbox of the network here: policy and proxy alone are tested.

This module runs itself in a network and mount namespace. Every address is routed to the loopback interface
(`ip route add local default`), so a packet to a forbidden address would arrive, and a raw socket sees it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import dns.flags
import dns.message
import dns.rdatatype
import dns.rrset
import pytest
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress.egress_policy import JOB_ADDRESSES_VARIABLE
from megatron_webrl.config.browser import BrowserConfig

USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
UNSHARE = ["unshare", *USER, "--net", "--mount", "--kill-child", "--fork"]
REASON = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False).stderr.strip()


FULL = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("share", [pytest.param("quick", marks=pytest.mark.slow), pytest.param("full", marks=FULL)])
@pytest.mark.skipif(bool(REASON), reason=REASON or "-")
def test_no_packet_of_a_hostile_page_leaves_for_a_forbidden_address(share: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [*UNSHARE, sys.executable, "-m", "tests.browser.egress.test_hostile_network", str(result), share]
    subprocess.run(command, env={**os.environ, JOB_ADDRESSES_VARIABLE: JOB}, check=True)
    found = json.loads(result.read_text())
    assert found["urls"] >= 500
    assert found["forbidden"] == {}
    assert found["packets of the control"] > 0
    assert found["allowed packets"] > 0
    for way, reasons in found["refused"].items():
        assert way == "navigation" or {"loopback", "private", "metadata"} <= reasons.keys(), way


PUBLIC = "93.184.216.34"  # the only address that pages may reach, at port 80
OWN, JOB, DENIED = "93.184.216.77", "93.184.216.99", "93.184.217.5"  # public addresses that are out of bounds
FORBIDDEN_IPV4 = (
    "127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.254", "192.168.1.1",
    "100.64.0.1", "169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192", "198.18.0.1",
    "192.0.2.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", OWN, JOB, DENIED,
)  # fmt: skip
FORBIDDEN_IPV6 = (
    "::1", "::", "::7f00:1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1", "2001::1",
    "4000::1", "::ffff:0:127.0.0.1", "fd00::1",
)  # fmt: skip


SCHEMES = ("https", "ws", "wss", "ftp", "gopher", "dict", "ldap", "tftp", "sftp", "ssh", "jar", "view-source:http")


def spellings(address: str) -> Iterator[str]:
    """Hosts that browsers or resolvers read as an IPv4 address."""
    value = int(IPv4Address(address))
    first, second, third, fourth = value.to_bytes(4)
    yield from (address, f"{address}.", str(value), f"{value:#x}", f"0{value:o}", f"0X{value:X}")
    yield from (f"{first}.{value & 0xFFFFFF}", f"{first}.{second}.{value & 0xFFFF}")
    yield from (f"{first:#x}.{second}.0{third:o}.{fourth}", f"{first:#x}.{value & 0xFFFFFF:#x}")
    yield f"000{first:o}.0{second:o}.0{third:o}.0{fourth:o}"
    yield "".join(f"%{ord(character):02x}" for character in address)
    yield "".join(chr(ord(character) + 0xFEE0) if character.isdigit() else "\u3002" for character in address)
    yield from (f"[::ffff:{address}]", f"[::ffff:{value >> 16:x}:{value & 0xFFFF:x}]", f"[64:ff9b::{address}]")
    yield from (f"[64:ff9b:1::{address}]", f"[2002:{value >> 16:x}:{value & 0xFFFF:x}::1]")
    yield f"[0:0:0:0:0:FFFF:{address}]"


def names(address: str) -> Iterator[str]:
    """Names that the test's name server resolves to an address: always, by turns, or among others."""
    dashed = address.replace(".", "-")
    for kind in ("ip", "IP", "mix", "mapped", "nat", "rebind"):
        yield f"{kind}-{dashed}.{'TEST.' if kind == 'IP' else 'test'}"
    yield f"rebind-{dashed}-1.test"


def corpus() -> list[str]:
    urls = [f"http://{host}/" for address in FORBIDDEN_IPV4 for host in (*spellings(address), *names(address))]
    urls += [f"http://[{address}]{port}/" for address in FORBIDDEN_IPV6 for port in ("", ":8080")]
    urls += [f"http://six-{address.replace(':', '_')}.test/" for address in FORBIDDEN_IPV6 if "." not in address]
    for host in ("localhost", "LOCALHOST.", "a.localhost", "localhost.localdomain", "ip6-localhost", "vm", "intranet",
                 "intranet.", "broadcasthost", "metadata", "metadata.google.internal", "METADATA.google.internal.",
                 "instance-data", "metadata.azure.com", "metadata.tencentyun.com", "host.docker.internal",
                 "\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3", "loc%61lhost"):  # fmt: skip
        urls += [f"http://{host}/", f"http://{host}:8080/"]
    for host in ("127.0.0.1", "169.254.169.254", "10.0.0.1"):
        urls += [f"http://{PUBLIC}@{host}/", f"http://{PUBLIC}:80@{host}/", f"http://{PUBLIC}%40{host}/",
                 f"http://{PUBLIC}\\@{host}/", f"http://{host}#@{PUBLIC}/", f"http://{host}?@{PUBLIC}/",
                 f"http://{host};@{PUBLIC}/", f"http://a:b@c@{host}/", f"http:{host}/", f"http:///{host}/",
                 f"http:\\\\{host}/", f"http://{host}%00.test/", f"http://\t{host}/", f"//{host}/"]  # fmt: skip
        urls += [f"http://{host}:{port}/" for port in ("", "0", "22", "443", "8080", "00080", "65535", "65536", "+80")]
        urls += [f"{scheme}://{host}/x" for scheme in SCHEMES]
    urls += [f"http://{PUBLIC}:{port}/" for port in (22, 25, 443, 3306, 6379, 8080)]
    urls += ["file:///etc/passwd", "file://127.0.0.1/etc/passwd", "chrome://version/", "devtools://devtools/x"]
    urls += ["data:text/html,<img src=http://127.0.0.1/>", "blob:http://127.0.0.1/x", "filesystem:http://127.0.0.1/x"]
    return list(dict.fromkeys(urls))


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


async def serve_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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


async def attempt(pool: BrowserPool, way: str, urls: Sequence[str], counter: PacketCounter) -> Counter[str]:
    """Try the URLs in one way from a page of the public server; returns the reasons of refusals."""
    async with pool.session() as session:
        page = session.page
        counter.proxy_ports.add(session.network.port)
        await page.goto(f"http://{PUBLIC}/")
        if way == "navigation":
            for url in urls:
                with suppress(PlaywrightError):  # refused, or no URL at all
                    await page.goto(url, timeout=NAVIGATION_MS, wait_until="commit")
        else:
            await page.evaluate(TRY_ALL, [way, list(urls), f"http://{PUBLIC}/to?", BATCH_MS])
        return Counter(session.network.refused)


async def run(quick: bool) -> dict[str, object]:
    urls = corpus()
    await asyncio.get_running_loop().create_datagram_endpoint(NameServer, local_addr=(NAME_SERVER, 53))
    server = await asyncio.start_server(serve_page, ["0.0.0.0", "::"], 80)
    control, counter = await count_control(), PacketCounter()
    denied = f"{DENIED.rpartition('.')[0]}.0/24"
    settings = BrowserConfig(width=400, height=300, open_web=True, deny=[denied], ports=[80], max_requests=100_000)
    refused: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    tried = urls[::8] if quick else urls
    async with BrowserPool(settings, {}, 1) as pool:
        for way in WAYS:
            for start in range(0, len(tried), CHUNK):
                refused[way] += await attempt(pool, way, tried[start : start + CHUNK], counter)
    await asyncio.to_thread(counter.stop)
    server.close()
    return {
        "urls": len(urls), "allowed packets": counter.allowed, "forbidden": counter.forbidden,
        "packets of the control": control, "refused": refused,
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


def main(result: str, quick: str) -> None:
    folder = Path(result).parent
    resolver = f"nameserver {NAME_SERVER}\nsearch intranet.test\noptions timeout:5 attempts:1\n"
    (folder / "resolv.conf").write_text(resolver)
    (folder / "hosts").write_text("10.0.0.1 broadcasthost\n127.0.0.1 localhost vm\n::1 ip6-localhost\n")
    for line in (
        "ip link set lo up", f"ip address add {OWN}/32 dev lo", "ip route add local default dev lo",
        "ip -6 route add local default dev lo", f"mount --bind {folder}/resolv.conf /etc/resolv.conf",
        f"mount --bind {folder}/hosts /etc/hosts",
    ):  # fmt: skip
        subprocess.run(line.split(), check=True)
    Path(result).write_text(json.dumps(asyncio.run(run(quick == "quick"))))


if __name__ == "__main__":
    main(*sys.argv[1:])
