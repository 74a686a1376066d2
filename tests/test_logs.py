"""Log lines: formats, levels, and nothing of a client that breaks a line."""

import json
import logging
import sys
from datetime import datetime

import pytest

from specjax.logs import ACCESS, FORMATS, configured, request_id

NASTY = 'a\nb\r\x1b[2J\x00\u2028\u202e\ud800"%s\\'


def record(message: str, *, fails: bool = False) -> logging.LogRecord:
    info = None
    if fails:
        try:
            raise ValueError(NASTY)
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("specjax.x", logging.ERROR, "x.py", 1, "%s", (message,), info)


@pytest.fixture
def _nasty_id():
    token = request_id.set(NASTY)
    yield
    request_id.reset(token)


@pytest.mark.usefixtures("_nasty_id")
@pytest.mark.parametrize("fails", [False, True])
def test_a_record_is_one_line(fails) -> None:
    first, *more = FORMATS["text"].format(record(NASTY, fails=fails)).split("\n")
    time, rest = first.split(" ", 1)
    assert datetime.fromisoformat(time).tzinfo is not None
    escaped = r'a\nb\r\x1b[2J\x00\u2028\u202e\ud800"%s\\'.replace("\\\\", "\\")
    assert rest == f"ERROR specjax.x: {escaped} [{escaped}]"
    assert bool(more) is fails
    assert all(line.startswith("  ") and line.isprintable() for line in more)

    text = FORMATS["json"].format(record(NASTY, fails=fails))
    assert text.isascii()
    assert text.isprintable()
    line = json.loads(text)
    assert datetime.fromisoformat(line.pop("time")) >= datetime.fromisoformat(time)
    assert ("ValueError" in line.pop("exception", "")) is fails
    names = {"level": "error", "logger": "specjax.x", "message": NASTY, "request_id": NASTY}
    assert line == names


def test_fields_are_members_of_the_object() -> None:
    made = record("hello")
    made.fields = {"running": 3}
    line = json.loads(FORMATS["json"].format(made))
    assert line["running"] == 3
    assert "request_id" not in line


@pytest.mark.parametrize("level", ["debug", "warning"])
@pytest.mark.parametrize("has_access", [False, True])
def test_levels(level, has_access, capsys) -> None:
    root, package, access = map(logging.getLogger, (None, "specjax", ACCESS))
    before = [(one.level, list(one.handlers)) for one in (root, package, access)]
    with configured(level, "json", has_access=has_access):
        for name in ("specjax.x", ACCESS, "other"):
            for number in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(number, "hello")
    assert [(one.level, list(one.handlers)) for one in (root, package, access)] == before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    seen = {(line["logger"], line["level"]) for line in lines}
    assert len(lines) == len(seen)
    levels = ["debug", "info", "warning"]
    expected = {("specjax.x", one) for one in levels[levels.index(level) :]}
    expected |= {("other", "warning"), (ACCESS, "warning")}
    if has_access:
        expected |= {(ACCESS, one) for one in levels[0 if level == "debug" else 1 :]}
    assert seen == expected
