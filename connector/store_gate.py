"""What is stored at all, before any policy is asked: ``offload_threshold`` and ``max_tokens``.

vLLM offers the chunks of a request once, as they are computed, and takes an empty answer
for "never in this request"; no answer at all it takes for a failure, and asks and warns
again in each step. Chunks that were turned away because the GPU's cache was not full
enough are therefore offered again by our own doing: by the same request, once the cache
is fuller, and by every later request that uses them (``OffloadPolicy.REQUEST_LEVEL``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import OffloadKey, OffloadPolicy, ReqContext, RequestOffloadingContext


class StoreGate:
    """One engine's gate. The scheduler's thread only.

    Args:
        threshold: share of the GPU's blocks that must be exceeded by those that are not
            empty, see ``compat.gpu_fullness``.
        max_tokens: chunks that end beyond that many tokens are not stored, None for
            no limit.

    """

    def __init__(self, threshold: float, max_tokens: int | None) -> None:
        self._threshold = threshold
        self._max_tokens = max_tokens
        self._fullness: Callable[[], float] | None = None
        # Requests whose chunks were turned away since the gate was last open.
        self._turned_away: set[str] = set()

    def watch(self, fullness: Callable[[], float]) -> None:
        """Look there for how full the GPU's cache is, from 0 to 1."""
        self._fullness = fullness

    def context(self) -> RequestOffloadingContext:
        """For a new request: whether what it hits is offered again."""
        if not self._threshold:
            return RequestOffloadingContext()
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def let_through(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> Sequence[OffloadKey]:
        """Those of the keys that may be stored now, in their order."""
        if not self._is_open():
            self._turned_away.add(req_context.req_id)
            return ()
        if self._max_tokens is None:
            return list(keys)
        return [key for key in keys if self._is_near(key, req_context)]

    def take_offers(self) -> set[str]:
        """Requests whose chunks were turned away and would be let through now; forgets them."""
        if not self._turned_away or not self._is_open():
            return set()
        again, self._turned_away = self._turned_away, set()
        return again

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._turned_away.discard(request_id)

    def _is_open(self) -> bool:
        if not self._threshold or self._fullness is None:
            return True
        return self._fullness() > self._threshold

    def _is_near(self, key: OffloadKey, req_context: ReqContext) -> bool:
        end = req_context.get_offload_key_position(key)
        return self._max_tokens is None or end is None or int(end) <= self._max_tokens
