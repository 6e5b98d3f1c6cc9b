import json
import math
import os
import textwrap
from pathlib import Path

import pytest
from config_kit import installed_tier, problem, problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.connector.config import Config, load, resolve_blocks_per_chunk, values
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.sizes import file_system_bytes
from kvtiers.tiers import TIERS, TierConfig
from kvtiers.tiers.host_memory import available_bytes
from pydantic import ValidationError

MIB = 1 << 20


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str, name: str = "kvtiers.yaml") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    options = "path: str | None = None\ncapacity: int = Field(default=7 * 2**20, ge=2**20)"
    with installed_tier(tmp_path, monkeypatch, options) as name:
        yield name


# Defaults and sources -------------------------------------------------------


def test_without_any_setting_there_is_a_cpu_and_a_filesystem_tier_under_lru():
    loaded = load({}, {})
    assert [tier.type for tier in loaded.config.tiers] == ["cpu", "fs"]
    assert loaded.config.policy.type == "lru"
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.warnings == ()


def test_extra_config_beats_environment_beats_file_beats_default(yaml_file):
    file = yaml_file("""
        weights_version: file
        blocks_per_chunk: 2
        offload_prompt_only: false
    """)
    environ = {"KVTIERS_WEIGHTS_VERSION": "environment", "KVTIERS_BLOCKS_PER_CHUNK": "4"}
    loaded = load({"config": file, "weights_version": "extra"}, environ)
    assert loaded.config.weights_version == "extra"
    assert loaded.config.blocks_per_chunk == 4
    assert loaded.config.offload_prompt_only is False
    assert loaded.origins["weights_version"] == "kv_connector_extra_config"
    assert loaded.origins["blocks_per_chunk"] == "environment KVTIERS_BLOCKS_PER_CHUNK"
    assert loaded.origins["offload_prompt_only"] == f"file {file}:4"
    assert loaded.origins["chunk_size"] == "default"


def test_every_value_has_an_origin_down_to_a_tiers_options(yaml_file):
    file = yaml_file("""
        tiers:
          - cpu
          - type: fs
            path: /data/kv
            capacity: 20GB
    """)
    loaded = load({"config": file}, {})
    assert set(loaded.origins) == {path for path, _ in values(loaded.config)}
    assert loaded.origins["tiers[0].type"] == f"file {file}:3"
    assert loaded.origins["tiers[0].capacity"] == "default"
    assert loaded.origins["tiers[1].capacity"] == f"file {file}:6"
    assert loaded.origins["tiers[1].fsync"] == "default"
    assert loaded.origins["policy.type"] == "default"


def test_what_a_tier_takes_out_of_another_option_was_written_with_its_entry(yaml_file):
    file = yaml_file("""
        tiers:
          - cpu
          - {type: redis, url: "redis://ada:secret@host/3"}
    """)
    origins = load({"config": file}, {}).origins
    assert origins["tiers[1].username"] == origins["tiers[1].password"] == f"file {file}:4"
    assert origins["tiers[1].ttl"] == "default"


def test_a_json_file_says_the_same_as_a_yaml_file(yaml_file):
    data = {"tiers": ["cpu", {"type": "fs", "path": "/data"}], "chunk_size": 256}
    as_json = yaml_file(json.dumps(data, indent="\t"), "kvtiers.json")
    as_yaml = yaml_file(json.dumps(data), "kvtiers.yaml")
    assert load({"config": as_json}, {}).config == load({"config": as_yaml}, {}).config


def test_the_environment_may_name_the_file_and_set_whole_lists(yaml_file):
    file = yaml_file("tiers: [cpu, fs]\nweights_version: v7\n")
    environ = {"KVTIERS_CONFIG": file, "KVTIERS_TIERS": '[{"type": "cpu", "capacity": "8GiB"}]'}
    config = load({}, environ).config
    assert [str(tier.capacity) for tier in config.tiers] == ["8 GiB"]
    assert config.weights_version == "v7"


@pytest.mark.parametrize("written", ["3", "1.10", "2026-01-31", "010", "yes", "'3'", "v7"])
def test_a_weights_version_is_the_text_as_it_is_written(yaml_file, written):
    file = yaml_file(f"weights_version: {written}\n")
    text = written.strip("'")
    assert load({"config": file}, {}).config.weights_version == text
    assert load({}, {"KVTIERS_WEIGHTS_VERSION": written}).config.weights_version == text


