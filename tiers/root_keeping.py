"""The background of one engine at a root: says what it used, and keeps the bound if it must.

One daemon thread. It sleeps for some seconds while nothing happens, for one while
something does, and for a moment while it keeps the bound and others wait for room; a store
of its own engine that does wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from kvtiers.tiers.base import Usage
from kvtiers.tiers.fs_layout import Layout, refuse_link
from kvtiers.tiers.keeper import BEAT_SECONDS, Keeper, Terms
from kvtiers.tiers.lease import PATIENCE, Inherited, Lease, LeaseLostError, Seen
from kvtiers.tiers.membership import Member
from kvtiers.tiers.owner import this_process
from kvtiers.tiers.pace import Pace

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 1.0
# Whoever waits for room does so for some seconds only: also for the first grant of a burst
# that nobody expected, which the holder of the lease has to hear of in time.
_HURRIED_SECONDS = 0.2
_LISTENING_SECONDS = 2.0
# Where something happened there is more to come, and others wait for grants.
_LINGER_SECONDS = 30.0
_JOIN_SECONDS = 5.0


class RootKeeping:
    """One engine's part in keeping a root, with its thread.

    Attributes:
        member: what the tier's calls tell and ask.

    Args:
        layout: of the root.
        terms: what to keep. The capacity is set.
        stores: False for an engine that only reads: it keeps no bound either.
        clock: seconds, monotonic.
        patience: seconds that a holder of the lease may be silent.
        pace: what long loops rest by.

    """

    def __init__(
        self,
        layout: Layout,
        terms: Terms,
        *,
        stores: bool,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
        pace: Pace | None = None,
    ) -> None:
        self._layout = layout
        self._terms = terms
        self._clock = clock
        self._pace = pace or Pace()
        self._contends = stores
        self._wake = threading.Event()
        self._stopping = threading.Event()
        owner = this_process()
        folder = f"{layout.keeping}/lease"
        self._lease = Lease(folder, owner.facts(), clock, patience)
        looking = Lease(folder, owner.facts(), clock, patience)
        self.member = Member(
            layout.keeping, owner, terms.unit, stores, looking.look, self._wake.set
        )
        self._keeper: Keeper | None = None
        self._evicted = 0
        self._logged: set[str] = set()
        self._told = self._joined = False
        self._busy_at = clock()
        self._thread = threading.Thread(target=self._run, name="kvtiers-keeper", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def usage(self) -> Usage:
        """How full the root is, and what this process evicted of it. Never blocks."""
        usage = self.member.usage(self._terms.tier.capacity)
        keeper = self._keeper
        evicted = self._evicted + (keeper.evicted if keeper is not None else 0)
        return Usage(usage.nbytes, usage.chunks, usage.limit, evicted)

    def close(self) -> None:
        """Say the last, and leave the lease to others."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            return  # it hangs in the file system; others see that it is silent
        self.member.leave()
        if self._keeper is not None:
            with contextlib.suppress(LeaseLostError, OSError):
                self._keeper.resign()

    def step(self) -> float:
        """Do what there is to do. Returns the seconds until it should be called again."""
        try:
            busy = self._step()
        except LeaseLostError:
            logger.info("Another engine keeps the bound of %s now.", self._layout.base)
            self._serve(None)
            busy = True
        except OSError as error:
            self._log_once(error)
            busy = True
        if busy:
            self._busy_at = self._clock()
        if self._keeper is not None and self._keeper.hurries:
            return _HURRIED_SECONDS
        if self._clock() < self._busy_at + _LINGER_SECONDS:
            return _BUSY_SECONDS
        return BEAT_SECONDS if self._keeper is None else _LISTENING_SECONDS

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                pause = self.step()
            except Exception:
                # A policy's fault, most likely. Somebody else may have a better one.
                logger.exception("Keeping the bound of %s failed", self._layout.base)
                self._contends = False
                self._serve(None)
                pause = BEAT_SECONDS
            self._wake.wait(pause)

    def _step(self) -> bool:
        refuse_link(self._layout.keeping)
        if self._contends and not self._joined:
            # So that an engine's first store needs not wait for its grant.
            self.member.join()
            self._joined = True
        busy = self.member.has_news()
        if self._contends or self._keeper is not None or not self._lease.is_free():
            # To nobody who would read it nothing is told: the log would grow for ever.
            with contextlib.suppress(FileNotFoundError):
                self.member.flush()
        if self._keeper is None:
            seen = self._lease.look()
            self.member.learn(seen)
            self._compare(seen)
            if not self._contends or not self._lease.is_free():
                return busy
            inherited = self._lease.take()
            if inherited is None:
                return True
            self._serve(self._new_keeper(inherited))
        assert self._keeper is not None
        return self._keeper.round() or busy

    def _new_keeper(self, inherited: Inherited) -> Keeper:
        return Keeper(self._layout, self._lease, inherited, self._terms, self._clock, self._pace)

    def _serve(self, keeper: Keeper | None) -> None:
        if self._keeper is not None:
            self._evicted += self._keeper.evicted
        self._keeper = keeper
        self.member.serve(keeper)

    def _compare(self, seen: Seen) -> None:
        """Say once that somebody else's bound counts."""
        wanted = self._terms.tier.capacity
        if self._told or seen.beat is None or not seen.beat.capacity:
            return
        if seen.beat.capacity != wanted:
            self._told = True
            logger.warning(
                "The bound of %s is kept by %s (pid %s), at %d bytes; here its 'capacity' is %d. "
                "One bound holds for all who share it: give all of them the same.",
                self._layout.base,
                seen.beat.owner.get("host"),
                seen.beat.owner.get("pid"),
                seen.beat.capacity,
                wanted,
            )

    def _log_once(self, error: OSError) -> None:
        kind = f"{type(error).__name__} {error.errno}"
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("Keeping the bound of %s: %s", self._layout.base, error)
