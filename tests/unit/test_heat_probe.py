"""The probe's figures against attention computed by hand, over caches as vLLM fills them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector.heat import (
    NO_COST,
    NO_REPORT,
    NO_STEP,
    HeatCost,
    HeatJob,
    HeatSettings,
    HeatStep,
    layers_at,
)
from kvtiers.connector.heat_clock import HeatClock
from kvtiers.connector.heat_mass import attention_mass
from kvtiers.connector.heat_probe import HeatProbe
from kvtiers.connector.heat_views import amx_tiles, column_major, keys_of, token_by_token
from vllm import _custom_ops as ops

HEADS, GROUP, SIZE, BLOCK = 2, 3, 32, 32
SCALE = SIZE**-0.5


def by_hand(query: torch.Tensor, keys: torch.Tensor, chunk: int) -> torch.Tensor:
    """Mean attention per chunk: query ``[n, heads * group, size]`` are the last of ``keys``."""
    tokens, queries = len(keys), len(query)
    chunks = -(-tokens // chunk)
    mass = torch.zeros(keys.shape[1], chunks)
    visible = torch.zeros(chunks)
    for i in range(queries):
        position = tokens - queries + i
        for c in range(chunks):
            visible[c] += position >= c * chunk
        for head in range(query.shape[1]):
            kv = head // (query.shape[1] // keys.shape[1])
            logits = keys[: position + 1, kv] @ query[i, head] * SCALE
            for at, share in enumerate(torch.softmax(logits, 0).tolist()):
                mass[kv, at // chunk] += share
    return mass / (visible * (query.shape[1] // keys.shape[1]))


def draw(tokens: int, heads: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, heads, SIZE, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 70), window=st.integers(1, 70), chunk=st.integers(1, 40))
def test_mass_is_the_attention_of_the_window_per_chunk(tokens, window, chunk) -> None:
    window = min(window, tokens)
    query, keys = draw(window, HEADS * GROUP), draw(tokens, HEADS, 1)
    mass = attention_mass(query, keys.permute(1, 2, 0), tokens - window, SCALE, chunk)
    torch.testing.assert_close(mass, by_hand(query, keys, chunk))


def test_a_window_in_parts_measures_the_same(monkeypatch) -> None:
    query, keys = draw(20, HEADS * GROUP), draw(64, HEADS, 1).permute(1, 2, 0)
    whole = attention_mass(query, keys, 44, SCALE, 16)
    monkeypatch.setattr("kvtiers.connector.heat_mass._MOST_LOGITS", 3 * HEADS * GROUP * 64)
    torch.testing.assert_close(attention_mass(query, keys, 44, SCALE, 16), whole)


def test_a_soft_cap_flattens_attention() -> None:
    query, keys = 30 * draw(4, HEADS * GROUP), draw(64, HEADS, 1).permute(1, 2, 0)
    sharp = attention_mass(query, keys, 60, SCALE, 8)
    capped = attention_mass(query, keys, 60, SCALE, 8, softcap=0.1)
    assert capped.max() < 1.5 / 8 < sharp.max()


@pytest.mark.parametrize(
    ("kernel", "dtype", "view"),
    [
        ("vec", torch.float32, column_major),
        ("vec16", torch.bfloat16, column_major),
        ("amx", torch.bfloat16, amx_tiles),
    ],
)
def test_keys_come_back_as_vllms_kernel_stored_them(kernel, dtype, view) -> None:
    keys = draw(80, HEADS).to(dtype)
    cache, blocks = stored(keys, [4, 1, 3], kernel)
    got = view(cache, torch.tensor(blocks), SIZE)
    torch.testing.assert_close(got[:, :, :80], keys.permute(1, 2, 0), rtol=0, atol=0)
    assert keys_of("CPU_ATTN", kernel) is view


def test_keys_come_back_from_a_cache_of_keys_and_values_token_by_token() -> None:
    keys = draw(80, HEADS)
    cache = torch.zeros(6, HEADS, BLOCK, 2 * SIZE)
    for token, key in enumerate(keys):
        cache[[4, 1, 3][token // BLOCK], :, token % BLOCK, :SIZE] = key
    got = token_by_token(cache, torch.tensor([4, 1, 3]), SIZE)
    assert torch.equal(got[:, :, :80], keys.permute(1, 2, 0))


def stored(keys: torch.Tensor, blocks: list[int], kernel: str) -> tuple[torch.Tensor, list[int]]:
    """A cache of six blocks into which vLLM's kernel wrote the keys."""
    cache = torch.zeros(6, HEADS, BLOCK, 2 * SIZE, dtype=keys.dtype)
    slots = torch.tensor([blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(len(keys))])
    write(cache, keys, slots, kernel)
    return cache, blocks