def test_a_weights_version_from_json_may_be_a_whole_number_and_no_other():
    assert load({"weights_version": 3}, {}).config.weights_version == "3"
    for version in (1.10, True):
        assert "it must be a text, in quotes. It is a text" in problem({"weights_version": version})
    assert load({}, {"KVTIERS_WEIGHTS_VERSION": "null"}).config.weights_version is None


def test_blocks_per_chunk_shows_what_counts():
    assert dict(values(load({}, {}).config))["blocks_per_chunk"] == 1
    assert dict(values(load({"chunk_size": 256}, {}).config))["blocks_per_chunk"] is None
    assert dict(values(load({"blocks_per_chunk": 4}, {}).config))["blocks_per_chunk"] == 4


def test_an_empty_file_sets_nothing(yaml_file):
    assert load({"config": yaml_file("# later\n")}, {}).config == load({}, {}).config


def test_an_unknown_variable_is_a_warning_with_the_nearest_name():
    warnings = load({}, {"KVTIERS_POLICI": "lru", "KVTIERS_TRACES": "x", "HOME": "/"}).warnings
    assert warnings == (
        "The environment variable KVTIERS_POLICI sets nothing in kvtiers. "
        "Did you mean 'KVTIERS_POLICY'?",
    )


# Paths ----------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["kv", "a:b", "d/kv", "./s3:/kv"])
def test_what_has_no_scheme_is_a_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load({"tiers": ["cpu", {"type": "fs", "path": folder}]}, {}).config
    assert str(config.tiers[1].options.path) == os.path.normpath(tmp_path / folder)


def test_a_relative_path_in_a_file_starts_at_the_files_folder(yaml_file, tmp_path):
    config = load({"config": yaml_file("tiers: [cpu, {type: fs, path: ../kv}]")}, {}).config
    assert config.tiers[1].options.path == tmp_path.parent / "kv"


def test_home_and_variables_in_a_path_expand(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SCRATCH", "/scratch/7")
    tiers = ["cpu", {"type": "fs", "path": "~/kv"}, {"type": "fs", "name": "b", "path": "$SCRATCH"}]
    config = load({"tiers": tiers}, {}).config
    assert config.tiers[1].options.path == Path("/home/ada/kv")
    assert config.tiers[2].options.path == Path("/scratch/7")


def test_a_variable_that_is_not_set_is_an_error_and_not_a_folder_of_that_name(monkeypatch):
    monkeypatch.delenv("SCRATCH", raising=False)
    assert problem({"tiers": ["cpu", {"type": "fs", "path": "${SCRATCH}/kv"}]}) == (
        "tiers[1].path is '${SCRATCH}/kv' (from kv_connector_extra_config): the variable "
        "${SCRATCH} is not set. Set it, or write the path in full."
    )


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("~nobody-of-this-name/kv", "there is no such user. Write the path in full."),
        ("/data/\0", "no path holds a null character."),
    ],
)
def test_a_path_that_cannot_be_is_refused(path, says):
    assert problem({"tiers": ["cpu", {"type": "fs", "path": path}]}) == (
        f"tiers[1].path is {path!r} (from kv_connector_extra_config): {says}"
    )


# Capacities -----------------------------------------------------------------


def test_a_share_is_of_free_memory_for_cpu_and_of_the_file_system_for_fs(tmp_path):
    tiers = [
        {"type": "cpu", "capacity": "10%"},
        {"type": "fs", "capacity": 0.5, "path": str(tmp_path)},
    ]
    cpu, fs = load({"tiers": tiers}, {}).config.tier_configs(chunk_bytes=MIB)
    assert cpu.capacity == pytest.approx(available_bytes() * 0.1, rel=0.2)
    assert fs.capacity == file_system_bytes(str(tmp_path)) // 2


def test_engines_of_one_host_divide_its_memory():
    config = load({"tiers": [{"type": "cpu", "capacity": "50%"}]}, {}).config
    (alone,) = config.tier_configs(MIB)
    (one_of_four,) = config.tier_configs(MIB, engines=4)
    assert one_of_four.capacity == pytest.approx(alone.capacity / 4, rel=0.2)


