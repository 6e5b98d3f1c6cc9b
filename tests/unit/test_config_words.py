"""The configuration's words that mean something to the hierarchy: what each does, and refuses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, key, prefix
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.connector.compat import gpu_fullness
from kvtiers.connector.config import check_max_tokens, load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.store_gate import StoreGate
from kvtiers.policies import PolicyRequest, Run
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ChunkKey, Namespace, ReadOutcome, TierConfig, TierConfigError
from kvtiers.tiers.base import WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.direct_io import transfer_in, transfer_out
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.host_memory import available_bytes
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.workers import OpKind
from pydantic import ValidationError
from vllm.v1.kv_offload.base import OffloadPolicy, ReqContext, make_offload_key

MIB = 1 << 20
PAYLOAD = 64 * 1024
WHERE = "(from kv_connector_extra_config)"


def problem(**extra: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load(extra, {})
    (only,) = raised.value.problems
    return only


def lower(**options: Any) -> list[Any]:
    """A cpu tier and a filesystem tier with these options."""
    return ["cpu", {"type": "fs", **options}]


# What is refused, and how ---------------------------------------------------


@pytest.mark.parametrize("word", ["offload_threshold", "warm_cache_ratio"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((value, repr(value)) for value in (-0.1, 1.5, "20", "120%", "some")),
        (True, "true"),
        ([0.2], "a list of 1"),
    ],
)
def test_a_share_that_is_none(word: str, value: object, shown: str) -> None:
    text = problem(**{word: value})
    assert text.startswith(
        f"{word} is {shown} {WHERE}: it must be a share from 0 to 1, such as 0.2 or 20%."
    )
    assert " It is the share of " in text


@pytest.mark.parametrize("value", [0, 1, 0.96, "0%"])
def test_an_arena_of_nothing_or_of_everything_is_refused(value: object) -> None:
    assert "above 0 and at most 0.95" in problem(warm_cache_ratio=value)


@pytest.mark.parametrize(
    ("word", "value", "least"), [("max_tokens", 0, 1), ("prefetch_window", -1, 0)]
)
def test_a_number_of_tokens_that_is_too_low(word: str, value: int, least: int) -> None:
    text = problem(**{word: value})
    assert text.startswith(f"{word} is {value} {WHERE}: it must be {least} or more.")
    assert " without limit if not set" in text


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("headroom", 1, "it must be below 1: a tier that is kept free holds nothing."),
        ("headroom", "lots", "it must be a share from 0 to 1, such as 0.2 or 20%."),
        ("block_size", 512, "it must be a power of two from 4KiB to 16MiB."),
        ("block_size", "12KiB", "it must be a power of two from 4KiB to 16MiB."),
        ("block_size", "32MiB", "it must be a power of two from 4KiB to 16MiB."),
        ("buffer", "a lot", "it must be a size, such as 4KiB, 1MiB or 65536, or 'auto'."),
        ("buffer", 0, "it must be a size, such as 4KiB, 1MiB or 65536, or 'auto'."),
        ("buffer", 4.5, "it must be a size, such as 4KiB, 1MiB or 65536, or 'auto'."),
    ],
)
def test_an_option_of_storage_that_cannot_be(word: str, value: object, says: str) -> None:
    assert problem(tiers=lower(**{word: value})) == f"tiers[1].{word} is {value!r} {WHERE}: {says}"


def test_a_buffer_is_whole_blocks() -> None:
    assert problem(tiers=lower(block_size="64KiB", buffer="96KiB")) == (
        f"tiers[1] {WHERE}: buffer is 98304, which is no multiple of block_size, which is 65536. "
        "Set buffer to 131072, or block_size to less."
    )


def test_a_block_larger_than_a_chunk_is_refused_where_chunks_are_known(tmp_path: Path) -> None:
    config = FsTier.Config(path=tmp_path, block_size=PAYLOAD * 2, buffer=PAYLOAD * 2)
    with pytest.raises(TierConfigError, match=r"'block_size' of 131072 bytes .* is 65536\."):
        FsTier(config, PAYLOAD)


def test_the_cpu_tier_has_no_headroom() -> None:
    text = problem(tiers=[{"type": "cpu", "headroom": 0.2}])
    assert text.startswith(f"tiers[0].headroom is 0.2 {WHERE}: the cpu tier keeps no room free")
    assert "tiers[0].headroom" not in load({}, {}).origins


def test_a_longest_prefix_below_one_chunk_is_refused_where_chunks_are_known() -> None:
    config = load({"max_tokens": 255}, {}).config
    check_max_tokens(config, 255)
    with pytest.raises(ConfigError, match="255, which is below one chunk of 256 tokens"):
        check_max_tokens(config, 256)
    check_max_tokens(load({}, {}).config, 1 << 40)


def test_a_prefix_below_a_chunk_of_known_size_needs_no_server_to_be_refused() -> None:
    assert "below one chunk of 256 tokens" in problem(max_tokens=255, chunk_size=256)


@pytest.mark.parametrize(
    ("path", "written", "meant"),
    [("s3://kv", "endpoint", "endpoint_url"), ("s3a://kv/x", "secrt", "secret")],
)
def test_a_misspelt_option_of_s3_is_told(path: str, written: str, meant: str) -> None:
    text = problem(tiers=lower(path=path, storage_options={written: "swordfish"}))
    assert text == (
        f"tiers[1] {WHERE}: 'storage_options' has '{written}'. Did you mean '{meant}'? Correct it."
    )


def test_options_that_only_a_stores_client_knows_are_left_to_it() -> None:
    options = {"endpoint_url": "http://h", "session_vars": {}, "client_kwargs": {}}
    load({"tiers": lower(path="s3://kv", storage_options=options)}, {})
    load({"tiers": lower(path="memory://kv", storage_options={"endpoint": "h"})}, {})


# Words at the wrong level ---------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [("headroom", "20%"), ("deadline", 3), ("capacity", "8GiB"), ("path", "/kv"), ("buffer", 4096)],
)
def test_a_tiers_option_at_the_top_is_told_where_it_belongs(word: str, value: object) -> None:
    assert problem(**{word: value}) == (
        f"{word} {WHERE} sets nothing there: it is an option of a tier. Write it into the entry of "
        f"the tier it is for, such as {{type: fs, {word}: {value}}} in 'tiers'."
    )


@pytest.mark.parametrize(
    "word", ["chunk_size", "max_tokens", "offload_threshold", "warm_cache_ratio", "prefetch_window"]
)
def test_a_key_of_its_own_inside_a_tier_is_told_where_it_belongs(word: str) -> None:
    assert problem(tiers=lower(**{word: 1})) == (
        f"tiers[1].{word} {WHERE} sets nothing there: it is a key of its own, for all tiers. Write "
        "it beside 'tiers', outside of the entry."
    )


def test_a_word_that_is_nobodys_is_unknown_as_ever() -> None:
    assert "Did you mean 'headroom'?" in problem(tiers=lower(headrom=0.1))
    assert "Did you mean 'max_tokens'?" in problem(max_token=1)


def test_a_block_size_at_the_top_may_be_either_of_two() -> None:
    text = problem(block_size=4096)
    assert "'chunk_size'" in text
    assert "'block_size' of an fs tier" in text


# warm_cache_ratio -----------------------------------------------------------


def test_the_cpu_tier_takes_its_ratio_of_free_memory() -> None:
    loaded = load({"tiers": ["cpu"], "warm_cache_ratio": "30%"}, {})
    (cpu,) = loaded.config.tier_configs(CHUNK)
    assert cpu.capacity == pytest.approx(0.3 * available_bytes(), rel=0.05)  # type: ignore[attr-defined]
    assert loaded.origins["tiers[0].capacity"] == "kv_connector_extra_config"


def test_half_of_free_memory_is_what_counts_without_a_word() -> None:
    config = load({}, {}).config
    assert config.warm_cache_ratio == 0.5
    assert str(config.tiers[0].capacity) == "50%"


def test_a_capacity_leaves_the_ratio_without_meaning() -> None:
    config = load({"tiers": [{"type": "cpu", "capacity": "1GiB"}]}, {}).config
    assert config.warm_cache_ratio is None


def test_only_one_of_the_two_says_how_large_the_cpu_tier_is() -> None:
    tiers = [{"type": "cpu", "capacity": "1GiB"}]
    assert problem(tiers=tiers, warm_cache_ratio=0.3) == (
        f"tiers[0].capacity is '1GiB' {WHERE}: warm_cache_ratio is 0.3 {WHERE}, and both say how "
        "much memory the cpu tier takes. Keep one of them."
    )


# headroom -------------------------------------------------------------------


def full_tier(capacity: int, headroom: float, stored: int) -> tuple[Stack, DictTier]:
    """A tier of so many chunks, after as many as ``stored`` were offered one by one."""
    tier = DictTier(capacity * CHUNK, headroom=headroom)
    stack = Stack(64, {"disk": tier})
    for number in range(stored):
        stack.store(prefix(f"p{number}", 1))
        stack.settle()
    return stack, tier


@pytest.mark.parametrize(
    ("headroom", "holds"),
    # Evicted above 1 - headroom / 2, down to 1 - headroom, of 20 chunks; 24 are offered.
    [(0.0, 19), (0.1, 18), (0.2, 18), (0.5, 12), (0.9, 4)],
)
def test_a_tier_keeps_its_own_share_free(headroom: float, holds: int) -> None:
    stack, tier = full_tier(20, headroom, 24)
    assert len(tier.chunks) == holds
    newest = prefix("p23", 1).chunks[0]
    assert newest in {k.hash for k in tier.chunks}
    assert stack.counts()["disk"]["evictions"] == 24 - holds


@pytest.mark.parametrize("headroom", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("capacity", [2, 3, 5])
def test_a_small_tier_never_gets_stuck(capacity: int, headroom: float) -> None:
    """Where half of the headroom is less than a chunk, room for one is kept all the same."""
    _, tier = full_tier(capacity, headroom, 12)
    assert prefix("p11", 1).chunks[0] in {k.hash for k in tier.chunks}


def test_a_tier_with_a_part_of_a_chunk_to_spare_never_gets_stuck() -> None:
    tier = DictTier(int(3.9 * CHUNK))
    stack = Stack(64, {"disk": tier})
    for number in range(8):
        stack.store(prefix(f"p{number}", 1))
        stack.settle()
    assert prefix("p7", 1).chunks[0] in {k.hash for k in tier.chunks}


def test_headroom_is_a_share_in_both_spellings() -> None:
    assert TierConfig(type="any").headroom == 0.2
    assert TierConfig(type="any", headroom="35%").headroom == 0.35
    with pytest.raises(ValidationError):
        TierConfig(type="any", headroom="35")


# prefetch_window ------------------------------------------------------------


class Foreseeing(LruPolicy):
    """Expects one prefix after each request, and another at any time."""

    after = prefix("after", 4)
    soon = prefix("soon", 4)

    def prefetch(self, request: PolicyRequest) -> Iterable[Run]:
        return (self.after,)

    def anticipate(self) -> Iterable[Run]:
        return (self.soon,)


def waiting(window: int | None, slots: int = 32, policy: Any = LruPolicy) -> Stack:
    """A stack whose tier holds prefixes of four chunks, with a window of so many."""
    tier = DictTier()
    for name in ("p0", "p1", "p2", "after", "soon"):
        tier.put(prefix(name, 4))
    return Stack(slots, {"disk": tier}, policy, None if window is None else {0: window})


def promoted(stack: Stack, name: str) -> int:
    """How many chunks of a prefix the arena holds."""
    return len(stack.ready() & set(prefix(name, 4).chunks))


@pytest.mark.parametrize(("window", "early"), [(None, 4), (0, 0), (1, 1), (3, 3), (9, 4)])
def test_only_the_window_is_promoted_before_the_engine_looks(
    window: int | None, early: int
) -> None:
    stack = waiting(window)
    stack.begin("r", prefix("p0", 4))
    stack.settle()
    assert promoted(stack, "p0") == early


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_rest_is_promoted_when_the_engine_looks(window: int) -> None:
    stack = waiting(window)
    run = prefix("p0", 4)
    stack.begin("r", run)
    stack.settle()
    assert stack.h.waits("r"), "its rest is wanted at once, not looked up chunk by chunk"
    stack.settle()
    assert not stack.h.waits("r")
    assert stack.look("r", run) == [Lookup.HIT] * 4
    assert -1 not in stack.load("r", run)
    assert stack.workers["disk"].count(OpKind.READ) <= 2 + 2


def test_an_engine_that_looks_before_the_tiers_have_answered_loses_nothing() -> None:
    stack = waiting(1)
    stack.begin("r", prefix("p0", 4))
    assert stack.h.waits("r")
    stack.settle()
    assert promoted(stack, "p0") == 4


def test_what_waits_in_the_queue_holds_nothing() -> None:
    """Else a request whose turn it is would wait for those behind it."""
    stack = waiting(2, slots=8)
    stack.begin("behind", prefix("p1", 4))
    stack.begin("later", prefix("p2", 4))
    stack.settle()
    assert stack.h.pinned() == 0
    for turn in ("behind", "later"):
        stack.h.waits(turn)
        stack.settle()
        assert not stack.h.waits(turn)


def test_the_queue_fills_half_of_the_arena_at_most() -> None:
    """Else what comes for the last request would push out what came for the first."""
    stack = waiting(4, slots=8)
    for name in ("p0", "p1", "p2"):
        stack.begin(name, prefix(name, 4))
        stack.settle()
    assert [promoted(stack, name) for name in ("p0", "p1", "p2")] == [4, 0, 0]
    stack.h.end("p0")
    stack.begin("again", prefix("p2", 4))
    stack.settle()
    assert promoted(stack, "p2") == 4


@pytest.mark.parametrize(("window", "early"), [(None, 4), (0, 0), (2, 2)])
def test_what_a_policy_foresees_is_bounded_too(window: int | None, early: int) -> None:
    stack = waiting(window, policy=Foreseeing)
    stack.settle()
    stack.begin("r", prefix("none", 1))
    stack.settle()
    assert promoted(stack, "after") == early
    assert promoted(stack, "soon") == 0
    # Asked about once a second.
    stack.clock.now += 2.0
    stack.settle()
    assert promoted(stack, "soon") == early


# offload_threshold and max_tokens -------------------------------------------


class Gpu:
    """vLLM's block pool, as far as fullness goes: a hundred blocks beside its own."""

    num_gpu_blocks = 101

    def __init__(self) -> None:
        self.cached_block_hash_to_block: dict[int, object] = {}
        self.used = 0

    def get_usage(self) -> float:
        return self.used / 100

    def cache(self, blocks: int) -> None:
        self.cached_block_hash_to_block = dict.fromkeys(range(blocks))

    def __call__(self) -> float:
        return gpu_fullness(self)