def write(cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, kernel: str) -> None:
    halves = cache.view(len(cache), HEADS, 2 * BLOCK, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys, keys + 1, *halves, slots, kernel, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )


# The probe over layers that stand in for a model's ---------------------------


class Impl:
    def __init__(self, **facts: Any) -> None:
        self.scale = SCALE
        vars(self).update(facts)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None):
        return output


@dataclass
class Layer:
    """What the probe looks at in vLLM's ``Attention``."""

    backend: str = "CPU_ATTN"
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    head_size: int = SIZE
    isa: str = "vec"
    impl: Any = field(default_factory=Impl)

    @property
    def attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)


def job(**changes: Any) -> HeatJob:
    facts = {
        "number": 7,
        "turn": 0,
        "tokens": 70,
        "queries": 5,
        "last_block": 3,
        "block_tokens": BLOCK,
        "chunk_tokens": 16,
    }
    return HeatJob(**(facts | changes))


def step_of(*jobs: HeatJob, prefill: float = 1.0) -> HeatStep:
    return HeatStep(jobs, prefill)


class Step:
    """A step with three rows: a decode, the end of a prompt of 70 tokens, a prompt of 40."""

    blocks = ((0, 5, 0), (4, 1, 3), (2, 4, 0))
    lengths = (33, 70, 40)
    computed = (1, 10, 40)

    def __init__(self) -> None:
        self.keys = draw(70, HEADS, 1)
        self.cache, _ = stored(self.keys, [4, 1, 3], "vec")
        self.query = draw(sum(self.computed), HEADS * GROUP, 2)
        self.key = draw(sum(self.computed), HEADS, 3)
        self.key[1:11] = self.keys[60:]
        self.metadata = SimpleNamespace(
            seq_lens=torch.tensor(self.lengths),
            block_table=torch.tensor(self.blocks),
            query_start_loc=torch.tensor([0, 1, 11, 51]),
        )

    def run(self, layer: Layer) -> Any:
        return layer.impl.forward(
            layer, self.query, self.key, self.key, self.cache, self.metadata, output="output"
        )


def probe_over(*layers: Layer, settings: HeatSettings | None = None) -> HeatProbe:
    named = {f"model.layers.{i}.self_attn.attn": layer for i, layer in enumerate(layers)}
    return HeatProbe(settings or HeatSettings(), named, rank=1, device="cpu")


def test_the_end_of_a_prompt_in_a_batch_is_measured_through_its_block_table() -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    assert step.run(layer) == "output"
    ((key, mass),) = probe.report().readings.items()
    assert key == (7, 0, 1)
    expected = by_hand(step.query[6:11], step.keys, 16)
    torch.testing.assert_close(torch.from_numpy(mass), expected)
    assert probe.report().readings == {}


def test_a_layers_soft_cap_is_measured_with() -> None:
    step, layer = Step(), Layer(impl=Impl(logits_soft_cap=0.5))
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    step.run(layer)
    ((_, mass),) = probe.report().readings.items()
    keys = step.keys.permute(1, 2, 0)
    expected = attention_mass(step.query[6:11], keys, 65, SCALE, 16, softcap=0.5)
    torch.testing.assert_close(torch.from_numpy(mass), expected)


def test_heads_measured_one_at_a_time_give_the_same(monkeypatch) -> None:
    monkeypatch.setattr("kvtiers.connector.heat_probe._MOST_KEYS", 1)
    test_the_end_of_a_prompt_in_a_batch_is_measured_through_its_block_table()


