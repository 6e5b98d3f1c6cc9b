"""The places that a command line names: by path or URL, or as the tiers of a configuration."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError, from_pydantic
from kvtiers.tiers.base import TierConfigError
from kvtiers.tiers.encryption import AtRestConfig
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tiers.redis_url import SCHEMES
from kvtiers.tiers.remote_config import RemoteFsConfig
from kvtiers.tiers.remote_url import is_remote, without_local_scheme
from kvtiers.tiers.sealing import Sealing, sealing_of
from kvtiers.tools.places import Folder, Place, PlaceError, Url
from pydantic import ValidationError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a place, and the keys to it."""
    parser.add_argument(
        "places",
        metavar="PLACE",
        nargs="*",
        help="a folder, a URL such as s3://bucket/prefix, or redis://host:6379, as a tier's 'path' "
        "or 'url'",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="take the tiers of a configuration, with all their options"
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="the keys of places that are encrypted (see kvtiers keygen)"
    )
    parser.add_argument(
        "--key-prefix",
        metavar="TEXT",
        default=RedisConfig.model_fields["key_prefix"].default,
        help="what the keys in a Redis begin with (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def places(arguments: argparse.Namespace) -> Iterator[tuple[Place, Sealing | None]]:
    """Each place with its keys, if it has any.

    Raises:
        ConfigError: what was written can't work.
        PlaceError: a place can't be looked at.

    """
    if bool(arguments.places) == bool(arguments.config):
        raise ConfigError(["Name one or more places, or a file with --config, and not both."])
    configs = _configured(arguments) if arguments.config else _named(arguments)
    for config in configs:
        try:
            sealing = sealing_of(config)
            place = _place(config, arguments)
        except TierConfigError as error:
            raise PlaceError(str(error)) from error
        try:
            yield place, sealing
        finally:
            place.close()


def _configured(arguments: argparse.Namespace) -> list[AtRestConfig]:
    loaded = load({"config": arguments.config}, os.environ, "--config")
    options = [tier.options for tier in loaded.config.tiers]
    found = [each for each in options if isinstance(each, AtRestConfig)]
    if not found:
        raise ConfigError([f"{arguments.config} has no tier with chunks at rest."])
    return found


def _named(arguments: argparse.Namespace) -> list[AtRestConfig]:
    return [_of_place(place, arguments) for place in arguments.places]


def _of_place(place: str, arguments: argparse.Namespace) -> AtRestConfig:
    model: type[AtRestConfig]
    if place.partition("://")[0] in SCHEMES and "://" in place:
        model, written = RedisConfig, {"url": place, "key_prefix": arguments.key_prefix}
    elif is_remote(place):
        model, written = RemoteFsConfig, {"path": place}
    else:
        model, written = FsTier.Config, {"path": without_local_scheme(place)}
    options: dict[str, Any] = {**written, "encryption": arguments.keys}
    try:
        return model.model_validate(options)
    except ValidationError as error:
        raise ConfigError(from_pydantic(error, model, lambda _: "the command line")) from error


def _place(config: AtRestConfig, arguments: argparse.Namespace) -> Place:
    if isinstance(config, RedisConfig):
        from kvtiers.tools.redis_place import RedisPlace

        return RedisPlace(config, renew_use=getattr(arguments, "renew_use", False))
    if isinstance(config, RemoteFsConfig):
        return Url(config)
    return Folder(Path(config.path), config)  # type: ignore[attr-defined]
