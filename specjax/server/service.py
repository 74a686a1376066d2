"""State that all routes share: the engine, requests in progress and access control."""

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from specjax.checks import check_integer
from specjax.disaggregation.address import is_loopback as is_loopback
from specjax.engine.engine import Engine
from specjax.scheduling.loop import EngineFault
from specjax.server.exchange import Exchange, LargeBodies, UnreadAnswers
from specjax.server.fields import ApiError, Body, IgnoredFields
from specjax.server.keys import KeyFile
from specjax.text.completion import TokenTexts
from specjax.text.tokenizer import Tokenizer

MAX_REQUESTS = 4096
# Requests that are read in one iteration of the event loop. In a burst of thousands, the loop must
# go on to accept connections and to answer /health.
READS_AT_ONCE = 16
# Maximum log-probabilities per request, for all tokens and their top tokens (25 MB).
MAX_REPORTED = 2**19
# Maximum experts of tokens per request (268 MB, and 358 MB as text). 48 layers, 8 experts and
# 131,072 tokens have 5.0e7.
MAX_EXPERTS = 2**26
MAX_BODY_BYTES = 32 * 2**20
MAX_UNREAD_BYTES = 128 * 2**20  # maximum size of finished responses that clients have not read
STATES = ("ready", "starting", "stopping", "engine_failed")
# Host name or address with an optional port.
_HOST = re.compile(r"(?:([\w.-]+)|\[([\da-fA-F:.]+)\])(?::\d+)?")


@dataclass(frozen=True, kw_only=True, repr=False)
class Access:
    """Access control. A key that is empty, not printable or has whitespace raises ValueError."""

    api_key: str | None = None  # required on all routes that are not open
    key_file: KeyFile | None = None  # further keys, which are not those of administrators
    # Required on administration routes. Default: the API key; without one, only local callers.
    admin_api_key: str | None = None
    # if the server listens on a loopback address: without a key, pages of other sites are refused
    is_private: bool = False
    allowed_hosts: Collection[str] = ()  # accepted Host headers in addition to loopback names
    origins: Collection[str] = ()  # origins whose pages may call from a browser; "*" allows all

    def __post_init__(self) -> None:
        for name, key in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key)):
            if key is not None and (key.split() != [key] or not key.isprintable()):
                raise ValueError(
                    f"{name} of {len(key)} characters must be printable, not empty and without "
                    f"whitespace; change or unset {name}, --{name.replace('_', '-')} or "
                    f"SPECJAX_{name.upper()}"
                )

    @property
    def has_keys(self) -> bool:
        """Whether callers must send a key."""
        return self.api_key is not None or self.key_file is not None

    def check(self, exchange: Exchange) -> None:
        """Raise ApiError if the caller may not use the server."""
        if self.has_keys:
            keys = () if self.key_file is None else self.key_file.keys
            sent_key = _check_key(exchange, self.api_key, self.admin_api_key, further_keys=keys)
            client_keys = {*keys, *([self.api_key.encode()] if self.api_key else [])}
            if len(client_keys) > 1:
                # each client has a key; a digest, because it is kept while its requests wait
                exchange.caller = blake2b(sent_key, digest_size=16).digest()
        elif self.is_private:
            self._check_site(exchange)

    def check_admin(self, exchange: Exchange) -> None:
        """Raise ApiError if the caller may not administer the server."""
        if (admin_key := self.admin_api_key or self.api_key) is not None:
            _check_key(exchange, admin_key)
        else:
            client = exchange.scope.get("client")
            if client is not None and not is_loopback(client[0]):
                message = "without --admin-api-key, only callers on the server's host may do this"
                raise ApiError(403, message, code="not_local")
            self._check_site(exchange)

    def _check_site(self, exchange: Exchange) -> None:
        """Refuse requests from pages of other sites, and requests with an unknown Host header."""
        host = (_only(exchange, b"host") or b"localhost").decode("latin-1")
        origin = _only(exchange, b"origin")
        site = _only(exchange, b"sec-fetch-site")
        host_match = _HOST.fullmatch(host)
        name = (host_match[1] or host_match[2]).lower() if host_match else ""
        if not is_loopback(name) and name not in map(str.lower, self.allowed_hosts):
            message = f"Host {host!r} is not a loopback address; allow it with --allowed-hosts"
            raise ApiError(403, message, code="unknown_host")
        if origin is not None and not {"*", origin.decode("latin-1")}.isdisjoint(self.origins):
            return
        is_own = origin is None or origin.decode("latin-1").partition("://")[2] == host
        if not is_own or site not in (None, b"none", b"same-origin"):
            message = "pages of other sites are refused; allow an origin with --cors-allow-origin"
            raise ApiError(403, message, code="cross_site")


