"""Access checks before the app: Host, Origin and API key; headers of the page.

A web page in the browser of the person who runs the server must not reach it. Its requests carry
an `Origin` that is not ours; and where its own name was made to lead to this machine (DNS
rebinding), a `Host` that is not ours. An address that is a number cannot be rebound.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fasteagle.options import ServeOptions

OPEN_PATHS = ("/", "/health")  # the page asks for the key itself
CLOSE = {"connection": "close"}  # what is left of the request is not read


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    """Return an error in the form of OpenAI's API."""
    clean = message.encode("utf-8", "replace").decode()
    return {"error": {"message": clean, "type": kind, "param": param, "code": code}}


def error_reply(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a reply with an error in the form of OpenAI's API."""
    return JSONResponse(error_body(message, kind, param, code), status, headers)


class Guard:
    """Guard before the app: refuses requests that may not come in."""

    def __init__(self, app: ASGIApp, options: ServeOptions, api_key: str | None) -> None:
        self._app, self._options = app, options
        self._names = {"localhost", *map(plain_name, (options.host, *options.allow_host))}
        self._origins = plain_origins(options)
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._stranger(headers) or self._keyless(scope, headers)
        await (refused or self._app)(scope, receive, send)

    def _stranger(self, headers: Headers) -> Response | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            shown = ", ".join(hosts)[:100]
            text = f"Host {shown!r} is not this server: see --allow-host"
            return error_reply(403, text, headers=CLOSE)
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return None
        if origin in (f"http://{hosts[0]}", f"https://{hosts[0]}"):
            return None
        text = f"pages of {origin[:100]!r} may not use this server: see --allow-origin"
        return error_reply(403, text, headers=CLOSE)

    def _is_ours(self, host: str) -> bool:
        try:
            name = plain_name(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not is_loopback(self._options.host)

    def _keyless(self, scope: Scope, headers: Headers) -> Response | None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.encode("latin-1"), self._key):
            return None
        text = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        more = CLOSE | {"www-authenticate": "Bearer"}
        kind, code = "authentication_error", "invalid_api_key"
        return error_reply(401, text, kind, code=code, headers=more)


def plain_name(host: str) -> str:
    """Return the name of a host as it is compared: in small letters, without a dot at its end."""
    return host.lower().removesuffix(".")


def plain_origins(options: ServeOptions) -> list[str]:
    """Return the origins that may come in as browsers write them, without the usual port."""
    lower = [origin.lower() for origin in options.allow_origin]
    return [o.removesuffix(":443" if o.startswith("https:") else ":80") for o in lower]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if plain_name(host) == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def page_headers(content: bytes) -> dict[str, str]:
    """Return headers that let the page's own style and script run, and no others."""
    sources = {}
    for tag in (b"style", b"script"):
        own = content.partition(b"<%s>" % tag)[2].partition(b"</%s>" % tag)[0]
        digest = base64.b64encode(hashlib.sha256(own).digest()).decode()
        sources[tag] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; style-src {sources[b'style']}; script-src {sources[b'script']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
