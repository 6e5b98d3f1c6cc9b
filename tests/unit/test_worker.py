from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import PlainArena, all_bytes, from_layers, model_kv, opaque
from kvtiers.connector.copy_cpu import CpuCopyWorker
from kvtiers.connector.layout import plan_row
from kvtiers.connector.transfer import ArenaSpec, TieredWorkerMetadata
from kvtiers.connector.worker import TieredWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferStats,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult


class FaultyEngine(OffloadingWorker):
    """A copy engine that does as told: ``script[job_id]`` says what becomes of a job.

    "ok" and "bad" end with that result, "raise" and "refuse" fail at once, "late"
    ends with "ok" when ``release`` is called, "lie" raises and reports all the same.
    """

    def __init__(self, **script):
        self.script = {int(name.removeprefix("job")): what for name, what in script.items()}
        self.ready, self.late = [], []
        self.calls = []
        self.broken = set()

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._submit("store", job_id, src_spec, dst_spec)

    def submit_load(self, job_id, src_spec, dst_spec, **options):
        return self._submit("load", job_id, src_spec, dst_spec, **options)

    def _submit(self, *call, **options):
        self.calls.append((*call, options))
        job_id, what = call[1], self.script.get(call[1], "ok")
        result = TransferResult(job_id, what != "bad", 10, 0.1)
        if what in ("ok", "bad", "lie"):
            self.ready.append(result)
        if what == "late":
            self.late.append(result)
        if what in ("raise", "lie"):
            raise RuntimeError(f"job {job_id}")
        return what != "refuse"

    def release(self):
        self.ready += self.late
        self.late = []

    def get_finished(self):
        self._maybe_break("get_finished")
        ready, self.ready = self.ready, []
        return ready

    def wait(self, job_ids):
        self.calls.append(("wait", set(job_ids)))
        self._maybe_break("wait")

    def shutdown(self):
        self.calls.append(("shutdown",))
        self._maybe_break("shutdown")

    def _maybe_break(self, what):
        if what in self.broken:
            raise OSError(what)


WHOLE = (GPULoadStoreSpec([3, 4], [2], [0]), ArenaSpec([0], [1]))


def store(worker, job_id, gpu=WHOLE[0], host=WHOLE[1]):
    assert worker.submit_store(job_id, gpu, host) is True


def load(worker, job_id):
    assert worker.submit_load(job_id, WHOLE[1], WHOLE[0]) is True


def finished(worker):
    results = worker.get_finished()
    assert all(result.success for result in results)
    return sorted(result.job_id for result in results)


@pytest.mark.parametrize("submit", [store, load])
@pytest.mark.parametrize("fault", ["raise", "refuse", "bad", "lie"])
def test_a_failed_job_is_finished_once_and_named_once(submit, fault):
    worker = TieredWorker(FaultyEngine(job1=fault), 2)
    submit(worker, 1)
    submit(worker, 2)
    assert worker.take_failed() == {}
    assert finished(worker) == [1, 2]
    assert worker.take_failed() == {1: ()}
    assert worker.take_failed() == {}
    assert finished(worker) == []
    assert sum(worker.failures.values()) == 1


def test_only_a_good_job_reports_its_speed():
    worker = TieredWorker(FaultyEngine(job1="bad", job2="raise"), 2)
    for job_id in (1, 2, 3):
        store(worker, job_id)
    sizes = {result.job_id: result.transfer_size for result in worker.get_finished()}
    assert sizes == {1: None, 2: None, 3: 10}


def test_a_job_is_not_finished_before_the_engine_says_so():
    engine = FaultyEngine(job1="late")
    worker = TieredWorker(engine, 2)
    store(worker, 1)
    assert finished(worker) == []
    engine.release()
    assert finished(worker) == [1]
    assert worker.take_failed() == {}