def context(name: str, run: Run, tokens: int = 128) -> ReqContext:
    made = ReqContext(name)
    for index, chunk in enumerate(offload_keys(run)):
        made.set_offload_key_position(chunk, (index + 1) * tokens)
    return made


def offload_keys(run: Run) -> list[Any]:
    return [make_offload_key(k, run.group) for k in run.chunks if isinstance(k, bytes)]


def gate(threshold: float = 0.0, max_tokens: int | None = None) -> tuple[StoreGate, Gpu]:
    made, gpu = StoreGate(threshold, max_tokens), Gpu()
    made.watch(gpu)
    return made, gpu


def test_without_a_threshold_everything_passes_and_hits_are_not_offered_again() -> None:
    made, _ = gate()
    run = prefix("p", 4)
    assert list(made.let_through(offload_keys(run), context("r", run))) == offload_keys(run)
    assert made.context().policy is OffloadPolicy.CHUNK_LEVEL


@pytest.mark.parametrize(("blocks", "passes"), [(0, False), (50, False), (51, True), (100, True)])
def test_a_cache_must_be_fuller_than_the_threshold(blocks: int, passes: bool) -> None:
    made, gpu = gate(0.5)
    gpu.cache(blocks)
    run = prefix("p", 4)
    assert bool(made.let_through(offload_keys(run), context("r", run))) is passes


