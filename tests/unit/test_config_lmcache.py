"""LMCache's words: each is taken over, or told; when its own sources count."""

import ast
import importlib.util
import io
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_kit import problem, problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.connector import config_lmcache_words as words
from kvtiers.connector.config import Loaded, load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.tools import cli, config_report
from rich.console import Console

GIB = 1 << 30
EXTRA = "kv_connector_extra_config"


@pytest.fixture
def lmcache_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "lmcache.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def entries(loaded: Loaded) -> list[dict]:
    """The tiers as they were set, with capacities in bytes."""
    return [
        {"type": tier.type, "name": tier.name}
        | tier.options.model_dump(exclude_unset=True, exclude={"type", "capacity"})
        | ({"capacity": tier.capacity.nbytes} if tier.capacity and tier.capacity.nbytes else {})
        for tier in loaded.config.tiers
    ]


def reasons(loaded: Loaded) -> dict[str, str]:
    return {use.word: use.why_not for use in loaded.lmcache if use.why_not}


def sets(loaded: Loaded) -> dict[str, str]:
    return {use.word: use.sets for use in loaded.lmcache if use.sets}


# The tables are complete ----------------------------------------------------


def lmcache_source(*path: str) -> ast.Module:
    """A module of the installed LMCache, without importing it and with it torch."""
    (root,) = importlib.util.find_spec("lmcache").submodule_search_locations
    return ast.parse(Path(root, *path).read_text())


def literal_keys(tree: ast.Module, name: str) -> set[str]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            return {key.value for key in node.value.keys}
    raise AssertionError(f"LMCache has no {name} any more")


def keys_of_its_connectors() -> Iterator[str]:
    (root,) = importlib.util.find_spec("lmcache").submodule_search_locations
    for path in Path(root, "integration", "vllm").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_read = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == (
                "get_from_extra_config"
            )
            if is_read and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value


def test_every_word_of_the_installed_lmcache_is_in_a_table_and_no_other_is():
    read = literal_keys(lmcache_source("v1", "config.py"), "_CONFIG_DEFINITIONS")
    of_connectors = set(keys_of_its_connectors())
    assert len(read) > 100
    assert "lmcache.mp.host" in of_connectors
    assert {*words.COUNTERPARTS, *words.WITHOUT_COUNTERPART} == read | of_connectors
    assert words.COUNTERPARTS.keys().isdisjoint(words.WITHOUT_COUNTERPART)


def test_every_older_spelling_of_the_installed_lmcache_is_known():
    tree = lmcache_source("v1", "config.py")
    old = literal_keys(tree, "_CONFIG_ALIASES") | literal_keys(tree, "_DEPRECATED_CONFIGS")
    assert words.ALIASES.keys() == old - literal_keys(tree, "_CONFIG_DEFINITIONS")
    assert all(words.is_known(today) for today in words.ALIASES.values())


