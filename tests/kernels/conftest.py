"""Of each test with many cases, the first case of every implementation is fast, the others slow."""

from pathlib import Path

import pytest

# parameters that name an implementation, or whose cases take no time
IMPLEMENTATIONS = ("run", "function", "implementation", "kernel", "bits", "message")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        call = getattr(item, "callspec", None)
        if call is None or Path(__file__).parent not in item.path.parents:
            continue
        values = (str(call.params[name]) for name in IMPLEMENTATIONS if name in call.params)
        case = (item.path, item.originalname, *values)  # type: ignore[attr-defined]
        if case in seen:
            item.add_marker(pytest.mark.slow)
        if "gpu" not in item.keywords:
            seen.add(case)
