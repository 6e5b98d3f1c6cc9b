"""Real engines with encrypted tiers: the same answers, and nothing in clear outside of them."""

from __future__ import annotations

from pathlib import Path

from encrypted_tiers import write_keys
from engine import Engine, chunk_files, cpu, fs, redis_tier
from kvtiers.tools import cli
from models import prompts
from redis_server import RedisServer

_PROMPTS = prompts(2, 700)
# Whole blocks of each prompt.
_CHUNKS = 5
_CACHED = _CHUNKS * 128


def test_answers_are_the_same_from_encrypted_tiers_after_a_restart_and_without_the_keys(
    llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    keys, root = write_keys(tmp_path / "kv.keys"), tmp_path / "root"
    encrypted = {"encryption": {"key_file": str(keys)}}
    redis, files = redis_tier(redis_server.url, **encrypted), fs(root, **encrypted)

    with Engine(llama, [cpu(), redis, files]) as first:
        cold = first.ask_each(_PROMPTS)
        assert {answer.cached for answer in cold} == {0}
        clear = [bytes(memory) for memory in first.arena().values()]
    tokens = [answer.tokens for answer in cold]
    nothing_in_clear(clear, root, redis_server)
    assert cli.main(["verify", str(root), "--keys", str(keys)]) == 0

    with Engine(llama, [cpu(), redis, files]) as second:
        answers = second.ask_each(_PROMPTS)
        assert [answer.tokens for answer in answers] == tokens
        assert {answer.cached for answer in answers} == {_CACHED}
        assert second.counts("redis")["hits"] == 2 * _CHUNKS

    with Engine(llama, [cpu(), files]) as without_redis:
        answers = without_redis.ask_each(_PROMPTS)
        assert [answer.tokens for answer in answers] == tokens
        assert without_redis.counts("fs")["hits"] == 2 * _CHUNKS

    before = {path: path.read_bytes() for path in chunk_files(root).values()}
    with Engine(llama, [cpu(), fs(root)]) as without_keys:
        answer = without_keys.ask(_PROMPTS[0])
        assert (answer.tokens, answer.cached) == (tokens[0], 0)
        counts = without_keys.counts("fs")
        assert (counts["unreadable"], counts["corrupt"], counts["failures"]) == (_CHUNKS, 0, 0)
    assert {path: path.read_bytes() for path in before} == before


def nothing_in_clear(clear: list[bytes], root: Path, server: RedisServer) -> None:
    """No stretch of any chunk's KV lies in a file or a value."""
    with server.client() as client:
        names = [name for name in client.keys("kvtiers:v1:*") if not name.endswith(b":about")]
        stored = [client.get(name) for name in names]
    stored += [path.read_bytes() for path in chunk_files(root).values()]
    assert len(stored) == 2 * 2 * _CHUNKS
    for chunk in clear:
        sample = next(chunk[n : n + 32] for n in range(0, len(chunk), 32) if any(chunk[n : n + 32]))
        assert not any(sample in content for content in stored)
