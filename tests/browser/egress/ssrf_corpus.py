"""URLs that try to reach what pages must not: families of schemes, spellings, names, user names and ports."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address

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


def spellings(address: str) -> Iterator[str]:
    """Hosts that browsers or resolvers read as an IPv4 address."""
    value = int(IPv4Address(address))
    first, second, third, fourth = value.to_bytes(4)
    yield from (address, f"{address}.", str(value), f"{value:#x}", f"0{value:o}", f"0X{value:X}")
    yield from (
        f"{first}.{value & 0xFFFFFF}",
        f"{first}.{second}.{value & 0xFFFF}",
        f"{first:#x}.{second}.0{third:o}.{fourth}",
    )
    yield from (f"000{first:o}.0{second:o}.0{third:o}.0{fourth:o}", f"{first:#x}.{value & 0xFFFFFF:#x}")
    yield "".join(f"%{ord(character):02x}" for character in address)
    yield "".join(chr(ord(character) + 0xFEE0) if character.isdigit() else "\u3002" for character in address)
    yield from (f"[::ffff:{address}]", f"[::ffff:{value >> 16:x}:{value & 0xFFFF:x}]", f"[64:ff9b::{address}]")
    yield from (
        f"[64:ff9b:1::{address}]",
        f"[2002:{value >> 16:x}:{value & 0xFFFF:x}::1]",
        f"[0:0:0:0:0:FFFF:{address}]",
    )


def names(address: str) -> Iterator[str]:
    """Names that the test's name server resolves to an address: always, by turns, or among others."""
    dashed = address.replace(".", "-")
    yield from (
        f"ip-{dashed}.test",
        f"IP-{dashed}.TEST.",
        f"mix-{dashed}.test",
        f"mapped-{dashed}.test",
        f"nat-{dashed}.test",
    )
    yield from (f"rebind-{dashed}-{number}.test" for number in range(2))


def corpus() -> list[str]:
    """All URLs, without duplicates."""
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
        schemes = (
            "https",
            "ws",
            "wss",
            "ftp",
            "gopher",
            "dict",
            "ldap",
            "tftp",
            "sftp",
            "ssh",
            "jar",
            "view-source:http",
        )
        urls += [f"{scheme}://{host}/x" for scheme in schemes]
    urls += [f"http://{PUBLIC}:{port}/" for port in (22, 25, 443, 3306, 6379, 8080)]
    urls += ["file:///etc/passwd", "file://127.0.0.1/etc/passwd", "chrome://version/", "devtools://devtools/x"]
    urls += ["data:text/html,<img src=http://127.0.0.1/>", "blob:http://127.0.0.1/x", "filesystem:http://127.0.0.1/x"]
    return list(dict.fromkeys(urls))