def test_every_policy_and_remote_backend_of_the_installed_lmcache_is_known():
    policies = lmcache_source("v1", "storage_backend", "cache_policy", "__init__.py")
    assert set(words.POLICIES) == literal_keys(policies, "POLICY_MAPPING")
    (root,) = importlib.util.find_spec("lmcache").submodule_search_locations
    schemes = set()
    for path in Path(root, "v1", "storage_backend", "connector").glob("*_adapter.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and str(node.value).endswith("://"):
                schemes.add(node.value.removesuffix("://"))
    taken_over = {"redis", "rediss", "unix", "resp", "valkey", "fs", "s3"}
    assert taken_over < schemes
    assert schemes - {"", "http", "https"} == {*words.REMOTE_SCHEMES, *taken_over}


@pytest.mark.parametrize("word", sorted({*words.WITHOUT_COUNTERPART, *words.ALIASES}))
def test_a_word_without_a_counterpart_sets_nothing_and_is_told(word):
    loaded = load({word: "x"}, {})
    assert reasons(loaded)[word] == words.job_of(word)
    assert loaded.config == load({}, {}).config


@pytest.mark.parametrize("word", sorted(words.COUNTERPARTS))
def test_a_word_with_a_counterpart_is_read(word):
    found = problems({word: {"a": [set()]}} if word != "extra_config" else {word: "no"})
    assert found[0].startswith(word)


# What each sets -------------------------------------------------------------


def test_a_whole_file_of_lmcaches_is_a_configuration(lmcache_file):
    file = lmcache_file("""
        chunk_size: 256
        local_cpu: true
        max_local_cpu_size: 20
        local_disk: "file:///nvme/kv/"
        max_local_disk_size: 0.5
        cache_policy: LRU
        save_decode_cache: true
        extra_config: {use_odirect: false, disk_io_threads: 8, nixl_path: /x}
        remote_serde: naive
    """)
    loaded = load({"config": file}, {})
    assert loaded.config.chunk_size == 256
    assert loaded.config.policy.type == "lru"
    assert loaded.config.offload_prompt_only is False
    assert entries(loaded) == [
        {"type": "cpu", "name": "cpu", "capacity": 20 * GIB},
        {
            "type": "fs",
            "name": "fs",
            "path": Path("/nvme/kv"),
            "capacity": GIB // 2,
            "direct": False,
            "threads": 8,
        },
    ]
    assert loaded.origins["tiers[0].capacity"] == f"max_local_cpu_size in file {file}:4"
    assert loaded.origins["tiers[1].type"] == f"local_disk in file {file}:5"
    assert loaded.origins["tiers[1].threads"] == (f"extra_config.disk_io_threads in file {file}:9")
    assert loaded.origins["offload_prompt_only"] == f"save_decode_cache in file {file}:8"
    assert loaded.origins["tiers[1].fsync"] == "default"
    assert reasons(loaded) == {
        "remote_serde": "KV is stored as it is",
        "extra_config.nixl_path": "an option of LMCache's own storage",
    }


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"local_cpu": True}, [{"type": "cpu", "name": "cpu"}]),
        ({"max_local_cpu_size": 2}, [{"type": "cpu", "name": "cpu", "capacity": 2 * GIB}]),
        ({"max_local_cpu_size": "2.5"}, [{"type": "cpu", "name": "cpu", "capacity": 5 * GIB // 2}]),
    ],
)
def test_who_says_where_kv_lies_gets_no_other_tier(extra, says):
    assert entries(load(extra, {})) == says


def test_words_that_say_nothing_of_storage_leave_the_default_tiers():
    loaded = load({"cache_policy": "lru", "save_decode_cache": False}, {})
    assert loaded.config == load({}, {}).config


def test_a_cpu_tier_is_always_there():
    loaded = load({"local_cpu": False, "max_local_cpu_size": 4}, {})
    assert entries(loaded) == [{"type": "cpu", "name": "cpu", "capacity": 4 * GIB}]
    assert "the cpu tier is always there" in reasons(loaded)["local_cpu"]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"local_disk": "/d"}, {"local_disk"}),
        ({"local_disk": "/d", "max_local_disk_size": 0}, {"local_disk", "max_local_disk_size"}),
        ({"max_local_disk_size": 5}, {"max_local_disk_size"}),
    ],
)
def test_a_disk_needs_a_folder_and_a_size_as_in_lmcache(extra, told):
    loaded = load(extra, {})
    assert [tier.type for tier in loaded.config.tiers] == ["cpu"]
    assert set(reasons(loaded)) == told


def test_of_several_folders_the_first_is_used_and_the_rest_is_told():
    loaded = load({"local_disk": "file:///a/,/b/", "max_local_disk_size": 1}, {})
    assert entries(loaded)[1]["path"] == Path("/a")
    assert sets(loaded)["local_disk"] == "tiers[1].path"
    assert reasons(loaded)["local_disk"] == "a tier has one folder, and of 2 got the first"


def test_a_relative_folder_starts_at_the_files_folder_and_for_lmcaches_own_at_the_servers(
    lmcache_file, tmp_path, monkeypatch
):
    file = lmcache_file("local_disk: kv\nmax_local_disk_size: 1\n")
    assert entries(load({"config": file}, {}))[1]["path"] == tmp_path / "kv"
    (tmp_path / "server").mkdir()
    monkeypatch.chdir(tmp_path / "server")
    plugin = {"remote_storage_plugins": "fs", "extra_config": {"fs_base_path": "remote"}}
    assert entries(load(plugin, {}))[1]["path"] == tmp_path / "server" / "remote"
    own = load({}, {"LMCACHE_CONFIG_FILE": file})
    assert entries(own)[1]["path"] == tmp_path / "server" / "kv"


