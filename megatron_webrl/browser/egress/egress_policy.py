"""What pages may reach: rules on hosts, ports and addresses, and the quotas of an episode.

The egress proxy applies them before it connects.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

import idna
import psutil

from megatron_webrl.config.browser import DENIED_PLACES, BrowserConfig, parse_denied_network
from megatron_webrl.config.setting import ConfigError

if TYPE_CHECKING:
    from megatron_webrl.browser.egress.har import HARReplayer

DEFAULT_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}
METADATA_NAMES = frozenset(
    {
        "metadata", "metadata.goog", "metadata.google.internal", "metadata.azure.internal", "metadata.azure.com",
        "metadata.tencentyun.com", "instance-data", "instance-data.ec2.internal",
    }
)  # fmt: skip
METADATA_ADDRESSES = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254", "169.254.169.253", "169.254.170.2", "169.254.170.23",  # AWS, GCP, Azure and others
        "100.100.100.200", "168.63.129.16", "192.0.0.192",  # Alibaba, Azure, Oracle; the second is a public address
        "fd00:ec2::254", "fd00:ec2::253", "fd00:ec2::23", "fd20:ce::254", "fd00:42::42",
    )
)  # fmt: skip
# IANA's special-purpose registries. IPv6 addresses outside 2000::/3 are refused; these are exceptions within it.
_SPECIAL = {
    ip_network(text): kind
    for kind, texts in {
        "unspecified": ("0.0.0.0/8", "::/128"),
        "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fec0::/10"),
        "unique-local": ("fc00::/7",),
        "shared": ("100.64.0.0/10",),
        "loopback": ("127.0.0.0/8", "::1/128"),
        "link-local": ("169.254.0.0/16", "fe80::/10"),
        "multicast": ("224.0.0.0/4", "ff00::/8"),
        "reserved": (
            "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
            "240.0.0.0/4", "2001:db8::/32", "3fff::/20",
            "2001::/23", "2002::/16",  # include Teredo and 6to4, which embed an IPv4 address
        ),
    }.items()
    for text in texts
}  # fmt: skip
_GLOBAL_IPV6 = ip_network("2000::/3")
_EMBEDDING = tuple(ip_network(text) for text in ("::ffff:0:0/96", "64:ff9b::/96"))  # IPv4-mapped, NAT64
_LOCAL_NAT64 = ip_network("64:ff9b:1::/48")
JOB_ADDRESSES_VARIABLE = "WEBRL_JOB_ADDRESSES"  # of the job's nodes, separated by commas; the job's script sets it
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_WILDCARD = "_any_"  # takes the place of `*` while a declared host is parsed
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#\\]*)([^\\]*)", re.IGNORECASE | re.DOTALL)
NOT_RECORDED = "not_recorded"  # reason of a refusal during replay
MAX_CONNECTIONS = 128  # at a time; Chromium opens at most 32 through one proxy, and as many WebSockets
MAX_LOOKUPS = 8  # at a time: slow names of one episode must not delay other episodes
MAX_ERRORS = 50
MAX_REPORTED_ERRORS = 3


class EgressDenied(Exception):
    """The policy or a quota forbids a request. `reason` is a short name to count by, the message one sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, order=True)
