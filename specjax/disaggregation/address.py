"""Addresses of the form ``host:port``, with an IPv6 host in brackets."""

import ipaddress
import socket
from functools import lru_cache

from specjax.checks import check_integer


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port; with port 0, a listener chooses a free port."""
    host, separator, digits = str(address).rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_host = host.isprintable() and not set(host) & set(" []/") and is_bracketed == (":" in host)
    if not separator or not host or not is_host or not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{address!r} is not an address such as 127.0.0.1:8998 or [::1]:8998")
    return host, check_integer(f"the port of {address!r}", int(digits[:6]), 0, 2**16 - 1)


def format_address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def endpoints(address: str) -> list[str]:
    """Resolve an address to libzmq endpoints."""
    host, port = parse_address(address)
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return [f"tcp://{format_address(*socket.getnameinfo(entry, flags))}" for *_, entry in infos]


@lru_cache(maxsize=64)  # a server calls this for every request
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_secret(address: str, secret: str) -> bytes:
    """Encode the secret; refuse an empty one if other machines can reach the address."""
    host, _ = parse_address(address)
    if not secret and not is_loopback(host):
        raise ValueError(
            f"{address} is not a loopback address; set the same disaggregation_secret on both "
            "sides (for a command: SPECJAX_DISAGGREGATION_SECRET or --disaggregation-secret-file)"
        )
    return secret.encode()
