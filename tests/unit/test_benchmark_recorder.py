"""The benchmark of the recorder: its requests are of the shapes it names."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from kvtiers.tiers import recording

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks import recorder

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("shape", recorder.SHAPES, ids=lambda shape: shape.name)
def test_conversations_grow_by_what_is_new_and_then_begin_anew(shape):
    turns = [batch[0].runs[0].chunks for batch in recorder._batches(shape, 30 * 50)]
    assert max(map(len, turns)) <= shape.chunks
    # The next turn has all of the one before, but where another conversation begins.
    grown = [now for now in pairwise(turns) if now[1][: len(now[0])] == now[0]]
    begun = len(turns) - 1 - len(grown)
    assert {len(now) - len(before) for before, now in grown} <= {shape.new}
    assert not grown if shape.new == shape.chunks else len(grown) > 2 * begun > 0


def test_both_threads_are_measured(monkeypatch):
    monkeypatch.setattr(recording, "_GATHER_SECONDS", 0.01)
    monkeypatch.setattr(recorder, "_hashing_seconds", lambda _shape: 0.001)
    cost = recorder.measure(recorder.SHAPES[0], 100)
    assert 0 < cost.engine < cost.recorder
    assert cost.hashing == 1000
    assert cost.enough == pytest.approx((cost.engine + cost.recorder) / 5)
    assert recorder.table([cost]).row_count == 1
