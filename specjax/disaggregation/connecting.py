"""Connecting: from an address, or a socket that has just been opened, to a channel."""

import socket
import time
from collections.abc import Callable
from functools import partial

from specjax.disaggregation.address import check_secret, parse_address
from specjax.disaggregation.channel import PULSE, Accept, Channel, Deliver, Lost, Pulse
from specjax.disaggregation.handshake import CONNECTING, receive_into, shake_hands
from specjax.disaggregation.messages import Hello
from specjax.disaggregation.sockets import Sockets
from specjax.disaggregation.values import WireError
from specjax.disaggregation.wire import Reader, encode

SayHello = Callable[[], Hello]


def connect(
    address: str,
    *,
    hello: Hello,
    secret: str,
    max_bytes: int,
    deliver: Deliver,
    lost: Lost,
    timeout: float = 5.0,
    pulse: Pulse = PULSE,
) -> Channel:
    """A channel to a listener.

    Args:
        max_bytes: of the arrays of one received message.
        deliver: called for each message in order, from the channel's receiving thread.
        lost: called once from there when the connection has ended, with the reason.
        timeout: seconds for the connection and the handshake together.

    Raises:
        OSError: nobody listens there, or it is no peer with this secret (HandshakeError).
        ValueError: the address is none, or lacks a secret; WireError if its hello is none.
    """
    return dial(
        address,
        hello=lambda: hello,
        secret=secret,
        max_bytes=max_bytes,
        accept=lambda channel: (deliver, lost),
        timeout=timeout,
        pulse=pulse,
        sockets=Sockets(),
    )


def dial(
    address: str,
    *,
    hello: SayHello,
    secret: str,
    max_bytes: int,
    accept: Accept,
    timeout: float,
    pulse: Pulse,
    sockets: Sockets,
) -> Channel:
    """:meth:`connect` that closing ``sockets`` ends; ``accept`` sees the channel before it runs."""
    key = check_secret(address, secret)
    deadline = time.monotonic() + timeout
    sock = _reach(address, deadline, sockets)
    try:
        with sockets.held(sock):
            channel = greet(
                sock, CONNECTING, key, hello, max_bytes=max_bytes, deadline=deadline, pulse=pulse
            )
        channel.admit(accept)
    except BaseException:
        sock.close()
        raise
    return channel


def greet(
    sock: socket.socket,
    role: int,
    key: bytes,
    hello: SayHello,
    *,
    max_bytes: int,
    deadline: float,
    pulse: Pulse,
) -> Channel:
    """The channel of a connected socket after handshake and hellos; closes nothing on failure."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    keys = shake_hands(sock, role, key, deadline)
    reader = Reader(partial(receive_into, sock, deadline=deadline), key=keys.receiving, max_bytes=0)
    # the connecting side speaks first: two that both send before they read may wait for ever
    if role == CONNECTING:
        sock.sendall(b"".join(encode(hello(), 0, keys.sending)))
    peer = reader.read()
    if not isinstance(peer, Hello):
        raise WireError(f"the first message is a {type(peer).__name__}, and no Hello")
    if role != CONNECTING:
        sock.sendall(b"".join(encode(hello(), 0, keys.sending)))
    return Channel(sock, keys=keys, hello=peer, max_bytes=max_bytes, pulse=pulse)


def _reach(address: str, deadline: float, sockets: Sockets) -> socket.socket:
    """A socket that is connected to the first of the places that a host has."""
    host, port = parse_address(address)
    error: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            with sockets.held(sock):
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                sock.connect(place)
            return sock
        except OSError as failure:
            sock.close()
            error = failure
    raise error