def test_memory_that_is_promised_but_not_yet_used_is_not_free():
    config = load({"tiers": [{"type": "cpu", "capacity": "90%"}]}, {}).config
    (most_of_it,) = config.tier_configs(MIB)
    (rest,) = config.tier_configs(MIB, promised_bytes=available_bytes() * 3 // 4)
    assert rest.capacity == pytest.approx(most_of_it.capacity / 4, rel=0.3)


def test_the_filesystem_tier_takes_no_more_than_100_gib_unless_told():
    _, fs = load({}, {}).config.tier_configs(MIB)
    assert 0 < fs.capacity <= 100 << 30


def test_a_third_partys_integer_capacity_reads_sizes_and_shares(third_party, tmp_path):
    tiers = ["cpu", {"type": "acme", "capacity": "25%", "path": str(tmp_path)}]
    _, acme = load({"tiers": tiers}, {}).config.tier_configs(MIB)
    assert acme.capacity == file_system_bytes(str(tmp_path)) // 4
    _, acme = load(
        {"tiers": ["cpu", {"type": "acme", "capacity": "8MiB"}]}, {}
    ).config.tier_configs(MIB)
    assert acme.capacity == 8 * MIB


def test_a_third_partys_own_default_and_bounds_hold(third_party):
    _, acme = load({"tiers": ["cpu", "acme"]}, {}).config.tier_configs(MIB)
    assert acme.capacity == 7 * MIB
    text = problem({"tiers": ["cpu", {"type": "acme", "capacity": "1kB"}]})
    assert text.startswith("tiers[1].capacity is 1000 (from kv_connector_extra_config):")
    assert "it must be 1048576 or more." in text


def test_a_filesystem_on_a_url_has_a_capacity_without_a_whole_to_take_a_share_of():
    config = load({"tiers": ["cpu", {"type": "fs", "path": "s3://bucket/kv"}]}, {}).config
    _, bucket = config.tier_configs(MIB)
    assert bucket.capacity == 100 << 30


def test_a_share_of_nothing_is_refused(third_party):
    assert problem({"tiers": ["cpu", {"type": "acme", "capacity": "25%"}]}) == (
        "tiers[1].capacity is '25%' (from kv_connector_extra_config): a tier of type 'acme' has "
        "no whole on this machine to take a share of. Give it as a size, such as 8GiB."
    )


def test_a_capacity_below_one_chunk_is_refused_for_every_tier_at_once():
    tiers = [{"type": "cpu", "capacity": "1MiB"}, {"type": "fs", "capacity": "3MiB"}]
    config = load({"tiers": tiers}, {}).config
    with pytest.raises(ConfigError) as raised:
        config.tier_configs(chunk_bytes=4 * MIB)
    first, second = raised.value.problems
    assert first == (
        "tiers[0].capacity is 1 MiB, which is below one chunk of 4 MiB. Set it to a good multiple "
        "of 4194304 bytes, or make chunks smaller with blocks_per_chunk."
    )
    assert second.startswith("tiers[1].capacity is 3 MiB")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("s3", "{type: fs, path: s3://bucket/prefix}"),
        ("disk", "{type: fs, path: /nvme/kvtiers}"),
        ("Valkey", "{type: redis, url: valkey://host:6379}"),
    ],
)
def test_a_tier_under_another_systems_name_is_told_ours(name, says):
    text = problem({"tiers": ["cpu", name]})
    assert text.startswith(f"tiers[1].type is '{name}' (from kv_connector_extra_config): ")
    assert says in text


def test_a_second_cpu_tier_is_not_told_to_be_the_first():
    assert problem({"tiers": ["cpu", "cpu"]}).endswith("no other one is. Leave this one out.")


def test_a_type_with_its_options_below_it_is_told_where_they_belong():
    text = problem({"tiers": ["cpu", {"redis": {"url": "redis://h"}}]})
    assert text.endswith("Written here: redis. Did you mean {type: redis, ...}?")
    assert problem({"policy": {"arc": None}}).endswith("Did you mean {type: arc, ...}?")


def test_a_policy_that_is_named_is_told_the_key():
    assert "Did you mean 'type' by 'name'?" in problem({"policy": {"name": "lru"}})


