"""Keys are read as written, bad ones are refused, and no text shows one."""

import base64
import os
import re
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.encryption import Encryption, keyring_of
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.keyring import (
    KeyringError,
    looks_like_keys,
    new_key,
    parse,
    read_file,
    read_variable,
)
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.remote_config import RemoteFsConfig
from pydantic import ValidationError

RANDOM = secrets.token_bytes(32)
ENCODED = base64.b64encode(RANDOM).decode()


def refusal(text: str) -> str:
    with pytest.raises(KeyringError) as caught:
        parse(text, "the key file k")
    return str(caught.value)


def test_the_first_key_is_for_writing_and_all_are_for_reading():
    keys = [new_key("b"), new_key("a"), new_key("c")]
    ring = parse("\n".join(keys), "k")
    assert (list(ring), ring.active) == (["b", "a", "c"], "b")
    assert [base64.b64encode(ring[name]).decode() for name in ring] == [
        line.partition(":")[2] for line in keys
    ]


@pytest.mark.parametrize("between", ["\n", ",", " ", "; ", "\r\n", " # old\n\n# a comment\n"])
def test_keys_stand_on_lines_or_in_a_list(between):
    assert list(parse(between.join([new_key("a"), new_key("b")]), "k")) == ["a", "b"]


def test_hexadecimal_is_read_too():
    assert parse(f"a:{RANDOM.hex()}", "k")["a"] == RANDOM


def test_a_new_key_is_random_and_has_an_id_of_its_own():
    lines = {new_key() for _ in range(100)}
    rings = [parse(line, "k") for line in lines]
    assert len({ring.active for ring in rings}) == len({ring[ring.active] for ring in rings}) == 100


@pytest.mark.parametrize("name", ["", "a b", "a:b", "ä", "x" * 33, "a\n"])
def test_an_id_that_could_not_be_written_is_refused(name):
    with pytest.raises(KeyringError, match=r"can't be a key id\. An id has 1 to 32 letters"):
        new_key(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the key file k holds no key. Write one, as 'id:base64'; 'kvtiers keygen' makes one"),
        ("# nothing\n", "holds no key"),
        (ENCODED, "key 1 in the key file k has no id. Write it as 'id:base64'"),
        (f":{ENCODED}", "key 1 in the key file k has an id that can't be one"),
        (f"ä:{ENCODED}", "has an id that can't be one"),
        (f"a:{ENCODED[:-1]}", "key 1 in the key file k, 'a', is neither base64 nor hexadecimal"),
        (f"a:{ENCODED[:22]}==", "'a', has 16 bytes, and AES-256 takes 32"),
        (
            f"a:{RANDOM.hex()}ffff",
            "'a', has 51 bytes, and AES-256 takes 32: 44",
        ),
        (f"a:{base64.b64encode(bytes(32)).decode()}", "'a', is not random"),
        (f"a:{base64.b64encode(bytes(range(8)) * 4).decode()}", "'a', is not random"),
        (
            f"a:{base64.b64encode(b'correct horse battery staple 12!').decode()}",
            "'a', is not random: it is text, or repeats itself, and can be guessed",
        ),
        (f"{new_key('a')}\n{new_key('a')}", "names the key id 'a' twice. Give each its own"),
        (f"a:{ENCODED}\nb:{ENCODED}", "holds one key under two ids, the second of them 'b'"),
    ],
)
def test_what_is_no_good_key_is_refused_and_not_shown(text, says):
    told = refusal(text)
    assert says in told
    for secret in re.findall(r"[A-Za-z0-9+/]{12,}", text):
        assert secret not in told


@given(st.text(max_size=200))
def test_any_text_is_a_keyring_or_a_clear_refusal(text):
    try:
        ring = parse(text, "k")
    except KeyringError:
        return
    assert ring.active in ring


def test_a_keyring_shows_ids_and_no_key():
    ring = parse(f"a:{ENCODED}", "k")
    assert repr(ring) == str(ring) == "Keyring(a)"


