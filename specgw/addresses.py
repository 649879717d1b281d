"""What an address tells: `host:port` or `unix:/path`. Pure; errors name the address."""

import ipaddress

from specgw.errors import ConfigError

IN_PROCESS = "inproc"
"""The address of what is in this process."""


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port.

    Raises:
        ConfigError: if it is not `host:port`.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError([f"address {address}: must be host:port or unix:/path"])
    return host, int(port)


def is_local(address: str) -> bool:
    """Whether only this machine reaches it."""
    if address == IN_PROCESS or address.startswith("unix:"):
        return True
    return is_loopback(split_address(address)[0])


def is_loopback(host: str) -> bool:
    """Whether a host name or address is the loopback's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
