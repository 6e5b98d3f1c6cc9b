"""The command ``kvtiers``. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from kvtiers.connector.config_errors import ConfigError
from kvtiers.simulator.errors import SimulatorError
from kvtiers.tiers.spelling import did_you_mean
from kvtiers.tools import (
    collect,
    config_report,
    demo,
    heat,
    keygen,
    listing,
    record,
    simulate,
    verify,
)
from kvtiers.tools.places import PlaceError


class _Module(Protocol):
    """What a command's module has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Its options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it. Returns the exit status."""


@dataclass(frozen=True)
class _Command:
    module: _Module
    help: str
    description: str


# In the order in which the help names them.
_COMMANDS = {
    "config": _Command(
        config_report,
        "check a configuration and show it with each value's origin",
        "Checks a configuration without a server and prints every value with where "
        "it comes from. Without a file: what the environment and the defaults make. "
        "The exit status is 2 if the configuration cannot work.",
    ),
    "demo": _Command(
        demo,
        "time a real vLLM server cold and with hits in each tier",
        "Starts a real vLLM server with kvtiers on its defaults and prints the time "
        "to first token of long prompts: cold, from the GPU, from CPU memory, and from disk "
        "after a restart.",
    ),
    "heat": _Command(
        heat,
        "show which chunks of a prompt its end attends to",
        "Runs a prompt through a model on the CPU, measures as the probe of a live engine does "
        "what the last tokens attend to, and shows it chunk by chunk; as a plot, for every head.",
    ),
    "ls": _Command(
        listing,
        "list what lies in a tier",
        "Lists the namespaces of a folder, a URL or a Redis: which model's KV it is, "
        "how much, when it was last used, and what it is encrypted with. Changes nothing.",
    ),
    "verify": _Command(
        verify,
        "read every chunk in a tier and name the damaged ones",
        "Reads every chunk of every namespace of a folder, a URL or a Redis, beside "
        "running engines, and names each that is not what its name says. The exit status is 1 if "
        "there is one.",
    ),
    "gc": _Command(
        collect,
        "bring a folder of chunks under its bound",
        "Deletes from a folder what its bound has no room for, in the order that the "
        "engines' own records give, and temporary files that dead writers left. Safe beside "
        "running engines: where one of them keeps the bound, it says which and leaves it to that.",
    ),
    "record": _Command(
        record,
        "run a server and record what its cache sees",
        "Runs a command, and records what the cache of each engine with kvtiers in it sees "
        "of each request: lengths, chunks as numbers, what each tier served, and no text. When the "
        "command has ended, the recording is a Parquet file, which 'kvtiers simulate' replays.",
    ),
    "simulate": _Command(
        simulate,
        "replay traces through policies, beside the optimum",
        "Replays traces of requests through the policy classes of a live engine and shows, for "
        "each capacity, what share of all prompt tokens each policy's cache would have had, beside "
        "LRU and the most that any policy could have had. See docs/simulate.md.",
    ),
    "keygen": _Command(
        keygen,
        "make a key to encrypt chunks with",
        "Makes a random key for the option 'encryption' of a tier. The first key of a "
        "file encrypts, all of them decrypt.",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Says which command may have been meant."""

    commands: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        if self.commands and "invalid choice" in message:
            word = message.split("'")[1]
            message = (
                f"unknown command '{word}'.{did_you_mean(word, self.commands)} "
                f"Commands: {', '.join(self.commands)}"
            )
        super().error(message)

    def unexpected(self, argument: str) -> NoReturn:
        """Refuse an argument that this command does not take."""
        if not argument.startswith("-"):
            self.error(f"one argument too many: '{argument}'")
        option = argument.partition("=")[0]
        self.error(f"unknown option '{option}'.{did_you_mean(option, self._option_string_actions)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 good, 1 failed, 2 wrong input."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    # By itself argparse blames the whole program for a command's unknown option.
    arguments, unknown = _parser().parse_known_args(words)
    if unknown:
        arguments.parser.unexpected(unknown[0])
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        status = run(arguments)
        if sys.stdout is not None:  # as where the shell closed it with `>&-`
            sys.stdout.flush()
    except ConfigError as error:
        for problem in error.problems:
            print(f"kvtiers: {problem}", file=sys.stderr)
        return 2
    except (PlaceError, SimulatorError) as error:
        print(f"kvtiers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as by `kvtiers config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"kvtiers: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvtiers", description="A KV cache in tiers for vLLM.")
    version = importlib.metadata.version("kvtiers")
    told = f"kvtiers {version}"
    parser.add_argument("--version", action="version", version=told)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in _COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            allow_abbrev=False,  # the beginning of an option is a slip, which is to be told
        )
        # For who asks here; the program's help names it.
        added.add_argument("--version", action="version", version=told, help=argparse.SUPPRESS)
        command.module.add_arguments(added)
        added.set_defaults(run=command.module.run, parser=added)
    parser.commands = list(_COMMANDS)
    return parser
