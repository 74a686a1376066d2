"""A reader of KV events knows what the prefix cache has, also after it lost the connection."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from specjax.engine.args import EngineArgs
from specjax.kv.events import KVEventPublisher, KVEventsConfig, read_config
from specjax.kv.holding import salt_of
from specjax.kv.pages import PageAllocator
from specjax.kv.prefix_cache import Node, PrefixCache

from ..support.waiting import wait_for

SIZE = 4
Page = tuple[tuple[int, ...], ...]  # keys of a page and of all pages before it


class Reader:
    """Follows events as a router does; messages that it missed are asked for."""

    def __init__(self, source: dict[str, Any]) -> None:
        self._context = zmq.Context()
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(source["replay_endpoint"])
        self._source, self._next, self.topic = source, 0, b""
        self.tokens: dict[int, tuple[int | None, tuple[int, ...], tuple[int, ...]]] = {}
        self.num_cleared = 0
        self.connect()

    def connect(self) -> None:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(self._source["endpoint"])
        self._sub.subscribe(self._source["topic"])

    def disconnect(self) -> None:
        self._sub.close(linger=0)

    def read(self) -> None:
        """Read what arrives, then all that is missing."""
        while self._sub.poll(200):
            self.topic, number, payload = self._sub.recv_multipart()
            if int.from_bytes(number) == self._next:
                self._take(payload)
        self._replay.send_multipart((b"", self._next.to_bytes(8)))
        while True:
            assert self._replay.poll(10_000)
            _, number, payload = self._replay.recv_multipart()
            if int.from_bytes(number, signed=True) == -1:
                return
            assert int.from_bytes(number) == self._next
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        self._next += 1
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert seconds > 1.7e9
        assert rank == 0
        for event in events:
            kind = event.pop("type")
            if kind == "AllBlocksCleared":
                self.tokens.clear()
                self.num_cleared += 1
            elif kind == "BlockRemoved":
                for name in event["block_hashes"]:
                    del self.tokens[name]
            else:
                assert kind == "BlockStored"
                assert event["medium"] == "GPU"
                assert event["block_size"] == SIZE
                ids, before = event["token_ids"], event["parent_block_hash"]
                ahead = event.get("lookahead_token_ids", [])
                for i, name in enumerate(event["block_hashes"]):
                    page, later = ids[i * SIZE : (i + 1) * SIZE], ids[(i + 1) * SIZE :] + ahead
                    assert name not in self.tokens
                    self.tokens[name] = before, tuple(page), tuple(later[: len(ahead)])
                    before = name

    @property
    def pages(self) -> set[Page]:
        return {self._path(name) for name in self.tokens}

    def _path(self, name: int) -> Page:
        before, page, ahead = self.tokens[name]
        return (*(() if before is None else self._path(before)), page + ahead)

    def close(self) -> None:
        self._context.destroy(linger=0)


def pages_of(cache: PrefixCache) -> set[Page]:
    def below(node: Node, path: Page) -> Iterator[Page]:
        for key, child in node.children.items():
            yield (*path, key)
            yield from below(child, (*path, key))

    return set(below(cache._root, ()))


def config_in(folder: Path, **changes: Any) -> dict[str, Any]:
    ends = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    return {**ends, "topic": "kv@pod@model", **changes}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[KVEventPublisher]:
    started = KVEventPublisher(read_config(config_in(tmp_path)), SIZE)
    yield started
    started.close()


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_reader_knows_what_is_cached(publisher: KVEventPublisher, lookahead: int) -> None:
    rng, pool = np.random.default_rng(lookahead), PageAllocator(40, SIZE)
    cache = PrefixCache(pool, lookahead=lookahead)
    cache.watcher = publisher
    with closing(Reader(publisher.source)) as reader:
        follow(cache, pool, reader, rng)
    assert cache.num_pages > 10
    assert reader.num_cleared >= 1
    assert reader.topic == b"kv@pod@model"


def follow(
    cache: PrefixCache, pool: PageAllocator, reader: Reader, rng: np.random.Generator
) -> None:
    for step in range(300):
        text = rng.integers(2, size=rng.integers(30)).tolist()
        count = cache.num_full_pages(len(text))
        cache.evict(count - pool.num_free)
        pages = pool.allocate(count)
        assert pages is not None
        pool.free(cache.insert(text, pages))
        if step % 40 == 10:
            cache.evict(int(rng.integers(10)))
        if step % 60 == 20:
            reader.disconnect()
        if step % 60 == 40:
            reader.connect()
        if step == 200:
            cache.flush()
        if step % 60 == 59:
            reader.read()
            assert reader.pages == pages_of(cache)


def test_hashes_do_not_depend_on_the_order_of_texts(publisher: KVEventPublisher) -> None:
    names = []
    for texts in (([1] * 9, [1] * 5 + [2] * 8), ([1] * 5 + [2] * 8, [1] * 9)):
        pool = PageAllocator(20, SIZE)
        cache = PrefixCache(pool, lookahead=1)
        cache.watcher = publisher
        for text in texts:
            pages = pool.allocate(cache.num_full_pages(len(text)))
            assert pages is not None
            pool.free(cache.insert(text, pages))
        names.append(set(publisher._hashes.values()))
        cache.flush()
    assert names[0] == names[1]
    assert len(names[0]) == 4  # one page of ones is followed by a one, another is not


def test_salted_pages_are_not_published(publisher: KVEventPublisher) -> None:
    pool = PageAllocator(20, SIZE)
    cache = PrefixCache(pool, lookahead=1)
    cache.watcher = publisher
    with closing(Reader(publisher.source)) as reader:
        for salt in (salt_of("a"), 0, salt_of("b")):
            text = [salt + token for token in range(9)]
            pages = pool.allocate(2)
            assert pages is not None
            assert cache.insert(text, pages) == []
        reader.read()
        assert reader.pages == {((0, 1, 2, 3, 4),), ((0, 1, 2, 3, 4), (4, 5, 6, 7, 8))}
        cache.flush()
        reader.read()
        assert reader.pages == set()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"endpoint": 3}, r"kv_events_config=.*\$\.endpoint"),
        ({"buffer_steps": -1}, r"buffer_steps"),
        ({"port": 5557}, "port"),
        ({"publisher": "nats"}, "nats"),
        ({"hwm": 2**31}, "hwm"),
        ({"topic": "\ud800"}, "topic"),
        ('{"topic": 1}', "topic"),
        ("{", "not valid JSON"),
        ("missing.json", r"missing\.json"),
    ],
)
def test_wrong_configurations_are_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(kv_events_config=config)


def test_events_need_a_prefix_cache() -> None:
    with pytest.raises(ValueError, match="disable_radix_cache"):
        EngineArgs(kv_events_config={}, disable_radix_cache=True)
    for off in ({"enable_kv_cache_events": False}, {"publisher": "null"}):
        args = EngineArgs(kv_events_config=off, disable_radix_cache=True)
        assert args.kv_events is None


def test_a_slow_reader_gets_all_messages(publisher: KVEventPublisher) -> None:
    """More than ZeroMQ keeps for a reader by default."""
    payload, count = b"x" * 1000, 4_000
    publisher._sent.extend((i.to_bytes(8), payload) for i in range(count))
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set_hwm(10)
        reader.connect(publisher.source["replay_endpoint"])
        reader.send_multipart((b"", (0).to_bytes(8)))
        time.sleep(0.5)
        numbers = []
        while not numbers or numbers[-1] >= 0:
            assert reader.poll(10_000)
            numbers.append(int.from_bytes(reader.recv_multipart()[1], signed=True))
    assert numbers == [*range(count), -1]


def test_events_go_on_while_others_ask_for_earlier_ones(publisher: KVEventPublisher) -> None:
    pool = PageAllocator(20, SIZE)
    cache = PrefixCache(pool, lookahead=0)
    cache.watcher = publisher
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.connect(publisher.source["replay_endpoint"])
        for _ in range(5_000):
            reader.send_multipart((b"", (0).to_bytes(8)))
        pages = pool.allocate(1)
        assert pages is not None
        cache.insert([1, 2, 3, 4], pages)
        wait_for(lambda: len(publisher._sent) == 1)
        reader.setsockopt(zmq.LINGER, 0)


def test_a_reader_is_found_at_all_addresses_of_the_host() -> None:
    for address in ("tcp://*:*", "tcp://0.0.0.0:*"):
        publisher = KVEventPublisher(KVEventsConfig(endpoint=address), SIZE)
        name, _, port = publisher.source["endpoint"].rpartition(":")
        assert name == f"tcp://{socket.gethostname()}"
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
            pass
        publisher.close()
        assert not publisher._thread.is_alive()


def test_an_address_is_refused_before_anything_is_compiled(files: Any, tmp_path: Path) -> None:
    config = {"endpoint": f"ipc://{tmp_path}/missing/events"}
    with pytest.raises(ValueError, match="kv_events_config: endpoint='ipc://"):
        files.engine(kv_events_config=config)


def test_an_address_in_use_is_refused(publisher: KVEventPublisher, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind("tcp://127.0.0.1:*")
        port = other.last_endpoint.decode().rpartition(":")[2].rstrip("\0")
        with pytest.raises(ValueError, match=f"endpoint='tcp://\\*:{port}'"):
            KVEventPublisher(KVEventsConfig(endpoint=f"tcp://*:{port}"), SIZE)


@pytest.mark.slow
def test_a_reader_knows_what_an_engine_has_cached(files: Any, tmp_path: Path) -> None:
    """Under few pages, with evictions, a lost connection, a flush and loaded weights."""
    config = config_in(tmp_path)
    sizes = {"page_size": SIZE, "max_total_tokens": 160, "max_running_requests": 3}
    with (
        ExitStack() as stack,
        files.engine(kv_events_config=config, batch_buckets=(4,), **sizes) as engine,
    ):
        (source,) = engine.kv_event_sources
        reader = stack.enter_context(closing(Reader(source)))
        rng = np.random.default_rng(0)
        shared = rng.integers(60, size=12).tolist()
        for step in range(12):
            prompts = [shared + rng.integers(60, size=rng.integers(1, 30)).tolist() for _ in "abc"]
            params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
            engine.generate(input_ids=prompts, sampling_params=params)
            if step == 2:
                reader.disconnect()
            if step == 5:
                reader.connect()
            if step == 6:
                engine.flush_cache()
            if step == 9:
                engine.update_weights_from_disk(files.target)
            if 2 <= step < 5:
                continue
            reader.read()
            assert reader.pages == pages_of(engine._scheduler._budget.cache)
        assert {path[0][:SIZE] for path in reader.pages} >= {tuple(shared[:SIZE])}
        assert reader.num_cleared >= 2
