"""Two servers under random load and random faults, for as long as one likes.

    make soak                      half an hour
    python tests/soak/soak.py --minutes 5 --seed 7 --json soak.json

All the time: every answer is that of an engine without a cache, every request ends in time,
and no engine dies. Every few minutes nothing is asked and nothing goes wrong for a moment:
then no slot is in use, no file is left over, and memory, descriptors and threads are what
they were. The exit status says whether all of that was so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "e2e"), str(HERE.parent / "support")]

# Found since the line above.
import processes  # noqa: E402
from soak_faults import KINDS, Record, Troublemaker  # noqa: E402
from soak_fleet import Scene, scene  # noqa: E402
from soak_load import Client, Gate, Question, Tally, universe  # noqa: E402
from soak_progress import Progress, end_by_itself, say  # noqa: E402
from soak_watch import Watch, abandoned  # noqa: E402

LOOK_SECONDS = 90.0
_CLIENTS = 6
# A replica that is being started when the gate closes is waited for.
_CLOSE_SECONDS = 400.0
# For what comes before and after the load: starts of servers, waits for what was begun.
_SPARE_SECONDS = 900.0
_BAD = ("wrong", "hung", "failed")


@dataclass(frozen=True)
class Report:
    """What a soak found.

    Attributes:
        seed: makes the same choices again, at other moments.
        minutes: how long it was under load.
        faults: how often each happened.
        not_here: faults that this machine does not let happen.
        requests: by outcome.
        seconds: of the requests that were answered: median, 99th percentile, longest.
        cached_tokens: prompt tokens that were not computed.
        tiers: figures of each tier, over all replicas and their lives.
        lives: how often each replica was started.
        footprints: memory in bytes, open files and threads of each life, at each look.
        problems: all of it that should not have been; none is a success.

    """

    seed: int
    minutes: float
    faults: dict[str, int]
    not_here: list[str]
    requests: dict[str, int]
    seconds: dict[str, float]
    cached_tokens: int
    tiers: dict[str, dict[str, int]]
    lives: dict[str, int]
    footprints: dict[str, list[dict[str, int]]]
    problems: list[str]

    def text(self) -> str:
        """For people."""
        lines = [f"soak of {self.minutes:.1f} minutes, seed {self.seed}"]
        for name in ("requests", "seconds", "faults", "lives"):
            figures = ", ".join(f"{key} {value}" for key, value in getattr(self, name).items())
            lines.append(f"{name}: {figures}")
        lines.append(f"prompt tokens not computed: {self.cached_tokens}")
        lines += [f"{tier}: {_listed(counts)}" for tier, counts in self.tiers.items()]
        for life, looks in self.footprints.items():
            lines.append(f"replica {life}: from {_listed(looks[0])} to {_listed(looks[-1])}")
        if self.not_here:
            lines.append(f"not possible here: {', '.join(self.not_here)}")
        return "\n".join([*lines, *(self.problems or ["nothing was wrong"])])


@dataclass
class Soak:
    """One run.

    Attributes:
        scene: what it runs on.
        questions: what is asked.
        seed: of all choices.
        progress: told what goes on.

    """

    scene: Scene
    questions: Sequence[Question]
    seed: int
    progress: Progress
    tally: Tally = field(default_factory=Tally)
    record: Record = field(default_factory=Record)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = Watch(self.scene)
        self._load, self._trouble = Gate(), Gate()
        self.progress.figures = self._figures
        self.progress.last_words = self._last_words

    def run(self, seconds: float) -> None:
        """Ask and spoil for so long, with a look now and then."""
        threads = [
            *(self._client(number) for number in range(_CLIENTS)),
            *(Troublemaker(k, self.seed, self.scene, self._trouble, self.record) for k in KINDS),
        ]
        for thread in threads:
            thread.start()
        try:
            self._under_load(time.monotonic() + seconds)
            # Nothing goes wrong any more, and requests go on.
            self._load.open()
            self.progress.enters("waiting for the tiers to be used again")
            self.problems += self.watch.recovered()
        finally:
            self.progress.enters("waiting for what is under way to end")
            # Also when it is interrupted: one that starts what was stopped would leave it behind.
            for gate in (self._trouble, self._load):
                gate.end()
            for thread in threads:
                thread.join()

    def _under_load(self, end: float) -> None:
        while True:
            self.progress.enters("under load")
            time.sleep(max(0.0, min(LOOK_SECONDS, end - time.monotonic())))
            self._look()
            # What a fault left behind, a replica that does not start, is a problem too.
            if self.problems or self.record.problems or time.monotonic() >= end:
                return
            self._load.open()
            self._trouble.open()

    def _client(self, number: int) -> Client:
        seed = self.seed * 1000 + number
        return Client(seed, self.scene.replicas, self.questions, self._load, self.tally)

    def _look(self) -> None:
        """Let all come to rest, and see what is left over."""
        self.progress.enters("waiting for faults and requests to end")
        # Both at once: a replica that starts gets nowhere while the other has all the load.
        for gate in (self._trouble, self._load):
            gate.shut()
        for gate, who in ((self._trouble, "faults"), (self._load, "requests")):
            if not gate.close(_CLOSE_SECONDS):
                self.problems.append(f"{who} did not come to an end")
        self.progress.enters("looking for what is left over")
        self.problems += self.watch.look()

    def _figures(self) -> str:
        requests, faults = sum(self.tally.counts.values()), sum(self.record.counts.values())
        doing = ", ".join(list(self.record.under_way.values())) or "none"
        return f"{requests} requests, {faults} faults, under way: {doing}"

    def _last_words(self) -> str:
        said = [f"{text}\n" for text in (*self.tally.examples, *self.record.problems)]
        return "".join([*said, *(replica.last_words() for replica in self.scene.replicas)])

    def report(self, minutes: float, left: Sequence[str]) -> Report:
        """After the end.

        Args:
            minutes: how long it took.
            left: what was there after all servers were stopped, and should not have been.

        """
        counts = self.tally.counts
        bad = [f"{counts[outcome]} requests {outcome}" for outcome in _BAD if counts[outcome]]
        tiers: dict[str, dict[str, int]] = {}
        for (tier, name), value in sorted(self.watch.counts.items()):
            if value:
                tiers.setdefault(tier, {})[name] = value
        looks = self.watch.looks.items()
        return Report(
            self.seed,
            minutes,
            dict(sorted(self.record.counts.items())),
            sorted(self.record.impossible),
            dict(sorted(counts.items())),
            _spread(self.tally.seconds),
            self.tally.cached_tokens,
            tiers,
            {replica.name: replica.lives for replica in self.scene.replicas},
            {life: [asdict(look) for look in its] for life, its in looks},
            [*bad, *self.tally.examples, *self.record.problems, *self.problems, *left],
        )


def main() -> int:
    """Run one. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="default: 30")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="default: any")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the report there")
    parser.add_argument("--keep", action="store_true", help="keep the servers' logs")
    arguments = parser.parse_args()
    progress = Progress()
    progress.start()
    end_by_itself(progress, 60 * arguments.minutes + _SPARE_SECONDS)
    say(f"seed {arguments.seed}")
    with _folder(arguments.keep) as folder:
        report = soak(folder, arguments.minutes, arguments.seed, progress)
    print(report.text())
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return 1 if report.problems else 0


