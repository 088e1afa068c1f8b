"""A thread that answers requests as they come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Condition, Thread, current_thread

from luthier.engines.answering import Answering
from luthier.engines.engine import NewTokens, OnTokens, Refusal, Request
from luthier.engines.next_tokens import Follower

_MOST_SECONDS = 60.0  # that a step may take when a session is closed

logger = logging.getLogger(__name__)


class LocalSession:
    """A `Session` over the model of a `LocalEngine`, which it leaves to others between two steps where they want it.

    A step that fails (most often for want of memory) ends the requests that were being answered, each with a `Refusal`
    whose reason is ``engine_failed``. Those that wait are answered.
    """

    def __init__(
        self, answering: Answering, at_work: Callable[[], AbstractContextManager[None]], is_wanted: Callable[[], bool]
    ) -> None:
        self._answering, self._at_work, self._is_wanted = answering, at_work, is_wanted
        self._changed = Condition()
        self._new: list[tuple[Request, Follower]] = []
        self._followers: dict[int, Follower] = {}
        self._closed = False
        self._thread = Thread(target=self._run, name="luthier-session", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        """Begin an answer. Raises `ValueError` for a key that is in use, or in a session that is closed."""
        left = request.num_samples

        def tell(told: NewTokens | Refusal) -> None:
            nonlocal left
            left -= isinstance(told, NewTokens) and told.finish is not None
            ended = left == 0 or isinstance(told, Refusal)
            try:
                on_tokens(told)
            except Exception:
                ended = True
                raise
            finally:
                if ended:
                    self._forget(request.key)

        follower = Follower(tell)
        with self._changed:
            if self._closed or request.key in self._followers:
                why = "this session is closed" if self._closed else f"request {request.key} is being answered"
                raise ValueError(f"{why}: no request {request.key} can begin")
            self._followers[request.key] = follower
            self._new.append((request, follower))
            self._changed.notify()

    def cancel(self, key: int) -> None:
        """End a request's answers where they are. Nothing is done for one that has ended, or never was."""
        follower = self._forget(key)
        if follower is not None:
            follower.cancel()

    def close(self) -> None:
        """Cancel all requests, and end the thread: it ends after the step that it is in."""
        with self._changed:
            self._closed = True
            keys = list(self._followers)
            self._changed.notify()
        for key in keys:
            self.cancel(key)
        if self._thread is not current_thread():
            self._thread.join(_MOST_SECONDS)

    def keys(self) -> tuple[int, ...]:
        """The requests that wait or are being answered."""
        with self._changed:
            return tuple(self._followers)

    def rows_held(self) -> int:
        """How many rows hold a part of the model's cache."""
        return len(self._answering.joined.lengths)

    def _forget(self, key: int) -> Follower | None:
        with self._changed:
            return self._followers.pop(key, None)

    def _run(self) -> None:
        while self._has_work():
            with self._at_work():
                while self._answering.busy:
                    try:
                        self._answering.step()
                    except Exception as error:
                        logger.exception("A step of a session has failed.")
                        self._answering.fail(f"{type(error).__name__}: {error}")
                    if self._is_wanted():
                        break
                    self._take_new()

    def _has_work(self) -> bool:
        """Wait for something to do. False when the session is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._answering.busy or self._closed)
        self._take_new()
        return self._answering.busy or not self._closed

    def _take_new(self) -> None:
        with self._changed:
            new, self._new = self._new, []
        for request, follower in new:
            self._answering.add(request, follower)
