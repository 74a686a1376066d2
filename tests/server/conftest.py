"""One tiny engine and one server, shared by all modules."""

from collections.abc import Iterator

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
