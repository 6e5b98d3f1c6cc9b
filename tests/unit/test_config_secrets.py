"""A configuration's problems go to logs: whatever is wrong, no password is in what is said."""

import pytest
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError, shown

SECRET = "swordfish"

# Each is a slip that somebody makes who has a password to write.
SLIPS = {
    "a comma forgotten": "tiers: [cpu, {type: redis, password: swordfish url: redis://h}]",
    "a quote left open": 'tiers: [cpu, {type: redis, password: "swordfish}]',
    "a star in front": "tiers: [cpu, {type: redis, password: *swordfish}]",
    "an exclamation mark in front": "tiers: [cpu, {type: redis, password: !swordfish x}]",
    "tiers as a mapping": "tiers: {redis: {password: swordfish}}",
    "a list in the list": "tiers: [cpu, [{type: redis, password: swordfish}]]",
    "a URL for the tiers": "tiers: redis://me:swordfish@host",
    "a URL for a tier": "tiers: [cpu, 'redis://me:swordfish@host']",
    "a URL for a type": "tiers: [cpu, {type: 'redis://me:swordfish@host'}]",
    "several URLs": "tiers: [cpu, {type: redis, url: ['redis://me:swordfish@host']}]",
    "half a URL": "tiers: [cpu, {type: fs, path: 's3:/me:swordfish@bucket'}]",
    "half a URL over two lines": 'tiers: "redis:me\\n:swordfish@host"',
    "half a Redis URL": "tiers: [cpu, {type: redis, url: 'redis:me:swordfish@host'}]",
    "a path of two": 'tiers: [cpu, {type: fs, path: "/me:swordfish@host\\0"}]',
    "an option as a mapping": "tiers: [cpu, {type: redis, deadline: {password: swordfish}}]",
    "a capacity as a mapping": "tiers: [cpu, {type: redis, capacity: {password: swordfish}}]",
    "a name as a mapping": "tiers: [cpu, {type: redis, name: {password: swordfish}}]",
    "a type as a mapping": "tiers: [cpu, {type: {redis: {password: swordfish}}}]",
    "a policy as a mapping": "policy: {type: {redis: {password: swordfish}}}",
    "a password at the top": "{tiers: [cpu, redis], password: swordfish}",
    "a URL at the top": "{tiers: [cpu, redis], url: 'redis://me:swordfish@host'}",
    "options at the top": "{tiers: [cpu, {type: fs, path: 's3://b'}], "
    "storage_options: {k: swordfish}}",
    "a ratio as a mapping": "{tiers: [{type: cpu, capacity: 1}], warm_cache_ratio: {k: swordfish}}",
    "a file in the file": "config: {tiers: [{type: redis, password: swordfish}]}",
}


def said(extra: dict[str, object], environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as raised:
        load(extra, environ)
    return str(raised.value)


@pytest.mark.parametrize("text", SLIPS.values(), ids=SLIPS)
def test_what_is_wrong_in_a_file_is_told_without_its_secrets(tmp_path, text):
    file = tmp_path / "kvtiers.yaml"
    file.write_text(text)
    assert SECRET not in said({"config": str(file)}, {})


@pytest.mark.parametrize("text", SLIPS.values(), ids=SLIPS)
def test_nor_are_those_of_a_variable_shown(text):
    value = text.removeprefix("tiers: ")
    assert SECRET not in said({}, {"KVTIERS_TIERS": value})


def test_the_place_of_a_slip_in_the_yaml_is_told(tmp_path):
    file = tmp_path / "kvtiers.yaml"
    file.write_text("policy: lru\ntiers: [cpu, {type: redis url: x}]\n")
    assert said({"config": str(file)}, {}) == (
        f"The configuration file {file} is not valid YAML: while parsing a flow mapping, expected "
        "',' or '}', but got ':' (line 2, column 30)."
    )


@pytest.mark.parametrize(
    ("value", "as_text"),
    [
        ("redis://me:swordfish@host:1/0", "'redis://***@host:1/0'"),
        ("s3:/me:swordfish@bucket", "'s3:/***@bucket'"),
        ("/snapshots/@today", "'/snapshots/@today'"),
        ("8GiB", "'8GiB'"),
        ({"a": 1, "b": {"c": 2}}, "a mapping of 'a', 'b'"),
        ([{"a": 1}, 2], "a list of 2"),
        ([], "[]"),
        (None, "empty"),
        (True, "true"),
        (0.5, "0.5"),
    ],
)
def test_how_a_value_is_shown(value, as_text):
    assert shown(value) == as_text
