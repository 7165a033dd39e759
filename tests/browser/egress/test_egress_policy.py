"""Hosts, ports and addresses that pages may reach, in any spelling."""

from __future__ import annotations

import re
import subprocess
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.browser.egress import egress_policy
from megatron_webrl.browser.egress.egress_policy import (
    EgressDenied,
    EgressPolicy,
    Endpoint,
    declared_endpoints,
    declared_target,
    machine_addresses,
    normalize_host,
    parse_endpoint,
    special_address_kind,
    split_url,
)
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError

# As a task source declares it.
SHOP = declared_endpoints(["http://shop.localhost", "https://Shop.localhost"], {"shop.localhost": "127.0.0.1:8000"})


def policy(**settings: object) -> EgressPolicy:
    return EgressPolicy.from_config(BrowserConfig(open_web=True, **settings))  # type: ignore[arg-type]


def reason(rules: EgressPolicy, url: str, declared: dict[Endpoint, Endpoint] | None = None) -> str | None:
    """Why a URL is refused before any look-up."""
    try:
        rules.check_endpoint(split_url(url)[1], declared or {})
    except EgressDenied as refused:
        return refused.reason
    return None


def address_reason(rules: EgressPolicy, address: str, host: str = "a.example", declared: bool = False) -> str | None:
    endpoint = Endpoint(host, 80)
    try:
        rules.check_address(ip_address(address), endpoint, {endpoint: endpoint} if declared else {})
    except EgressDenied as refused:
        return refused.reason
    return None


SPELLINGS = {
    "example.com": [
        "example.com", "EXAMPLE.Com", "example.com.", "\uff45\uff58\uff41\uff4d\uff50\uff4c\uff45\u3002com",
    ],
    "my_host.example.com": ["my_host.example.com"],
    "xn--bcher-kva.example": ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example", "b%C3%BCcher.example"],
    "xn--strae-oqa.example": ["straße.example"],
    "localhost": ["%6c%6Fcalhost"],
    "127.0.0.1": [
        "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "017700000001", "0x7f000001", "0X7F.1",
        "0177.0.0.01", "0x7f.0x0.0x0.0x1", "\uff11\uff12\uff17.0.0.1", "\u2460\u2461\u2466.0.0.1",
    ],
    "0.0.0.0": ["0", "0x"],
    "169.254.169.254": ["0xa9fea9fe"],
    "::1": ["[::1]", "[0:0:0:0:0:0:0:1]"],
    "::ffff:7f00:1": ["[::FFFF:127.0.0.1]"],
    "2001:4860:4860::8888": ["[2001:4860:4860::8888]"],
}  # fmt: skip
BAD_HOSTS = [
    "", ".", "..", "a..b", ".a", "a b", "a\tb", "a\nb", "a\0b", "a%00b", "a%0ab", "a%2fb", "a%40b", "a/b", "a\\b",
    "a<b", "a|b", "a^b", "a:b", "%", "%zz", "%ff", "256.1", "1.2.3.4.5", "1.2.3.256", "0x100000000", "08.1",
    "a.1.2.3.4", "a.0x7f", "4294967296", "9" * 5000, "[", "]", "[]", "[::1", "::1", "[::1]a", "[1.2.3.4]",
    "[fe80::1%eth0]", "[fe80::1%25eth0]", "[::g]", "a" * 64, "a." * 127 + "ab", "xn--\u00fc.example", "\ud800",
]  # fmt: skip


def test_a_host_has_one_spelling_or_is_refused() -> None:
    for host, spellings in SPELLINGS.items():
        for spelling in (*spellings, f"[{host}]" if ":" in host else host):
            assert normalize_host(spelling) == host, spelling
    for text in BAD_HOSTS:
        with pytest.raises(EgressDenied, match="is not a host that can be reached") as refused:
            normalize_host(text)
        assert refused.value.reason == "bad_host", text[:99]


