"""Where a workflow may connect to: the public internet, and what the server's operator allows.

Names are judged by what they resolve to, when they are connected to; see
`workflows.outbound.client`. What is not plainly public is refused: an address family or a tunnel
that is not known here may lead inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# Public by their range, and yet inside: Azure's host, which hands out secrets.
_INSIDE: Final = frozenset({IPv4Address("168.63.129.16")})
_NAME: Final = re.compile(r"[\w-]+(\.[\w-]+)*")
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
# They carry another address inside, which a relay would connect to: Teredo, with its neighbours
# that serve protocols only, and 6to4.
_TUNNELS: Final = (IPv6Network("2001::/23"), IPv6Network("2002::/16"))
_NEVER_V4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
_NEVER_V6: Final = (*_TUNNELS, IPv6Network("2001:db8::/32"), IPv6Network("3fff::/20"))


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What is allowed beside the public internet.

    networks: address ranges. hosts: names as they stand in URLs, `*.` in front for all below.
    """

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AddressPolicy:
        """Of addresses, ranges (`10.1.0.0/16`) and names. Raises ValueError with the entry."""
        networks: list[Network] = []
        hosts: set[str] = set()
        for entry in entries:
            text = entry.strip().strip("[]").lower()
            try:
                networks.append(ip_network(text, strict=False))
                continue
            except ValueError:
                pass
            name = text.removeprefix("*.").rstrip(".")
            if not _NAME.fullmatch(name) or name.replace(".", "").isdigit():
                raise ValueError(f"{entry!r} is neither an address, nor a range, nor a host name")
            hosts.add(text.rstrip("."))
        return cls(tuple(networks), frozenset(hosts))

    @classmethod
    def everywhere(cls) -> AddressPolicy:
        """For targets that the server's operator has named."""
        return cls((IPv4Network("0.0.0.0/0"), IPv6Network("::/0")))

    def allows(self, host: str, address: Address) -> bool:
        """Whether a request for `host` may go to `address`."""
        return self.trusts(host) or is_public(address) or self._is_listed(address)

    def trusts(self, host: str) -> bool:
        """Whether a name may lead anywhere."""
        name = host.lower().rstrip(".")
        parents = (name[place + 1 :] for place, letter in enumerate(name) if letter == ".")
        return name in self.hosts or any(f"*.{parent}" in self.hosts for parent in parents)

    def _is_listed(self, address: Address) -> bool:
        plain = _plain(address)
        return any(one.version == plain.version and plain in one for one in self.networks)


def is_public(address: Address) -> bool:
    """Whether anyone on the internet means the same by it, and it is one machine's."""
    plain = _plain(address)
    if isinstance(plain, IPv4Address):
        return plain not in _INSIDE and not any(plain in network for network in _NEVER_V4)
    if plain in _NAT64:
        return is_public(IPv4Address(int(plain) & 0xFFFFFFFF))
    return plain in _GLOBAL_V6 and not any(plain in network for network in _NEVER_V6)


def parse_address(text: str) -> Address | None:
    """An address as the resolver and sockets write it; None if it is none."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """The IPv4 address that an IPv4-mapped one is."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
