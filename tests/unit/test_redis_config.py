import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.tiers import TierConfigError
from kvtiers.tiers.redis import RedisTier
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_url import Address, parse, without_secrets
from kvtiers.tools import cli
from pydantic import ValidationError
from redis_tiers import ALLOWED

SECRET = "hunter2-swordfish"


def tier(**options):
    return {"tiers": ["cpu", {"type": "redis", **options}]}


def problem(**options) -> str:
    with pytest.raises(ConfigError) as raised:
        load(tier(**options), {})
    (only,) = raised.value.problems
    return only


def options(**given) -> RedisConfig:
    return load(tier(**given), {}).config.tiers[1].options


# Addresses ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address", "database"),
    [
        ("redis://127.0.0.1", Address(host="127.0.0.1"), 0),
        ("redis://cache.local:7000/3", Address(host="cache.local", port=7000), 3),
        ("redis://cache.local/", Address(host="cache.local"), 0),
        ("redis://cache.local?db=4", Address(host="cache.local"), 4),
        ("rediss://cache.local/1", Address(tls=True, host="cache.local"), 1),
        ("valkey://cache.local", Address(host="cache.local"), 0),
        ("valkeys://cache.local", Address(tls=True, host="cache.local"), 0),
        ("redis://[::1]:7000/2", Address(host="::1", port=7000), 2),
        ("redis://[::1]", Address(host="::1"), 0),
        ("unix:///run/redis.sock", Address(path="/run/redis.sock"), 0),
        ("unix:///run/a@b.sock?db=5", Address(path="/run/a@b.sock"), 5),
    ],
)
def test_an_address_is_read_as_redis_clients_do(url, address, database):
    read = options(url=url)
    assert (read.address, read.database_number) == (address, database)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "must begin with one of redis, rediss, unix"),
        ("http://localhost", "must begin with one of redis, rediss, unix"),
        ("redis://", "must name a host"),
        ("redis://:7000", "must name a host"),
        ("redis://host:70000", "its port must be a number from 1 to 65535"),
        ("redis://host:seven", "its port must be a number from 1 to 65535"),
        ("redis://[::1]7000", "must have its port after a colon"),
        ("redis://host/seven", "its database must be a number"),
        ("redis://host/1?db=1", "names the database twice"),
        ("redis://host?socket_timeout=3", "can carry no 'socket_timeout'"),
        ("redis://host#1", "must end before the '#'"),
        ("unix://redis.sock", "must name the socket in full"),
    ],
)
def test_a_wrong_address_is_refused_with_its_remedy(url, says):
    text = problem(url=url)
    assert text.startswith(f"tiers[1].url is {url!r} (from kv_connector_extra_config)")
    assert says in text


def test_defaults_are_for_a_server_on_this_host():
    read = RedisConfig()
    assert (read.address, read.database_number) == (Address(host="127.0.0.1"), 0)
    assert (read.key_prefix, read.connections, read.required) == ("kvtiers:", 5, False)
    assert (RedisConfig(threads=9).connections, RedisConfig(pool_size=2).connections) == (10, 2)


# Secrets --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "username"),
    [
        (f"redis://:{SECRET}@host/1", None),
        (f"redis://ann:{SECRET}@host", "ann"),
        (f"unix://ann:{SECRET}@/run/redis.sock", "ann"),
    ],
)
def test_user_and_password_in_the_url_become_options(url, username):
    read = options(url=url)
    assert read.username == username
    assert read.password.get_secret_value() == SECRET
    assert SECRET not in read.url


def test_special_characters_in_a_url_are_decoded():
    password = "p@ss/w:rd#%?"
    read = options(url=f"redis://an%20n:{quote(password, safe='')}@host")
    assert (read.username, read.password.get_secret_value()) == ("an n", password)


@pytest.mark.parametrize(
    "given",
    [
        {"url": f"redis://:{SECRET}@host"},
        {"url": f"rediss://ann:{SECRET}@host", "ttl": 5},
        {"url": "redis://host", "password": SECRET},
    ],
)
def test_a_password_is_not_shown(given, tmp_path, capsys):
    read = options(**given)
    assert SECRET not in f"{read!r} {read} {read.model_dump_json()}"
    again = load(tier(**given), {}).config.tiers[1].with_bytes("tiers[1]", 4096)
    assert again.password.get_secret_value() == SECRET, "it survives being checked again"
    file = tmp_path / "kvtiers.yaml"
    file.write_text(json.dumps(tier(**given)))
    assert cli.main(["config", str(file)]) == 0
    shown = "".join(capsys.readouterr())
    assert "tiers[1].password" in shown
    assert SECRET not in shown


@pytest.mark.parametrize(
    "given",
    [
        {"url": f"redis://:{SECRET}/x@host"},
        {"url": f"redis://:{SECRET}#x@host"},
        {"url": f"redis://:{SECRET}?x@host"},
        {"url": f":{SECRET}@host:6379"},
        {"url": f"http://:{SECRET}@host"},
        {"url": f"redis://:{SECRET}@host:seven"},
        {"url": f"redis://host?password={SECRET}"},
        {"url": f"redis://:{SECRET}@host", "password": "other"},
        {"url": f"redis://:{SECRET}@host", "ttl": -1},
        {"url": f"redis://:{SECRET}@host", "ssl_ca_certs": "/x"},
        {"password": [SECRET]},
        {"password": SECRET, "tttl": 5},
        {"passwort": None, "password": SECRET},
    ],
)
def test_an_error_does_not_show_a_password(given):
    assert SECRET not in problem(**given)
    with pytest.raises(ValidationError) as raised:
        RedisConfig(**given)
    assert SECRET not in str(raised.value)


