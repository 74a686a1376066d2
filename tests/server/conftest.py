"""One tiny engine and one server, shared by all modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specjax import Engine
from specjax.server import make_app
from specjax.testing import Client, Files, running

MODEL = "tiny"


@pytest.fixture(scope="package")
def engine(files: Files) -> Iterator[Engine]:
    with files.engine() as made:
        yield made


@pytest.fixture(scope="package")
def client(engine: Engine) -> Iterator[Client]:
    with running(make_app(engine, served_model_name=MODEL)) as port:
        yield Client(port)


@contextmanager
def served(files: Files, engine: Engine, **options: Any) -> Iterator[Client]:
    """A server over an engine with the same weights, grammars and these options."""
    options |= {"grammar_backend": "llguidance", "share_weights_with": engine}
    with (
        files.engine(**options) as made,
        running(make_app(made, served_model_name=MODEL)) as port,
    ):
        yield Client(port)