REDIS = [
    ("redis://h:6379", "redis://h:6379"),
    ("rediss://h:6380/2", "rediss://h:6380/2"),
    ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ("resp://h:6379", "redis://h:6379"),
    ("valkey://h:6379", "redis://h:6379"),
]


@pytest.mark.parametrize(("url", "becomes"), REDIS)
def test_a_remote_redis_is_a_redis_tier(url, becomes):
    loaded = load({"remote_url": url, "blocking_timeout_secs": 7}, {})
    _, redis = loaded.config.tiers
    assert (redis.type, redis.options.url, redis.options.deadline) == ("redis", becomes, 7.0)
    assert loaded.origins["tiers[1].url"] == f"remote_url in {EXTRA}"
    assert loaded.origins["tiers[1].deadline"] == f"blocking_timeout_secs in {EXTRA}"


def test_a_password_reaches_the_redis_tier_and_no_text():
    in_url = load({"remote_url": "redis://ada:secret@h:6379"}, {})
    extra = {"valkey_username": "ada", "valkey_password": "secret", "tls_enable": True}
    in_options = load({"remote_url": "valkey://h:6379", "extra_config": extra}, {})
    for loaded in (in_url, in_options):
        redis = loaded.config.tiers[1].options
        assert (redis.username, redis.password.get_secret_value()) == ("ada", "secret")
        assert "secret" not in str(loaded)
    assert in_options.config.tiers[1].options.url == "rediss://h:6379"
    assert "secret" not in str(problems({"remote_url": "reds://ada:secret@h:6379"}))
    wrong = {"remote_url": "valkey://h:6379", "extra_config": {"valkey_password": [76543]}}
    assert "76543" not in str(problems(wrong))


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("fs://localhost:0/mnt/kv", "/mnt/kv"),
        ("fs:///mnt/kv,/mnt/other", "/mnt/kv"),
    ],
)
def test_a_remote_folder_is_an_fs_tier_beside_the_disk(url, path):
    disk = {"local_disk": "/nvme", "max_local_disk_size": 1}
    extra = {"fs_connector_use_odirect": True, "use_odirect": False}
    loaded = load({**disk, "remote_url": url, "extra_config": extra}, {})
    _, local, remote = entries(loaded)
    assert (local["name"], local["path"], local["direct"]) == ("fs", Path("/nvme"), False)
    assert (remote["name"], remote["path"], remote["direct"]) == ("fs-2", Path(path), True)


def test_a_bucket_is_named_by_the_host_that_lmcache_names_it_by():
    extra = {"s3_region": "eu-1", "aws_access_key_id": "ada", "aws_secret_access_key": "hunter2"}
    url = "s3://bucket-7.x.s3.us-east-1.amazonaws.com"
    loaded = load({"remote_url": url, "extra_config": {**extra, "s3_num_io_threads": 8}}, {})
    bucket = loaded.config.tiers[1].options
    assert (bucket.type, bucket.path) == ("fs", "s3://bucket-7.x")
    assert dict(bucket.storage_options) == {
        "key": "ada",
        "secret": "hunter2",
        "client_kwargs": {"region_name": "eu-1"},
    }
    assert set(reasons(loaded)) == {"extra_config.s3_num_io_threads"}
    assert "hunter2" not in str(loaded)
    wrong = {"remote_url": url, "extra_config": {"aws_secret_access_key": 76543}}
    assert "76543" not in str(problems(wrong))


def test_an_express_bucket_has_no_counterpart():
    url = "s3://b--use1-az4--x-s3.s3express-use1-az4.us-east-1.amazonaws.com"
    assert "remote_url" in reasons(load({"remote_url": url}, {}))


@pytest.mark.parametrize(
    ("plugins", "options", "tiers"),
    [
        ("redis", {}, [("redis", "redis://localhost:6379")]),
        (["redis"], {"redis_url": "redis://a:1"}, [("redis", "redis://a:1")]),
        (
            ["redis", "fs.primary"],
            {
                "remote_storage_plugin.redis.redis_url": "redis://b:2",
                "remote_storage_plugin.fs.primary.base_path": "/mnt/p",
            },
            [("redis", "redis://b:2"), ("fs", "/mnt/p")],
        ),
        ("fs", {"fs_base_path": "/mnt/f"}, [("fs", "/mnt/f")]),
    ],
)
def test_plugins_of_lmcaches_are_tiers_too(plugins, options, tiers):
    loaded = load({"remote_storage_plugins": plugins, "extra_config": options}, {})
    found = [
        (tier.type, str(tier.options.url if tier.type == "redis" else tier.options.path))
        for tier in loaded.config.tiers[1:]
    ]
    assert found == tiers
    assert reasons(loaded) == {}


