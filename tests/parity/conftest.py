"""Ignore warnings of torch and transformers; all other warnings stay errors."""

from pathlib import Path

import pytest

FOREIGN = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for rule in FOREIGN:
                item.add_marker(pytest.mark.filterwarnings(rule))
