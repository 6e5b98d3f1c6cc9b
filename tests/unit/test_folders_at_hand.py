"""``kvtiers ls``, ``verify`` and ``gc`` on folders as operators and attackers leave them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kvtiers.tiers.base import ChunkKey
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.lease import Beat, Lease
from kvtiers.tools.cli import main
from root_kit import FILE, NAMESPACE, PAYLOAD, Clock, Engine, files_of, filled, key, settled

COMMANDS = ["ls", "verify", "gc"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten chunks, whose bound nobody has kept yet."""
    root = tmp_path / "root"
    tier = FsTier(FsTier.Config(path=root, capacity=1000 * FILE, direct=False), PAYLOAD)
    keys = [ChunkKey(NAMESPACE, bytes([n]) * 16, n) for n in range(10)]
    tier.write(keys, [filled(k) for k in keys])
    tier.close()
    return root


def run(*words: str) -> int:
    try:
        return main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/nowhere", "is no folder"),
        ("{file}", "is no folder"),
        ("{empty}", "has no folder 'v1'"),
        ("x" * 3000, "name too long"),
        ("~nobody-of-that-name/kv", "no such user"),
    ],
)
def test_what_is_no_folder_of_chunks_is_told(command, place, says, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    place = place.format(file=tmp_path / "file", empty=tmp_path / "empty")
    assert run(command, place) == 2
    assert says in capsys.readouterr().err


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user who may do nothing here."""
    # What is imported must be so before: that user may not be able to read this checkout.
    code = (
        "import os, sys; from kvtiers.policies import POLICIES; from kvtiers.tools.cli import main;"
        "POLICIES.get('lru'); os.setgid(65534); os.setuid(65534); sys.exit(main(sys.argv[1:]))"
    )
    words = (sys.executable, "-c", code, *words)
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def reachable(root: Path, tmp_path: Path) -> Path:
    """The root, which another user comes up to and no further."""
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    return root


@only_root
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_may_not_be_looked_at_is_not_called_empty(command, reachable):
    reachable.chmod(0o700)
    done = as_nobody(command, str(reachable))
    assert done.returncode == 2
    assert "Permission denied" in done.stderr
    assert "Run this as the user of the engines" in done.stderr


@only_root
def test_root_keeps_no_bound_for_engines_of_another_user(reachable, capsys):
    for path in [reachable, *reachable.rglob("*")]:
        os.chown(path, 65534, 65534)
    assert run("gc", str(reachable), "--capacity", "1GB") == 2
    assert "sudo -u" in capsys.readouterr().err
    assert not (reachable / "v1" / ".keeping").exists()
    assert run("gc", str(reachable), "--capacity", "1GB", "--dry-run") == 0
    done = as_nobody("gc", str(reachable), "--capacity", "1GB")
    assert done.returncode == 0, done.stderr


def test_a_preview_of_what_nobody_kept_yet_changes_nothing(root, capsys):
    assert run("gc", str(root), "--capacity", f"{5 * FILE}", "--dry-run") == 0
    assert "it holds 10 chunks" in capsys.readouterr().out
    assert not (root / "v1" / ".keeping").exists()
    assert len(files_of(root)) == 10


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [("LRU", 0, ""), ("w_tinylfu", 0, ""), ("lruu", 2, "--policy is 'lruu'. Did you mean 'lru'?")],
)
def test_the_policy_may_be_written_as_people_do(root, name, status, says, capsys):
    words = ("gc", str(root), "--capacity", "1GB", "--policy", name, "--dry-run")
    assert run(*words) == status
    assert says in capsys.readouterr().err


def test_what_was_collected_is_not_counted_the_next_time(root, capsys):
    for capacity in (5 * FILE, FILE):
        assert run("gc", str(root), "--capacity", str(capacity)) == 0
    assert run("gc", str(root), "--capacity", "1GB") == 0
    left = len(files_of(root))
    assert f"it holds {left} chunks" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("words", [["ls", "--chunks"], ["verify"], ["gc", "--capacity", "1GB"]])
def test_a_reader_that_has_seen_enough_is_no_error(words, root):
    for file in files_of(root):
        file.write_bytes(b"")  # so that verify has something to print
    code = "import sys; from kvtiers.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-u", "-c", code, *words, str(root)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.returncode == 1
    assert "Broken pipe" not in done.stderr


def plant(root: Path, name: str, facts: str) -> None:
    folder = root / "v1" / name / "ab"
    folder.mkdir(parents=True)
    (folder / "abcd.kv").write_bytes(b"x" * 9)
    (folder.parent / "namespace.json").write_text(facts)


@pytest.mark.parametrize("words", [["ls"], ["ls", "--chunks"], ["ls", "--json"], ["verify"]])
def test_names_that_others_chose_do_nothing_to_a_terminal(words, root, capsys):
    plant(root, "\x1b[2J\nname", json.dumps({"model": "\x1b]0;title\x07" + "m" * 100_000}))
    plant(root, os.fsdecode(b"\xff\xfe"), "{}")
    plant(root, "cd" * 16, "[" * 100_000)
    run(*words, str(root))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    text.encode()
    assert "name" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_what_is_not_damaged_is_not_removed_for_an_error(root, monkeypatch, capsys):
    real, sound = os.pread, files_of(root)
    sound[0].unlink()
    sound[0].symlink_to("/etc/passwd")

    def pread(descriptor: int, nbytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(sound[1]):
            raise OSError(5, "Input/output error")
        return real(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert run("verify", str(root), "--remove") == 1
    assert f"{sound[1]}: can't be read: Input/output error" in capsys.readouterr().out
    assert files_of(root) == sound[1:]


def test_what_an_engine_evicted_is_not_counted_in_a_preview(root, capsys):
    """It stands in the logs until the next snapshot."""
    engine = Engine(root, 8, Clock())
    settled([engine])
    for prompt in range(5):
        engine.write(*(key(n, prompt=prompt) for n in range(3)))
        settled([engine])
    assert run("gc", str(root), "--dry-run") == 0
    assert f"it holds {len(files_of(root))} chunks" in capsys.readouterr().out


def test_a_file_system_that_is_full_to_the_last_byte_is_collected(root, monkeypatch, capsys):
    """Nothing can be written there before something is deleted, not even a lease."""
    real = Lease.publish

    def publish(lease: Lease, beat: Beat) -> None:
        if len(files_of(root)) == 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(lease, beat)

    monkeypatch.setattr(Lease, "publish", publish)
    assert run("gc", str(root), "--capacity", "1GB") == 1
    assert "Give a smaller --capacity, or free some space" in capsys.readouterr().err
    shutil.rmtree(root / "v1" / ".keeping")
    assert run("gc", str(root), "--capacity", str(5 * FILE)) == 0
    left = len(files_of(root))
    assert left <= 5
    assert f"{10 - left} chunks evicted" in capsys.readouterr().out
