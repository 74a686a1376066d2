"""Listener: accepts the channels of decode sides."""

import logging
import math
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from specjax.disaggregation import messages as wire
from specjax.disaggregation.address import check_secret, endpoints, format_address, parse_address
from specjax.disaggregation.channel import LANES, WINDOW, Bell, Channel, ChannelClosed, Hook, Terms
from specjax.scheduling.loop import start_device_thread

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512  # 128 decode sides; an idle connection takes 5 KB
# While frames are queued, a decode side must take MIN_FRAMES within MAX_STALL heartbeats. At less
# than 1.6 MB/s, it would compute any prompt faster than it gets the KV.
MAX_STALL = 10
MIN_FRAMES = 16
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
EVENTS = REFUSALS | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED


class _Side(Channel):
    """A channel to a decode side, with the state of its frames."""

    def __init__(self, lanes: list[bytes], assembler: wire.Assembler, *channel: Any) -> None:
        super().__init__(*channel)
        self.lanes = lanes
        self.assembler = assembler
        self.frames: deque[wire.Frame | Hook] = deque()  # frames, and callbacks to run after them
        self.num_sent = 0
        self.num_taken = 0
        self.mark = 0  # num_taken at the last check that found progress
        self.num_ticks = 0  # heartbeats since then


class Listener:
    """Accepts decode sides until it is closed; each has its own queue.

    One thread owns all sockets. Another thread waits for arrays that a device still computes. A
    peer without the secret occupies a connection until its handshake fails.

    ``address`` is the address to connect to, with the actual port if port 0 was passed.
    """

    def __init__(
        self, address: str, terms: Terms, *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        """Start to listen. ValueError for a bad address or secret, OSError if binding fails."""
        check_secret(address, terms.secret)
        host, _ = parse_address(address)
        [endpoint, *_] = endpoints(address)
        self._terms = terms
        self._max_connections = max_connections
        self._is_closing = False
        self._sides: dict[bytes, _Side] = {}  # one entry per lane
        # token -> lanes of a decode side that has not opened all of its lanes yet
        self._openings: dict[bytes, dict[int, bytes]] = {}
        self._connections: set[int] = set()
        self._num_refused = self._num_excess = 0  # since the last heartbeat
        self._messages = SimpleQueue[tuple[Channel, wire.Message, Hook | None] | None]()
        self._bell = Bell()
        self._context = zmq.Context(io_threads=LANES)
        try:
            self._router = self._context.socket(zmq.ROUTER)
            terms.prepare(self._router, listens=True)
            self._router.router_mandatory = True  # sending to a disconnected peer is an error
            self._monitor = self._router.get_monitor_socket(EVENTS)
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from None
        self._port = int(
            str(self._router.get_string(zmq.LAST_ENDPOINT)).rstrip("\0").rpartition(":")[2]
        )
        self.address = format_address(host, self._port)
        self._encoder = start_device_thread(self._encode_all, "specjax-send", self.close)
        self._thread = start_device_thread(self._run, "specjax-listen", self.close)

    def close(self) -> None:
        self._is_closing = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._terms.pulse.handshake)

    # In the thread that waits for devices.

    def _encode_all(self) -> None:
        while (item := self._messages.get()) is not None:
            side, message, sent = item
            if isinstance(side, _Side) and side.is_open:
                try:
                    side.frames.extend(wire.encode(message))
                    if sent is not None:
                        side.frames.append(sent)
                except Exception as error:
                    logger.exception("a message to a decode side could not be sent")
                    side.end(error)
                self._bell.ring()
            del item, side, message, sent  # they may keep device memory alive

    # In the thread that owns the sockets.

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._router, self._monitor, self._bell.fd):
            poller.register(source, zmq.POLLIN)
        ticked = time.monotonic()
        try:
            while not self._is_closing:
                seconds = ticked + self._terms.pulse.interval - time.monotonic()
                ready = dict(poller.poll(max(0, math.ceil(1000 * seconds))))
                if self._bell.fd in ready:
                    self._bell.silence()
                if self._router in ready:
                    self._receive()
                if self._monitor in ready:
                    self._watch()
                # count intervals, not seconds: no interval passes while this process is stopped
                if is_tick := time.monotonic() - ticked >= self._terms.pulse.interval:
                    ticked = time.monotonic()
                    self._tick()
                for side in set(self._sides.values()):
                    try:
                        self._serve(side, is_tick)
                    except Exception as error:
                        logger.exception("a decode side could not be served")
                        side.end(error)
        except Exception:
            logger.exception("the listener on %s has stopped", self.address)
        finally:
            for side in set(self._sides.values()):
                side.end(ChannelClosed("this side closed the connection"))
                self._drop(side)
            self._messages.put(None)
            try:
                self._router.disable_monitor()
            finally:
                self._context.destroy(linger=0)

    def _receive(self) -> None:
        for _ in range(WINDOW):
            try:
                lane, *frames = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            if side := self._sides.get(lane.bytes):
                if side.is_open:
                    self._feed(side, lane.bytes, frames)
            elif len(frames) == 1:
                self._open(lane.bytes, frames[0].buffer)

    def _feed(self, side: _Side, lane: bytes, frames: list[zmq.Frame]) -> None:
        try:
            if lane != side.lanes[0] or len(frames) != 1:
                raise wire.WireError("unexpected frame from the peer; expected one frame on lane 0")
            message = side.assembler.feed(frames[0].buffer)
            if isinstance(message, wire.Taken):
                side.num_taken += message.count
                if side.num_taken > side.num_sent:
                    counts = f"{side.num_taken} frames, but only {side.num_sent} were sent"
                    raise wire.WireError(f"peer acknowledged {counts}")
            elif isinstance(message, wire.Open | wire.Hello):
                raise wire.WireError("the peer sent a second hello")
            elif message is not None:
                side.deliver(message)
        except Exception as error:
            side.fail(error)

    def _open(self, lane: bytes, frame: memoryview) -> None:
        try:
            message = wire.Assembler(0).feed(frame)
        except wire.WireError:  # for example from a decode side that was disconnected
            return
        if not isinstance(message, wire.Open) or message.lane >= LANES:
            return
        if any(lane in opening.values() for opening in self._openings.values()):
            return
        if len(self._openings) > self._max_connections:  # lost connections leave entries
            self._openings.clear()
        opening = self._openings.setdefault(message.token, {})
        opening[message.lane] = lane
        if len(opening) < LANES:
            return
        del self._openings[message.token]
        lanes = [opening[number] for number in range(LANES)]
        assembler, hello = wire.Assembler(self._terms.max_bytes), wire.Hello(facts=message.facts)
        side = _Side(lanes, assembler, hello, self._bell, self._queue)
        self._sides.update(dict.fromkeys(lanes, side))
        try:
            side.frames.extend(wire.encode(self._terms.hello()))
            side.open(self._terms)
        except Exception as error:
            logger.warning("%s refused a decode side: %s", self.address, error)
            self._send_frames(side)  # the hello lets the decode side report the difference
            side.end(error)

    def _queue(self, side: Channel, message: wire.Message, sent: Hook | None) -> None:
        self._messages.put((side, message, sent))

    def _serve(self, side: _Side, is_tick: bool) -> None:
        if side.is_open:
            self._send_frames(side)
        if is_tick and side.is_open:
            self._check_progress(side)
            self._send(side, b"")  # a heartbeat, which detects a lost connection
        if not side.is_open:
            self._drop(side)

    def _send_frames(self, side: _Side) -> None:
        while side.frames and side.num_sent - side.num_taken < WINDOW:
            frame = side.frames[0]
            if callable(frame):
                frame()
            elif not self._send(side, frame):
                return
            side.frames.popleft()

    def _send(self, side: _Side, *frames: wire.Frame) -> bool:
        lane = side.lanes[side.num_sent % LANES]
        try:
            self._router.send_multipart([lane, *frames], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            side.end(ChannelClosed("the peer closed the connection"))
            return False
        side.num_sent += 1
        return True

    def _check_progress(self, side: _Side) -> None:
        side.num_ticks += 1
        if not side.frames or side.num_taken - side.mark >= MIN_FRAMES:
            side.mark, side.num_ticks = side.num_taken, 0
        elif side.num_ticks >= MAX_STALL:
            logger.warning("disconnecting a decode side that reads its KV too slowly")
            side.end(ChannelClosed("the decode side reads its KV too slowly"))

    def _drop(self, side: _Side) -> None:
        assert side.reason is not None
        side.frames.clear()
        self._send(side, b"", str(side.reason).encode()[:1000])  # two frames mark the end
        for lane in side.lanes:
            del self._sides[lane]
        side.tell_lost()

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._admit(event["value"])
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.discard(event["value"])
            else:
                self._num_refused += 1

    def _admit(self, descriptor: int) -> None:
        """Count a libzmq connection, or close it if there are too many."""
        if len(self._connections) < self._max_connections:
            self._connections.add(descriptor)
        else:
            self._num_excess += 1
            self._is_connected(descriptor, hangs_up=True)

    def _is_connected(self, descriptor: int, *, hangs_up: bool = False) -> bool:
        """Return whether a descriptor is a connection of this listener; ``hangs_up`` closes it."""
        # libzmq may have closed it, and another file may have its number now
        with (
            suppress(OSError, IndexError),
            socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            is_ours = bool(sock.getpeername()) and sock.getsockname()[1] == self._port
            if is_ours and hangs_up:
                sock.shutdown(socket.SHUT_RDWR)
            return is_ours
        return False

    def _tick(self) -> None:
        if self._num_refused:
            logger.warning(
                "%s refused %d connections: the peer is not a decode side, or its version or "
                "disaggregation_secret differs",
                self.address,
                self._num_refused,
            )
            self._num_refused = 0
        if self._num_excess:
            closed = self.address, self._num_excess, self._max_connections
            logger.warning("%s closed %d connections above the limit of %d", *closed)
            self._num_excess = 0
        # libzmq may report the end of a connection before its beginning
        self._connections = set(filter(self._is_connected, self._connections))
