"""The key ``record``: what it may be, and what is told of what it may not."""

from pathlib import Path

import pytest
from config_kit import problem
from kvtiers.connector.config import load


def recorded(extra, environ=None):
    return load(extra, environ or {}).config.record


def test_nothing_is_recorded_by_default():
    assert recorded({}) is None
    assert recorded({"record": None}) is None


def test_a_path_alone_is_enough_and_a_bound_may_be_set():
    plain = recorded({"record": "/srv/rec"})
    assert (plain.path, plain.max_bytes) == (Path("/srv/rec"), 1 << 30)
    bound = recorded({"record": {"path": "/srv/rec", "max_bytes": "2GiB"}})
    assert (bound.path, bound.max_bytes) == (Path("/srv/rec"), 2 << 30)
    assert str(bound) == "/srv/rec, at most 2 GiB"


def test_a_relative_path_starts_where_the_file_lies_that_it_stands_in(tmp_path, monkeypatch):
    file = tmp_path / "kvtiers.yaml"
    file.write_text("record: rec/../here\n")
    assert recorded({"config": str(file)}).path == tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    assert recorded({"record": "here"}).path == tmp_path / "here"
    assert recorded({}, {"KVTIERS_RECORD": "there"}).path == tmp_path / "there"


def test_home_and_variables_expand(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("SCRATCH", "/scratch/alice")
    assert recorded({"record": "~/rec"}).path == Path("/home/alice/rec")
    assert recorded({"record": "$SCRATCH/rec"}).path == Path("/scratch/alice/rec")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "record is true (from kv_connector_extra_config): it must be a folder, such as"),
        (7, "record is 7 (from kv_connector_extra_config): it must be a folder, such as"),
        (["/srv"], "record is a list of 1 (from kv_connector_extra_config): it must be a folder"),
        ("", "record.path is '' (from kv_connector_extra_config): it must be the path of a folder"),
        ({"path": 7}, "record.path is 7 (from kv_connector_extra_config): it must be the path"),
        ({"max_bytes": 7}, "record.path is missing."),
        (
            {"path": "/srv", "max_bytes": "many"},
            "record.max_bytes is 'many' (from kv_connector_extra_config): it must be a size",
        ),
        (
            {"path": "/srv", "max_byte": 7},
            "record.max_byte (from kv_connector_extra_config) is not a key that kvtiers knows. "
            "Did you mean 'max_bytes'?",
        ),
        ("$NOT_SET_HERE/rec", "the variable $NOT_SET_HERE is not set."),
        ("~nobody-of-that-name/rec", "there is no such user."),
        ("/srv/\0", "no path holds a null character."),
    ],
)
def test_what_cant_be_is_told_with_what_can(value, says):
    assert says in problem({"record": value})


def test_a_misspelt_key_is_told():
    assert "Did you mean 'record'?" in problem({"recrod": "/srv"})