def test_a_capacity_that_is_none_says_what_one_is():
    assert problem({"tiers": [{"type": "cpu", "capacity": "lots"}]}) == (
        "tiers[0].capacity is 'lots' (from kv_connector_extra_config): it is neither a size "
        "above 0 nor a share of at most 100%; write for example 8GiB, 20GB, 1073741824, 25% or "
        "0.25."
    )


def test_a_third_partys_bad_capacity_is_told_once(third_party):
    text = problem({"tiers": ["cpu", {"type": "acme", "capacity": -5}]})
    assert text.startswith(
        "tiers[1].capacity is -5 (from kv_connector_extra_config): it is neither"
    )


@pytest.mark.parametrize("capacity", ["100%", "96%", 0.96])
def test_nearly_all_of_the_memory_is_refused_for_the_cpu_tier_only(capacity):
    assert problem({"tiers": [{"type": "cpu", "capacity": capacity}]}) == (
        f"tiers[0].capacity is {capacity!r} (from kv_connector_extra_config): the engine needs a "
        "part of the memory that is free when the server starts. Take at most 95% of it."
    )
    load({"tiers": [{"type": "cpu", "capacity": "95%"}, {"type": "fs", "capacity": capacity}]}, {})


# Chunk sizes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "blocks"),
    [({}, 1), ({"blocks_per_chunk": 8}, 8), ({"chunk_size": 256}, 16)],
)
def test_chunks_are_counted_in_blocks(extra, blocks):
    assert resolve_blocks_per_chunk(load(extra, {}).config, [16, 16]) == blocks


@pytest.mark.parametrize(
    ("size", "advice"), [(200, "Set it to 192 or 208"), (10, "Set it to 16, or")]
)
def test_a_chunk_size_that_does_not_divide_names_the_nearest_that_do(size, advice):
    with pytest.raises(ConfigError, match=advice) as raised:
        resolve_blocks_per_chunk(load({"chunk_size": size}, {}).config, [16])
    assert f"chunk_size is {size} tokens, which is no multiple of vLLM's block of 16" in str(
        raised.value
    )


def test_tokens_cannot_measure_a_chunk_where_groups_differ():
    with pytest.raises(ConfigError, match="blocks of 16, 128 tokens"):
        resolve_blocks_per_chunk(load({"chunk_size": 256}, {}).config, [16, 128])


def test_only_one_of_the_two_chunk_sizes():
    assert problem({"chunk_size": 256, "blocks_per_chunk": 2}) == (
        "blocks_per_chunk is 2 and chunk_size is 256, and both say how large a chunk is. "
        "Keep one of them."
    )


# Bad input ------------------------------------------------------------------


def test_a_misspelt_key_names_its_path_its_line_and_the_nearest_spelling(yaml_file):
    file = yaml_file("""
        tiers:
          - cpu
          - type: fs
            capcity: 8GiB
    """)
    assert problem({"config": file}) == (
        f"tiers[1].capcity (from file {file}:5) is not a key that kvtiers knows. Did you mean "
        "'capacity'? Known here: block_size, buffer, capacity, deadline, direct, encryption, "
        "fsync, headroom, name, path, tenant_quota, threads, type. Correct it or leave it out."
    )


def test_a_misspelt_top_level_key():
    text = problem({"polcy": "lru"})
    assert text.startswith("polcy (from kv_connector_extra_config) is not a key")
    assert "Did you mean 'policy'?" in text


def test_every_problem_is_told_at_once():
    found = problems({"tiers": ["cpu", "fss"], "polcy": "lru", "chunk_size": 0})
    assert {text.split()[0] for text in found} == {"tiers[1].type", "polcy", "chunk_size"}


def test_unknown_tier():
    text = problem({"tiers": ["cpu", "fss"]})
    assert text.startswith(
        "tiers[1].type is 'fss' (from kv_connector_extra_config): Unknown tier 'fss'. Known: "
    )
    assert text.endswith("Did you mean 'fs'?")


def test_two_packages_that_offer_one_name_are_told_once(third_party, tmp_path):
    info = tmp_path / "emca-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emca\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtiers.tiers]\nacme = emca:Tier\n")
    assert problem({"tiers": ["cpu", "fs", "acme"]}).startswith(
        "Two packages offer a tier named 'acme': "
    )