def test_an_authority_is_a_host_and_a_valid_port() -> None:
    for authority, host, port in (
        ("example.com", "example.com", 80), ("example.com:", "example.com", 80),
        ("example.com:8080", "example.com", 8080), ("user:secret@example.com:8080", "example.com", 8080),
        ("example.com:80@evil.example", "evil.example", 80), ("a@b@evil.example", "evil.example", 80),
        ("127.0.0.1:00080", "127.0.0.1", 80), ("[::1]", "::1", 80), ("[::1]:8080", "::1", 8080),
    ):  # fmt: skip
        assert parse_endpoint(authority, 80) == Endpoint(host, port), authority
    for authority in ("a:0", "a:65536", "a:-1", "a:+1", "a:8 0", "a:x", "a:²", "a:999999", ":80", "a"):
        with pytest.raises(EgressDenied):
            parse_endpoint(authority)


def test_a_url_is_split_where_browsers_split_it_and_only_web_addresses_have_an_endpoint() -> None:
    for url, parts in {
        "http://a.example": ("http", "a.example", 80, "/"),
        "HTTP://A.Example/x?y#z": ("http", "a.example", 80, "/x?y"),
        "https://a.example?y": ("https", "a.example", 443, "/?y"),
        "ws://a.example:81/": ("ws", "a.example", 81, "/"),
        "wss://a@a.example/b@c": ("wss", "a.example", 443, "/b@c"),
        "http://a.example#@b.example/": ("http", "a.example", 80, "/"),
        "http://a.example?@b.example/": ("http", "a.example", 80, "/?@b.example/"),
    }.items():
        scheme, endpoint, rest = split_url(url)
        assert (scheme, endpoint.host, endpoint.port, rest) == parts, url
    for url in (
        "file:///etc/passwd", "ftp://a.example/", "javascript:alert(1)", "chrome://gpu", "data:text/html,x", "", "/",
        "a", "http:a.example", "http:/a.example", "http://a.example\\@b.example/", "http://a.example/\\",
        " http://a.example",
    ):  # fmt: skip
        with pytest.raises(EgressDenied) as refused:
            split_url(url)
        assert refused.value.reason in ("scheme", "bad_host"), url


@given(st.text() | st.text("0123456789abcdefx.:[]%@", max_size=24))
def test_any_text_is_refused_or_has_a_stable_canonical_spelling(text: str) -> None:
    try:
        host = normalize_host(text)
    except EgressDenied:
        return
    assert host.isascii()
    for spelling in (host, host.upper()):
        for form in (f"[{spelling}]",) if ":" in host else (spelling, f"{spelling}."):
            assert normalize_host(form) == host


@given(st.ip_addresses(v=4), st.data())
def test_every_spelling_of_an_ipv4_address_is_that_address(address: IPv4Address, data: st.DataObject) -> None:
    value, count = int(address), data.draw(st.integers(1, 4))
    numbers = [value >> (24 - 8 * place) & 255 for place in range(count - 1)]
    numbers.append(value & ((1 << (8 * (5 - count))) - 1))
    forms = data.draw(st.lists(st.sampled_from(("{}", "{:#x}", "{:#X}", "0{:o}", "00{:o}")), min_size=4, max_size=4))
    spelling = ".".join(form.format(number) for form, number in zip(forms, numbers, strict=False))
    assert normalize_host(spelling) == str(address)


KINDS = {
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "private": [
        "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fec0::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1",
    ],
    "shared": ["100.64.0.1", "100.127.255.255"],
    "loopback": ["127.0.0.1", "127.255.255.254", "::1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1"],
    "link-local": ["169.254.1.1", "fe80::1", "fe80::1%eth0"],
    "multicast": ["224.0.0.1", "239.255.255.250", "ff02::1"],
    "unique-local": ["fc00::1", "fdff::1"],
    "reserved": [
        "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "240.0.0.1", "255.255.255.255", "::2",
        "::7f00:1", "2001:db8::1", "2001::1", "2002:7f00:1::", "2002:808:808::", "4000::1", "::ffff:0:127.0.0.1",
        "64:ff9b:1::808:808",
    ],
    None: [
        "8.8.8.8", "100.63.255.255", "100.128.0.0", "172.32.0.1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8",
        "2606:4700:4700::1111", "2a00:1450:4001::1",
    ],
}  # fmt: skip


def test_non_public_addresses_have_a_kind() -> None:
    rules = policy()
    for kind, addresses in KINDS.items():
        for address in addresses:
            assert special_address_kind(ip_address(address)) == kind, address
            assert address_reason(rules, address) == kind, address
            assert address_reason(rules, address, declared=True) is None, address


