"""The registered reward that a server gives."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mt_core.errors import ConfigError, DataError
from mt_tune.rewards.options import GIVEN, read_options
from mt_tune.rewards.reward_specs import RewardFunction

RETRIED = (429, 500, 502, 503, 504)
ANSWER_BYTES = 64 << 20


@dataclass(frozen=True)
class HttpOptions:
    """url: of the server. allow_remote: it may be on another machine, to which prompts, completions and columns are
    sent. timeout: seconds of one request; attempts: requests until the reward fails, after 1 s, 2 s, ..."""

    url: str = "http://127.0.0.1:8000/reward"
    allow_remote: bool = False
    timeout: float = 30.0
    attempts: int = 3


def build_http(options: Mapping[str, Any]) -> RewardFunction:
    """POST {"prompts", "completions", "completion_ids", "columns": {name: [...]}}, whose answer is
    {"rewards": [number or null, ...]}, one for each completion."""
    keys = read_options(HttpOptions, "http", options)
    _check_url(keys)

    def judge(completions: Sequence[Any], **columns: Any) -> Any:
        prompt_fields = {name: columns[name] for name in ("prompts", "completion_ids")}
        rows = {name: values for name, values in columns.items() if name not in GIVEN}
        answer = _posted(keys, {**prompt_fields, "completions": completions, "columns": rows})
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
            raise DataError(f'{keys.url}: the answer has no list "rewards"')
        return answer["rewards"]

    return judge


def _check_url(keys: HttpOptions) -> None:
    parts = urlsplit(keys.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"rewards.options.http.url={keys.url} must read http://HOST:PORT/PATH")
    if not keys.allow_remote and not is_loopback(parts.hostname):
        raise ConfigError(
            f"rewards.options.http.url={keys.url} is not on this machine; prompts, completions and columns are sent "
            "there with rewards.options.http.allow_remote=true"
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The request is sent to the URL of the configuration alone."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _posted(keys: HttpOptions, content: Mapping[str, Any]) -> Any:
    """The JSON of the answer. Raises DataError."""
    body = json.dumps(content, default=str).encode()
    # No proxy of the environment: a local server is not reached through one.
    proxies = urllib.request.ProxyHandler(None if keys.allow_remote else {})
    opener = urllib.request.build_opener(proxies, _NoRedirects)
    problem = ""
    for attempt in range(max(keys.attempts, 1)):
        if attempt:
            time.sleep(2 ** (attempt - 1))
        request = urllib.request.Request(keys.url, body, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=keys.timeout) as answer:
                return _json(keys.url, answer.read(ANSWER_BYTES + 1))
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}"
            if error.code not in RETRIED:
                raise DataError(f"{keys.url}: {problem}") from error
        except (OSError, HTTPException) as error:
            problem = str(error) or type(error).__name__
    raise DataError(f"{keys.url}: no answer after {keys.attempts} attempts: {problem}")


def _json(url: str, body: bytes) -> Any:
    if len(body) > ANSWER_BYTES:
        raise DataError(f"{url}: the answer has more than {ANSWER_BYTES >> 20} MiB")
    try:
        return json.loads(body)
    except ValueError as error:
        raise DataError(f"{url}: the answer is no JSON: {error}") from error