def test_unknown_policy_and_unknown_option_of_a_known_one():
    assert "policy.type is 'lruu'" in problem({"policy": "lruu"})
    text = problem({"policy": {"type": "lru", "agee": 1}})
    assert text.startswith("policy.agee (from kv_connector_extra_config) is not a key")


def test_two_tiers_of_one_name_are_both_named():
    assert problem({"tiers": ["cpu", "fs", {"type": "fs", "path": "/b"}]}) == (
        "tiers[2] is 'fs' (from kv_connector_extra_config): tiers[1] is called that already. "
        "Remove one of the two, or give one of them another 'name'."
    )


def test_two_tiers_of_one_type_may_differ_in_name():
    tiers = ["cpu", "fs", {"type": "fs", "name": "lustre", "path": "/b"}]
    assert [t.name for t in load({"tiers": tiers}, {}).config.tiers] == ["cpu", "fs", "lustre"]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_no_tier_takes_a_name_that_metrics_have_for_another(name):
    assert problem({"tiers": ["cpu", {"type": "fs", "name": name}]}) == (
        f"tiers[1].name is '{name}' (from kv_connector_extra_config): metrics call another tier "
        "that. Give this one another name, such as 'fs'."
    )


def test_the_cpu_tier_has_its_name():
    assert problem({"tiers": [{"type": "cpu", "name": "ram"}]}) == (
        "tiers[0].name is 'ram' (from kv_connector_extra_config): the cpu tier is always called "
        "'cpu'."
    )


def test_the_gpu_tier_is_not_listed():
    assert problem({"tiers": ["gpu", "cpu", "fs"]}) == (
        "tiers[0].type is 'gpu' (from kv_connector_extra_config): the GPU tier is vLLM's own "
        "prefix cache. It is always there, above the first tier, and is not listed. Leave it out."
    )
    assert "Unknown policy 'gpu'" in problem({"policy": "gpu"})


def test_two_tiers_in_one_folder_are_both_named_however_it_is_written(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    tiers = [
        "cpu",
        {"type": "fs", "path": f"{tmp_path}/kv"},
        {"type": "fs", "name": "b", "path": f"{tmp_path}/x/../kv/"},
        {"type": "fs", "name": "c", "path": f"{tmp_path}/link"},
        {"type": "fs", "name": "d", "path": f"{tmp_path}/other"},
    ]
    second, third = problems({"tiers": tiers})
    assert second == (
        f"tiers[2].path is '{tmp_path}/kv' (from kv_connector_extra_config): tiers[1] lies in "
        "that folder already. Remove one of the two, or give one of them another 'path'."
    )
    assert third.startswith(f"tiers[3].path is '{tmp_path}/link'")


@pytest.mark.parametrize("tiers", [["fs"], ["fs", "cpu"], ["cpu", {"type": "cpu", "name": "b"}]])
def test_cpu_is_the_first_tier_and_no_other(tiers):
    assert any("the first tier is always 'cpu'" in text for text in problems({"tiers": tiers}))


@pytest.mark.parametrize("tiers", [[], {}, "cpu", None, 3])
def test_tiers_must_be_a_list(tiers):
    assert "it must be a list of tiers, such as" in problem({"tiers": tiers})


def test_an_entry_without_a_type_shows_what_it_has():
    text = problem({"tiers": ["cpu", {"typ": "fs"}]})
    assert text == (
        "tiers[1].type is missing (from kv_connector_extra_config): it must be the name of a tier "
        "or policy. Written here: typ. Did you mean 'type' by 'typ'?"
    )
    assert "Written here: nothing." in problem({"tiers": ["cpu", {}]})
    assert problem({"policy": {"type": 3}}).startswith("policy.type is 3 (from")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("block_size", "chunk_size"),
        ("cpu_bytes_to_use", "capacity"),
        ("eviction_policy", "policy"),
        ("secondary_tiers", "tiers"),
        ("spec_name", "leave it out"),
        ("store_threshold", "leave it out"),
    ],
)
def test_vllms_own_offloading_keys_are_refused_with_ours(key, instead):
    text = problem({key: 1})
    assert text.startswith(f"{key} (from kv_connector_extra_config) belongs to vLLM's own")
    assert instead in text


