"""What encryption costs a filesystem tier: chunks in clear and encrypted, in turns.

    python -m benchmarks.encryption [--mib 4] [--chunks 16] [--rounds 9] [--folder DIR]

Each round writes and reads all chunks in clear and then encrypted, with one thread and with
two, so that what else the machine does hits both alike; of each round only the ratio
counts. The default folder is in memory: what a device is slower by, it hides.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtiers.tiers import ChunkKey, Namespace, ReadOutcome, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.keyring import new_key

HERE = Namespace("be" * 16)
THREADS = (1, 2)


class Side:
    """A tier, with or without keys, and how long it took."""

    def __init__(self, folder: Path, nbytes: int, keys: Path | None) -> None:
        encryption = None if keys is None else str(keys)
        self.tier = FsTier(FsTier.Config(path=folder, encryption=encryption), nbytes)
        self.seconds: dict[tuple[str, int], list[float]] = {}

    def round(self, keys: list[ChunkKey], buffers: list[memoryview], threads: int) -> None:
        """Write all chunks, read them all, and remove them."""
        each = [[key] for key in keys], [[buffer] for buffer in buffers]
        for what, call, good in (
            ("write", self.tier.write, WriteOutcome.STORED),
            ("read", self.tier.read, ReadOutcome.HIT),
        ):
            with ThreadPoolExecutor(threads) as pool:
                # Threads are made before the clock starts.
                list(pool.map(lambda _: time.sleep(0.01), range(threads)))
                begin = time.perf_counter()
                done = list(pool.map(call, *each))
                took = time.perf_counter() - begin
            assert done == [[good]] * len(keys)
            self.seconds.setdefault((what, threads), []).append(took)
        assert self.tier.remove(keys) == len(keys)


def main() -> None:
    options = _parser().parse_args()
    nbytes = options.mib << 20
    chunks = [ChunkKey(HERE, n.to_bytes(4, "big") * 8) for n in range(options.chunks)]
    buffers = [aligned_buffer(nbytes) for _ in chunks]
    for buffer in buffers:
        buffer[:] = os.urandom(nbytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        keys = folder / "kv.keys"
        keys.touch(0o600)
        keys.write_text(new_key())
        sides = Side(folder / "clear", nbytes, None), Side(folder / "sealed", nbytes, keys)
        for turn in range(options.rounds + 1):
            for threads in THREADS:
                for side in sides if turn % 2 else reversed(sides):
                    side.round(chunks, buffers, threads)
    _show(*sides, total=nbytes * options.chunks)


def _show(clear: Side, sealed: Side, total: int) -> None:
    print("call   threads  clear GB/s  encrypted GB/s  time, encrypted to clear")
    for (what, threads), plain in clear.seconds.items():
        # The first round pays for what is done once.
        pairs = list(zip(sealed.seconds[what, threads][1:], plain[1:], strict=True))
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{what:5}  {threads:7}  {total / theirs / 1e9:10.2f}  {total / ours / 1e9:14.2f}  "
            f"{ratio:24.2f}"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=4, help="MiB a chunk")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", default="/dev/shm", help="where the tiers lie")
    return parser


if __name__ == "__main__":
    main()
