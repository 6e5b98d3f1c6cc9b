"""``kvtiers keygen`` on key files as operators have them: no key is lost, and no reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvtiers.tiers.keyring import read_file
from kvtiers.tools.cli import main


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "kv.keys"
    assert main(["keygen", "--id", "first", str(file)]) == 0
    return file


def test_a_link_stays_one_and_what_it_names_gets_the_key(keys, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(keys.name)
    assert main(["keygen", "--id", "second", str(link)]) == 0
    assert link.is_symlink()
    assert list(read_file(keys)) == ["first", "second"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_who_could_read_the_file_still_can(keys):
    os.chown(keys, 0, 4321)
    keys.chmod(0o440)
    assert main(["keygen", "--id", "second", str(keys)]) == 0
    status = keys.stat()
    assert (status.st_gid, status.st_mode & 0o777) == (4321, 0o440)


def test_of_keys_that_are_added_at_once_none_is_lost(keys):
    code = "import sys; from kvtiers.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    names = [f"key{number}" for number in range(4)]
    command = [sys.executable, "-c", code, "keygen", str(keys), "--id"]
    started = [subprocess.Popen([*command, name], stderr=subprocess.DEVNULL) for name in names]
    assert [process.wait() for process in started] == [0] * 4
    assert sorted(read_file(keys)) == ["first", *names]


def test_a_key_that_can_not_be_written_leaves_nothing(keys, tmp_path, monkeypatch):
    def replace(source: str, target: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    assert main(["keygen", "--id", "second", str(keys)]) == 130
    assert list(tmp_path.iterdir()) == [keys]


def test_what_a_killed_one_left_is_in_nobodys_way(keys, tmp_path):
    # Of the same number: in a container, keygen has the same one each time.
    (tmp_path / f".{keys.name}.{os.getpid()}").write_text("half a k")
    assert main(["keygen", "--id", "second", str(keys)]) == 0
    assert list(read_file(keys)) == ["first", "second"]
    assert list(tmp_path.iterdir()) == [keys]


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["keygen", str(tmp_path / "none" / "kv.keys")]) == 1
    assert f"'{tmp_path / 'none'}'" in capsys.readouterr().err