@pytest.mark.parametrize("value", ["yes please", 3, "automatic"])
def test_a_wrong_value_says_what_is_allowed_and_what_the_key_is(value):
    text = problem({"canonical_layout": value})
    assert text.startswith(f"canonical_layout is {value!r} (from kv_connector_extra_config): ")
    assert "'auto', true or false" in text
    assert text.endswith("It is whether KV is stored independently of the tensor-parallel shape.")


# Options of tiers -----------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 257, True, 2.5, "4", None])
@pytest.mark.parametrize("tier", TIERS.names())
def test_every_tier_refuses_a_number_of_threads_that_is_none(tier, value):
    with pytest.raises(ValidationError, match=r"threads\n"):
        TIERS.get(tier).Config(capacity=MIB, threads=value)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "5s", None])
@pytest.mark.parametrize("tier", TIERS.names())
def test_every_tier_refuses_a_deadline_that_is_none(tier, value):
    with pytest.raises(ValidationError, match=r"deadline\n"):
        TIERS.get(tier).Config(capacity=MIB, deadline=value)


def test_a_tier_that_declares_a_common_option_again_keeps_its_bounds():
    class Again(TierConfig):
        type: str = "again"
        threads: int = 8
        deadline: float = 1.0

    assert Again(threads=1, deadline=2).threads == 1
    for wrong in ({"threads": 0}, {"deadline": math.inf}):
        with pytest.raises(ValidationError):
            Again(**wrong)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("threads", 0, "it must be a whole number from 1 to 256."),
        ("deadline", "5s", "it must be a number of seconds above 0, without a unit, such as 5."),
        ("direct", "maybe", "it must be 'auto', true or false."),
        ("fsync", 3, "it must be true or false."),
        ("path", 7, "it must be a path, in quotes."),
        ("path", "", "it is empty. Name a folder, or leave 'path' out for the default."),
    ],
)
def test_a_wrong_option_of_a_filesystem_tier_says_in_one_line_what_is_allowed(key, value, says):
    assert problem({"tiers": ["cpu", {"type": "fs", key: value}]}) == (
        f"tiers[1].{key} is {value!r} (from kv_connector_extra_config): {says}"
    )


@pytest.mark.parametrize("key", ["threads", "deadline"])
def test_the_cpu_tier_has_no_threads_and_no_deadline(key):
    assert problem({"tiers": [{"type": "cpu", key: 4}]}) == (
        f"tiers[0].{key} is 4 (from kv_connector_extra_config): the cpu tier has neither a "
        "deadline nor threads, as the engine makes its copies. Leave it out."
    )
    assert f"tiers[0].{key}" not in load({}, {}).origins
    text = problem({"tiers": [{"type": "cpu", "thread": 4}]})
    assert "Known here: capacity, name, tenant_quota, type. Correct it" in text


