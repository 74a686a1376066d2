"""The handshake: both ends of a new connection prove that they know the secret.

Each side sends a preamble (magic, schema, role, nonce). Then the connecting side proves itself,
and only then the listening one, so that strangers learn nothing to try secrets on. A proof is an
HMAC-SHA256 with the secret over the role of the one who proves and both preambles; the key of each
direction is made likewise. As the roles differ, nothing that one side sends serves as the other's.
"""

import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

from specjax.disaggregation.wire import SCHEMA

MAGIC = b"SJXH"
PREAMBLE = struct.Struct("<4sHB32s")
NONCE_BYTES = 32
PROOF_BYTES = 32
CONNECTING, LISTENING = 1, 2


class HandshakeError(ConnectionError):
    """The peer is not one that this side can talk to."""


class Keys(NamedTuple):
    """Keys of the two directions of one connection."""

    sending: bytes
    receiving: bytes


def shake_hands(sock: socket.socket, role: int, secret: bytes, deadline: float) -> Keys:
    """Prove and have proved; HandshakeError or another OSError where that fails.

    ``deadline`` is of the monotonic clock and holds for all of it, however slowly bytes drip in.
    """
    peer_role = CONNECTING + LISTENING - role
    own = PREAMBLE.pack(MAGIC, SCHEMA, role, secrets.token_bytes(NONCE_BYTES))
    sock.sendall(own)
    peer = receive(sock, PREAMBLE.size, deadline)
    magic, schema, claimed_role, _ = PREAMBLE.unpack(peer)
    if magic != MAGIC:
        raise HandshakeError(f"the peer speaks something else: it starts with {magic!r}")
    if schema != SCHEMA:
        raise HandshakeError(f"the peer speaks schema {schema}, and this side {SCHEMA}")
    if claimed_role != peer_role:
        raise HandshakeError(f"the peer has the role {claimed_role}, and not {peer_role}")
    preambles = own + peer if role == CONNECTING else peer + own

    def derive(purpose: bytes, whose: int) -> bytes:
        return hmac.digest(secret, purpose + bytes([whose]) + preambles, "sha256")

    if role == CONNECTING:
        sock.sendall(derive(b"proof", role))
    proof = receive(sock, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, derive(b"proof", peer_role)):
        raise HandshakeError("the peer has another disaggregation_secret")
    if role == LISTENING:
        sock.sendall(derive(b"proof", role))
    return Keys(derive(b"key", role), derive(b"key", peer_role))


def receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly ``count`` bytes before the deadline."""
    data = bytearray(count)
    receive_into(sock, memoryview(data), deadline)
    return bytes(data)


def receive_into(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill ``view`` before the deadline."""
    while view:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the peer was too slow in the handshake")
        sock.settimeout(remaining)
        count = sock.recv_into(view)
        if not count:
            raise HandshakeError(
                "the peer closed the connection in the handshake: it may have another "
                "disaggregation_secret, or refuse what this side is"
            )
        view = view[count:]