def soak(folder: Path, minutes: float, seed: int, progress: Progress) -> Report:
    """Prepare, run, and see what is left."""
    before = processes.shared_memory()
    model = folder / "model"
    progress.enters("answering without a cache")
    questions = _questions(model, folder, seed)
    progress.enters(f"starting the servers for {len(questions)} prompts")
    with scene(model, folder) as made:
        running = Soak(made, questions, seed, progress)
        begun = time.monotonic()
        running.run(60 * minutes)
        took = (time.monotonic() - begun) / 60
        progress.enters("stopping the servers")
    killed = running.record.counts["replica_killed"] > 0
    return running.report(took, abandoned(before, killed))


def _questions(model: Path, folder: Path, seed: int) -> list[Question]:
    """Answers of an engine without the connector, in a process that ends with it."""
    asked, answered = folder / "asked.json", folder / "answered.json"
    made = universe(seed)
    asked.write_text(json.dumps(made))
    command = [sys.executable, str(HERE / "soak_truth.py"), str(model), str(asked), str(answered)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    answers = json.loads(answered.read_text())
    questions = [Question(p, w) for p, w in zip(made, answers, strict=True)]
    random.Random(seed).shuffle(questions)
    return questions


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    if keep:
        made = tempfile.mkdtemp(prefix="kvtiers-soak-")
        say(f"the servers' logs: {made}/A/vllm.log, {made}/B/vllm.log")
        yield Path(made)
        return
    with tempfile.TemporaryDirectory(prefix="kvtiers-soak-") as made:
        yield Path(made)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    longest = max(seconds)
    figures = {
        "p50": statistics.median(seconds),
        "p99": statistics.quantiles(seconds, n=100)[98],
        "max": longest,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _listed(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