def test_blocks_of_the_kernel_may_be_parts_of_the_managers() -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    # The manager's block 1 is the kernel's 2 and 3; the last token is in the first of its half.
    probe.begin(step_of(job(last_block=1, block_tokens=2 * BLOCK)))
    step.metadata.block_table = torch.tensor(((0, 5, 0), (4, 1, 2), (2, 4, 0)))
    step.cache, _ = stored(step.keys, [4, 1, 2], "vec")
    step.run(layer)
    ((_, mass),) = probe.report().readings.items()
    torch.testing.assert_close(torch.from_numpy(mass), by_hand(step.query[6:11], step.keys, 16))


@pytest.mark.parametrize("changes", [{"last_block": 2}, {"tokens": 69}])
def test_a_request_that_is_not_in_the_batch_gives_nothing(changes) -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    step.run(layer)  # from here on the layer is trusted
    probe.report()
    probe.begin(step_of(job(**changes)))
    step.run(layer)
    assert probe.report().readings == {}


def test_without_a_job_and_without_metadata_nothing_is_measured() -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    step.metadata, metadata = None, step.metadata
    step.run(layer)
    probe.begin(step_of())
    step.metadata = metadata
    step.run(layer)
    assert probe.report().readings == {}


def test_layers_take_turns_until_all_have_been_measured() -> None:
    layers = [Layer() for _ in range(7)]
    step, probe = Step(), probe_over(*layers, settings=HeatSettings(layers=2))
    seen = []
    for turn in range(4):
        probe.begin(step_of(job(turn=turn)))
        for layer in layers:
            step.run(layer)
        seen.append([number for _, number, _ in probe.report().readings])
    assert seen == [[0, 4], [1, 5], [2, 6], [3]]


def test_a_prompt_is_told_once_all_of_it_has_arrived() -> None:
    layers = [Layer(), Layer()]
    step, probe = Step(), probe_over(*layers)
    probe.begin(step_of(job()))
    for layer in layers:
        step.run(layer)
    arrived = False
    probe._measured[1] = replace(probe._measured[1], ready=lambda: arrived)
    assert probe.report().readings == {}
    arrived = True
    assert probe.report().readings.keys() == {(7, 0, 1), (7, 1, 1)}
    assert probe.report().readings == {}


class Ticks:
    """A clock of the host: each look at it takes a second, and of the processor a quarter."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> tuple[float, float]:
        self.looks += 1
        return float(self.looks), self.looks / 4

    def sleep(self, seconds: int) -> None:
        self.looks += seconds


def timed(probe: HeatProbe) -> Ticks:
    """The probe's clock from here on."""
    ticks = Ticks()
    probe._clock = HeatClock("cpu", ticks)
    return ticks


def cost(probe_s: float, prefill_s: float = 0.0) -> HeatCost:
    """By both clocks, where the processor's is ``Ticks``'."""
    return HeatCost(probe_s, prefill_s, probe_s / 4, prefill_s / 4)


def test_a_step_costs_its_share_of_prompts_and_all_that_the_probe_does_in_it() -> None:
    layers = [Layer(), Layer()]
    step, probe = Step(), probe_over(*layers)
    timed(probe)
    probe.begin(step_of(job(), prefill=0.5))  # from 1 to 3, the step from 2
    for layer in layers:
        step.run(layer)  # 4 to 5 and 6 to 7
    # From 8 on it is told, and the step ends at 9.
    assert probe.report().cost == cost(2 + 1 + 1, 0.5 * (9 - 2))
    assert not probe.report(), "it is told once"


def test_what_a_report_takes_is_in_the_next() -> None:
    probe = probe_over(Layer())
    timed(probe)
    probe.begin(step_of())  # 1 to 3
    assert probe.report().cost == cost(2, 5 - 2)  # 4 to 6
    probe.begin(step_of())  # 7 to 9
    assert probe.report().cost == cost((6 - 4) + (9 - 7), 11 - 8)


