"""One arena for all workers of an engine: the first makes it, the others map it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtiers.tiers.arena import Arena, ArenaHandle


def share_arena(make: Callable[[], Arena], slot_bytes: int, world_size: int) -> Arena:
    """The engine's arena, in every worker process.

    Collective: every worker calls it once, while it registers its KV cache.

    Args:
        make: makes the arena; called on the first worker only.
        slot_bytes: what this worker needs a slot to be.
        world_size: number of workers.

    Raises:
        RuntimeError: the first worker could not make it; the text says why.
        ValueError: the workers need slots of different sizes.

    """
    if world_size == 1:
        return make()
    group = _engine_group()
    if group.rank_in_group == 0:
        arena, error = _try(make)
        group.broadcast_object(arena.handle if arena is not None else str(error), src=0)
        if arena is None:
            raise RuntimeError(str(error)) from error
        return arena
    answer = group.broadcast_object(None, src=0)
    if not isinstance(answer, ArenaHandle):
        raise RuntimeError(  # noqa: TRY004 - it failed, and said why
            f"the first worker could not make the arena: {answer}"
        )
    if answer.slot_bytes != slot_bytes:
        raise ValueError(
            f"This worker keeps {slot_bytes} bytes a chunk and the first one {answer.slot_bytes}: "
            "kvtiers needs workers with equal shares of the KV cache. With pipeline parallelism, "
            "choose a number of stages that divides the layers evenly."
        )
    return Arena.attach(answer)


def _try(make: Callable[[], Arena]) -> tuple[Arena | None, Exception | None]:
    """The others wait in the broadcast: they must hear of a failure too."""
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - told to the others, then raised
        return None, error


def _engine_group() -> Any:
    """All workers of this engine; with data parallelism the world holds other engines too."""
    from vllm.distributed.parallel_state import get_inner_dp_world_group, get_world_group

    try:
        return get_inner_dp_world_group()
    except AssertionError:
        return get_world_group()
