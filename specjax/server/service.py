"""What all routes share: the engine once it is there, its name, and the work in hand."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from specjax.checks import check_integer
from specjax.engine import Engine
from specjax.server.access import Access
from specjax.server.body import Body
from specjax.server.errors import ApiError, unavailable
from specjax.server.exchange import LargeBodies, UnreadAnswers
from specjax.server.fields import IgnoredFields
from specjax.server.tokens import TokenTexts

MAX_REQUESTS = 4096
MAX_BODY_BYTES = 32 * 2**20
MAX_UNREAD_BYTES = 128 * 2**20  # of finished answers whose clients do not read


class Service:
    """Serves one engine, from before it is made to after its end.

    Args:
        engine: the engine, or a future of one that is being made.
        name: model name that clients give; by default what the engine was made with.
        access: who may use which routes; everybody by default.
        max_requests: completions in hand at once; samples and entries of a batch count each.
        max_body_bytes: longer bodies are refused.
    """

    def __init__(
        self,
        engine: Engine | Future[Engine],
        *,
        name: str | None = None,
        access: Access | None = None,
        max_requests: int = MAX_REQUESTS,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        check_integer("max_requests", max_requests, 1)
        check_integer("max_body_bytes", max_body_bytes, 1)
        self._engine, self._name = engine, name
        self.access = access or Access()
        self.max_requests, self.max_body_bytes = max_requests, max_body_bytes
        self.num_requests = 0
        self.ignored_fields = IgnoredFields()
        self.renderers = ThreadPoolExecutor(4, "specjax-render")  # of chat templates
        # two of the longest bodies
        self.large_bodies = LargeBodies(2 * max_body_bytes)
        self.unread = UnreadAnswers(MAX_UNREAD_BYTES)
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

    def decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids)

    def take_inputs(self, body: Body, name: str) -> Any:
        """A text, a list of token ids that may fit the context, or a list of either."""
        return body.inputs(name, max_ids=self.engine.context_length, max_rows=self.max_requests)

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
