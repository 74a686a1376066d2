"""What all routes share: the engine once it is there, its name, the key, and the work in hand."""

import hmac
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from urllib.parse import urlsplit

from specjax.checks import check_integer
from specjax.engine import Engine
from specjax.server.body import Body
from specjax.server.errors import ApiError, unavailable
from specjax.server.exchange import Exchange
from specjax.server.tokens import TokenTexts

MAX_REQUESTS = 4096
MAX_BODY_BYTES = 32 * 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Service:
    """Serves one engine, from before it is made to after its end.

    Args:
        engine: the engine, or a future of one that is being made.
        name: model name that clients give; by default what the engine was made with.
        api_key: what clients have to show.
        max_requests: completions in hand at once; samples and entries of a batch count each.
        max_body_bytes: longer bodies are refused.
    """

    def __init__(
        self,
        engine: Engine | Future[Engine],
        *,
        name: str | None = None,
        api_key: str | None = None,
        max_requests: int = MAX_REQUESTS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        check_integer("max_requests", max_requests, 1)
        check_integer("max_body_bytes", max_body_bytes, 1)
        # nobody could show it, or everybody
        if api_key is not None and (api_key.split() != [api_key] or not api_key.isprintable()):
            raise ValueError(
                f"an API key of {len(api_key)} characters must have no whitespace and at least one "
                "character; set another one, or none (api_key, --api-key, SPECJAX_API_KEY)"
            )
        self._engine, self._name = engine, name
        self._api_key = api_key
        self.max_requests, self.max_body_bytes = max_requests, max_body_bytes
        self.num_requests = 0
        self._is_stopping = False
        self._texts: TokenTexts | None = None
        self.is_updating = False  # its weights

    @property
    def engine(self) -> Engine:
        """The engine; ApiError 503 where there is none, or it has failed or been closed."""
        engine = self._engine
        if isinstance(engine, Future):
            if not engine.done():
                raise unavailable("the model is being loaded", "starting")
            if engine.exception() is not None:
                raise unavailable("the model could not be loaded", "engine_failed")
            engine = self._engine = engine.result()
        try:
            engine.check_health()
        except ValueError:
            raise unavailable("the engine is closed", "stopping") from None
        return engine

    @property
    def name(self) -> str:
        return self._name or self.engine.target.name

    @property
    def texts(self) -> TokenTexts:
        """Texts of single tokens."""
        if self._texts is None:
            self._texts = TokenTexts(self.engine.tokenizer)
        return self._texts

    @property
    def max_tokens(self) -> int:
        """Tokens that prompt and completion have room for, in the context and in the pool."""
        engine = self.engine
        pool = engine.metrics.snapshot().max_total_tokens - engine.runner.config.reach.overhang
        return max(1, min(engine.context_length, pool))

    def decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids)

    def check_model(self, body: Body) -> str:
        """The name of the model that a request asks for, by its name or by what it is made of."""
        model = body.text("model", self.name)
        if model not in (self.name, self.engine.target.name):
            message = f"the model {model!r} does not exist; there is {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def check_open(self) -> None:
        """Refuse new requests where the server ends."""
        if self._is_stopping:
            raise unavailable("the server is shutting down", "stopping")

    def check_key(self, exchange: Exchange) -> None:
        if self._api_key is None:
            return
        scheme, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
        # bytes: text beyond ASCII cannot be compared in constant time
        is_same = hmac.compare_digest(given.strip(), self._api_key.encode())
        if scheme.lower() != b"bearer" or not is_same:
            message = "give the API key as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key")

    def check_admin(self, exchange: Exchange) -> None:
        """Refuse to change the server for others than holders of the key or local callers."""
        if self._api_key is None and not _is_local(exchange):
            message = "without an API key this is for callers on the same host; set --api-key"
            raise ApiError(403, message, code="not_local")

    def check_count(self, count: int) -> None:
        """Refuse a request of more completions than are ever in hand."""
        if count > self.max_requests:
            raise ApiError(
                400, f"{count} completions in one request; at most {self.max_requests} are served"
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Count completions as in hand, until their client has the answer."""
        self.check_open()
        if self.num_requests + count > self.max_requests:
            raise ApiError(
                429,
                f"{self.num_requests} completions are in hand, {count} more came and at most "
                f"{self.max_requests} are served at once; try again later",
                code="too_many_requests",
            )
        self.num_requests += count
        try:
            yield
        finally:
            self.num_requests -= count

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """What an engine that could serve refuses is the client's matter."""
        try:
            yield
        except ValueError as error:
            self.engine  # noqa: B018 - raises where it cannot
            raise ApiError(400, str(error)) from error

    def stop(self) -> None:
        """Refuse new requests from now on; those in hand go on."""
        self._is_stopping = True

    def abort_all(self) -> None:
        """End what is in hand with finish reason ``abort``; its clients get what there is."""
        if isinstance(self._engine, Engine):  # before its first use there is nothing in hand
            self._engine.abort_request(abort_all=True)


def _is_local(exchange: Exchange) -> bool:
    """Whether a caller is on this host and no page that a browser has from elsewhere."""
    client = exchange.scope.get("client")
    if client is not None and client[0] not in LOOPBACK:
        return False
    # what a browser sends for a page may carry no origin, but says that it is for one
    if exchange.header(b"sec-fetch-site") not in (None, b"none", b"same-origin"):
        return False
    addresses = [b"//" + (exchange.header(b"host") or b"localhost")]
    if (origin := exchange.header(b"origin")) is not None:
        addresses.append(origin)
    try:
        return all(urlsplit(a.decode("latin-1")).hostname in LOOPBACK for a in addresses)
    except ValueError:
        return False