# Where they are -----------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kv.keys"
    path.touch(0o600)
    path.write_text(new_key("a") + "\n")
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_a_file_that_only_its_owner_and_group_read_is_taken(file, mode):
    file.chmod(mode)
    assert list(read_file(file)) == ["a"]


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o602, 0o666])
def test_a_file_that_others_read_or_change_is_refused_with_the_command_that_helps(file, mode):
    file.chmod(mode)
    with pytest.raises(KeyringError, match=rf"has the mode {mode:04o}: .* 'chmod 400 {file}'"):
        read_file(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(file):
    os.chown(file, 4711, 4711)
    with pytest.raises(KeyringError, match="belongs to another user, who can change it"):
        read_file(file)


def test_what_is_no_file_of_keys_is_refused(file, tmp_path):
    os.mkfifo(tmp_path / "fifo", 0o600)
    binary = tmp_path / "binary"
    binary.touch(0o600)
    binary.write_bytes(b"\xff" * 32)
    for path, says in [
        (tmp_path / "gone", r"can't be read \(No such file"),
        (tmp_path, "can't be read"),
        (tmp_path / "fifo", "is not a file"),
        (binary, "is no text in ASCII. Keys are written in base64"),
    ]:
        with pytest.raises(KeyringError, match=says):
            read_file(path)


def test_a_variable_holds_keys_and_is_named_where_it_does_not():
    assert list(read_variable("K", {"K": f"{new_key('a')},{new_key('b')}"})) == ["a", "b"]
    with pytest.raises(KeyringError, match="The variable K, which 'key_env' names, is not set"):
        read_variable("K", {})
    with pytest.raises(KeyringError, match="key 1 in the variable K has no id"):
        read_variable("K", {"K": ENCODED})


# The option -----------------------------------------------------------------------

CONFIGS = [FsTier.Config, RedisConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_text_is_short_for_a_file(config, file):
    options = config(encryption=str(file))
    assert options.encryption == Encryption(key_file=file)
    assert list(keyring_of(options)) == ["a"]
    assert str(options.encryption) == f"key_file {file}"


def test_a_url_has_the_option_too(file, monkeypatch):
    options = RemoteFsConfig(path="memory://x", encryption={"key_env": "KVTIERS_TEST_KEYS"})
    monkeypatch.setenv("KVTIERS_TEST_KEYS", new_key("b"))
    assert list(keyring_of(options)) == ["b"]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "written",
    [
        f"a:{ENCODED}",
        ENCODED,
        RANDOM.hex(),
        {"key": ENCODED},
        {"key_file": f"a:{ENCODED}"},
        {"key_env": ENCODED},
        {"password": "hunter2hunter2"},
    ],
)
def test_a_key_in_the_configuration_is_refused_and_not_shown(config, written):
    with pytest.raises(ValidationError, match="must not hold a key itself") as caught:
        config(encryption=written)
    for secret in (ENCODED, RANDOM.hex(), "hunter2"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (True, "'encryption' must be a file of keys, such as /run/secrets/kv.keys, or a mapping"),
        ({}, "it must name either 'key_file' or 'key_env'"),
        ({"key_file": "a", "key_env": "B"}, "it must name either 'key_file' or 'key_env'"),
        ({"key_file": ""}, "it is empty. Name a file, or leave it out"),
    ],
)
def test_an_option_that_names_no_keys_is_refused(written, says):
    with pytest.raises(ValidationError, match=says):
        FsTier.Config(encryption=written)


def test_bad_keys_stop_the_start_and_say_which_tier_has_them(tmp_path):
    options = FsTier.Config(path=tmp_path, encryption=str(tmp_path / "gone"))
    with pytest.raises(TierConfigError, match="The fs tier's 'encryption' can't be used: The key"):
        FsTier(options, 8192)


def test_a_path_is_not_taken_for_a_key():
    assert not looks_like_keys("/run/secrets/kv.keys")
    assert not looks_like_keys("KVTIERS_KEYS")
