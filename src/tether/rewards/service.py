"""Requests to scoring services: the one place for timeouts, retries and their error messages."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment

import httpx2

from tether.config.rewards import ServiceReward
from tether.config.secrets import address_without_keys
from tether.data.sources import RepeatedKey, object_of
from tether.errors import ConfigError, RewardError, RewardResponseError, RewardTimeout
from tether.report.text import one_line
from tether.rewards.loop import awaited, started

T = TypeVar("T")
Post = Callable[[Any], Awaitable[Any]]
"""Sends a payload; returns the JSON that the service answers."""

LARGEST_BODY = 16 * 2**20
"""Maximum number of bytes of an answer that are read."""
LONGEST_DELAY = 30.0
"""Maximum number of seconds between two tries."""
SHOWN = 300
"""Maximum number of characters of an answer that a message quotes."""
_FILTERED = re.compile(
    r"content[ _-]*(filter|polic|management|exists risk)|inappropriate content|responsible ?ai|data_?inspection"
    r"|safety (system|polic|reason)|moderation|invalid_prompt",
    re.IGNORECASE,
)
"""Phrases with which services of language models report that a filter refused a text."""


class NoScore(RewardResponseError):
    """A service refuses to score one answer, however often it is asked, but scores others."""


@dataclass(frozen=True)
class Service:
    """A service that is sent JSON and answers with JSON.

    A request takes at most (retries + 1) · (connect_timeout + read_timeout) seconds and the delays between its tries,
    whatever the service does.
    """

    url: str = field(repr=False)
    """Address that requests are posted to; messages show it without its query, which may hold a key."""
    name: str
    """Name in messages of the source that asks."""
    wanted: str
    """The answer that is wanted, in words."""
    key: str | None = field(repr=False)
    """Sent as ``Authorization: Bearer``; no message shows it."""
    connect_timeout: float
    """Seconds within which a connection must be established."""
    read_timeout: float
    """Seconds after that within which the whole answer must have arrived."""
    retries: int
    """How often a request is sent again after a time-out, a lost connection, or status 429 or 5xx."""
    retry_delay: float
    """Seconds before the first of these; doubled each time."""
    max_concurrency: int
    """Maximum number of concurrent jobs."""

    def session(self) -> Session:
        """Connections to the service, to be closed. For a service on this machine, no proxy is used.

        Raises:
            RewardError: a proxy that the environment names cannot be used.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        timeout = httpx2.Timeout(self.read_timeout, connect=self.connect_timeout)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.max_concurrency)
        proxied = not _is_on_this_machine(urlsplit(self.url).hostname)
        # certificates named by the environment apply everywhere
        options = {"verify": httpx2.create_ssl_context(), "trust_env": proxied}
        # redirects are not followed: they would lose the payload, or carry the key elsewhere
        try:
            return Session(self, httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits, **options))
        except ImportError:
            why = "a SOCKS proxy needs the package socksio: install it, name an HTTP proxy, or unset the variable"
        except (ValueError, httpx2.InvalidURL):  # which may hold the proxy's password
            why = "its address is invalid; wanted one such as http://proxy.example:3128: correct or unset the variable"
        named = " or ".join(_proxy_variables("http", "https", "all")) or "this system"
        raise RewardError(f"{self.name}: POST {self.address}: the proxy of {named} cannot be used: {why}")

    async def posted(self, client: httpx2.AsyncClient, payload: Any) -> Any:
        """The service's JSON answer, after as many tries as are needed and allowed."""
        content = json.dumps(payload, allow_nan=False).encode()
        for tried in range(1, self.retries + 2):
            wait, cause = 0.0, None
            try:
                status, headers, body = await self._exchanged(client, content)
            except (TimeoutError, httpx2.TimeoutException) as error:
                failure, cause = RewardTimeout(self._timed_out(error, tried)), error
            except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError) as error:
                failure, cause = RewardError(f"{self._place(tried)}: the connection failed: {_told(error)}"), error
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                raise RewardError(f"{self._place(tried)}: {_told(error)}") from error
            else:
                if status == 200:
                    return self._parsed(body)
                is_filtered = status == 400 and _FILTERED.search(body.decode(errors="replace")) is not None
                kind = NoScore if is_filtered else RewardResponseError
                failure, wait = kind(self._refused(status, headers, body, tried)), _asked_delay(headers)
                if status != 429 and status < 500:
                    raise failure
            if tried <= self.retries:
                await asyncio.sleep(min(max(wait, self.retry_delay * 2 ** (tried - 1)), LONGEST_DELAY))
        raise failure from cause

    async def _exchanged(self, client: httpx2.AsyncClient, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of one answer; the body of anything but a success is cut."""
        body = bytearray()
        async with (
            asyncio.timeout(self.connect_timeout + self.read_timeout),
            client.stream("POST", self.url, content=content) as response,
        ):
            if (packed := response.headers.get("content-encoding", "identity")) != "identity":
                raise RewardResponseError(
                    f"{self.name}: {self.address} (status {response.status_code}) compressed its reply as "
                    f"{one_line(self.without_key(packed), SHOWN)}, although it was asked not to; wanted {self.wanted}"
                )
            async for chunk in response.aiter_raw():
                body += chunk
                if response.status_code != 200 and len(body) > SHOWN:
                    break
                if len(body) > LARGEST_BODY:
                    raise RewardResponseError(
                        f"{self.place} returned more than {LARGEST_BODY // 2**20} MiB; wanted {self.wanted}"
                    )
        return response.status_code, response.headers, bytes(body)

    def _parsed(self, body: bytes) -> Any:
        try:
            return json.loads(body, object_pairs_hook=object_of)
        except RepeatedKey as error:
            told = one_line(self.without_key(str(error)), SHOWN)
            raise RewardResponseError(f"{self.place} returned JSON that {told}") from error
        except (ValueError, RecursionError) as error:
            raise RewardResponseError(
                f"{self.place} did not return JSON ({_told(error)}): {self._shown(body)}; wanted {self.wanted}"
            ) from error

    @property
    def address(self) -> str:
        """The URL as messages show it."""
        return address_without_keys(self.url)

    @property
    def place(self) -> str:
        """Who returned what a message is about, if the status was a success."""
        return f"{self.name}: {self.address} (status 200)"

    def without_key(self, text: str) -> str:
        """The service's text, without the key, which some services repeat."""
        return text.replace(self.key, "…") if self.key else text

    def without_keys(self, value: Any) -> Any:
        """JSON of the service, without the key in any of its texts and names."""
        if isinstance(value, str):
            return self.without_key(value)
        if isinstance(value, list):
            return [self.without_keys(each) for each in value]
        if isinstance(value, dict):
            return {self.without_key(name): self.without_keys(each) for name, each in value.items()}
        return value

    def _place(self, tried: int) -> str:
        variable = _proxy_variable(self.url)
        through = f" through the proxy of {variable}" if variable is not None else ""
        return f"{self.name}: POST {self.address}{through}" + (f", tried {tried} times" if tried > 1 else "")

    def _timed_out(self, error: Exception, tried: int) -> str:
        if isinstance(error, httpx2.ConnectTimeout):
            return f"{self._place(tried)}: no connection within connect_timeout, {self.connect_timeout:g} s"
        return (
            f"{self._place(tried)}: no complete answer within read_timeout, {self.read_timeout:g} s; raise it, or "
            "lower max_concurrency, if the service needs longer"
        )

    def _refused(self, status: int, headers: Mapping[str, str], body: bytes, tried: int) -> str:
        location = one_line(self.without_key(_without_query(headers.get("location", ""))), SHOWN)
        to = f", a redirect to {location}," if location else ""
        got = f"status {status}{to} and {self._shown(body)}"
        return f"{self._place(tried)}: got {got}; wanted status 200 and {self.wanted}"

    def _shown(self, body: bytes) -> str:
        """The beginning of a body."""
        text = self.without_key(body[: 4 * SHOWN].decode(errors="replace"))
        return repr(one_line(text, SHOWN)) if text else "an empty body"


class Session:
    """Concurrent jobs for one batch, over shared connections; none begins after one has failed for good.

    Args:
        service: the service to ask.
        client: its connections.
    """

    def __init__(self, service: Service, client: httpx2.AsyncClient) -> None:
        self._service, self._client = service, client
        self._gate = asyncio.Semaphore(service.max_concurrency)
        self._has_failed = False

    def start(self, job: Callable[[Post], Awaitable[T]]) -> Future[T]:
        """A future of the job's result, or of ``RewardError`` if it fails for good; the job posts one payload after the
        other."""
        return started(self._at_work(job))

    def close(self) -> None:
        """Closes the connections."""
        awaited(self._client.aclose())

    async def _at_work(self, job: Callable[[Post], Awaitable[T]]) -> T:
        async with self._gate:
            if self._has_failed:  # nobody needs the others' scores any more, and they have not been requested yet
                raise asyncio.CancelledError
            try:
                return await job(lambda payload: self._service.posted(self._client, payload))
            except RewardError:
                self._has_failed = True
                raise


def service_of(config: ServiceReward, url: str, *, name: str, key: str, wanted: str) -> Service:
    """The service that a reward section describes.

    Args:
        url: address that requests are posted to.
        name: name of the source.
        key: the section's configuration key, which messages about it begin with.
        wanted: the answer that is wanted, in words.

    Raises:
        ConfigError: the service's key is not set.
    """
    return Service(
        url,
        name=f"reward {name}",
        wanted=wanted,
        key=service_key(config, key),
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        retries=config.retries,
        retry_delay=config.retry_delay,
        max_concurrency=config.max_concurrency,
    )


def service_key(config: ServiceReward, key: str) -> str | None:
    """The service's key from the environment; None if it needs none.

    Args:
        key: the section's configuration key, which messages begin with.

    Raises:
        ConfigError: the variable is not set, or holds what no header can carry; its value is not shown.
    """
    if config.api_key_env is None:
        return None
    value = os.environ.get(config.api_key_env, "")
    if not value:
        raise ConfigError(f"{key}.api_key_env: the environment variable {config.api_key_env} is not set, or is empty")
    if not (value.isascii() and value.isprintable()) or " " in value:
        raise ConfigError(
            f"{key}.api_key_env: the value of {config.api_key_env} holds whitespace or characters that no key contains"
        )
    return value


def _is_on_this_machine(host: str | None) -> bool:
    """Whether a host is this machine by its name or address, which no proxy can mean."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _proxy_variables(*schemes: str) -> list[str]:
    """The environment variables that name a proxy for one of the schemes; lower-case ones take precedence."""
    spelled = [(f"{scheme}_proxy", f"{scheme}_proxy".upper()) for scheme in schemes]
    found = (next(filter(os.environ.get, names), None) for names in spelled)
    return [name for name in found if name is not None]


def _proxy_variable(url: str) -> str | None:
    """The environment variable whose proxy an address is asked through; None if it is contacted directly."""
    parts = urlsplit(url)
    if _is_on_this_machine(parts.hostname) or proxy_bypass_environment(parts.hostname or ""):
        return None
    return next(iter(_proxy_variables(parts.scheme, "all")), None)


def _without_query(location: str) -> str:
    """The target of a redirect, without anything that may hold a key."""
    try:
        return address_without_keys(location)
    except ValueError:
        return "an invalid address"


def _told(error: Exception) -> str:
    """The error with its kind, as many have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _asked_delay(headers: Mapping[str, str]) -> float:
    """Seconds that the service asks to wait before the next try; 0 if it does not say, or gives a date."""
    try:
        seconds = float(headers.get("retry-after", 0))
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0
