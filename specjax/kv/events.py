"""KV events: the pages that a prefix cache stores and removes, for routers.

A router that reads them sends a request to the engine that has computed most of its prompt. The
messages are those of vLLM and SGLang: three parts on a PUB socket of ZeroMQ (a topic, a number in
8 bytes, and msgpack), and a ROUTER socket that sends earlier ones again. The payload is
``[seconds, events, 0]``; events are maps with a ``type``.

A page's hash depends on all tokens that its KV depends on: those before it, its own, and with most
drafters the next ones, which ``lookahead_token_ids`` has for the last page of an event.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import zmq
from msgspec import Meta, Struct

from specjax.checks import short
from specjax.config import TOKEN_LIMIT
from specjax.json_file import read_object

if TYPE_CHECKING:
    from specjax.kv.prefix_cache import Node

logger = logging.getLogger(__name__)

MEDIUM = "GPU"  # as other engines call the memory of their device
WILDCARDS = "*", "0.0.0.0", "[::]"
WAIT_SECONDS = 0.1  # for events, after which requests for earlier messages are answered
END = (-1).to_bytes(8, signed=True)  # the number after the last message that is sent again
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class KVEventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where events are published; the keys are those of vLLM and SGLang."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000  # messages that can be sent again
    hwm: Count = 100_000  # messages kept for a slow reader
    max_queue_size: Count = 100_000  # without effect: no event waits for a reader
    topic: str = ""

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> KVEventsConfig:
    """Read a mapping, a string with a JSON object, or the path of a JSON file.

    Raises ValueError with the key.
    """
    values, _ = read_object(source, "kv_events_config=")
    try:
        config = msgspec.convert(values, KVEventsConfig)
        config.topic.encode()
        return config
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ValueError(f"kv_events_config={short(values)}: {error}") from None


class BlockStored(Struct, tag=True, omit_defaults=True):
    """Pages that follow one another in a text."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    lookahead_token_ids: list[int] = []


class BlockRemoved(Struct, tag=True):
    """Pages that are cached no more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(Struct, tag=True):
    """No page is cached any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def page_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """Hash the tokens of a page with its lookahead, and the hash of the page before it."""
    text = f"{parent}:{','.join(map(str, tokens))}"
    return int.from_bytes(sha256(text.encode()).digest()[:8])


class KVEventPublisher:
    """Publishes the changes of one prefix cache; see ``PrefixCache.watcher``.

    Raises ValueError if an address cannot be used.
    """

    def __init__(self, config: KVEventsConfig, page_size: int) -> None:
        self._topic, self._page_size = config.topic.encode(), page_size
        self._hashes: dict[Node, int] = {}
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUB)]
        self._sockets[0].set_hwm(config.hwm)
        if config.replay_endpoint is not None:
            self._sockets.append(self._context.socket(zmq.ROUTER))
            self._sockets[1].set_hwm(0)  # buffer_steps is the limit
        self._addresses = []
        for name, link in zip(("endpoint", "replay_endpoint"), self._sockets, strict=False):
            address = getattr(config, name)
            try:
                link.ipv6 = "[" in address
                # as in vLLM: an address without a wildcard is that of a reader that listens
                is_bound = link.type == zmq.ROUTER or not address.startswith("tcp://")
                is_bound |= any(wildcard in address for wildcard in WILDCARDS)
                (link.bind if is_bound else link.connect)(address)
            except zmq.ZMQError as error:
                self._context.destroy(linger=0)
                raise ValueError(f"kv_events_config: {name}={address!r}: {error}") from None
            bound: Any = link.last_endpoint
            self._addresses.append(bound.decode().rstrip("\0") or address)
        self._sent = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="specjax-kv-events", daemon=True)
        self._thread.start()

    @property
    def source(self) -> dict[str, Any]:
        """Where a router subscribes; the answer of ``/kv_event_sources``."""
        addresses = self._addresses
        for wildcard in WILDCARDS:
            addresses = [x.replace(wildcard, socket.gethostname()) for x in addresses]
        replay = addresses[1] if len(addresses) > 1 else None
        topic = self._topic.decode()
        return {
            "data_parallel_rank": 0,
            "endpoint": addresses[0],
            "replay_endpoint": replay,
            "topic": topic,
        }

    # called by the cache, in the engine's thread

    def stored(self, nodes: Sequence["Node"]) -> None:
        """Publish pages that follow one another."""
        first, hashes, tokens = nodes[0], self._hashes, list[int]()
        assert first.parent is not None
        is_first = not first.parent.key
        if first.key[0] >= TOKEN_LIMIT if is_first else first.parent not in hashes:
            return  # salted pages serve requests with their salt only
        parent = before = None if is_first else hashes[first.parent]
        for node in nodes:
            before = hashes[node] = page_hash(before, node.key)
            tokens += node.key[: self._page_size]
        stored = [hashes[node] for node in nodes]
        ahead = list(nodes[-1].key[self._page_size :])
        event = BlockStored(stored, parent, tokens, self._page_size, None, MEDIUM, None, ahead)
        self._put(event)

    def removed(self, nodes: Sequence["Node"], *, is_empty: bool) -> None:
        """Publish pages that are cached no more, or that the cache is empty."""
        hashes = [self._hashes.pop(node) for node in nodes if node in self._hashes]
        if hashes:
            self._put(AllBlocksCleared() if is_empty else BlockRemoved(hashes, MEDIUM))

    def _put(self, event: Event) -> None:
        if not self._has_failed:
            self._events.put(event)

    def close(self) -> None:
        """Send what was published before."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:  # of a finalizer
            self._thread.join(5.0)

    # in a thread of its own

    def _run(self) -> None:
        try:
            self._publish()
        except Exception:
            self._has_failed = True
            logger.exception("KV events are published no more")
        finally:
            self._context.destroy(linger=1000)

    def _publish(self) -> None:
        sender, *replays = self._sockets
        encode, number, is_open = msgspec.msgpack.Encoder().encode, 0, True
        while is_open:
            for replay in replays:
                if replay.poll(0):  # one in each turn, so that events go on
                    self._send_again(replay)
            events = list[Event]()
            try:
                event = self._events.get(timeout=WAIT_SECONDS)
                while event is not None:
                    events.append(event)
                    event = self._events.get_nowait()
                is_open = False
            except Empty:
                pass
            if events:
                message = number.to_bytes(8), encode([time.time(), events, 0])
                sender.send_multipart((self._topic, *message))
                self._sent.append(message)
                number += 1

    def _send_again(self, replay: "zmq.Socket[bytes]") -> None:
        """Send the messages from the asked number on; other requests are ignored."""
        reader, *empty, asked = replay.recv_multipart()
        if len(asked) != 8:
            return
        for number, payload in (*self._sent, (END, b"")):
            if number >= asked:
                replay.send_multipart((reader, *empty, number, payload))
