"""Says in the log why KV of the same model that lies in a shared tier is not shared.

Replicas that differ in what gives the bytes their meaning keep apart, each in a
namespace of its own, and nothing fails: an operator sees misses. So an engine that
starts compares the namespaces it finds beside its own with it, fact by fact.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvtiers.connector.namespace import explain_mismatch
from kvtiers.tiers import Namespace, Tier

logger = logging.getLogger(__name__)

# Looked at in each tier, told of each tier, and named of each neighbour.
_MOST_FOUND = 16
_MOST_TOLD = 3
_MOST_FACTS = 5
# Of a fact that is named.
_MOST_CHARACTERS = 200


def announce(namespace: Namespace, tiers: Mapping[str, Tier]) -> threading.Thread:
    """Look for neighbours on a thread of its own: the start of an engine waits for no tier.

    Args:
        namespace: of this engine.
        tiers: those that answer, by name.

    """
    shared = {name: tier for name, tier in tiers.items() if tier.shared or tier.persistent}
    # A daemon, since a mount that hangs must not keep the process alive.
    thread = threading.Thread(
        target=_tell, args=(namespace, shared), name="kvtiers-neighbours", daemon=True
    )
    thread.start()
    return thread


def neighbours(ours: Namespace, found: Sequence[Namespace]) -> list[tuple[Namespace, list[str]]]:
    """Namespaces of this model other than ours, and what differs; the most alike first.

    A model is the same if its configuration is: then it is the weights that may differ.
    """
    model = _model(ours.facts)
    others = [
        (other, sorted(explain_mismatch(ours.facts, other.facts), key=_derived))
        for other in found
        if other.id != ours.id and model is not None and _model(other.facts) == model
    ]
    return sorted(others, key=lambda other: len(other[1]))


def _tell(ours: Namespace, tiers: Mapping[str, Tier]) -> None:
    for name, tier in tiers.items():
        try:
            others = neighbours(ours, tier.namespaces(_MOST_FOUND))
        except Exception as error:  # noqa: BLE001 - a tier's fault must not show as a thread's death
            logger.debug("The %s tier does not say whose KV it holds: %s", name, error)
            continue
        for other, facts in others[:_MOST_TOLD]:
            logger.info(
                "The %s tier holds KV of this model that is not shared with this engine, as "
                "these differ: %s (namespace %s, ours is %s).",
                name,
                _short(facts),
                _plain(other.id),
                ours.id,
            )
        if len(others) > _MOST_TOLD:
            logger.info(
                "The %s tier holds KV of this model in %d more such namespaces.",
                name,
                len(others) - _MOST_TOLD,
            )


def _model(facts: Mapping[str, Any]) -> object:
    model = facts.get("model")
    return model.get("config") if isinstance(model, Mapping) else None


def _derived(fact: str) -> bool:
    """Whether it follows from others, so that it explains less: each group's shape does."""
    return fact.startswith("groups")


def _short(facts: Sequence[str]) -> str:
    rest = len(facts) - _MOST_FACTS
    return "; ".join(map(_plain, facts[:_MOST_FACTS])) + (f"; and {rest} more" if rest > 0 else "")


def _plain(text: str) -> str:
    """What stands in a tier, for the log. Who wrote it may mean harm: one line, and a short one."""
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