def test_blocks_in_use_count_where_they_are_more() -> None:
    """Those of a sliding window are in use and hold nothing that could be hit."""
    made, gpu = gate(0.5)
    gpu.cache(20)
    gpu.used = 60
    run = prefix("p", 4)
    assert made.let_through(offload_keys(run), context("r", run))


def test_a_threshold_of_one_stores_nothing() -> None:
    made, gpu = gate(1.0)
    gpu.cache(100)
    run = prefix("p", 4)
    assert not made.let_through(offload_keys(run), context("r", run))


def test_what_was_turned_away_is_offered_again_once_the_cache_is_fuller() -> None:
    made, gpu = gate(0.5)
    run = prefix("p", 4)
    for name in ("early", "ended"):
        made.let_through(offload_keys(run), context(name, run))
    assert made.take_offers() == set(), "it would be turned away again"
    gpu.cache(60)
    made.let_through(offload_keys(run), context("late", run))
    made.forget("ended")
    assert made.take_offers() == {"early"}
    assert made.take_offers() == set(), "once is enough"


def test_later_requests_offer_what_they_hit() -> None:
    made, _ = gate(0.5)
    assert made.context().policy is OffloadPolicy.REQUEST_LEVEL


def test_chunks_that_end_beyond_the_longest_prefix_are_not_stored() -> None:
    made, _ = gate(max_tokens=300)
    run = prefix("p", 4)
    assert list(made.let_through(offload_keys(run), context("r", run))) == offload_keys(run)[:2]