def test_getting_to_know_the_layers_is_in_the_cost(monkeypatch) -> None:
    probe = probe_over(Layer())
    ticks = timed(probe)
    known = probe._known

    def slowly() -> Any:
        ticks.sleep(100)
        return known()

    monkeypatch.setattr(probe, "_known", slowly)
    probe.begin(step_of(job()))
    assert probe.report().cost.probe_s == 102
    probe.begin(step_of(job()))
    assert probe.report().cost.probe_s < 10, "they are known by now"


def test_wrapping_the_layers_of_a_turn_is_in_the_cost(monkeypatch) -> None:
    layers = [Layer() for _ in range(3)]
    probe = probe_over(*layers)
    ticks = timed(probe)
    wrap = probe._wrap

    def slowly(layer: Any) -> None:
        ticks.sleep(100)
        wrap(layer)

    monkeypatch.setattr(probe, "_wrap", slowly)
    probe.begin(step_of(job()))
    assert probe.report().cost.probe_s == 302


def test_bringing_what_was_measured_together_is_in_the_cost(monkeypatch) -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    ticks = timed(probe)
    probe.begin(step_of(job()))
    step.run(layer)

    def slowly() -> bool:
        ticks.sleep(100)
        return True

    probe._measured[0] = replace(probe._measured[0], ready=slowly)
    first = probe.report().cost
    probe.begin(step_of())
    assert first.probe_s < 100 < probe.report().cost.probe_s


def test_the_way_of_what_to_measure_is_in_the_cost() -> None:
    probe = probe_over(Layer())
    timed(probe)
    probe.begin(HeatStep((), 1.0, post_s=100.0))
    assert probe.report().cost == HeatCost(102.0, 3.0, 100.5, 0.75)


def test_a_step_of_decodes_is_nobodys_prompt_and_looks_at_no_clock() -> None:
    probe = probe_over(Layer())
    ticks = timed(probe)
    probe.begin(NO_STEP)
    assert probe.report() is NO_REPORT
    assert ticks.looks == 0


def test_a_layer_is_called_through_the_probe_only_when_it_is_its_turn() -> None:
    layers = [Layer(), Layer(), Layer()]
    layers[2].impl.forward = own = layers[2].impl.forward  # as if somebody else had put it there
    step, probe = Step(), probe_over(*layers)

    def wrapped() -> list[bool]:
        return [vars(layer.impl).get("forward") not in (None, own) for layer in layers]

    assert wrapped() == [False, False, False]
    probe.begin(step_of(job()))
    assert wrapped() == [True, True, True]
    step.run(layers[0])
    assert wrapped() == [False, True, True], "it was measured"
    step.run(layers[2])
    probe.report()
    assert wrapped() == [False, False, False], "what was not called is left as it was"
    assert layers[2].impl.forward is own


def test_who_wraps_a_layer_that_is_measured_keeps_it_wrapped() -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    ours, calls = layer.impl.forward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    layer.impl.forward = theirs
    step.run(layer)
    assert len(probe.report().readings) == 1
    assert step.run(layer) == "output"
    assert layer.impl.forward is theirs
    assert len(calls) == 2


def test_a_device_tells_what_was_spent_once_it_is_there(monkeypatch) -> None:
    class Event:
        """Of a device that is asked by hand how far it is."""

        reached, recorded = 0, 0

        def __init__(self, device: str, *, enable_timing: bool) -> None:
            assert (device, enable_timing) == ("cuda", True)

        def record(self) -> None:
            Event.recorded += 1
            self.at = Event.recorded

        def query(self) -> bool:
            return self.at <= Event.reached

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1000.0

    monkeypatch.setattr(torch, "Event", Event)
    clock = HeatClock("cuda", Ticks())
    begin = clock.mark()
    clock.probed(clock.mark())  # events 2 and 3
    clock.computed(begin, 0.5)  # 1 to 4
    assert clock.take() == NO_COST
    assert clock.waits
    Event.reached = 3
    # A device's time is its processor's.
    assert clock.take() == HeatCost(probe_s=1.0, probe_cpu_s=1.0)
    Event.reached = 4
    assert clock.take() == HeatCost(prefill_s=1.5, prefill_cpu_s=1.5)
    assert clock.take() == NO_COST
    assert not clock.waits
    clock.prepared(clock.now())
    assert clock.take() == cost(1), "the host's is by its own"


