"""What ranks tell each other beside their collectives: short texts in the store of the run.

Through a connection of its own, so that it works while the main thread waits in a collective, and from a thread of
its own, since a call to a store whose keeper is stopped never returns: no caller waits longer than it said.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Unreachable(Exception):
    """The store didn't answer in time, or is gone."""


@dataclass
class _Call:
    """Something to do with the store, and what came of it."""

    does: Callable[[Any], Any]
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None


class Notices:
    """Texts under names, the same for all ranks.

    store   a connection that nobody else uses (`ParallelMesh.second_store`)
    keeper  whose store it is, for messages
    """

    def __init__(self, store: Any, keeper: str) -> None:
        self.keeper = keeper
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._last = _Call(lambda store: None)
        self._last.done.set()
        threading.Thread(target=self._serve, args=(store,), name="notices", daemon=True).start()

    def close(self) -> None:
        """Let go of the store; nothing may be asked afterwards."""
        self._calls.put(None)

    def put(self, name: str, text: str, patience: float) -> None:
        """Set `name`. Raises Unreachable after `patience` seconds, as every method does."""
        self._ask(lambda store: store.set(name, text), patience)

    def get(self, names: list[str], patience: float) -> list[str | None]:
        """The texts of `names`; None for those that nobody has set."""

        def read(store: Any) -> list[str | None]:
            return [store.get(name).decode() if store.check([name]) else None for name in names]

        return list(self._ask(read, patience))

    def drop(self, names: list[str], patience: float) -> None:
        """Forget `names`, as far as anybody set them."""
        self._ask(lambda store: [store.delete_key(name) for name in names], patience)

    def swap(self, name: str, old: str, new: str, patience: float) -> bool:
        """Set `name` if it is still `old` ("": nobody has set it); whether it was. Of all who try one succeeds."""
        return bool(self._ask(lambda store: store.compare_set(name, old, new).decode() == new, patience))

    def _ask(self, does: Callable[[Any], Any], patience: float) -> Any:
        if not self._last.done.wait(patience):  # the store may be asked again when it has come back
            raise Unreachable("no answer")
        self._last = call = _Call(does)
        self._calls.put(call)
        if not call.done.wait(patience):
            raise Unreachable("no answer")
        if call.error is not None:
            raise Unreachable((str(call.error).splitlines() or [type(call.error).__name__])[0]) from call.error
        return call.result

    def _serve(self, store: Any) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.does(store)
            except Exception as error:  # a store that is gone says so in several ways
                call.error = error
            call.done.set()
