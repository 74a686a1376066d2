"""Who may use which routes: keys, callers on the same host, and pages of other sites."""

import hmac
import ipaddress
import re
from collections.abc import Collection

from specjax.server.errors import ApiError
from specjax.server.exchange import Exchange

# a name or address, with or without a port
_HOST = re.compile(r"(?:([\w.-]+)|\[([\da-fA-F:.]+)\])(?::\d+)?")


class Access:
    """The rules of one server.

    Args:
        api_key: clients have to show it, for all but open routes; ``None`` for no key.
        admin_api_key: administrators have to show it. By default they show the API key or, if there
            is none either, have to be on the same host.
        is_private: the server listens at a loopback address. Without a key it then refuses pages
            of other sites, which a browser on this host may have.
        allowed_hosts: names in the Host header of callers on this host, besides loopback ones.
        origins: of pages that may call from a browser; ``"*"`` for all.

    Raises:
        ValueError: for a key that nobody could show.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        is_private: bool = False,
        allowed_hosts: Collection[str] = (),
        origins: Collection[str] = (),
    ) -> None:
        for name, key in (("api_key", api_key), ("admin_api_key", admin_api_key)):
            if key is not None and (key.split() != [key] or not key.isprintable()):
                raise ValueError(
                    f"{name} of {len(key)} characters must have no whitespace and at least one "
                    f"character; set another one, or none ({name}, --{name.replace('_', '-')}, "
                    f"SPECJAX_{name.upper()})"
                )
        self._api_key, self._admin_key = api_key, admin_api_key
        self._is_private = is_private
        self._hosts = {name.lower() for name in allowed_hosts}
        self.origins = origins

    @property
    def has_key(self) -> bool:
        """Whether clients have to show a key."""
        return self._api_key is not None

    def check(self, exchange: Exchange) -> None:
        """Refuse a caller who may not use the server; ApiError."""
        if self._api_key is not None:
            _check_key(exchange, self._api_key, self._admin_key)
        elif self._is_private:
            self._check_site(exchange)

    def check_admin(self, exchange: Exchange) -> None:
        """Refuse a caller who may not change the server; ApiError."""
        if self._admin_key is not None:
            _check_key(exchange, self._admin_key)
        elif self._api_key is None:
            client = exchange.scope.get("client")
            if client is not None and not is_loopback(client[0]):
                message = "without a key this is for callers on the same host; set --admin-api-key"
                raise ApiError(403, message, code="not_local")
            self._check_site(exchange)

    def _check_site(self, exchange: Exchange) -> None:
        """Refuse what browsers send for pages of other sites, and foreign names of this host."""
        host = (_only(exchange, b"host") or b"localhost").decode("latin-1")
        origin = _only(exchange, b"origin")
        site = _only(exchange, b"sec-fetch-site")
        found = _HOST.fullmatch(host)
        name = (found[1] or found[2]).lower() if found else ""
        if not is_loopback(name) and name not in self._hosts:
            message = f"Host {host!r} is not a loopback address; allow it with --allowed-hosts"
            raise ApiError(403, message, code="unknown_host")
        if origin is not None and not {"*", origin.decode("latin-1")}.isdisjoint(self.origins):
            return
        is_own = origin is None or origin.decode("latin-1").partition("://")[2] == host
        if not is_own or site not in (None, b"none", b"same-origin"):
            message = "pages of other sites may not use this server; see --cors-allow-origin"
            raise ApiError(403, message, code="cross_site")


def _check_key(exchange: Exchange, *keys: str | None) -> None:
    scheme, _, given = (exchange.header(b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        given = exchange.header(b"x-api-key") or b""
    # bytes: text beyond ASCII cannot be compared in constant time
    known = [key.encode() for key in keys if key is not None]
    if not any(hmac.compare_digest(given.strip(), key) for key in known):
        message = "give the API key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        raise ApiError(401, message, code="invalid_api_key")


def _only(exchange: Exchange, name: bytes) -> bytes | None:
    """The value of a header that may not come twice."""
    values = [value for key, value in exchange.scope["headers"] if key == name]
    if len(values) > 1:
        raise ApiError(400, f"the header {name.decode()} comes {len(values)} times")
    return values[0] if values else None


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, which nobody else reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
