"""Engines that modules share: one that speculates and one that decodes plainly."""

from collections.abc import Iterator

import pytest

from specjax import Engine
from specjax.testing import Files


@pytest.fixture(scope="package")
def base_engine(files: Files) -> Iterator[Engine]:
    with files.engine() as made:
        yield made


@pytest.fixture(scope="package")
def engine(base_engine: Engine) -> Engine:
    """The shared engine; a module may have one of its own under this name."""
    return base_engine


@pytest.fixture(scope="package")
def plain(files: Files, base_engine: Engine) -> Iterator[Engine]:
    """With a pool that is too small for the whole context."""
    arguments = {"speculative": False, "max_total_tokens": 96, "share_weights_with": base_engine}
    with files.small(**arguments) as made:
        yield made
