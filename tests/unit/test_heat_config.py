"""How the measuring of attention is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.heat import HeatSettings


def heat(**extra) -> HeatSettings | None:
    return load(extra, {}).config.heat


def test_heat_is_measured_if_the_policy_asks_for_it() -> None:
    assert heat(policy="lru") is None
    assert heat(policy="attention-heat") == HeatSettings()


def test_the_user_has_the_last_word() -> None:
    assert heat(policy="attention-heat", attention_heat=False) is None
    assert heat(policy="lru", attention_heat=True) == HeatSettings()
    assert heat(attention_heat={"layers": 5, "every": 2}) == HeatSettings(layers=5, every=2)
    assert heat(attention_heat={"log": "/tmp/heat.jsonl"}).log == Path("/tmp/heat.jsonl")
    assert heat(attention_heat={"log": "~/heat.jsonl"}).log == Path.home() / "heat.jsonl"


def test_the_variable_takes_a_mapping_too() -> None:
    loaded = load({}, {"KVTIERS_ATTENTION_HEAT": "{window: 16}"})
    assert loaded.config.heat == HeatSettings(window=16)
    assert "KVTIERS_ATTENTION_HEAT" in loaded.origins["attention_heat"]


@pytest.mark.parametrize(
    ("value", "tail"),
    [
        ("yes", "the path of a file"),
        (1, "the path of a file"),
        ({"windw": 3}, "and it has 'windw'. Did you mean 'window'?"),
        ({"layers": 0}, "and its layers is 0"),
        ({"every": "often"}, "and its every is 'often'"),
        ({"budget": 0}, "and its budget is 0"),
        ({"share": "first"}, "and its share is 'first'"),
        ({"log": 5}, "and its log is 5"),
        ({"log": ""}, "and its log is ''"),
    ],
)
def test_what_cannot_be_meant_is_told_with_what_is_allowed(value, tail) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"attention_heat": value}, {})
    (problem,) = caught.value.problems
    assert problem.startswith("attention_heat is ")
    assert (
        "(from kv_connector_extra_config): it must be 'auto', true, false, or a mapping" in problem
    )
    assert tail in problem
