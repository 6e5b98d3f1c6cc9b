"""Three servers share a Redis and a folder, all at work; one dies, one is reset, weights change.

Starting three servers takes most of a minute, so they serve all tests of this module, which
come in this order: each leaves the fleet as the next one wants it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest
from engine import Engine, chunk_files, cpu, file_digests, fs, redis_tier
from kvtiers.tools.measure import Answer, complete
from kvtiers.tools.server import ServerError, VllmServer
from models import prompts
from redis_server import RedisServer
from serving import metric, server, wait_for_metric

TOKENS = 8
CHUNKS = 5
CACHED = CHUNKS * 128
CHUNK_BYTES = 2 * 2 * 4 * 32 * 4 * 128
"""K and V of two layers, four heads of 32 floats, 128 tokens."""
LONG_CHUNKS = 14
AT_ONCE = 3
ALWAYS = {"load_or_recompute": "always_load"}
"""Whatever is quicker: what tiers hold is to be seen here."""
CAPACITY = 400
"""Chunks that the folder may hold."""

SHORT = prompts(36, 700, seed=11)
LONG = prompts(24, 1800, seed=12)

Prompt = list[int]


@dataclass(frozen=True)
class Fleet:
    """The replicas A, B and C, what they share, and what they must say.

    Attributes:
        replicas: by name.
        redis: with all chunks that were stored.
        root: of the filesystem tier, the same.
        tiers: the configuration of all of them.
        truth: the answer of an engine without the connector to each prompt.
        shared_memory: what was in /dev/shm before.

    """

    replicas: dict[str, VllmServer]
    redis: RedisServer
    root: Path
    tiers: Sequence[Mapping[str, object]]
    truth: Mapping[tuple[int, ...], str]
    shared_memory: set[str]

    def ask(self, questions: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Answer]]:
        """Ask several replicas at the same time, each several prompts at once; all is right."""
        with ThreadPoolExecutor(AT_ONCE * len(questions)) as pool:
            asked = {
                name: [pool.submit(complete, self.replicas[name], p, TOKENS) for p in asked]
                for name, asked in questions.items()
            }
            answers = {name: [each.result() for each in all_] for name, all_ in asked.items()}
        for name, prompts_ in questions.items():
            texts = [answer.text for answer in answers[name]]
            assert texts == [self.truth[tuple(prompt)] for prompt in prompts_], name
        return answers

    def figure(self, name: str, figure: str, tier: str) -> float:
        return metric(self.replicas[name], figure, tier) or 0

    def wait(self, name: str, figure: str, tier: str, value: float) -> None:
        """Until the figure is exactly that."""
        wait_for_metric(self.replicas[name], figure, tier, lambda now: now == value)

    def wait_until_stored(self, name: str, chunks: int) -> None:
        """Until the replica has stored so many, all told, in both tiers."""
        for tier in ("redis", "fs"):
            self.wait(name, "bytes_written_total", tier, chunks * CHUNK_BYTES)

    def shared_hits(self, name: str) -> float:
        """Chunks that came from what all share."""
        return sum(self.figure(name, "hits_total", tier) for tier in ("redis", "fs"))

    def temporary(self) -> list[Path]:
        """Files that somebody is writing, or was."""
        return list(self.root.glob("v1/.keeping/w-*/*.kv.*"))

    def files(self) -> dict[bytes, bytes]:
        """Digests of the chunks in the folder, each of which is whole."""
        while True:
            # Who keeps its bound deletes some now and then.
            with contextlib.suppress(FileNotFoundError):
                return file_digests(self.root)

    def keys(self) -> set[bytes]:
        """Of the chunks in Redis."""
        with self.redis.client() as client:
            found = client.keys("kvtiers:v1:*")
        return {key for key in found if not key.endswith(b":about")}


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f" w{token}" for token in tokens)


def truth_of(model: Path, asked: Sequence[Prompt]) -> dict[tuple[int, ...], str]:
    """Of an engine without the connector. All answers differ, or equal ones would say nothing."""
    with Engine(model) as engine:
        answers = engine.ask_each(asked, TOKENS)
    truth = {tuple(p): text_of(a.tokens) for p, a in zip(asked, answers, strict=True)}
    assert len(set(truth.values())) == len(asked)
    return truth


@pytest.fixture(scope="module")
def model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose weights may be changed."""
    return Path(shutil.copytree(llama, tmp_path_factory.mktemp("fleet") / "model"))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("replicas")
    truth = truth_of(model, [*SHORT, *LONG])
    cores = sorted(os.sched_getaffinity(0))
    before = processes.shared_memory()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        root = folder / "fs"
        capacity = str(CAPACITY * (CHUNK_BYTES + 4096))
        tiers = [cpu(), redis_tier(redis.url), fs(root, capacity)]
        # The one that is to be killed while it writes takes longer to.
        slower = [*tiers[:2], fs(root, capacity, fsync=True)]
        replicas = {
            name: server(
                model,
                folder / name,
                extra={"tiers": slower if name == "C" else tiers, **ALWAYS},
                # A core each, as far as there are any.
                environment={"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])},
            )
            for number, name in enumerate("ABC")
        }
        for replica in replicas.values():
            stack.callback(replica.stop)
        with ThreadPoolExecutor(len(replicas)) as pool:
            list(pool.map(VllmServer.start, replicas.values()))
        yield Fleet(replicas, redis, root, tiers, truth, before)


def test_what_one_computes_is_a_hit_in_the_other_from_both_tiers_while_both_serve(
    fleet: Fleet,
) -> None:
    on_disk = {"A": SHORT[0:3], "B": SHORT[3:6]}
    in_both = {"A": SHORT[6:9], "B": SHORT[9:12]}
    for number, asked in enumerate((on_disk, in_both), start=1):
        answers = fleet.ask(asked)
        assert {a.cached_tokens for each in answers.values() for a in each} == {0}
        for name in asked:
            fleet.wait_until_stored(name, number * 3 * CHUNKS)
        if asked is on_disk:
            fleet.redis.client().flushall()
    load = {"A": SHORT[12:18], "B": SHORT[18:24]}
    mixed = {
        name: [
            p
            for three in zip(on_disk[other], load[name], in_both[other], strict=False)
            for p in three
        ]
        for name, other in (("A", "B"), ("B", "A"))
    }
    answers = fleet.ask(mixed)
    for name in ("A", "B"):
        cached = [answer.cached_tokens for answer in answers[name]]
        assert cached == [CACHED, 0, CACHED] * 3, name
        fleet.wait(name, "hits_total", "redis", 3 * CHUNKS)
        fleet.wait(name, "hits_total", "fs", 3 * CHUNKS)


def test_one_that_is_killed_while_it_stores_leaves_whole_chunks_that_the_others_hit(
    fleet: Fleet,
) -> None:
    session = fleet.replicas["C"].pid
    arenas = processes.arenas(session)
    kill_while_it_writes(fleet, LONG[18:24])
    processes.wait_for_end(session)
    assert processes.mapped_by(arenas) == []
    left = fleet.temporary()
    assert left, "it was killed while it wrote a file"
    # Each of them checked from its first byte to its last.
    whole = fleet.files()
    before = {name: fleet.shared_hits(name) for name in ("A", "B")}
    answers = fleet.ask({"A": LONG[18:21], "B": LONG[21:24]})
    cached = [answer.cached_tokens for each in answers.values() for answer in each]
    assert sum(cached) > 0, "it had stored some"
    assert sum(cached) < 6 * LONG_CHUNKS * 128, "it was killed before it had stored all"
    for name in ("A", "B"):
        hits = sum(answer.cached_tokens for answer in answers[name]) // 128
        wanted = before[name] + hits
        wait_for_metric(
            fleet.replicas[name],
            "hits_total",
            "redis",
            lambda _, name=name, wanted=wanted: fleet.shared_hits(name) == wanted,
        )
        assert fleet.figure(name, "corrupt_total", "redis") == 0
        assert fleet.figure(name, "corrupt_total", "fs") == 0
    assert whole.items() & fleet.files().items()
    # vLLM's own queues, which a server without the connector leaves too: see test_kill.py.
    assert processes.abandoned_since(fleet.shared_memory) <= {"psm_", "sem."}


def kill_while_it_writes(fleet: Fleet, asked: Sequence[Prompt]) -> None:
    """Kill all of C at a moment when it is in the middle of writing a file."""
    victim = fleet.replicas["C"]

    def ask(prompt: Prompt) -> None:
        with contextlib.suppress(ServerError, OSError, http.client.HTTPException):
            complete(victim, prompt, TOKENS)

    running = processes.of_session(victim.pid)
    (engine,) = [pid for pid, command in running.items() if "EngineCore" in command]
    with ThreadPoolExecutor(len(asked)) as pool:
        for prompt in asked:
            pool.submit(ask, prompt)
        deadline = time.monotonic() + 60
        while True:
            os.kill(engine, signal.SIGSTOP)
            wait_until_stopped(engine)
            if fleet.temporary():
                break
            os.kill(engine, signal.SIGCONT)
            assert time.monotonic() < deadline, "it was never seen to write"
            time.sleep(0.002)
        for pid in processes.of_session(victim.pid):
            os.kill(pid, signal.SIGKILL)


def wait_until_stopped(pid: int) -> None:
    """Until none of its threads runs."""
    tasks = Path(f"/proc/{pid}/task")
    while any(
        task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T"
        for task in tasks.iterdir()
    ):
        time.sleep(0.001)


def test_the_bound_of_the_folder_holds_with_all_that_live_storing(fleet: Fleet) -> None:
    before = len(chunk_files(fleet.root))
    largest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.is_set():
            largest = max(largest, len(chunk_files(fleet.root)))
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        fleet.ask({"A": LONG[0:9], "B": LONG[9:18]})
    finally:
        done.set()
        watcher.join()
    assert before + 18 * LONG_CHUNKS > CAPACITY
    assert CAPACITY // 2 < largest <= CAPACITY


def test_a_reset_of_one_leaves_nothing_stale_in_it_and_everything_to_the_others(
    fleet: Fleet,
) -> None:
    asked = SHORT[24:27]
    files, keys = stored_by(fleet, "A", asked), fleet.keys()
    before = shared_figures(fleet, "A")
    fleet.replicas["A"].reset_prefix_cache(external=True)
    assert cached(fleet.ask({"A": asked})["A"]) == [0, 0, 0], "from before the reset"
    # What it computed since is its own: on the GPU, in its arena, and nowhere else.
    fleet.replicas["A"].reset_prefix_cache()
    assert cached(fleet.ask({"A": asked})["A"]) == [CACHED] * 3
    assert shared_figures(fleet, "A") == before
    assert files.items() <= fleet.files().items()
    assert fleet.keys() == keys
    assert cached(fleet.ask({"B": asked})["B"]) == [CACHED] * 3, "B lost what A had stored"


def test_new_weights_under_the_same_path_find_nothing_old_and_delete_nothing(
    fleet: Fleet, model: Path
) -> None:
    asked = SHORT[27:30]
    stored_by(fleet, "B", asked)
    keys = fleet.keys()
    change_weights(model)
    new = truth_of(model, asked)
    # An engine that runs, and is given the new weights as trainers do.
    running = fleet.replicas["A"]
    running.post("/pause")
    running.post("/collective_rpc", {"method": "reload_weights"})
    running.post("/resume")
    for _ in range(2):
        answers = [complete(running, prompt, TOKENS) for prompt in asked]
        assert [answer.text for answer in answers] == [new[tuple(prompt)] for prompt in asked]
        assert cached(answers) in ([0, 0, 0], [CACHED] * 3)
        running.reset_prefix_cache()
    # One that starts with them.
    with Engine(model, fleet.tiers, extra=ALWAYS) as engine:
        assert engine.namespace not in {path.parts[-3] for path in chunk_files(fleet.root).values()}
        fresh = engine.ask_each(asked, TOKENS)
    assert [text_of(answer.tokens) for answer in fresh] == [new[tuple(p)] for p in asked]
    assert [answer.cached for answer in fresh] == [0, 0, 0]
    # And one that goes on with the old ones.
    fleet.replicas["B"].reset_prefix_cache()
    assert cached(fleet.ask({"B": asked})["B"]) == [CACHED] * 3
    # What the folder has is bounded, and the fresh engine has stored there.
    assert keys <= fleet.keys()


def test_what_the_dead_one_was_writing_is_swept(fleet: Fleet) -> None:
    deadline = time.monotonic() + 150
    while fleet.temporary():
        assert time.monotonic() < deadline, "temporary files of a dead replica stay for ever"
        complete(fleet.replicas["B"], [1, 2, 3], 1)
        time.sleep(0.5)


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def shared_figures(fleet: Fleet, name: str) -> list[float]:
    """What the replica has read from the tiers that it shares, and written there."""
    return [
        fleet.figure(name, figure, tier)
        for figure in ("hits_total", "bytes_read_total", "bytes_written_total")
        for tier in ("redis", "fs")
    ]


def stored_by(fleet: Fleet, name: str, asked: Sequence[Prompt]) -> dict[bytes, bytes]:
    """Let the replica compute prompts that nobody asked yet. Returns the files that it adds.

    Redis has all of it afterwards. The folder is full, and takes what it has room for just
    then; that is the last used of all, and so nothing that its bound takes away again.
    """
    before, keys = fleet.files(), fleet.keys()
    fleet.ask({name: asked})
    deadline = time.monotonic() + 60
    while len(fleet.keys() - keys) < len(asked) * CHUNKS:
        assert time.monotonic() < deadline, "its chunks were not all stored"
        time.sleep(0.1)
    wait_for_metric(fleet.replicas[name], "pinned_chunks", "cpu", lambda pinned: not pinned)
    return dict(fleet.files().items() - before.items())


def change_weights(model: Path) -> None:
    """Give the model other keys and values, in files of the same names and sizes."""
    import torch
    from safetensors.torch import load_file, save_file

    (path,) = model.glob("*.safetensors")
    source = torch.Generator().manual_seed(5)
    weights = load_file(path)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weight.copy_(torch.randn(weight.shape, generator=source) * 0.1)
    # Beside it first, as what is downloaded arrives: engines may have the old file mapped.
    fresh = path.with_suffix(".new")
    save_file(weights, fresh, metadata={"format": "pt"})
    assert fresh.stat().st_size == path.stat().st_size
    fresh.rename(path)
