"""What vLLM's ``kv_role`` means here: who fills the tiers, and who reads them.

vLLM's own offloading takes no notice of it. It is no hand-off of running requests from a
prefill engine to a decode engine: see docs/shapes.md.
"""

from __future__ import annotations


def loads(role: str) -> bool:
    """Whether an engine of that role serves requests from the tiers."""
    return role != "kv_producer"


def stores(role: str) -> bool:
    """Whether an engine of that role stores what it computes."""
    return role != "kv_consumer"