def test_results_lost_with_an_exception_are_failures_after_their_copies_ended():
    engine = FaultyEngine(job1="late")
    worker = TieredWorker(engine, 2)
    store(worker, 1)
    load(worker, 2)
    engine.broken = {"get_finished"}
    assert finished(worker) == [1, 2]
    assert engine.calls[-1] == ("wait", {1, 2})
    assert worker.take_failed() == {1: (), 2: ()}
    engine.broken = set()
    engine.release()
    assert finished(worker) == []
    assert worker.take_failed() == {}


def test_a_job_whose_wait_failed_is_not_trusted():
    engine = FaultyEngine(job1="late")
    worker = TieredWorker(engine, 2)
    store(worker, 1)
    store(worker, 2)
    engine.broken = {"wait"}
    worker.wait({1, 99})
    assert worker.failures == {"wait: OSError": 1}
    engine.release()
    assert finished(worker) == [1, 2]
    assert worker.take_failed() == {1: ()}


def test_wait_and_shutdown_reach_the_engine_and_raise_nothing():
    engine = FaultyEngine()
    worker = TieredWorker(engine, 2)
    worker.wait({7})
    engine.broken = {"shutdown"}
    worker.shutdown()
    assert engine.calls == [("wait", {7}), ("shutdown",)]
    assert worker.failures == {"shutdown: OSError": 1}


def test_expedited_is_passed_on_only_when_set():
    engine = FaultyEngine()
    worker = TieredWorker(engine, 2)
    load(worker, 1)
    worker.submit_load(2, WHOLE[1], WHOLE[0], expedited=True)
    assert [call[-1] for call in engine.calls] == [{}, {"expedited": True}]


def test_each_kind_of_failure_is_logged_once_and_counted_always(caplog):
    worker = TieredWorker(FaultyEngine(job1="raise", job2="raise", job3="bad"), 2)
    for job_id in (1, 2, 3):
        store(worker, job_id)
    finished(worker)
    assert worker.failures == {"store: RuntimeError": 2, "copy reported as failed": 1}
    assert [record.getMessage().split(",", 1)[0] for record in caplog.records] == [
        "KV copy failed"
    ] * 2
    assert "job 1" in caplog.text
    assert "RuntimeError: job 1" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "indices"),
    [
        ([3, 2], [0, 0]),  # a null block inside
        ([3, 2], [1, 0]),  # a null block at the start
        ([4, 2], [1, 0]),  # as many blocks as needed, from the middle of a chunk
        ([5, 2], [0, 0]),  # more blocks than the chunks hold
    ],
)
def test_a_group_with_missing_blocks_is_left_out_and_its_slots_named(sizes, indices):
    engine = FaultyEngine()
    worker = TieredWorker(engine, 2)
    gpu = GPULoadStoreSpec(list(range(10, 10 + sum(sizes))), sizes, indices)
    store(worker, 1, gpu, ArenaSpec([7, 5, 6], [2, 1]))
    (call,) = engine.calls
    assert call[2].block_ids.tolist() == [10 + sizes[0], 11 + sizes[0]]
    assert call[2].group_sizes == [0, 2]
    assert call[3].block_ids.tolist() == [6]
    assert call[3].group_chunks == (0, 1)
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: (7, 5)}


def test_a_store_without_any_whole_chunk_never_reaches_the_engine():
    engine = FaultyEngine()
    worker = TieredWorker(engine, 4)
    store(worker, 1, GPULoadStoreSpec([1, 2, 3], [3], [1]), ArenaSpec([9], [1]))
    assert engine.calls == []
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: (9,)}


def test_a_partial_store_that_fails_in_the_engine_distrusts_all_of_it():
    worker = TieredWorker(FaultyEngine(job1="raise"), 2)
    store(worker, 1, GPULoadStoreSpec([1, 2, 3], [1, 2], [0, 0]), ArenaSpec([9, 8], [1, 1]))
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: ()}


def test_a_load_of_a_chunk_that_is_gone_fails_and_never_reaches_the_engine():
    engine = FaultyEngine()
    worker = TieredWorker(engine, 2)
    blocks = GPULoadStoreSpec([1, 2, 3, 4], [4], [0])
    assert worker.submit_load(1, ArenaSpec([3, -1], [2]), blocks)
    assert engine.calls == []
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: ()}