def test_each_group_is_cut_by_tokens_and_not_by_chunks() -> None:
    made, _ = gate(max_tokens=512)
    full, window = prefix("p", 8), prefix("p", 8, group=1)
    both = context("r", full, tokens=128)
    for index, chunk in enumerate(offload_keys(window)):
        both.set_offload_key_position(chunk, (index + 1) * 256)
    offered = [*offload_keys(full), *offload_keys(window)]
    kept = [*offload_keys(full)[:4], *offload_keys(window)[:2]]
    assert list(made.let_through(offered, both)) == kept


# block_size and buffer ------------------------------------------------------


def open_tier(root: Path, **options: Any) -> FsTier:
    return FsTier(FsTier.Config(path=root, **options), PAYLOAD)


def chunk_key(name: str = "one") -> ChunkKey:
    return ChunkKey(Namespace("ab" * 16), key(name))


def content(seed: int = 1) -> memoryview:
    buffer = aligned_buffer(PAYLOAD)
    buffer[:] = bytes((index * seed) % 251 for index in range(PAYLOAD))
    return buffer


def only_file(root: Path) -> Path:
    (file,) = root.rglob("*.kv")
    return file


class Calls:
    """Offset and size of each transfer, done all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[int, int]] = []
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, call: Any) -> Any:
        def watched(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.made.append((offset, sum(buffer.nbytes for buffer in buffers)))
            return int(call(descriptor, buffers, offset))

        return watched

    def take(self) -> list[tuple[int, int]]:
        made, self.made = self.made, []
        return made


@pytest.mark.parametrize("direct", ["auto", False])
def test_no_call_moves_more_than_the_buffer_and_the_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Any
) -> None:
    tier = open_tier(tmp_path, buffer=PAYLOAD // 4, direct=direct)
    calls = Calls(monkeypatch)
    quarter = PAYLOAD // 4
    pieces = [(0, quarter), (quarter, quarter), (2 * quarter, quarter)]
    pieces.append((3 * quarter, quarter + METADATA_BYTES))
    assert tier.write([chunk_key()], [content()]) == [WriteOutcome.STORED]
    assert calls.take() == pieces
    buffer = aligned_buffer(PAYLOAD)
    assert tier.read([chunk_key()], [buffer]) == [ReadOutcome.HIT]
    assert calls.take() == pieces
    assert buffer == content()


@pytest.mark.parametrize("direct", [True, False])
def test_a_buffer_left_to_the_tier_is_one_mebibyte_through_the_page_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    size = 3 * MIB
    config = FsTier.Config(path=tmp_path, direct=direct)
    assert (config.buffer, config.block_size) == ("auto", 4096)
    try:
        tier = FsTier(config, size)
    except TierConfigError:
        assert direct, "this file system has no O_DIRECT, and the tier said so"
        return
    calls = Calls(monkeypatch)
    buffer = aligned_buffer(size)
    assert tier.write([chunk_key()], [buffer]) == [WriteOutcome.STORED]
    in_pieces = [(0, MIB), (MIB, MIB), (2 * MIB, MIB + METADATA_BYTES)]
    assert calls.take() == ([(0, size + METADATA_BYTES)] if direct else in_pieces)


def test_blocks_beyond_the_usual_buffer_need_no_other_word(tmp_path: Path) -> None:
    config = FsTier.Config(path=tmp_path, block_size="2MiB", direct=False)
    tier = FsTier(config, 4 * MIB)
    buffer = aligned_buffer(4 * MIB)
    assert tier.write([chunk_key()], [buffer]) == [WriteOutcome.STORED]
    assert tier.read([chunk_key()], [buffer]) == [ReadOutcome.HIT]


@pytest.mark.parametrize("block_size", [4096, 8192, 65536])
def test_files_and_calls_are_whole_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    tier = open_tier(tmp_path, block_size=block_size, buffer=block_size)
    calls = Calls(monkeypatch)
    tier.write([chunk_key()], [content()])
    tier.read([chunk_key()], [aligned_buffer(PAYLOAD)])
    assert all(offset % block_size == 0 == size % block_size for offset, size in calls.take())
    size = only_file(tmp_path).stat().st_size
    assert size % block_size == 0
    assert size - PAYLOAD - METADATA_BYTES < block_size
    assert tier.usage().nbytes == tier.chunk_bytes == size


@pytest.mark.parametrize("written", ["4KiB", "8KiB", "64KiB"])
@pytest.mark.parametrize("read", ["4KiB", "8KiB", "64KiB"])
def test_files_of_one_block_size_are_read_with_another(
    tmp_path: Path, written: str, read: str
) -> None:
    options = {"buffer": "64KiB"}
    writer = open_tier(tmp_path, block_size=written, **options)
    assert writer.write([chunk_key()], [content(3)]) == [WriteOutcome.STORED]
    reader = open_tier(tmp_path, block_size=read, **options)
    assert reader.write([chunk_key()], [content(3)]) == [WriteOutcome.EXISTS]
    buffer = aligned_buffer(PAYLOAD)
    assert reader.read([chunk_key()], [buffer]) == [ReadOutcome.HIT]
    assert buffer == content(3)
    assert [entry.key for entry in reader.scan()] == [chunk_key()]
    assert reader.usage().nbytes == only_file(tmp_path).stat().st_size
    assert reader.remove([chunk_key()]) == 1
    assert reader.usage().nbytes == 0


def test_padding_is_no_part_of_the_chunk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, block_size="64KiB", buffer="64KiB")
    tier.write([chunk_key()], [content()])
    file = only_file(tmp_path)
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        opened.write(b"x")
    assert tier.read([chunk_key()], [aligned_buffer(PAYLOAD)]) == [ReadOutcome.HIT]
    assert tier.write([chunk_key("two")], [content()]) == [WriteOutcome.STORED]
    padding = [path.read_bytes()[PAYLOAD + METADATA_BYTES :] for path in tmp_path.rglob("*.kv")]
    assert any(not any(rest) for rest in padding), "what a read left behind is not written"


def test_a_file_of_no_block_size_is_no_chunk(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.write([chunk_key()], [content()])
    with only_file(tmp_path).open("ab") as opened:
        opened.write(bytes(100))
    assert tier.write([chunk_key()], [content()]) == [WriteOutcome.STORED]


def test_a_capacity_counts_the_padding(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, block_size="64KiB", buffer="64KiB", capacity=3 * PAYLOAD)
    outcomes = tier.write([chunk_key("one"), chunk_key("two")], [content(), content()])
    assert outcomes == [WriteOutcome.STORED, WriteOutcome.REFUSED]


@given(
    payload=st.integers(0, 40),
    tail=st.integers(1, 9),
    most=st.integers(1, 50),
    short=st.integers(0, 60),
)
def test_whatever_the_sizes_all_bytes_arrive_in_their_places(
    tmp_path_factory: pytest.TempPathFactory, payload: int, tail: int, most: int, short: int
) -> None:
    data = bytes(range(1, payload + tail + 1))
    file = tmp_path_factory.getbasetemp() / "pieces"
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        whole = memoryview(data)
        transfer_out(descriptor, whole[:payload], whole[payload:], most)
        assert file.read_bytes() == data
        os.truncate(descriptor, min(short, len(data)))
        there = min(short, len(data))
        into = memoryview(bytearray(len(data)))
        assert transfer_in(descriptor, into[:payload], into[payload:], most) == there
        assert bytes(into) == data[:there] + bytes(len(data) - there)
    finally:
        os.close(descriptor)
