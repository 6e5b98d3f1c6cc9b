"""The soak notices what it is there to notice. It runs itself in tests/e2e."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from kvtiers.tools.server import VllmServer

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "e2e"), str(TESTS / "soak")]

# Found since the line above.
import soak_load  # noqa: E402
from soak_fleet import Replica  # noqa: E402
from soak_load import Client, Gate, Question, Tally, universe  # noqa: E402
from soak_watch import Footprint  # noqa: E402

WORDS = [f"w{n}" for n in range(soak_load.TOKENS)]


class Oracle(BaseHTTPRequestHandler):
    """Answers every prompt with the first of these words."""

    words: Sequence[str] = WORDS
    reason = "length"
    status = 200
    delay = 0.0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.delay)
        text = "".join(f" {word}" for word in self.words[: body["max_tokens"]])
        usage = {"prompt_tokens_details": {"cached_tokens": 128}}
        choice = {"text": text, "finish_reason": self.reason}
        answer = json.dumps({"choices": [choice], "usage": usage}).encode()
        # Some clients do not wait for it.
        with contextlib.suppress(ConnectionError):
            self.send_response(self.status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    """One that stands where a server would."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Oracle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Replica("A", VllmServer("m", tmp_path / "log", port=server.server_address[1]))
        made.up, made.lives = True, 1
        yield made
        server.shutdown()


def asked(replica: Replica, times: int = 5) -> Tally:
    tally = Tally()
    client = Client(1, [replica], [Question([1, 2, 3], WORDS)], Gate(), tally)
    client._choose.seed(3)
    for _ in range(times):
        client._once()
    return tally


def test_a_right_answer_is_right(replica: Replica) -> None:
    tally = asked(replica)
    assert tally.counts["right"] > 0
    assert set(tally.counts) <= {"right", "given up"}
    assert tally.cached_tokens == 128 * tally.counts["right"]


def test_another_word_is_wrong(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Oracle, "words", ["w9", *WORDS[1:]])
    tally = asked(replica)
    assert tally.counts["right"] == 0
    assert tally.counts["wrong"] > 0
    assert "w9" in tally.examples[0]


def test_an_answer_that_ends_early_is_wrong(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracle, "words", [])
    assert asked(replica).counts["wrong"] > 0


@pytest.mark.parametrize(
    ("words", "lives", "outcome"),
    [
        (WORDS[:1], 2, "lost with its replica"),
        (WORDS[:1], 1, "failed"),
        (["w9"], 2, "wrong"),
    ],
    ids=["of a server that stops", "of one that does not", "with another word"],
)
def test_an_answer_that_was_broken_off(
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    lives: int,
    outcome: str,
) -> None:
    monkeypatch.setattr(Oracle, "words", words)
    monkeypatch.setattr(Oracle, "reason", "abort")
    post = replica.server.post

    def answered(*args: Any, **kwargs: Any) -> dict[str, Any]:
        answer = post(*args, **kwargs)
        replica.lives = lives
        return answer

    monkeypatch.setattr(replica.server, "post", answered)
    assert asked(replica, times=1).counts == {outcome: 1}


def test_an_error_of_a_server_that_is_up_is_a_failure(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracle, "status", 500)
    assert asked(replica).counts["failed"] > 0


def test_a_request_without_an_answer_hangs(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracle, "delay", 2.0)
    monkeypatch.setattr(soak_load, "LIMIT", 0.1)
    assert asked(replica, times=2).counts["hung"] > 0


def test_prompts_share_heads_and_differ_from_seed_to_seed() -> None:
    prompts = universe(1)
    assert prompts == universe(1)
    assert prompts != universe(2)
    heads = {tuple(prompt[:128]) for prompt in prompts if len(prompt) > 128}
    assert len(heads) < len(prompts) // 4
    assert max(map(len, prompts)) < 2000


def test_who_closes_a_gate_waits_for_the_rounds_under_way() -> None:
    gate, begun, leave = Gate(), threading.Event(), threading.Event()

    def work() -> None:
        with gate.round():
            begun.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(10)
    assert not gate.close(0.05)
    leave.set()
    assert gate.close(10)
    thread.join()


def test_growth_is_told_beyond_what_is_usual() -> None:
    first = Footprint(500 << 20, 100, 60)
    assert not list(Footprint(550 << 20, 110, 64).beyond(first))
    grown = list(Footprint(900 << 20, 500, 200).beyond(first))
    assert [problem.split()[0] for problem in grown] == ["memory", "open", "threads"]
