"""``kvtiers gc``: brings folders of chunks under their bound, where no engine does so."""

from __future__ import annotations

import argparse
import os
import pwd
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError, shown
from kvtiers.connector.config_specs import PolicySpec
from kvtiers.connector.sizes import Capacity, file_system_bytes, format_bytes
from kvtiers.policies import POLICIES, TierInfo
from kvtiers.tiers import keeper_listing
from kvtiers.tiers.base import TierConfig
from kvtiers.tiers.file_option import at_home
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.fs_files import FULL
from kvtiers.tiers.fs_layout import Layout, refuse_link
from kvtiers.tiers.keeper import Keeper, Terms
from kvtiers.tiers.lease import PATIENCE, Beat, Inherited, Lease, LeaseLostError, Seen
from kvtiers.tiers.owner import is_alive, this_process
from kvtiers.tiers.pace import Pace
from kvtiers.tiers.remote_url import is_remote, without_local_scheme
from kvtiers.tiers.spelling import did_you_mean, meant
from kvtiers.tools.places import PlaceError, layout_of, printable, what_to_do

_LOOK_SECONDS = 0.5
_DEFAULT_POLICY = "lru"
_LACKS_ROOM = " Give a smaller --capacity, or free some space: the bound has room for all chunks."
_T = TypeVar("_T")


@dataclass(frozen=True)
class Root:
    """A folder to bring under its bound.

    Attributes:
        path: of the fs tier.
        name: of the tier, for its policy.
        capacity: as written, None to go by what engines said last.
        headroom: share of the capacity that an eviction makes free.
        policy: says what goes first.

    """

    path: Path
    name: str
    capacity: Capacity | None
    headroom: float
    policy: PolicySpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers gc``."""
    parser.add_argument(
        "path", metavar="PATH", nargs="?", help="the 'path' of an fs tier that is a folder"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="take the fs tiers, and the policy, of a configuration"
    )
    parser.add_argument(
        "--capacity",
        metavar="SIZE",
        help="the bound, such as 100GB or 50%% (default: that of the configuration, or of the "
        "engines that used the folder last)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="the order of eviction (default: the configuration's, or lru)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would go, and change nothing"
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="list the whole folder, and not only read what engines recorded",
    )


def run(arguments: argparse.Namespace) -> int:
    """Collect every folder that is named.

    Raises:
        ConfigError: what was written can't work.
        PlaceError: a folder can't be looked at.

    """
    status = 0
    for root in _roots(arguments):
        try:
            text = _collected(root, arguments)
        except OSError as error:
            told = f"{root.path} could not be collected: {what_to_do(error)}"
            told += _LACKS_ROOM if error.errno in FULL else ""
            print(f"kvtiers: {told}", file=sys.stderr)
            status = 1
        else:
            print(text)
    return status


def _collected(root: Root, arguments: argparse.Namespace) -> str:
    """Do it, and say what was done."""
    layout = layout_of(root.path)
    refuse_link(layout.keeping)
    if not arguments.dry_run:
        _refuse_wrong_root(root.path, os.stat(layout.base).st_uid)
    lease = Lease(f"{layout.keeping}/lease", this_process().facts(), time.monotonic)
    seen = lease.look()
    terms = _terms(root, seen)
    if arguments.dry_run:
        return _previewed(root, terms, layout, lease, arguments.rebuild)
    waits = False
    while not lease.is_free():
        now = lease.look()
        if now.beat is not None and _lives(seen, now):
            keeper_listing.sweep(layout)
            return _kept_by(root, now.beat)
        if not waits:
            _say_whom_for(root, now)
            waits = True
        time.sleep(_LOOK_SECONDS)
    room = _Room(lambda: _onlooker(terms, layout, lease, arguments.rebuild))
    inherited = room.made_for(lease.take)
    if inherited is None:
        return f"{root.path}: another process has just begun to keep its bound. Nothing to do."

    def collected() -> str:
        keeper = Keeper(
            layout, lease, inherited, terms, time.monotonic, Pace(1.0), rebuild=arguments.rebuild
        )
        return _brought_under(root, keeper, room.evicted)

    return room.made_for(collected)


class _Room:
    """Makes room where a file system is so full that not even a lease can be written.

    Attributes:
        evicted: chunks that went for it.

    Args:
        onlooker: makes a keeper that has only looked at the lease.

    """

    def __init__(self, onlooker: Callable[[], Keeper]) -> None:
        self._onlooker = onlooker
        self.evicted = 0

    def made_for(self, action: Callable[[], _T]) -> _T:
        """The action's answer, the second time if need be. Raises what it raises."""
        try:
            return action()
        except OSError as error:
            if error.errno not in FULL:
                raise
            evicted = self._onlooker().make_room()
            if not evicted:
                raise
            self.evicted += evicted
        return action()


def _refuse_wrong_root(path: Path, owner: int) -> None:
    """Raise PlaceError for the superuser in a folder of another user.

    What root writes there only root can read, and the engines could keep no bound any more.
    """
    if os.geteuid() or not owner:
        return
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"#{owner}"
    raise PlaceError(
        f"{path} belongs to the user {name}, and what root writes there its engines could not "
        f"read. Run this as that user, such as with: sudo -u '{name}' kvtiers gc ..."
    )