def test_a_plugin_that_is_not_here_is_told():
    loaded = load({"remote_storage_plugins": "mooncake,fs"}, {})
    assert [tier.type for tier in loaded.config.tiers] == ["cpu"]
    assert "no such plugin here" in reasons(loaded)["remote_storage_plugins"]


@pytest.mark.parametrize("scheme", sorted(words.REMOTE_SCHEMES))
def test_a_remote_backend_without_a_counterpart_is_told(scheme):
    loaded = load({"remote_url": f"{scheme}://user:secret@host:1/x"}, {})
    assert reasons(loaded)["remote_url"] == f"{scheme}: {words.REMOTE_SCHEMES[scheme]}"
    assert "secret" not in str(loaded)


def test_a_timeout_without_a_remote_backend_is_told():
    assert (
        "there is none" in reasons(load({"blocking_timeout_secs": 5}, {}))["blocking_timeout_secs"]
    )


@pytest.mark.parametrize(
    ("name", "type_"),
    [("LRU", "lru"), ("lru", "lru"), ("ARC", "arc"), ("FIFO", "fifo"), ("LFU", "lfu")],
)
def test_a_policy_is_the_one_of_that_name(name, type_):
    assert load({"cache_policy": name}, {}).config.policy.type == type_


@pytest.mark.parametrize("name", ["MRU", "mru"])
def test_a_policy_that_is_not_here_is_told_and_the_default_decides(name):
    loaded = load({"cache_policy": name}, {})
    assert loaded.config.policy.type == "lru"
    assert f"there is no policy {name.lower()}; 'policy' may be " in reasons(loaded)["cache_policy"]


# Values that are none -------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            {"max_local_cpu_size": "8GiB"},
            "max_local_cpu_size is '8GiB' (from kv_connector_extra_config): it must be a number of "
            "GiB above 0 without a unit, as LMCache counts, such as 20; all KV comes and goes "
            "through that memory.",
        ),
        ({"max_local_cpu_size": 0}, "it must be a number of GiB above 0"),
        ({"max_local_cpu_size": True}, "it must be a number of GiB above 0"),
        ({"max_local_cpu_size": 1e308}, "it must be a number of GiB above 0"),
        ({"max_local_disk_size": -1}, "it must be a number of GiB without a unit"),
        ({"max_local_disk_size": float("nan")}, "it must be a number of GiB without a unit"),
        ({"max_local_cpu_size": "9" * 5000}, "9" * 199 + " (from kv_connector_extra_config): it m"),
        ({"local_cpu": "maybe"}, "local_cpu is 'maybe' (from kv_connector_extra_config): it must"),
        ({"local_disk": True, "max_local_disk_size": 1}, "it must be a folder"),
        ({"local_disk": "s3://x", "max_local_disk_size": 1}, "it must be a folder"),
        ({"save_decode_cache": 2}, "it must be true or false."),
        (
            {"cache_policy": "LRUU"},
            "it must be one of FIFO, LFU, LRU, MRU, or a policy of kvtiers. Did you mean 'lru'?",
        ),
        ({"cache_policy": ["LRU"]}, "it must be one of FIFO"),
        (
            {"remote_url": "rediss.example.com:6379"},
            "remote_url (from kv_connector_extra_config): it must be a URL of the form redis://..",
        ),
        ({"remote_url": "redus://h:1"}, "Did you mean 'redis'?"),
        ({"remote_url": "fs://host"}, "remote_url (from kv_connector_extra_config): it must be a"),
        ({"remote_url": 6379}, "it must be a text, in quotes."),
        ({"extra_config": "{"}, "extra_config (from kv_connector_extra_config): it must be a map"),
        ({"extra_config": [1]}, "it must be a mapping of keys."),
        (
            {"local_disk": "/d", "max_local_disk_size": 1, "extra_config": {"use_odirect": "x"}},
            "extra_config.use_odirect is 'x' (from kv_connector_extra_config): it must be true or",
        ),
        (
            {"remote_url": "redis://h:1", "blocking_timeout_secs": 0},
            "tiers[1].deadline is 0.0 (from blocking_timeout_secs in kv_connector_extra_config): "
            "it must be a number of seconds above 0",
        ),
    ],
)
def test_a_value_that_is_none_says_what_one_is(extra, says):
    assert says in problem(extra)


