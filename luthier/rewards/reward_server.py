"""Asks a server of rewards. It runs in the process of a reward function, which has a deadline and little memory.

POST {"answers": [{"answer": …, "expected": …, "prompt": …, "finished": …, "columns": {…}}, …]}
200  {"rewards": [1.0, null, …]}      a number or null for each answer, in their order
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

MOST_BYTES = 4_000_000  # of what a server says; a reward has some ten
TRIES, PAUSE = 3, 0.2  # seconds, twice as long each time


def ask(answers: Sequence[str], *, url: str, asked: Sequence[dict[str, object]], timeout: float) -> list[object]:
    """What the server at ``url`` says of each answer. Raises what says in words what was wrong: `NoServer`,
    `ServerError`, `NoJson`, `TooMuch`, `WrongCount`."""
    rewards = _rewards_in(_said(url, json.dumps({"answers": list(asked)}).encode(), timeout))
    if len(rewards) != len(answers):
        raise WrongCount(f"it gave a list of {len(rewards)}, and was asked about {len(answers)}")
    return rewards


class NoServer(Exception):
    """Nothing answers there."""

    told = "no server answers"


class ServerError(Exception):
    """It answers with an error."""

    told = "its server answers with an error"


class NoJson(Exception):
    """It answers with what is no JSON, or has no list ``rewards``."""

    told = "its server gives no JSON with a list of rewards"


class TooMuch(Exception):
    """It answers with more than any rewards can be."""

    told = "its server says more than rewards can be"


class WrongCount(Exception):
    """It gives more or fewer rewards than there are answers."""

    told = "its server gives more or fewer rewards than there are answers"


def _said(url: str, body: bytes, timeout: float) -> bytes:
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE * 2 ** (number - 1))
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                found: bytes = response.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            if error.code < 500 or number == TRIES - 1:
                raise ServerError(str(error.code)) from error
        except (OSError, http.client.HTTPException) as error:
            if number == TRIES - 1:
                raise NoServer(str(error)) from error
        else:
            if len(found) > MOST_BYTES:
                raise TooMuch(url)
            return found
    raise NoServer(url)


def _rewards_in(body: bytes) -> list[object]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoJson(str(error)) from error
    rewards = told.get("rewards") if isinstance(told, dict) else None
    if not isinstance(rewards, list):
        raise NoJson("there is no list rewards")
    return rewards