def test_little_is_measured_by_one_thread_and_much_by_all(monkeypatch) -> None:
    usual = torch.get_num_threads()
    seen = []

    def mass(*_: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.zeros(HEADS, 5)

    monkeypatch.setattr("kvtiers.connector.heat_probe.attention_mass", mass)
    torch.set_num_threads(3)
    # As vLLM does once it has bound threads to cores.
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    try:
        logits = 5 * 70 * HEADS * GROUP
        for alone in (logits, logits - 1):
            monkeypatch.setattr("kvtiers.connector.heat_probe._ALONE", alone)
            step, layer = Step(), Layer()
            probe = probe_over(layer)
            probe.begin(step_of(job()))
            step.run(layer)
            assert torch.get_num_threads() == 3, "the model has its own back"
    finally:
        torch._C.set_num_threads(usual)
    assert seen == [1, 3]


@settings(max_examples=50, deadline=None)
@given(wanted=st.integers(1, 90), count=st.integers(1, 90))
def test_a_round_of_turns_has_every_layer_once(wanted, count) -> None:
    turns = [layers_at(turn, wanted, count) for turn in range(-(-count // wanted))]
    assert sorted(index for turn in turns for index in turn) == list(range(count))
    assert max(map(len, turns)) <= wanted


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Layer(backend="FLASHINFER", isa=""), "FLASHINFER"),
        (Layer(isa="neon"), r"CPU_ATTN's KV cache is not known \(neon\)"),
        (Layer(kv_cache_dtype="fp8_e4m3"), "quantised"),
        (Layer(sliding_window=64), "sliding window"),
        (Layer(impl=Impl(alibi_slopes=[1.0])), "ALiBi"),
        (Layer(impl=Impl(sinks=[1.0])), "learned sinks"),
        (Layer(impl=Impl(dcp_world_size=2)), "decode context parallelism"),
    ],
)
def test_what_cannot_be_measured_is_told_once_and_left_alone(layer, why, caplog) -> None:
    probe, step = probe_over(layer), Step()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            probe.begin(step_of(job()))
            assert step.run(layer) == "output"
    (record,) = caplog.records
    assert "Attention heat is not measured" in record.getMessage()
    assert re.search(why, record.getMessage())
    assert probe.report().readings == {}


def test_a_cache_with_other_bytes_than_were_stored_turns_the_probe_off(caplog) -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    step.key = step.key + 1
    probe.begin(step_of(job()))
    with caplog.at_level(logging.WARNING):
        step.run(layer)
    assert "CPU_ATTN is not arranged as kvtiers knows it" in caplog.text
    assert probe.report().readings == {}


def test_a_failure_of_the_measurement_never_reaches_the_engine(caplog) -> None:
    step, layer = Step(), Layer()
    probe = probe_over(layer)
    step.metadata.block_table = "not a table"
    probe.begin(step_of(job()))
    with caplog.at_level(logging.WARNING):
        assert step.run(layer) == "output"
    assert "measuring layer 0 failed" in caplog.text
    probe.begin(step_of(job()))
    assert probe.report().readings == {}


def test_nor_does_one_of_what_comes_before_it_or_after(caplog) -> None:
    step, layer = Step(), Layer()
    odd = SimpleNamespace()
    probe = HeatProbe(HeatSettings(), {"no number": odd}, rank=0, device="cpu")
    with caplog.at_level(logging.WARNING):
        probe.begin(step_of(job()))
        assert probe.report().readings == {}
    assert "preparing it failed" in caplog.text
    caplog.clear()
    probe = probe_over(layer)
    probe.begin(step_of(job()))
    step.run(layer)
    probe._arrived = lambda: 1 / 0  # type: ignore[method-assign,return-value]
    with caplog.at_level(logging.WARNING):
        assert probe.report() is NO_REPORT
    assert "reading what was measured failed" in caplog.text
    probe.begin(step_of(job()))
    assert probe.report() == NO_REPORT
    assert step.run(layer) == "output"


def test_a_rank_without_such_layers_says_so(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        probe_over().begin(step_of(job()))
    assert "no layer of this rank has full attention" in caplog.text