def test_every_problem_is_told_at_once_with_kvtiers_own():
    extra = {"max_local_cpu_size": -1, "cache_policy": "none", "chunk_size": 0, "polcy": 1}
    assert [text.split()[0] for text in problems(extra)] == [
        "cache_policy",
        "max_local_cpu_size",
        "chunk_size",
        "polcy",
    ]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["8GiB", "redis://h:1", "file:///x", "fs:///x", "LRU", "{}", "a,b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.dictionaries(st.sampled_from([*words.COUNTERPARTS, "tiers", "policy"]), VALUES, max_size=4)
)
def test_whatever_stands_there_is_a_configuration_or_a_clear_error(extra):
    found, loaded = [], None
    try:
        loaded = load(extra, {})
    except ConfigError as error:
        found = error.problems
    assert bool(found) == (loaded is None)
    assert all(text.endswith((".", "?")) for text in found)


# kvtiers' own words beside them ---------------------------------------------


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (
            {"tiers": ["cpu"], "max_local_cpu_size": 5},
            "max_local_cpu_size (from kv_connector_extra_config) says where KV lies in LMCache's "
            "words, and tiers (from kv_connector_extra_config) says it too. Keep the one or the "
            "other.",
        ),
        ({"policy": "lru", "cache_policy": "LRU"}, "cache_policy (from"),
        ({"offload_prompt_only": True, "save_decode_cache": False}, "save_decode_cache (from"),
        ({"blocks_per_chunk": 2, "lmcache.chunk_size": 256}, "lmcache.chunk_size (from"),
        ({"warm_cache_ratio": 0.5, "max_local_cpu_size": 5}, "both say how much memory"),
    ],
)
def test_one_thing_is_said_in_one_way_only(extra, says):
    assert says in problems(extra)[0]


def test_who_overrides_a_file_in_lmcaches_words_does_it_in_lmcaches_words(lmcache_file):
    file = lmcache_file("max_local_cpu_size: 5\nlocal_disk: /d\nmax_local_disk_size: 1\n")
    loaded = load({"config": file, "lmcache.max_local_cpu_size": 7}, {})
    found = problem({"config": file, "max_local_disk_size": 1, "tiers": ["cpu"]})
    assert f"(from {EXTRA}) say where KV lies in LMCache's words, and tiers (from" in found
    assert [entry["capacity"] for entry in entries(loaded)] == [7 * GIB, GIB]
    twice = lmcache_file("local_cpu: true\nmax_local_cpu_size: 5\nlmcache.max_local_cpu_size: 6\n")
    assert "are the same word" in problem({"config": twice})
    loaded = load({"config": twice, "max_local_cpu_size": 7}, {})
    assert entries(loaded)[0]["capacity"] == 7 * GIB


def test_words_are_written_as_for_lmcaches_connector_too():
    loaded = load({"lmcache.max_local_cpu_size": 5, "lmcache.mp.host": "tcp://localhost"}, {})
    assert entries(loaded) == [{"type": "cpu", "name": "cpu", "capacity": 5 * GIB}]
    assert loaded.origins["tiers[0].capacity"] == f"lmcache.max_local_cpu_size in {EXTRA}"
    assert "lmcache.mp.host" in reasons(loaded)


def test_one_word_in_two_spellings_is_refused():
    assert problem({"lmcache.local_cpu": True, "local_cpu": True}) == (
        f"local_cpu (from {EXTRA}) and lmcache.local_cpu (from {EXTRA}) are the same word of "
        "LMCache's. Keep one of them."
    )
    assert "are the same word" in problem({"pd_role": "a", "nixl_role": "a"})