def test_a_store_that_makes_no_sense_is_a_failure():
    worker = TieredWorker(FaultyEngine(), 2)
    store(worker, 1, GPULoadStoreSpec([1, 2], [2], [0]), ArenaSpec([9, 8], [1, 1]))
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: ()}


def test_nothing_of_a_refused_group_is_written_and_the_others_are_complete():
    layers = list(model_kv(2))
    caches = from_layers(layers, [[0, 2], [1]], opaque(layers))
    layout = plan_row(caches, 2, 0, 1)
    arena = PlainArena(4, layout.row_bytes)
    worker = TieredWorker(CpuCopyWorker(caches, layout, arena), 2)
    gpu = GPULoadStoreSpec([1, 2, 3, 4, 5], [3, 2], [0, 0])
    store(worker, 1, gpu, ArenaSpec([0, 1, 3], [2, 1]))
    assert finished(worker) == [1]
    assert worker.take_failed() == {1: (0, 1)}
    rows = arena.array.reshape(4, -1)
    place = layout.places[1]
    pages = rows[3, place.offset : place.offset + 2 * place.page_bytes].reshape(2, -1)
    np.testing.assert_array_equal(pages.view(np.int8), all_bytes(caches)[1][[4, 5]])
    assert not rows[:3].any()
    rows[3, place.offset : place.offset + 2 * place.page_bytes] = 0
    assert not rows.any()


def test_an_arena_spec_survives_pickling_and_knows_its_groups():
    spec = pickle.loads(pickle.dumps(ArenaSpec([5, 6, 9], [2, 0, 1])))
    assert spec.group_chunks == (2, 0, 1)
    assert [slots.tolist() for slots in spec.groups()] == [[5, 6], [], [9]]
    assert spec.chunk_ids.tolist() == [5, 6, 9]


def test_an_arena_spec_whose_groups_do_not_add_up_is_refused():
    with pytest.raises(ValueError, match="add up to 3 chunks, but 2"):
        ArenaSpec([5, 6], [2, 1])


slots = st.lists(st.integers(0, 6), max_size=4).map(tuple)
failures = st.dictionaries(st.integers(0, 3), slots)


@given(failures, failures)
def test_ranks_distrust_together_what_each_of_them_distrusts(ours, theirs):
    merged = TieredWorkerMetadata(failed_jobs=ours).aggregate(
        TieredWorkerMetadata(failed_jobs=theirs)
    )
    assert set(merged.failed_jobs) == set(ours) | set(theirs)
    for job_id, distrusted in merged.failed_jobs.items():
        reports = [side[job_id] for side in (ours, theirs) if job_id in side]
        everything = () in reports
        assert set(distrusted) == (set() if everything else {s for r in reports for s in r})


def test_metadata_extends_and_sums_vllms_own():
    plain = OffloadingWorkerMetadata(completed_jobs={1: 1, 2: 1}, transfer_stats=TransferStats())
    plain.transfer_stats.load.record(100, 0.5)
    ours = TieredWorkerMetadata.extend(plain, {2: (4,)})
    both = pickle.loads(pickle.dumps(ours)).aggregate(plain)
    assert isinstance(both, TieredWorkerMetadata)
    assert both.completed_jobs == {1: 2, 2: 2}
    assert both.transfer_stats.load.bytes == 200
    assert both.failed_jobs == {2: (4,)}


def test_ranks_tell_what_an_adapter_holds_only_where_they_agree():
    first = TieredWorkerMetadata(adapters={1: b"a", 2: b"b", 3: None})
    second = TieredWorkerMetadata(adapters={2: b"other", 3: b"c", 4: b"d"})
    merged = first.aggregate(pickle.loads(pickle.dumps(second)))
    assert merged.adapters == {1: b"a", 2: None, 3: None, 4: b"d"}
    assert first.aggregate(OffloadingWorkerMetadata()).adapters == first.adapters