class Endpoint:
    """Host, in the canonical spelling of `normalize_host`, and port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def normalize_host(text: str) -> str:
    """Canonical spelling of a host: lower case, A-labels, no trailing dot, addresses in their usual form.

    Accepts percent-encoding, IDNA, IPv4 in 1 to 4 decimal, octal or hex parts, [IPv6]. Raises EgressDenied (bad_host).
    """
    try:
        if text.startswith("[") and text.endswith("]") and "%" not in text:  # without a zone
            return str(IPv6Address(text[1:-1]))
        plain = unquote_to_bytes(text).decode()
        if not plain.isascii():
            plain = idna.uts46_remap(plain, std3_rules=False, transitional=False)
        labels = plain.lower().removesuffix(".").split(".")
        labels = [label if label.isascii() else idna.alabel(label).decode() for label in labels]
    except (ValueError, idna.IDNAError):
        raise _bad_host(text) from None
    if not all(_LABEL.fullmatch(label) for label in labels) or sum(map(len, labels)) + len(labels) > 254:
        raise _bad_host(text)
    if not _NUMBER.fullmatch(labels[-1]):
        return ".".join(labels)
    try:  # one to four decimal, octal or hex numbers; the last fills all remaining bytes
        return str(IPv4Address(socket.inet_aton(".".join("0" if label == "0x" else label for label in labels))))
    except OSError:
        raise _bad_host(text) from None


def parse_endpoint(authority: str, default_port: int | None = None) -> Endpoint:
    """Host and port of `user@host:port`. Raises EgressDenied (bad_host)."""
    host_and_port = authority.rpartition("@")[2]
    host, colon, port = host_and_port.rpartition(":")
    if not colon or "]" in port:
        host, port = host_and_port, ""
    if not port and default_port is not None:
        return Endpoint(normalize_host(host), default_port)
    if not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 65536 or len(port) > 5:
        raise _bad_host(authority)
    return Endpoint(normalize_host(host), int(port))


def split_url(url: str) -> tuple[str, Endpoint, str]:
    """Scheme, endpoint and the rest (path and query, at least "/"). Raises EgressDenied (bad_host, scheme)."""
    match = _URL.fullmatch(url)
    if not match:
        raise EgressDenied("scheme", f"{url[:100]!a} is not a web address")
    scheme, authority, rest = match[1].lower(), match[2], match[3].partition("#")[0]
    if scheme not in DEFAULT_PORTS:
        raise EgressDenied("scheme", f"{scheme}: is not one of {', '.join(DEFAULT_PORTS)}")
    return scheme, parse_endpoint(authority, DEFAULT_PORTS[scheme]), rest if rest.startswith("/") else f"/{rest}"


def declared_endpoints(origins: Iterable[str], addresses: Mapping[str, str]) -> dict[Endpoint, Endpoint]:
    """Map origins to the endpoints to use, which `addresses` may override. Raises EgressDenied (bad_host, scheme).

    The first label of a host may contain one `*`, as in http://shop-*.localhost.
    """
    targets = {normalize_host(host.replace("*", _WILDCARD, 1)): address for host, address in addresses.items()}
    declared = {}
    for origin in origins:
        _, endpoint, _ = split_url(origin.replace("*", _WILDCARD, 1))
        target = targets.get(endpoint.host)
        endpoint = Endpoint(endpoint.host.replace(_WILDCARD, "*", 1), endpoint.port)
        declared[endpoint] = endpoint if target is None else parse_endpoint(target, endpoint.port)
    return declared


def declared_target(declared: Mapping[Endpoint, Endpoint], endpoint: Endpoint) -> Endpoint | None:
    """The endpoint to use in place of a declared one; None if it is not declared.

    A `*` in a declared host stands for one or more characters of a label: shop-17.localhost is shop-*.localhost.
    """
    if endpoint in declared:
        return declared[endpoint]
    for each, target in declared.items():
        pattern = re.escape(each.host).replace(r"\*", "[a-z0-9_-]+")
        if each.port == endpoint.port and re.fullmatch(pattern, endpoint.host):
            return endpoint if target == each else target
    return None


@dataclass(frozen=True)
class EgressPolicy:
    """The rules of a browser pool. Deny wins; a declared endpoint may be anywhere except at a metadata service."""

    open_web: bool
    allow: tuple[str, ...]  # patterns as returned by `normalize_pattern`; empty: every public host
    deny: tuple[str, ...]
    deny_networks: tuple[IPv4Network | IPv6Network, ...]
    ports: frozenset[int]
    job: frozenset[IPv4Address | IPv6Address] = frozenset()  # addresses of the job's nodes

    @classmethod
    def from_config(cls, settings: BrowserConfig, job_addresses: str = "") -> EgressPolicy:
        """Build the rules from the settings; `job_addresses` separated by commas. Raises ConfigError."""
        allow = tuple(normalize_pattern(text, "browser.allow") for text in settings.allow)
        networks = {text: _network(text) for text in settings.deny}
        deny = tuple(normalize_pattern(text, "browser.deny") for text, network in networks.items() if network is None)
        if allow and not settings.open_web:
            raise ConfigError("browser.allow has no effect with browser.open_web=false; set browser.open_web=true")
        for port in settings.ports:
            if not 0 < port < 65536:
                raise ConfigError(f"browser.ports contains {port}, which is not a port; use 1 to 65535")
        try:
            job = frozenset(ip_address(text.strip()) for text in job_addresses.split(",") if text.strip())
        except ValueError as error:
            raise ConfigError(f"{JOB_ADDRESSES_VARIABLE}={job_addresses}: {error}; separate them by commas") from None
        denied = tuple(network for network in networks.values() if network is not None)
        return cls(settings.open_web, allow, deny, denied, frozenset(settings.ports), job)

    def check_endpoint(self, endpoint: Endpoint, declared: Mapping[Endpoint, Endpoint]) -> None:
        """Check an endpoint before its name is resolved. Raises EgressDenied."""
        host = endpoint.host
        address = _literal(host)
        if host in METADATA_NAMES:
            raise EgressDenied("metadata", f"{host} is a cloud metadata service")
        if address is not None:
            self.check_address(address, endpoint, declared)
        elif _matches(self.deny, host):
            raise EgressDenied("denied", f"{host} is on the list of denied hosts (browser.deny)")
        if declared_target(declared, endpoint) is not None:
            return
        if not self.open_web:
            allowed = ", ".join(sorted(map(str, declared))) or "none"
            raise EgressDenied(
                "not_declared", f"{endpoint} is not one of the allowed places: {allowed} (browser.open_web=false)"
            )
        if self.allow and not _matches(self.allow, host):
            raise EgressDenied("not_allowed", f"{host} is not on the list of allowed hosts (browser.allow)")
        if endpoint.port not in self.ports:
            raise EgressDenied(
                "port", f"port {endpoint.port} of {host} is not one of {sorted(self.ports)} (browser.ports)"
            )
        if host == "localhost" or host.endswith(".localhost"):
            raise EgressDenied("loopback", f"{host} is this machine itself")

    def check_address(
        self, address: IPv4Address | IPv6Address, endpoint: Endpoint, declared: Mapping[Endpoint, Endpoint]
    ) -> None:
        """Check an address that `endpoint` resolved to. Raises EgressDenied."""
        readings = _readings(address)
        address = readings[-1]
        if any(each in METADATA_ADDRESSES for each in readings):
            raise EgressDenied("metadata", f"{endpoint.host} leads to {address}, a cloud metadata service")
        if any(each in network for each in readings for network in self.deny_networks):
            raise EgressDenied("denied", f"{address} is on the list of denied hosts (browser.deny)")
        if declared_target(declared, endpoint) is not None:
            return
        if (kind := special_address_kind(readings[0])) is not None:
            raise EgressDenied(kind, f"{endpoint.host} leads to {_unwrapped(readings[0])}, which is a {kind} address")
        if any(each in self.job for each in readings):
            raise EgressDenied("this_job", f"{endpoint.host} leads to {address}, a node of this job")
        if not machine_addresses().isdisjoint(readings):
            raise EgressDenied("this_machine", f"{endpoint.host} leads to {address}, an address of this machine")


def machine_addresses() -> set[IPv4Address | IPv6Address]:
    """The addresses of this machine's network interfaces except loopback ones, as they are at the moment."""
    texts = [
        each.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return {address for address in map(ip_address, texts) if not address.is_loopback}


def special_address_kind(address: IPv4Address | IPv6Address) -> str | None:
    """Kind of a non-public address, such as "loopback"; None for a public one."""
    address = _unwrapped(address)
    for network, kind in _SPECIAL.items():
        if address in network:
            return kind
    return "reserved" if address.version == 6 and address not in _GLOBAL_IPV6 else None


def normalize_pattern(text: str, setting: str) -> str:
    """Canonical spelling of a host pattern; `*.host` matches the host and its subdomains. Raises ConfigError."""
    below = text.startswith("*.")
    try:
        bare = text.removeprefix("*.")
        host = normalize_host(f"[{bare}]" if ":" in bare and not bare.startswith("[") else bare)
    except EgressDenied:
        places = DENIED_PLACES if setting == "browser.deny" else "write hosts such as example.com or *.example.com"
        raise ConfigError(f"{setting} contains {text!r}; {places}") from None
    return f"*.{host}" if below else host


def _network(text: str) -> IPv4Network | IPv6Network | None:
    """The network of a CIDR or of an address; None for a host name. Raises ConfigError."""
    if "/" in text:
        network = parse_denied_network(text)
        if any(network.version == 6 and network.subnet_of(embedding) for embedding in _EMBEDDING):  # type: ignore[arg-type]
            return ip_network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
        return network
    try:
        address = _literal(normalize_host(f"[{text}]" if ":" in text and not text.startswith("[") else text))
    except EgressDenied:
        return None
    return None if address is None else ip_network(_unwrapped(address))


def _matches(patterns: Iterable[str], host: str) -> bool:
    return any(
        host == pattern or (pattern.startswith("*.") and (host == pattern[2:] or host.endswith(pattern[1:])))
        for pattern in patterns
    )


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _readings(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address and the IPv4 address that it embeds, which is where a translator or relay would send a packet."""
    if address.version == 6 and address.sixtofour is not None:
        return [address, address.sixtofour]
    if address in _LOCAL_NAT64:
        return [address, IPv4Address(int(address) & 0xFFFFFFFF)]
    plain = _unwrapped(address)
    return [address] if plain == address else [address, plain]


def _unwrapped(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if any(address in network for network in _EMBEDDING):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _bad_host(text: str) -> EgressDenied:
    return EgressDenied("bad_host", f"{text[:100]!a} is not a host that can be reached")


@dataclass
class EgressTotals:
    """Counts over all episodes of a pool."""

    refused: Counter[str] = field(default_factory=Counter)  # by reason
    replayed: int = 0  # requests that recordings answered
    connections: int = 0  # to servers, attempts included; name look-ups belong to them


class NetworkAccess:
    """One episode's port of the egress proxy, with its request and byte counts."""

    def __init__(
        self, policy: EgressPolicy, declared: Mapping[Endpoint, Endpoint], settings: BrowserConfig, totals: EgressTotals
    ) -> None:
        """`declared`: endpoints of the task source. `totals` counts over all episodes."""
        self.egress_policy, self.declared = policy, declared
        self.port = 0
        self.requests = self.bytes = 0
        self.replayer: HARReplayer | None = None  # during replay, from the reset on
        self.unrecorded_urls: set[str] = set()  # requested during replay
        self.refused_urls: set[str] = set()  # of plain requests, which got an error page
        self.refused: Counter[str] = Counter()
        self.errors: deque[tuple[str, str]] = deque(maxlen=MAX_ERRORS)  # host, or empty, and message: not yet reported
        self.lookup_semaphore = asyncio.Semaphore(MAX_LOOKUPS)
        self.connections: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None
        self._settings, self.totals = settings, totals

    def refusal_reason(self, url: str) -> str | None:
        """Why a URL is refused before its name is resolved; None if it is not."""
        try:
            _, endpoint, _ = split_url(url)
            self.egress_policy.check_endpoint(endpoint, self.declared)
        except EgressDenied as refused:
            return str(refused)
        return None

    def count_request(self) -> None:
        """Count a request. Raises EgressDenied beyond browser.max_requests."""
        if self.requests >= self._settings.max_requests:
            raise EgressDenied(
                "requests", f"the episode has used its {self._settings.max_requests} requests (browser.max_requests)"
            )
        self.requests += 1

    def count_bytes(self, number: int) -> None:
        """Count bytes moved. Raises EgressDenied beyond browser.max_network_mib."""
        self.bytes += number
        if self.bytes > self._settings.max_network_mib << 20:
            raise EgressDenied(
                "bytes", f"the episode has used its {self._settings.max_network_mib} MiB (browser.max_network_mib)"
            )

    def count_connection(self) -> None:
        """Check the number of open connections. Raises EgressDenied beyond MAX_CONNECTIONS."""
        if len(self.connections) > MAX_CONNECTIONS:
            raise EgressDenied("connections", f"the episode has {MAX_CONNECTIONS} connections open")

    def record_refusal(self, host: str, refused: EgressDenied) -> None:
        """Count a refusal and keep its message for the agent."""
        self.refused[refused.reason] += 1
        self.totals.refused[refused.reason] += 1
        self.record_error(host, str(refused))

    def record_error(self, host: str, message: str) -> None:
        self.errors.append((host, message))

    def take_errors(self, url: str) -> list[str]:
        """Messages since the last call about the host of `url`; for an error page, messages about all hosts."""
        try:
            host = split_url(url)[1].host
        except EgressDenied:
            host = ""
        messages = [message for place, message in self.errors if not host or place in ("", host)]
        self.errors.clear()
        return list(dict.fromkeys(reversed(messages)))[:MAX_REPORTED_ERRORS]

    def reset(self) -> None:
        """Clear counts and messages for another episode."""
        self.requests = self.bytes = 0
        self.refused.clear()
        self.refused_urls.clear()
        self.errors.clear()

    async def close(self) -> None:
        """Close the port and every connection of the episode. A second call does nothing."""
        if self.server is not None:
            self.server.close()
        for connection in self.connections:
            connection.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)