def test_a_password_that_yaml_took_for_a_number_is_refused_unseen():
    text = problem(password=31337)
    assert text.startswith("tiers[1].password is hidden (from kv_connector_extra_config)")
    assert "must be a text, in quotes" in text
    assert "31337" not in text


@given(
    st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1),
    st.sampled_from(["redis://{}@host", "redis://u:{}@host:7/1", "unix://:{}@/s", "{}@host"]),
)
@example("@#", "redis://{}@host")
@example("://", "{}@host")
def test_no_part_of_a_written_password_survives_in_the_url(password, form):
    marked = f"<{SECRET}>{password}<{SECRET}>"
    assert SECRET not in without_secrets(form.format(marked))[0]


@given(st.text(), st.text())
def test_any_text_is_an_address_or_a_clear_error(before, after):
    for text in (before, f"redis://{before}", f"unix://{before}", f"redis://{before}@{after}"):
        try:
            address, database = parse(without_secrets(text)[0])
        except ValueError as error:
            said = str(error)
        else:
            said = "its" if (address.path or address.host) and (database or 0) >= 0 else ""
        assert said.startswith("it")


# Options --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"database": -1}, "it must be a whole number, 0 or above"),
        ({"database": "1"}, "it must be a whole number, 0 or above"),
        ({"ttl": 0}, "whole number of seconds above 0"),
        ({"ttl": 1.5}, "whole number of seconds above 0"),
        ({"ttl": "1h"}, "whole number of seconds above 0"),
        ({"pool_size": 0}, "whole number from 1 to 1024"),
        ({"connect_timeout": 0}, "number of seconds above 0"),
        ({"connect_timeout": "1s"}, "number of seconds above 0"),
        ({"required": "yes"}, "must be true or false"),
        ({"required": 1}, "must be true or false"),
        ({"username": 5}, "must be a text, in quotes"),
        ({"ssl_ca_certs": ""}, "it is empty. Name a file"),
        ({"ssl_ca_certs": 5}, "must be a path, in quotes"),
        ({"ssl_ca_certs": "~nobody-of-that-name/ca.pem"}, "there is no such user"),
        ({"deadline": 0}, "number of seconds above 0"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key_and_what_is_allowed(given, says):
    ((key, value),) = given.items()
    text = problem(**given)
    assert text.startswith(f"tiers[1].{key} is {value!r} (from kv_connector_extra_config)")
    assert says in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": "redis://h/1", "database": 2}, "the database is 1 in 'url' and 2 in 'database'"),
        ({"url": "redis://a@h", "username": "b"}, "the username stands in 'url' and in 'username'"),
        ({"ssl_ca_certs": "/ca.pem"}, "'ssl_ca_certs' is for TLS, and 'url' does not ask for it"),
        ({"ssl_check_hostname": False}, "Begin 'url' with rediss://"),
        ({"url": "rediss://h", "ssl_keyfile": "/k"}, "'ssl_keyfile' is set without 'ssl_certfile'"),
        ({"db": 3}, "'db' is not an option here. Set 'database'"),
        ({"host": "h"}, "'host' is not an option here. Set 'url'"),
        ({"cacert": "/ca.pem"}, "Set 'ssl_ca_certs'"),
        ({"key_prefx": "x:"}, "Did you mean 'key_prefix'?"),
        ({"capacity": "50%"}, "no whole on this machine to take a share of"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(given, says):
    assert says in problem(**given)


def test_the_same_database_may_stand_in_both_places():
    assert options(url="redis://h/2", database=2).database_number == 2


# What only the serving machine can tell ---------------------------------------


def test_a_capacity_below_one_chunk_is_refused():
    with pytest.raises(TierConfigError, match="'capacity' of 8191 bytes is less than one chunk"):
        RedisTier(RedisConfig(capacity=8191), 4096)


@pytest.mark.parametrize("content", [None, "no certificate"])
@pytest.mark.parametrize("key", ["ssl_ca_certs", "ssl_certfile"])
def test_a_file_that_holds_no_certificate_is_refused_by_name(key, content, tmp_path):
    file = tmp_path / "x.pem"
    if content is not None:
        file.write_text(content)
    config = RedisConfig(url="rediss://127.0.0.1", **{key: file})
    with pytest.raises(TierConfigError, match=f"'{key}' .*x.pem can't be used"):
        RedisTier(config, 4096)


def test_without_redis_py_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    monkeypatch.delitem(__import__("sys").modules, "kvtiers.tiers.redis_client", raising=False)
    with pytest.raises(TierConfigError, match=r"pip install 'kvtiers\[redis\]'"):
        RedisTier(RedisConfig(), 4096)


def test_the_configurations_shown_are_valid():
    page = (Path(__file__).parents[2] / "docs" / "tiers" / "redis.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    types = [load(yaml.safe_load(block), {}).config.tiers[1].type for block in blocks]
    assert types == ["redis", "redis"]


def test_the_rights_shown_are_those_that_are_tested():
    page = (Path(__file__).parents[2] / "docs" / "tiers" / "redis.md").read_text()
    assert f"~kvtiers:* {' '.join(sorted(ALLOWED, key=page.index))}`" in page