def _say_whom_for(root: Root, seen: Seen) -> None:
    holder = _named(seen.beat) if seen.beat is not None else "a process that said nothing yet"
    print(
        f"kvtiers: {root.path} was kept by {holder}. Waiting up to {PATIENCE:g} s for a sign of "
        "life.",
        file=sys.stderr,
    )


def _named(beat: Beat) -> str:
    return printable(f"process {beat.owner.get('pid')} on {beat.owner.get('host')}")


def _lives(before: Seen, now: Seen) -> bool:
    """Whether the holder is seen to live: it published anew, or is a process of this host."""
    if now.beat is None or now.beat.resigned:
        return False
    return (before.beat is not None and now != before) or is_alive(now.beat.owner)


def _brought_under(root: Root, keeper: Keeper, before_it: int) -> str:
    try:
        keeper.round()
        while not keeper.knows_all:
            keeper.round()
        before = None
        while keeper.usage() != before and keeper.is_crowded():
            before = keeper.usage()
            keeper.round()
        after, evicted = keeper.usage(), keeper.evicted + before_it
        keeper.resign()
    except LeaseLostError:
        return f"{root.path}: another process keeps its bound now. {keeper.evicted} chunks evicted."
    assert after.limit is not None
    text = f"{_sized(after.chunks, after.nbytes)} of {format_bytes(after.limit)}"
    return f"{root.path}: {evicted} chunks evicted; it holds {text}."


def _previewed(root: Root, terms: Terms, layout: Layout, lease: Lease, rebuild: bool) -> str:
    keeper = _onlooker(terms, layout, lease, rebuild)
    chunks, nbytes = keeper.preview()
    usage = keeper.usage()
    return (
        f"{root.path}: it holds {_sized(usage.chunks, usage.nbytes)} of "
        f"{format_bytes(usage.limit or 0)}; {_sized(chunks, nbytes)} would be evicted."
    )


def _onlooker(terms: Terms, layout: Layout, lease: Lease, rebuild: bool) -> Keeper:
    """A keeper that has only looked at the lease."""
    found = Inherited({}, snapshot=os.path.isdir(layout.keeping))
    view = lease.left_alone()
    return Keeper(layout, view, found, terms, time.monotonic, Pace(1.0), rebuild=rebuild)


def _kept_by(root: Root, beat: Beat) -> str:
    return (
        f"{root.path}: {_named(beat)} keeps its bound of {format_bytes(beat.capacity)}, and it "
        f"holds {_sized(beat.chunks, beat.nbytes)}. Only temporary files of writers that died were "
        "swept. For another bound change the 'capacity' of the engines."
    )


def _sized(chunks: int, nbytes: int) -> str:
    return f"{chunks} chunks, {format_bytes(nbytes)}"


def _terms(root: Root, seen: Seen) -> Terms:
    capacity = seen.beat.capacity if root.capacity is None and seen.beat is not None else 0
    if root.capacity is not None:
        whole = file_system_bytes(str(root.path)) if root.capacity.share is not None else 0
        capacity = root.capacity.resolve(whole)
    if not capacity:
        raise ConfigError(
            [
                f"{root.path} is used without a bound, as far as is known. Say how much may lie "
                "there with --capacity, such as --capacity 100GB."
            ]
        )
    info = TierInfo(root.name, capacity, shared=True, persistent=True)
    return Terms(info, root.headroom, 0, root.policy.make)


def _roots(arguments: argparse.Namespace) -> list[Root]:
    if bool(arguments.path) == bool(arguments.config):
        raise ConfigError(["Name a folder, or a file with --config, and not both."])
    capacity = _capacity(arguments.capacity)
    policy = None if arguments.policy is None else _policy(arguments.policy)
    if arguments.path:
        headroom: float = TierConfig.model_fields["headroom"].default
        folder = _folder(arguments.path)
        return [Root(folder, "fs", capacity, headroom, policy or _policy(_DEFAULT_POLICY))]
    return _configured(arguments.config, capacity, policy)


def _configured(file: str, capacity: Capacity | None, policy: PolicySpec | None) -> list[Root]:
    config = load({"config": file}, os.environ, "--config").config
    roots = [
        Root(
            _folder(str(tier.options.path)),
            tier.name,
            capacity or tier.capacity,
            tier.options.headroom,
            policy or config.policy,
        )
        for tier in config.tiers
        if isinstance(tier.options, FsTier.Config)
    ]
    if not roots:
        raise ConfigError([f"{file} has no fs tier whose 'path' is a folder."])
    return roots


def _folder(path: str) -> Path:
    if is_remote(path):
        raise ConfigError(
            [
                f"{path} is a URL, whose bound is kept by each engine that uses it. Name the "
                "'path' of an fs tier that is a folder."
            ]
        )
    try:
        return at_home(Path(str(without_local_scheme(path))))
    except ValueError as error:
        raise ConfigError([f"{path}: {error}."]) from error


def _capacity(written: str | None) -> Capacity | None:
    if written is None:
        return None
    try:
        return Capacity.parse(written)
    except ValueError as error:
        raise ConfigError([f"--capacity is {shown(written)}: {error}."]) from error


def _policy(written: str) -> PolicySpec:
    known = POLICIES.names()
    name = meant(written, known)
    if name is None:
        raise ConfigError(
            [f"--policy is '{written}'.{did_you_mean(written, known)} Known: {', '.join(known)}."]
        )
    return PolicySpec(type=name, options=POLICIES.get(name).Config())
