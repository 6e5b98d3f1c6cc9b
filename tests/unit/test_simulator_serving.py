"""Replays through the live hierarchy on a virtual clock, and the stacks that are read for them."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvtiers.policies import Policy, TierInfo
from kvtiers.policies.lru import LruPolicy
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.replay import Tally, replay
from kvtiers.simulator.serving import serve
from kvtiers.simulator.stack import StackModel, TierModel, read_stack
from kvtiers.simulator.timeline import Device, Pipe, Timeline, VirtualWorkers
from kvtiers.simulator.trace import Trace, TraceRequest
from kvtiers.tiers import ChunkKey, Namespace
from kvtiers.tiers.base import ReadOutcome
from kvtiers.tiers.workers import Op, OpKind
from kvtiers.tools import cli
from small_traces import chat, trace_of

MIB = 1 << 20
# One chunk takes an engine 16 ms, at 1000 tokens a second.
PREFILL = 1000.0


def lru(tiers: Sequence[TierInfo], clock: Callable[[], float], cost: Callable) -> Policy:
    return LruPolicy(tiers, clock=clock, recompute_seconds=cost)


def stack_of(*tiers: dict, **more: object) -> StackModel:
    return StackModel.model_validate({"tiers": list(tiers), "prefill": PREFILL, **more})


CPU = {"name": "cpu", "capacity": "1"}


def served(trace: Trace, stack: StackModel, score_from: int = 0, **capacities: int) -> Tally:
    return serve(trace, stack, capacities, lru, MIB, score_from)


def talk(requests: int = 60) -> Trace:
    return trace_of(chat(random.Random(1), requests, sessions=4))


def test_one_tier_and_time_enough_hit_what_a_plain_replay_hits() -> None:
    trace = talk()
    plain = replay(trace, lambda tiers, clock: LruPolicy(tiers, clock=clock), 60)
    tally = served(trace, stack_of(CPU), cpu=60)
    assert plain.hit_tokens > 0
    assert tally.hit_tokens == plain.hit_tokens == tally.tiers["cpu"].hit_tokens
    assert (tally.requests, tally.input_tokens) == (plain.requests, plain.input_tokens)
    assert tally.tiers["cpu"].written_bytes == plain.written_chunks * MIB


def test_the_first_token_takes_the_prefill_of_what_was_not_hit() -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 2, 3]])
    tally = served(trace, stack_of({**CPU, "read": 3 * MIB, "latency": 0.5}), cpu=9)
    # Three chunks of 16 tokens; then three chunks from the arena, and one chunk.
    assert tally.first_token == pytest.approx([0.048, 0.5 + 1.0 + 0.016])


def test_who_comes_while_the_engine_computes_waits_for_it() -> None:
    trace = trace_of([[0, 1, 2], [5]])
    same_time = [replace(request, arrival=0.0) for request in trace.requests]
    tally = served(replace(trace, requests=same_time), stack_of(CPU), cpu=9)
    assert tally.first_token == pytest.approx([0.048, 0.064])


DISK = {"name": "disk", "capacity": "1", "latency": 0.001, "read": 1e9, "write": 1e9}


def test_what_the_arena_lost_comes_from_the_tier_below() -> None:
    trace = trace_of([[0, 1], [5, 6], [0, 1]])
    tally = served(trace, stack_of(CPU, DISK), cpu=2, disk=9)
    assert tally.tiers["cpu"].hit_tokens == 0
    assert tally.tiers["disk"].hit_tokens == 32
    assert tally.tiers["disk"].read_bytes == 2 * MIB
    assert tally.tiers["disk"].written_bytes == 4 * MIB
    # Loaded, and its last chunk not computed again.
    assert tally.first_token[2] == pytest.approx(0.001 + 2 * MIB / 1e9, abs=0.03)


def test_a_tier_slower_than_computing_is_not_waited_for() -> None:
    trace = trace_of([[0, 1], [5, 6], [0, 1], [5, 6], [0, 1]])
    slow = {**DISK, "latency": 3.0, "deadline": 60.0}
    tally = served(trace, stack_of(CPU, slow), cpu=2, disk=9)
    assert max(tally.first_token) < 1.0


def test_what_a_device_carries_comes_one_after_the_other_and_a_latency_later() -> None:
    pipe = Pipe(Timeline(), bandwidth=10.0)
    assert pipe.carry(20, latency=1.0) == 3.0
    assert pipe.carry(10, latency=1.0) == 4.0
    assert pipe.carried == 30


NAMESPACE = Namespace("made")


def op_of(kind: OpKind, chunk: int, **more: Any) -> Op:
    """A call for one chunk of a MiB."""
    return Op(kind, [ChunkKey(NAMESPACE, bytes([chunk]))], [memoryview(b"")], **more)


def ended(*ops: Op, threads: int) -> list[tuple[Op, float]]:
    """What comes back when, of a device that moves a chunk a second either way."""
    timeline, back = Timeline(), list[tuple[Op, float]]()
    model = TierModel.model_validate(
        {"name": "disk", "capacity": "9", "read": MIB, "write": MIB, "threads": threads}
    )
    device = Device(model, 9, MIB, timeline)
    workers = VirtualWorkers(device, lambda op: back.append((op, timeline.now)), timeline)
    for op in ops:
        workers.submit(op)
    if ops[-1].request_id == "given up":
        assert workers.cancel(ops[-1])
    timeline.run(lambda: False)
    return back


def test_half_of_the_threads_take_no_stores() -> None:
    stores = [op_of(OpKind.WRITE, chunk) for chunk in range(3)]
    load = op_of(OpKind.READ, 9)
    came = dict(ended(*stores, load, threads=2))
    assert [came[op] for op in (load, *stores)] == [1.0, 1.0, 2.0, 3.0]


def test_a_load_whose_deadline_passes_in_the_queue_takes_no_more_time() -> None:
    loads = [op_of(OpKind.READ, 1, deadline=0.5) for _ in range(3)]
    came = ended(*loads, threads=1)
    assert [seconds for _, seconds in came] == [1.0, 1.0, 1.0]
    assert [op.reads for op, _ in came] == [[ReadOutcome.MISS], *[[ReadOutcome.FAILED]] * 2]


def test_what_is_taken_back_in_the_queue_does_not_come_back() -> None:
    first, second = op_of(OpKind.READ, 1), op_of(OpKind.READ, 2, request_id="given up")
    assert ended(first, second, threads=1) == [(first, 1.0)]


def test_the_engines_own_cache_is_the_nearest_tier() -> None:
    trace = trace_of([[0, 1], [0, 1, 2], [7], [0, 1, 2]])
    tally = served(trace, stack_of({"name": "gpu", "capacity": "1"}, CPU), gpu=3, cpu=9)
    assert tally.tiers["gpu"].hit_tokens == 16 * (2 + 2)
    assert tally.tiers["cpu"].hit_tokens == 16 * 1


def test_what_another_request_left_on_the_gpu_meanwhile_is_hit_there() -> None:
    trace = trace_of([[0, 1], [0, 1]])
    same_time = [replace(request, arrival=0.0) for request in trace.requests]
    stack = stack_of({"name": "gpu", "capacity": "1"}, CPU)
    tally = served(replace(trace, requests=same_time), stack, gpu=9, cpu=9)
    assert tally.tiers["gpu"].hit_tokens == 32


def test_replicas_share_what_is_shared_and_nothing_else() -> None:
    trace = trace_of([[0, 1], [0, 1], [0, 1], [0, 1]])
    alone = served(trace, stack_of(CPU, DISK, replicas=2), cpu=9, disk=9)
    shared = served(trace, stack_of(CPU, {**DISK, "shared": True}, replicas=2), cpu=9, disk=9)
    assert alone.hit_tokens == 2 * 32
    assert shared.hit_tokens == 3 * 32
    assert shared.tiers["disk"].written_bytes == 2 * MIB


def test_a_shared_tier_keeps_its_bound_by_the_policy() -> None:
    prompts = [[10 * k, 10 * k + 1] for k in (0, 1, 2, 0, 3, 0, 1)]
    stack = stack_of(CPU, {**DISK, "shared": True})
    tally = served(trace_of(prompts), stack, cpu=2, disk=6)
    # 0 was used when 3 came, so that 1 went.
    assert tally.tiers["disk"].hit_tokens == 2 * 32


def test_requests_of_a_session_go_to_one_replica() -> None:
    trace = trace_of([[0], [5], [0, 1], [5, 6]])
    named = [replace(r, session=s) for r, s in zip(trace.requests, "abab", strict=True)]
    swapped = [replace(r, session=s) for r, s in zip(trace.requests, "abba", strict=True)]
    stack = stack_of(CPU, replicas=2)
    assert served(replace(trace, requests=named), stack, cpu=9).hit_tokens == 32
    assert served(replace(trace, requests=swapped), stack, cpu=9).hit_tokens == 0


def test_what_comes_before_the_score_warms_up_only() -> None:
    trace = trace_of([[0, 1], [5, 6], [0, 1]])
    tally = served(trace, stack_of(CPU, DISK), score_from=2, cpu=2, disk=9)
    assert (tally.requests, len(tally.first_token), tally.hit_tokens) == (1, 1, 32)
    assert tally.tiers["disk"].written_bytes == 0


def test_chunks_of_the_output_are_there_for_the_next_turn() -> None:
    first = TraceRequest(0, 0.0, 32, 16, (range(2),), (range(2, 3),))
    second = TraceRequest(1, 9.0, 48, 0, (range(3),))
    tally = served(Trace("made", 16, [first, second], 3), stack_of(CPU), cpu=9)
    assert tally.hit_tokens == 48


def test_a_replay_is_the_same_every_time() -> None:
    stack = stack_of(CPU, {**DISK, "shared": True}, replicas=2)
    once, again = (served(talk(40), stack, cpu=20, disk=60) for _ in range(2))
    assert once.hit_tokens > 0
    once.seconds = again.seconds = 0
    assert once == again


# The command, and files ---------------------------------------------------------------


def write_stack(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "stack.yaml"
    file.write_text(text)
    return file


def write_trace(tmp_path: Path, prompts: Sequence[list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * i, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return trace


@pytest.mark.parametrize(("admission", "written"), [("all", 4), ("reused", 2)])
def test_lower_tiers_are_filled_as_the_stack_says(
    tmp_path: Path, admission: str, written: int
) -> None:
    trace = write_trace(tmp_path, [[0, 1], [5, 6], [0, 1], [0, 1]])
    stack = write_stack(
        tmp_path,
        f"chunk_bytes: 1MiB\nadmission: {admission}\ntiers:\n"
        "- {name: cpu, capacity: 2}\n- {name: disk, capacity: 8, read: 5GB/s}\n",
    )
    out = tmp_path / "out.json"
    words = ["simulate", str(trace), "--policies", "lru", "--tiers", str(stack)]
    assert cli.main([*words, "--jobs", "1", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["tiers"]["disk"]["written_bytes"] == written * MIB


def test_the_command_shows_each_tier(tmp_path: Path, capsys) -> None:
    trace = write_trace(tmp_path, [[0, 1], [5, 6], [0, 1], [5, 6]])
    stack = write_stack(
        tmp_path,
        "chunk_bytes: 1MiB\nprefill: 1e4\ntiers:\n"
        "- {name: cpu, capacity: 50%}\n- {name: disk, capacity: 8, read: 5GB/s}\n",
    )
    out = tmp_path / "out.json"
    words = ["simulate", str(trace), "--policies", "min,lru", "--tiers", str(stack)]
    assert cli.main([*words, "--jobs", "1", "--json", str(out)]) == 0
    min_row, lru_row = json.loads(out.read_text())
    assert lru_row["tiers"]["disk"]["token_hit_ratio"] == 0.5
    assert lru_row["first_token_mean"] > 0
    assert lru_row["capacity_chunks"] == 2
    # Nobody counts what leaves a stack.
    assert lru_row["removed_chunks"] is None
    # All tiers together hold everything.
    assert min_row["token_hit_ratio"] == 0.5
    shown = capsys.readouterr().out
    assert [word for word in ("cpu", "first token") if word not in shown] == []
    assert shown.split("disk", 1)[1].splitlines()[0].split()[:2] == ["50.00", "%"]


def test_the_figures_of_four_tiers_fit_a_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("kvtiers.tools.simulate._WIDTH", 80)
    trace = write_trace(tmp_path, [[0, 1], [5, 6], [0, 1], [5, 6]])
    stack = write_stack(
        tmp_path,
        "chunk_bytes: 1MiB\nreplicas: 2\ntiers:\n"
        "- {name: gpu, capacity: 100}\n- {name: cpu, capacity: 100}\n"
        "- {name: ssd, capacity: 8}\n- {name: pool, capacity: 8, shared: true}\n",
    )
    words = ["--policies", "attention-heat,prefix-reuse,min", "--tiers", str(stack)]
    assert cli.main(["simulate", str(trace), *words, "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert [name for name in ("gpu", "cpu", "ssd", "pool") if shown.count(name) != 2] == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tiers: []", "'tiers'"),
        ("tiers: [{name: disk, capacity: 5}]", "the first tier must be cpu"),
        ("tiers: [{name: cpu, capacity: 5}, {name: gpu, capacity: 5}]", "gpu and then cpu"),
        ("tiers: [{name: cpu, capacity: 5}, {name: cpu, capacity: 5}]", "two tiers are named"),
        ("tiers: [{name: cpu, capacity: 5, shared: true}]", "can't be shared"),
        ("tiers: [{name: cpu, capacity: 1.5}]", "write chunks (5000)"),
        ("tiers: [{name: cpu, capacity: 5, red: 5GB/s}]", "'tiers.0.red' is no key of it"),
        ("tiers: [{name: cpu, capacity: 5, read: fast}]", "such as 5GB/s"),
        ("tiers: [{type: cpu, capacity: 5GiB}]", "belongs to an engine's configuration"),
        ("tires: []", "'tires' is no key of it. Did you mean 'tiers'?"),
        ("replicas: 2", "'tiers': Field required"),
        ("- 5", "must be a mapping"),
        ("{", "it is no YAML"),
        ("[" * 5000, "it is no YAML"),
        ("tiers: 2020-99-99", "it is no YAML"),
        ('tiers: [{name: "", capacity: 5}]', "'tiers.0.name'"),
        ("tiers: [{name: cpu, capacity: 5, latency: .inf}]", "'tiers.0.latency'"),
        ("tiers: [{name: cpu, capacity: 5, deadline: .inf}]", "'tiers.0.deadline'"),
        ("tiers: [{name: cpu, capacity: 5, read: .inf}]", "'tiers.0.read'"),
        ("tiers: [{name: cpu, capacity: 5, write: 0}]", "'tiers.0.write'"),
        ("tiers: [{name: cpu, capacity: 5, threads: 10000000}]", "'tiers.0.threads'"),
        ("replicas: 10000000\ntiers: [{name: cpu, capacity: 5}]", "'replicas'"),
        ("prefill: .inf\ntiers: [{name: cpu, capacity: 5}]", "'prefill'"),
    ],
)
def test_a_stack_that_cannot_be_is_told_with_its_file(tmp_path: Path, text: str, told: str) -> None:
    file = write_stack(tmp_path, text)
    with pytest.raises(SimulatorError) as caught:
        read_stack(file)
    assert told in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_stack_is_told() -> None:
    with pytest.raises(SimulatorError, match="can't be read"):
        read_stack("/no/such/stack.yaml")


def test_chunks_of_unknown_size_take_no_known_time(tmp_path: Path, capsys) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n')
    stack = write_stack(tmp_path, "tiers: [{name: cpu, capacity: 5}]")
    assert cli.main(["simulate", str(trace), "--tiers", str(stack)]) == 2
    assert "--chunk-bytes" in capsys.readouterr().err