KEYS = st.sampled_from(
    ["tiers", "policy", "type", "name", "path", "capacity", "chunk_size", "canonical_layout", "x"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["cpu", "fs", "lru", "8GiB", "25%", "auto", "$HOME", "s3://bucket"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_stands_there_is_a_configuration_or_a_clear_error(extra):
    found, loaded = [], None
    try:
        loaded = load(extra, {})
    except ConfigError as error:
        found = error.problems
    assert bool(found) == (loaded is None)
    assert all(text.endswith((".", "?")) for text in found)


# Files ----------------------------------------------------------------------


def test_keys_that_yaml_reads_as_numbers_are_unknown_keys_like_others(yaml_file):
    file = yaml_file("7: x\ntiers: [cpu, {type: fs, 8: y}]\n")
    found = problems({"config": file})
    assert [text.split(" (from")[0] for text in found] == ["tiers[1].8", "7"]


def test_a_list_as_a_yaml_key_is_no_mapping_of_keys(yaml_file):
    assert "is not valid YAML" in problem({"config": yaml_file("? [a]\n: b\n")})


def test_a_missing_file_says_who_named_it(tmp_path):
    text = problem({}, {"KVTIERS_CONFIG": str(tmp_path / "no.yaml")})
    assert "no.yaml, which KVTIERS_CONFIG names, cannot be read: No such file" in text
    assert "'config' in kv_connector_extra_config" in problem({"config": str(tmp_path)})


def test_a_file_cannot_name_another(yaml_file):
    file = yaml_file("config: other.yaml\n")
    assert problem({"config": file}) == (
        f"config (from file {file}:1): a file cannot name another one. Move its keys here."
    )


def test_a_key_that_stands_twice_in_a_file_is_refused(yaml_file):
    file = yaml_file("chunk_size: 16\npolicy: lru\nchunk_size: 32\n")
    assert "chunk_size stands twice in" in (text := problem({"config": file}))
    assert "in lines 1 and 3. Keep one of them." in text


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("tiers: [cpu", "a.yaml", "is not valid YAML"),
        ('{"tiers": ', "a.json", "is not valid JSON"),
        ("- cpu\n- fs\n", "a.yaml", "must hold a mapping of keys"),
    ],
)
def test_a_file_that_is_no_mapping(yaml_file, text, name, says):
    assert says in problem({"config": yaml_file(text, name)})


def test_a_variable_that_is_not_yaml():
    text = problem({}, {"KVTIERS_TIERS": "[cpu"})
    assert text.startswith("The value of environment KVTIERS_TIERS is not YAML")


LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(8)]
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("&a [*a]", "more than 32 levels deep"),
        ("&a {x: *a}", "more than 32 levels deep"),
        ("&a {<<: *a}", "more than 32 levels deep"),
        ("[" * 5000 + "]" * 5000, "more than 32 levels deep"),
        ("{a: " * 900 + "1" + "}" * 900, "more than 32 levels deep"),
        ("- " * 3000 + "x", "more than 32 levels deep"),
        ("[" + "x, " * 10_001 + "x]", "more than 10000 keys and values"),
        ("{" + LAUGHS.replace("\n", ", ") + "}", "more than 10000 keys and values"),
        ("2001-99-99", "read as timestamp and is none"),
        ("!!int x", "read as int and is none"),
        ("!!float x", "read as float and is none"),
        ("!!bool x", "read as bool and is none"),
        ("!!timestamp x", "read as timestamp and is none"),
        ("9" * 5000, "read as int and is none"),
        ("0x" + "f" * 5000, "has more than 4096 bits"),
        ("{? [a] : b}", "a list or a mapping is no key"),
        ("{a: 1, a: 2}", "a stands twice in it, in lines 1 and 1. Keep one of them"),
    ],
)
def test_what_a_yaml_parser_trips_over_is_a_paragraph_that_names_its_source(yaml_file, text, says):
    file = yaml_file(f"tiers:\n  {text}\n")
    found = problem({"config": file})
    assert found.startswith(f"The configuration file {file} is not valid YAML: ")
    assert says.replace("lines 1 and 1", "lines 2 and 2") in found
    for variable in ("KVTIERS_TIERS", "KVTIERS_POLICY"):
        found = problem({}, {variable: text})
        assert found.startswith(f"The value of environment {variable} is not YAML: ")
        assert says in found
        assert len(found) < 600


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"tiers": ' + "[" * 100_000, "more than 32 levels deep"),
        ('{"tiers": ' + "[" * 40 + "]" * 40 + "}", "more than 32 levels deep"),
        ('{"chunk_size": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"weights_version": "\\ud800"}', "weights_version holds what is no Unicode text"),
    ],
)
def test_what_a_json_parser_trips_over_is_a_paragraph_too(yaml_file, text, says):
    file = yaml_file(text, "a.json")
    found = problem({"config": file})
    assert found.startswith(f"The configuration file {file} is not valid JSON: ")
    assert says in found


def test_a_weights_version_need_not_be_what_yaml_takes_it_for(yaml_file):
    file = yaml_file("weights_version: 2001-99-99\n")
    assert load({"config": file}, {}).config.weights_version == "2001-99-99"


def test_an_alias_that_ends_is_written_out(yaml_file):
    file = yaml_file("tiers: [{type: cpu, capacity: &size 1GiB}, {type: fs, capacity: *size}]\n")
    assert {str(tier.capacity) for tier in load({"config": file}, {}).config.tiers} == {"1 GiB"}


