"""``GET /``: a page to chat with the model and to watch the engine."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from specjax.server.exchange import Exchange, Header
from specjax.server.service import Service


async def answer_page(service: Service, exchange: Exchange) -> None:
    body, headers = page()
    await exchange.reply(body, kind=b"text/html; charset=utf-8", headers=headers)


@cache
def page() -> tuple[bytes, list[Header]]:
    """The page, and headers that let it run its own script and talk to this server alone."""
    body = files(__package__).joinpath("page.html").read_bytes()
    script, style = (_hash(body, tag) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, [
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    ]


def _hash(body: bytes, tag: bytes) -> str:
    """What a content security policy calls the page's only element of a kind."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
