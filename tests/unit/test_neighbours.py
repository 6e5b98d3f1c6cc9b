import logging
from pathlib import Path

import pytest
from kvtiers.connector.neighbours import announce, neighbours
from kvtiers.tiers import ChunkKey, Namespace, Tier
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.wrappers import WrapperTier

SIZE = 8192


def facts(tp: int = 1, **others: object) -> dict[str, object]:
    return {
        "model": {"config": "abc", "dtype": "bfloat16"},
        "weights": "w1",
        "groups": [{"num_kv_heads": 8 // tp, "page": 4096 // tp, "slots": 8 // tp}],
        "layout": {"portable": False, "tp": tp, "ranks": tp},
        **others,
    }


OURS = Namespace("0" * 32, facts())
TWO_RANKS = Namespace("2" * 32, facts(tp=2))
NEW_WEIGHTS = Namespace("3" * 32, facts(weights="w2"))
OTHER_MODEL = Namespace("4" * 32, facts(model={"config": "xyz", "dtype": "bfloat16"}))
NO_FACTS = Namespace("5" * 32, {})


def holding(folder: Path, *namespaces: Namespace) -> FsTier:
    tier = FsTier(FsTier.Config(path=folder), SIZE)
    for namespace in namespaces:
        tier.write([ChunkKey(namespace, b"h" * 32)], [aligned_buffer(SIZE)])
    return tier


def told(caplog: pytest.LogCaptureFixture, tiers: dict[str, Tier]) -> list[str]:
    caplog.set_level(logging.INFO, "kvtiers")
    announce(OURS, tiers).join(10)
    return [record.getMessage() for record in caplog.records]


def test_only_other_namespaces_of_the_same_model_are_neighbours() -> None:
    found = [TWO_RANKS, OTHER_MODEL, OURS, NO_FACTS, NEW_WEIGHTS]
    others = neighbours(OURS, found)
    assert [other.id for other, _ in others] == [NEW_WEIGHTS.id, TWO_RANKS.id]
    assert others[0][1] == ['weights: "w1" here, "w2" there']
    # What says why comes before what follows from it.
    assert others[1][1][:2] == ["layout.ranks: 1 here, 2 there", "layout.tp: 1 here, 2 there"]


def test_an_engine_without_facts_of_a_model_has_no_neighbours() -> None:
    assert neighbours(Namespace("1" * 32, {"engine": "x"}), [NO_FACTS, TWO_RANKS]) == []


def test_the_log_names_tier_and_facts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = holding(tmp_path, OURS, TWO_RANKS, OTHER_MODEL)
    (line,) = told(caplog, {"fs": tier})
    assert "The fs tier holds KV of this model that is not shared" in line
    assert "layout.ranks: 1 here, 2 there; layout.tp: 1 here, 2 there; groups" in line
    assert OURS.id in line
    assert TWO_RANKS.id in line


def test_who_shares_with_all_of_its_model_is_told_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(caplog, {"fs": holding(tmp_path, OURS, OTHER_MODEL)}) == []


def test_a_crowd_is_counted_and_many_facts_are_cut_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = [
        Namespace(f"{n:032x}", facts(cache={f"fact{i}": n for i in range(9)})) for n in range(1, 6)
    ]
    lines = told(caplog, {"fs": holding(tmp_path, *crowd)})
    assert len(lines) == 4
    assert all("; and 4 more (namespace" in line for line in lines[:3])
    assert lines[3].endswith("in 2 more such namespaces.")


def test_a_tier_that_fails_keeps_no_other_from_being_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(WrapperTier):
        def namespaces(self, most: int) -> list[Namespace]:
            raise OSError("gone")

    tier = holding(tmp_path, TWO_RANKS)
    (line,) = told(caplog, {"first": Broken(tier), "fs": tier})
    assert line.startswith("The fs tier")


def test_memory_of_one_engine_has_no_neighbours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Private(WrapperTier):
        def __init__(self, inner: Tier) -> None:
            super().__init__(inner)
            vars(self).update(shared=False, persistent=False)

    assert told(caplog, {"own": Private(holding(tmp_path, TWO_RANKS))}) == []


def test_what_others_wrote_is_told_in_one_short_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = holding(tmp_path, OURS, Namespace("6" * 32, facts(**{"\x1b[2J\nname": "v" * 9000})))
    [line] = told(caplog, {"fs": tier})
    assert "name" in line
    assert len(line) < 1000
    assert line.isprintable()


def test_facts_that_are_nested_without_end_end_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = holding(tmp_path, OURS, NEW_WEIGHTS)
    deep = '{"model": {"config": "abc"}, "x": ' + '{"x":' * 900 + "1" + "}" * 901
    (tmp_path / "v1" / NEW_WEIGHTS.id / "namespace.json").write_text(deep)
    assert all(len(line) < 1000 for line in told(caplog, {"fs": tier}))
