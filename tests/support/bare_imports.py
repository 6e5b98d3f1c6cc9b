"""Imports what must work without an engine, in an interpreter where one can't be imported.

As a script: ``python bare_imports.py MODULE...`` imports the modules, and of kvtiers'
packages among them all modules within. One may lack a package of kvtiers' own extras.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

BARE = (
    "kvtiers.policies",
    "kvtiers.tiers",
    "kvtiers.simulator",
    "kvtiers.connector.config",
    "kvtiers.tools.cli",
)
EXTRAS = {"fsspec", "hypothesis", "pytest", "redis"}


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "transformers"):
            raise ImportError(f"{name} must not be imported here")


def main(*names: str) -> None:
    sys.meta_path.insert(0, Refuse())
    for name in names:
        module = importlib.import_module(name)
        if name in ("kvtiers.policies", "kvtiers.tiers", "kvtiers.simulator", "kvtiers.tools"):
            for found in pkgutil.iter_modules(module.__path__, name + "."):
                import_within(found.name)


def import_within(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
