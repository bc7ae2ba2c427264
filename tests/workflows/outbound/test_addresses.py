"""Which addresses are public."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address

import pytest
from hypothesis import given
from hypothesis.strategies import ip_addresses

from workflows.outbound.addresses import Address, AddressPolicy, is_public, parse_address

INSIDE = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",
    "100.100.100.200",  # metadata of Alibaba's cloud
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",  # metadata of Oracle's cloud
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "239.255.255.250",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "64:ff9b::7f00:1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "100::1",
    "2001:0:1::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "fc00::1",
    "fd00:ec2::254",  # metadata of Amazon's cloud
    "fe80::1",
    "fec0::1",
    "ff02::1",
]
OUTSIDE = [
    "1.1.1.1",
    "93.184.216.34",
    "172.32.0.1",
    "192.167.255.255",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "::ffff:1.1.1.1",
    "64:ff9b::1.1.1.1",
]


@pytest.mark.parametrize("text", INSIDE)
def test_what_is_inside_is_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize("text", OUTSIDE)
def test_what_is_outside_is_public(text: str) -> None:
    assert is_public(ip_address(text))


def test_ranges_are_allowed_however_they_are_reached() -> None:
    policy = AddressPolicy.parse(["10.1.0.0/16", "[fd00::5]", "127.0.0.1"])
    for text, allowed in [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("10.2.0.1", False),
        ("fd00::5", True),
        ("fd00::6", False),
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("8.8.8.8", True),
    ]:
        assert policy.allows("name", ip_address(text)) == allowed, text


def test_names_are_allowed_as_they_stand() -> None:
    policy = AddressPolicy.parse(["Intranet", "*.corp.example"])
    inside = ip_address("10.0.0.1")
    for host, allowed in [
        ("intranet", True),
        ("INTRANET.", True),
        ("intranet.evil.example", False),
        ("a.corp.example", True),
        ("a.b.corp.example", True),
        ("corp.example", False),
        ("evilcorp.example", False),
    ]:
        assert policy.allows(host, inside) == allowed, host


@pytest.mark.parametrize(
    "entry", ["", "*", "10.0.0", "10.0.0.0/33", "a b", "http://x", "*.", "a/b"]
)
def test_an_entry_that_means_nothing_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="neither an address"):
        AddressPolicy.parse([entry])


def test_a_zone_is_no_part_of_an_address() -> None:
    assert parse_address("fe80::1%eth0") == ip_address("fe80::1")
    assert parse_address("example.org") is None


@given(ip_addresses(v=4) | ip_addresses(v=6) | ip_addresses(network="2000::/3"))
def test_nothing_is_public_that_python_knows_to_be_inside(address: Address) -> None:
    if is_public(address):
        plain = getattr(address, "ipv4_mapped", None) or address
        assert plain.is_global
        assert not plain.is_multicast
        assert not getattr(plain, "sixtofour", None)
        assert not getattr(plain, "teredo", None)


@given(ip_addresses(v=4))
def test_an_address_is_no_more_public_in_ipv6(address: IPv4Address) -> None:
    for written in (f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(ip_address(written)) == is_public(address)
    assert not is_public(ip_address(f"::{address}"))