EMBEDDING = {0xFFFF, 0x64FF9B << 64}  # the first 96 bits of IPv4-mapped and NAT64 addresses


@given(st.ip_addresses() | st.builds(lambda high, low: IPv6Address(high << 32 | low),
                                     st.sampled_from(sorted(EMBEDDING)), st.integers(0, 2**32 - 1)))  # fmt: skip
def test_no_address_passes_that_the_standard_library_calls_not_global(address: IPv4Address | IPv6Address) -> None:
    if special_address_kind(address) is None:
        plain = ip_address(int(address) & 0xFFFFFFFF) if int(address) >> 32 in EMBEDDING else address
        assert plain.is_global
        assert not plain.is_multicast


def test_metadata_addresses_and_names_are_refused_in_every_spelling_even_if_declared() -> None:
    for address in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "::ffff:169.254.169.254"):
        assert address_reason(policy(), address, declared=True) == "metadata", address
        url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
        assert reason(policy(), url, declared_endpoints([url], {})) == "metadata", address
    for host in ("metadata.google.internal", "METADATA.google.internal.", "metadata", "instance-data.ec2.internal"):
        assert reason(policy(), f"http://{host}/computeMetadata/v1/") == "metadata", host


def test_deny_wins_over_allow_and_an_empty_allow_list_allows_what_is_public() -> None:
    good, local = {"allow": ["*.good.example"]}, {"allow": ["localhost", "127.0.0.1"]}
    host, below, address = ({"deny": [text]} for text in ("evil.example", "*.evil.example", "8.8.8.8"))
    for settings, authority, expected in (
        ({}, "a.example", None), ({}, "a.example:443", None), ({}, "a.example:8080", "port"),
        ({}, "a.example:22", "port"), ({"ports": [80, 443, 8080]}, "a.example:8080", None),
        ({}, "localhost", "loopback"), ({}, "x.LOCALHOST.", "loopback"), ({}, "0x7f.1", "loopback"),
        ({}, "[::ffff:10.1.2.3]", "private"),
        (host, "evil.example", "denied"), (host, "EVIL.example.", "denied"), (host, "www.evil.example", None),
        (below, "www.evil.example", "denied"), (below, "evil.example", "denied"), (below, "notevil.example", None),
        ({"deny": ["bücher.example"]}, "xn--bcher-kva.example", "denied"),
        (address, "0x08080808", "denied"), (address, "[::ffff:8.8.8.8]", "denied"),
        (good, "www.good.example", None), (good, "other.example", "not_allowed"),
        (good, "good.example.evil.example", "not_allowed"),
        ({**good, "deny": ["bad.good.example"]}, "bad.good.example", "denied"),
        (local, "127.0.0.1", "loopback"), (local, "localhost", "loopback"),
    ):  # fmt: skip
        assert reason(policy(**settings), f"http://{authority}/") == expected, (settings, authority)


def test_a_denied_address_or_network_is_denied_under_every_name_and_in_every_address_that_leads_there() -> None:
    assert address_reason(policy(deny=["8.8.8.8"]), "8.8.8.8") == "denied"
    assert address_reason(policy(deny=["2606:4700::1"]), "2606:4700:0::1") == "denied"
    for denied in (["93.184.0.0/16", "2a00:1::/32"], ["::ffff:93.184.0.0/112", "2a00:1::5"]):
        rules = policy(deny=denied)
        for address in (
            "93.184.1.1", "::ffff:93.184.1.1", "64:ff9b::93.184.1.1", "64:ff9b:1::5db8:101", "2002:5db8:101::1",
            "2a00:1::5",
        ):  # fmt: skip
            for declared in (False, True):
                assert address_reason(rules, address, declared=declared) == "denied", (denied, address, declared)
        assert address_reason(rules, "93.185.1.1") is None