def test_a_key_that_neither_knows_is_refused_with_the_nearest_of_both(lmcache_file):
    assert problem({"max_local_cpu_sise": 5}).endswith(
        "Did you mean 'max_local_cpu_size', a word of LMCache's?"
    )
    assert "Did you mean 'policy'?" in problem({"polici": "lru"})
    assert problem({"lmcache.local_dsk": "/d"}) == (
        f"lmcache.local_dsk (from {EXTRA}) is not a word of LMCache's that kvtiers knows. Did you "
        "mean 'lmcache.local_disk'? Correct it or leave it out."
    )
    file = lmcache_file("chunk_size: 256\nlocal_cpus: true\n")
    assert f"local_cpus (from file {file}:2) is not a key" in problem({"config": file})


def test_a_word_that_is_not_set_in_lmcache_is_not_set_here():
    extra = {"local_disk": None, "remote_url": "", "remote_storage_plugins": [], "pd_role": None}
    loaded = load(extra, {})
    assert loaded.config == load({}, {}).config
    assert loaded.lmcache == ()


# LMCache's own sources ------------------------------------------------------


def test_lmcaches_own_file_and_variables_count_where_kvtiers_own_say_nothing(lmcache_file):
    file = lmcache_file("max_local_cpu_size: 5\nchunk_size: 128\ncache_policy: MRU\n")
    environ = {
        "LMCACHE_CONFIG_FILE": file,
        "LMCACHE_CHUNK_SIZE": " '256' ",
        "LMCACHE_LOCAL_DISK": "file:///d",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "2.5",
        "LMCACHE_SAVE_DECODE_CACHE": "True",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "LMCACHE_LOG_LEVEL": "INFO",
    }
    loaded = load({"weights_version": "1"}, environ)
    assert loaded.config.chunk_size == 256
    assert loaded.config.offload_prompt_only is False
    assert [entry.get("capacity") for entry in entries(loaded)] == [5 * GIB, 5 * GIB // 2]
    assert entries(loaded)[1]["direct"] is True
    assert loaded.origins["chunk_size"] == "environment LMCACHE_CHUNK_SIZE"
    assert loaded.origins["tiers[0].capacity"] == f"max_local_cpu_size in file {file}:1"
    assert loaded.origins["tiers[1].path"] == "environment LMCACHE_LOCAL_DISK"
    assert loaded.warnings == ()
    assert set(reasons(loaded)) == {"cache_policy"}
    (note,) = loaded.notes
    assert note.startswith("Configured by LMCache's own LMCACHE_CONFIG_FILE, LMCACHE_CHUNK_SIZE, ")
    assert note.endswith("If they are meant for an LMCache beside kvtiers, set 'tiers'.")


OWN = [
    {"tiers": ["cpu"]},
    {"policy": "lru"},
    {"blocks_per_chunk": 2},
    {"warm_cache_ratio": 0.2},
    {"local_cpu": True},
]


@pytest.mark.parametrize("extra", OWN)
def test_who_has_configured_kvtiers_gets_nothing_from_lmcaches_own_sources(lmcache_file, extra):
    file = lmcache_file("chunk_size: 4096\nmax_local_cpu_size: wrong\n")
    environ = {"LMCACHE_CONFIG_FILE": file, "LMCACHE_CHUNK_SIZE": "no"}
    loaded, alone = load(extra, environ), load(extra, {})
    assert (loaded.config, loaded.origins) == (alone.config, alone.origins)
    (key,) = extra
    left = (
        "Left to LMCache: LMCACHE_CONFIG_FILE, LMCACHE_CHUNK_SIZE. kvtiers is configured by its "
        f"own sources, as {key} is set (from {EXTRA}). To build on a file of LMCache's, name it "
        "with 'config'."
    )
    assert left in loaded.notes
    assert loaded.warnings == alone.warnings


@pytest.mark.parametrize("variable", ["KVTIERS_TIERS", "KVTIERS_CONFIG"])
def test_kvtiers_variables_count_as_its_own(lmcache_file, variable):
    file = lmcache_file("tiers: [cpu]\n")
    value = file if variable == "KVTIERS_CONFIG" else "[cpu]"
    loaded = load({}, {variable: value, "LMCACHE_CHUNK_SIZE": "256"})
    assert loaded.config.chunk_size is None


def test_an_unknown_word_in_lmcaches_own_file_is_a_warning_as_it_is_for_lmcache(lmcache_file):
    file = lmcache_file("local_cpuu: true\nchunk_size: 256\n")
    loaded = load({}, {"LMCACHE_CONFIG_FILE": file})
    assert loaded.warnings == (
        f"local_cpuu (from file {file}:1) is not a word of LMCache's that kvtiers knows, and sets "
        "nothing. Did you mean 'local_cpu'?",
    )


def test_a_misspelt_variable_is_told_and_lmcaches_other_variables_are_not():
    environ = {"LMCACHE_CHUNKSIZE": "1", "LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_RESP_HOST": "h"}
    assert load({}, environ).warnings == (
        "The environment variable LMCACHE_CHUNKSIZE sets nothing in kvtiers. Did you mean "
        "'LMCACHE_CHUNK_SIZE'?",
    )


def test_words_for_the_encoder_cache_are_told(lmcache_file):
    file = lmcache_file("ec: {local_cpu: true}\nec_max_local_cpu_size: 1\nec_x: 1\n")
    loaded = load({}, {"LMCACHE_CONFIG_FILE": file})
    assert set(reasons(loaded)) == {"ec", "ec_max_local_cpu_size"}
    assert "ec_x (from file" in loaded.warnings[0]


def test_a_file_of_lmcaches_that_cannot_be_read_was_named_by_its_variable(tmp_path):
    text = problem({}, {"LMCACHE_CONFIG_FILE": str(tmp_path / "no.yaml")})
    assert "no.yaml, which LMCACHE_CONFIG_FILE names, cannot be read: No such file" in text
    assert load({}, {"LMCACHE_CONFIG_FILE": ""}).config == load({}, {}).config


def test_a_variable_that_is_no_text_is_refused():
    text = problem({}, {"LMCACHE_LOCAL_DISK": "/\udcff"})
    assert text.startswith("The environment cannot be read: LMCACHE_LOCAL_DISK holds")


def test_the_command_line_tells_what_became_of_each_word_in_order(lmcache_file, capsys):
    file = lmcache_file("""
        enable_p2p: false
        cache_policy: LFU
        max_local_cpu_size: 5
        extra_config: {nixl_path: /x}
        local_cpu: true
    """)
    assert cli.main(["config", "--check", file]) == 0
    shown = capsys.readouterr()
    _, words_shown = shown.out.split("\n\n")
    rows = [re.split("  +", line) for line in words_shown.splitlines()]
    assert [(row[0], row[2]) for row in rows] == [
        ("enable_p2p", f"file {file}:2"),
        ("cache_policy", f"file {file}:3"),
        ("max_local_cpu_size", f"file {file}:4"),
        ("extra_config.nixl_path", f"file {file}:5"),
        ("local_cpu", f"file {file}:6"),
    ]
    assert rows[2][1] == "sets tiers[0].capacity"
    assert rows[0][1] == f"nothing: {words.job_of('enable_p2p')}"
    assert shown.err.count("\n") == 1


def test_on_a_terminal_the_words_are_a_table():
    screen = Console(file=io.StringIO(), force_terminal=True, width=200)
    config_report.show(load({"local_cpu": True}, {}), screen)
    assert "LMCache's word" in screen.file.getvalue()


def test_the_command_line_says_whose_configuration_it_is(lmcache_file, capsys, monkeypatch):
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", lmcache_file("chunk_size: 256\n"))
    assert cli.main(["config"]) == 0
    assert "Configured by LMCache's own LMCACHE_CONFIG_FILE" in capsys.readouterr().err
    assert cli.main(["config", '{"tiers": ["cpu"]}']) == 0
    assert "kvtiers: Left to LMCache: LMCACHE_CONFIG_FILE." in capsys.readouterr().err


def test_a_server_logs_what_was_taken_and_what_was_not(caplog):
    extra = {"enable_p2p": True, "remote_serde": "naive", "p2p_host": "h"}
    loaded = load({"max_local_cpu_size": 5, **extra}, {})
    with caplog.at_level(logging.INFO, "kvtiers"):
        loaded.log()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "kvtiers: Words of LMCache's that set nothing in kvtiers: enable_p2p, p2p_host "
            "(engines share KV through a redis tier, or an fs tier on a shared mount); "
            "remote_serde (KV is stored as it is).",
        ),
        (
            "INFO",
            "kvtiers: Set by LMCache's words: tiers[0].capacity by max_local_cpu_size in "
            "kv_connector_extra_config.",
        ),
    ]