def _endless() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"tiers": _endless()}, "more than 32 levels deep"),
        ({"chunk_size": 10**5000}, "the number at chunk_size has more than 4096 bits"),
        (
            {"tiers": ["cpu", {"type": "fs", "path": "/\ud800"}]},
            "tiers[1].path holds what is no Unicode text",
        ),
    ],
)
def test_values_beyond_the_bounds_in_the_extra_config(extra, says):
    found = problem(extra)
    assert found.startswith("kv_connector_extra_config cannot be read: ")
    assert says in found


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"tiers": [{1: 2}]}, "Written here: 1."),
        ({"policy": {1: 2}}, "Written here: 1."),
        ({1: 2}, "1 (from kv_connector_extra_config) is not a key that kvtiers knows."),
    ],
)
def test_a_key_that_is_no_text_is_unknown_like_others(extra, says):
    assert says in problem(extra)


def test_only_a_regular_file_is_opened(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for name in (pipe, "/dev/null"):
        assert "cannot be read: it is no regular file." in problem({"config": str(name)})
    assert "cannot be read: Is a directory." in problem({"config": str(tmp_path)})


def test_a_file_is_at_most_1_mib(yaml_file):
    padding = "#" * (MIB - 1) + "\n"
    assert load({"config": yaml_file(padding)}, {}).warnings == ()
    assert "cannot be read: it is larger than 1 MiB." in problem(
        {"config": yaml_file(padding + "#")}
    )


@pytest.mark.parametrize(("name", "shown"), [("a\0b", r"a\x00b"), ("\ud800", r"\ud800")])
def test_a_name_that_no_file_can_have(name, shown):
    text = problem({"config": name})
    assert f"{shown}, which 'config' in" in text
    assert "cannot be read: no file can have that name." in text


def test_a_file_in_another_encoding(tmp_path):
    (tmp_path / "a.yaml").write_bytes("tiers: [cpu]".encode("utf-16"))
    assert "it is no text in UTF-8" in problem({"config": str(tmp_path / "a.yaml")})


def test_a_configuration_cannot_be_changed_afterwards():
    config: Config = load({}, {}).config
    with pytest.raises(ValueError, match="frozen"):
        config.chunk_size = 3


def test_more_memory_than_there_is_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtiers.connector.config_specs.available_bytes", lambda: 8 << 30)
    (cpu,) = load({"tiers": [{"type": "cpu", "capacity": "5GiB"}]}, {}).config.tiers
    assert cpu.with_bytes("tiers[0]", 4096).capacity == 5 << 30
    with pytest.raises(ConfigError) as caught:
        cpu.with_bytes("tiers[0]", 4096, engines=2)
    assert str(caught.value) == (
        "tiers[0].capacity is 5 GiB, but this host (or its cgroup) has 4 GiB of memory left for "
        "each of the 2 engines on it. Set it to less than that, or to a share such as 50%, or "
        "leave it out."
    )
    with pytest.raises(ConfigError, match=r"has 4 GiB of memory left\. Set it"):
        cpu.with_bytes("tiers[0]", 4096, promised=4 << 30)


def test_a_capacity_beyond_all_numbers_is_refused_too() -> None:
    (cpu,) = load({"tiers": [{"type": "cpu", "capacity": 10**30}]}, {}).config.tiers
    with pytest.raises(ConfigError, match=r"tiers\[0\].capacity is .* of memory left"):
        cpu.with_bytes("tiers[0]", 4096)


@pytest.mark.parametrize("url", ["redis://:hunter2@host:6379/0", "s3://me:hunter2@bucket/a@b"])
@pytest.mark.parametrize(
    "given",
    [
        lambda url: {"tiers": ["cpu", url]},
        lambda url: {"tiers": url},
        lambda url: {"policy": url},
        lambda url: {"policy": {"type": url}},
        lambda url: {"chunk_size": url},
        lambda url: {"save_decode_cache": [{"len": [url]}]},
        lambda url: {"blocking_timeout_secs": url, "remote_url": "redis://host"},
        lambda url: {"max_tokens": {"a": [url]}},
    ],
)
def test_a_password_in_a_url_at_a_wrong_place_is_not_shown(url, given):
    with pytest.raises(ConfigError) as raised:
        load(given(url), {})
    assert "hunter2" not in f"{raised.value} {raised.value.problems}"
