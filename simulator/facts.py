"""What a policy is told of a trace's request, whoever replays it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvtiers.policies import ChunkId, PolicyRequest, Run
from kvtiers.simulator.trace import TraceRequest


def facts_of(number: int, request: TraceRequest, prompt: Run) -> PolicyRequest:
    """What is known of a request when it arrives; its turn is a hint, as an engine's is.

    Args:
        number: of the request in its trace.
        request: from the trace.
        prompt: its full chunks.

    """
    turn = {} if request.turn is None else {"turn": request.turn}
    return PolicyRequest(
        f"r{number}",
        (prompt,),
        request.arrival,
        request.tenant,
        request.session,
        request.input_tokens,
        {**request.hints, **turn},
    )


def run_of(
    ids: tuple[ChunkId, ...], stretches: Sequence[range], chunk_bytes: int, tenant: str
) -> Run:
    """Chunks of a trace as one run.

    Args:
        ids: what the policy knows each chunk of the trace by. A run is made of slices of it,
            so that no id is made twice.
        stretches: numbers of the chunks, head first.
        chunk_bytes: size of a chunk.
        tenant: who the request belongs to.

    """
    parts = [ids[stretch.start : stretch.stop] for stretch in stretches]
    chunks = parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))
    return Run(chunks, 0, chunk_bytes, tenant=tenant)