def _check_key(
    exchange: Exchange, *keys: str | None, further_keys: Collection[bytes] = ()
) -> bytes:
    """Return the key that was sent; raise ApiError if it is none of ``keys``."""
    scheme, _, sent_key = (exchange.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        sent_key = exchange.header(b"x-api-key") or b""
    sent_key = sent_key.strip()
    # bytes: hmac cannot compare non-ASCII strings in constant time
    valid_keys = (*(key.encode() for key in keys if key is not None), *further_keys)
    if not any(hmac.compare_digest(sent_key, key) for key in valid_keys):
        message = "API key missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise ApiError(401, message, code="invalid_api_key")
    return sent_key


def _only(exchange: Exchange, name: bytes) -> bytes | None:
    values = [value for key, value in exchange.scope["headers"] if key == name]
    if len(values) > 1:
        raise ApiError(400, f"header {name.decode()} was sent {len(values)} times; send it once")
    return values[0] if values else None


class Service:
    """The engine, which may still be loading, and the state that all routes share."""

    def __init__(
        self,
        engine: Engine | Future[Engine],
        *,
        name: str | None = None,
        access: Access | None = None,
        max_requests: int = MAX_REQUESTS,
        max_body_bytes: int = MAX_BODY_BYTES,
        default_max_tokens: int | None = None,
    ) -> None:
        self._engine, self._name = engine, name
        self.access = access or Access()
        self.max_requests = check_integer("max_requests", max_requests, 1)
        self.max_body_bytes = check_integer("max_body_bytes", max_body_bytes, 1)
        if default_max_tokens is not None:
            check_integer("default_max_tokens", default_max_tokens, 1)
        self.default_max_tokens = default_max_tokens  # of requests that set none
        self.num_requests = 0
        self.ignored_fields = IgnoredFields()
        self.responses = Counter[tuple[str, str, int]]()  # by route, method and status
        self.renderers = ThreadPoolExecutor(4, "specjax-render")  # of chat templates
        self.compilers = ThreadPoolExecutor(32, "specjax-grammar")  # wait for grammars
        # of calls that wait for the engine's thread; requests use other pools
        self.administrators = ThreadPoolExecutor(2, "specjax-admin")
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self.large_bodies = LargeBodies(2 * max_body_bytes)  # enough for two of the longest
        self.unread = UnreadAnswers(MAX_UNREAD_BYTES)
        self._progress = ""
        self._is_stopping = False
        self.is_updating = False  # a weight update is running

    @property
    def engine(self) -> Engine:
        """The engine. Raises ApiError 503 if it is not ready, has failed or is closed."""
        engine = self._engine
        if isinstance(engine, Future):
            if not engine.done():
                message = f"the model is still loading{self._progress}"
                raise ApiError(503, message, code="starting")
            if engine.exception() is not None:
                message = "the model could not be loaded; see the server's log"
                raise ApiError(503, message, code="engine_failed")
            engine = self._engine = engine.result()
        try:
            engine.check_health()
        except ValueError:
            raise ApiError(503, "the engine is closed", code="stopping") from None
        return engine

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed since its start."""
        with suppress(ApiError):
            try:
                self.engine  # noqa: B018 - raises if it cannot serve
            except EngineFault:
                return True
        return False

    async def take_turn(self) -> None:
        """Wait until the event loop may read another request in this iteration."""
        await self._turns.acquire()
        asyncio.get_running_loop().call_soon(self._turns.release)

    async def administrate(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that waits for the engine's thread; a ValueError is status 400."""
        run = partial(copy_context().run, function, *arguments)
        with self.refusals():
            await asyncio.get_running_loop().run_in_executor(self.administrators, run)

    def report_progress(self, num_ready: int, num_all: int) -> None:
        """Show the progress of compiling in error responses until the engine is ready."""
        self._progress = f": {num_ready}/{num_all} functions ready"

    @property
    def state(self) -> str:
        """One of ``STATES``."""
        try:
            self.check_open()
            self.engine  # noqa: B018 - raises if there is none
        except ApiError as error:
            return error.code or "engine_failed"
        except EngineFault:
            return "engine_failed"
        return "ready"

    @property
    def name(self) -> str:
        return self._name or self.engine.target.name

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer. Raises ApiError 400 if it has none."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ApiError(400, "the server has no tokenizer (skip_tokenizer_init); send input_ids")
        return tokenizer

    def take_inputs(self, body: Body, name: str) -> Any:
        """Take a string, a list of token ids within the context length, or a list of either."""
        return body.inputs(name, max_ids=self.engine.context_length, max_rows=self.max_requests)

    def check_model(self, body: Body) -> str:
        """Return the requested model; the served name and the target's name are accepted."""
        model = body.text("model", self.name)
        if model not in (self.name, self.engine.target.name):
            raise self.unknown_model(model)
        return model

    def unknown_model(self, name: str) -> ApiError:
        message = f"the model {name!r} does not exist; this server has {self.name!r}"
        return ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        if self._is_stopping:
            raise ApiError(503, "the server is shutting down", code="stopping")

    def check_count(self, count: int) -> None:
        """Refuse a request for more completions than ``max_requests``."""
        if count > self.max_requests:
            raise ApiError(
                400,
                f"the request needs {count} completions; the limit is {self.max_requests}: send "
                "fewer prompts, lower n or raise --max-requests",
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Count completions as in progress until the client has the response."""
        self.check_open()
        if self.num_requests + count > self.max_requests:
            raise ApiError(
                429,
                f"the limit of {self.max_requests} completions in progress is reached: "
                f"{self.num_requests} are running or waiting, {count} are new; try again later",
                code="too_many_requests",
            )
        self.num_requests += count
        try:
            yield
        finally:
            self.num_requests -= count

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn a ValueError from a healthy engine into status 400."""
        try:
            yield
        except ValueError as error:
            self.engine  # noqa: B018 - raises if it cannot serve
            raise ApiError(400, str(error)) from error

    def stop(self) -> None:
        """Refuse new requests from now on; those in progress continue."""
        self._is_stopping = True

    def abort_all(self) -> None:
        """End all requests with finish reason ``abort``; clients get the partial results."""
        if isinstance(self._engine, Engine):  # before the engine's first use, no request can run
            self._engine.abort_request(abort_all=True)