def test_addresses_of_this_machine_and_of_the_job_are_reached_only_as_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_policy, "machine_addresses", lambda: {ip_address("8.8.4.4"), ip_address("2a00:1::5")})
    rules = EgressPolicy.from_config(BrowserConfig(open_web=True), "9.9.9.9, 2a00:2::7")
    for address, kind in (
        ("8.8.4.4", "this_machine"), ("::ffff:8.8.4.4", "this_machine"), ("64:ff9b::8.8.4.4", "this_machine"),
        ("2a00:1::5", "this_machine"), ("9.9.9.9", "this_job"), ("2a00:2::7", "this_job"), ("9.9.9.8", None),
    ):  # fmt: skip
        assert address_reason(rules, address) == kind
        assert address_reason(rules, address, declared=True) is None
    assert reason(rules, "http://0x09090909/") == "this_job"
    with pytest.raises(ConfigError, match="WEBRL_JOB_ADDRESSES=node7: 'node7' does not appear to be"):
        EgressPolicy.from_config(BrowserConfig(open_web=True), "node7")


def test_the_addresses_of_this_machine_are_those_of_its_interfaces() -> None:
    shown = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    expected = {ip_address(text.split("/")[0]) for text in re.findall(r" inet6? (\S+)", shown)}
    assert machine_addresses() == {address for address in expected if not address.is_loopback}


def test_by_default_only_declared_origins_can_be_reached() -> None:
    rules = EgressPolicy.from_config(BrowserConfig())
    assert reason(rules, "http://shop.localhost/cart", SHOP) is None
    assert reason(rules, "wss://SHOP.localhost./", SHOP) is None
    assert reason(rules, "http://shop.localhost:8000/", SHOP) == "not_declared"
    assert reason(rules, "https://a.example/", SHOP) == "not_declared"
    denying = EgressPolicy.from_config(BrowserConfig(deny=["*.localhost"]))
    assert reason(denying, "http://shop.localhost/", SHOP) == "denied"
    target = Endpoint("127.0.0.1", 8000)
    assert {Endpoint("shop.localhost", 80): target, Endpoint("shop.localhost", 443): target} == SHOP
    assert declared_endpoints(["http://[::1]:81", "http://a.example"], {"a.example": "10.0.0.1"}) == {
        Endpoint("::1", 81): Endpoint("::1", 81),
        Endpoint("a.example", 80): Endpoint("10.0.0.1", 80),
    }


def test_a_star_in_a_declared_host_stands_for_part_of_its_label() -> None:
    addresses = dict.fromkeys(("shop-*.localhost", "shop.localhost"), "127.0.0.1:8000")
    shops = declared_endpoints(["http://shop-*.localhost", "http://shop.localhost"], addresses)
    rules = EgressPolicy.from_config(BrowserConfig())
    for host in ("shop-1.localhost", "SHOP-abc.localhost.", "shop.localhost"):
        assert reason(rules, f"http://{host}/", shops) is None
        assert declared_target(shops, split_url(f"http://{host}/")[1]) == Endpoint("127.0.0.1", 8000)
    for host in ("shop-.localhost", "shop-1.a.localhost", "a.shop-1.localhost", "shop-1.localhost:81",
                 "wiki-1.localhost", "shop-1.localhost.example", "shop-1-localhost", "shop-1"):  # fmt: skip
        assert reason(rules, f"http://{host}/", shops) == "not_declared"
    assert reason(rules, "http://shop-*.localhost/", {}) == "bad_host"
    rules = policy(deny=["shop-5.localhost"])
    assert reason(rules, "http://shop-5.localhost/", shops) == "denied"
    assert reason(rules, "http://shop-6.localhost/", shops) is None
    own = declared_endpoints(["http://shop-*.localhost"], {})
    assert list(own) == [Endpoint("shop-*.localhost", 80)]
    assert declared_target(own, Endpoint("shop-1.localhost", 80)) == Endpoint("shop-1.localhost", 80)


def test_contradictory_settings_are_refused() -> None:
    for settings, message in (
        ({"allow": ["a.example"]}, r"browser\.allow .* browser\.open_web=false"),
        *(({"deny": [text]}, rf"browser\.deny .*{re.escape(repr(text))}") for text in (
            "http://a.example", "*", "a.*.example", "10.0.0.1/8", "10.0.0.0/33", "a.example/8")),
        ({"allow": ["10.0.0.0/8"], "open_web": True}, r"browser\.allow .*'10\.0\.0\.0/8'"),
        ({"ports": [0]}, r"browser\.ports .*0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            EgressPolicy.from_config(BrowserConfig(**settings))  # type: ignore[arg-type]
