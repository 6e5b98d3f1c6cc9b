"""The vLLM plugin. Importing this package imports neither vLLM nor torch."""

import logging


def register() -> None:
    """Make ``TieredKVConnector`` known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may load plugins more than once in a process, and its registry refuses
    # a name that it knows.
    if "TieredKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no public look-up
        KVConnectorFactory.register_connector(
            "TieredKVConnector", "kvtiers.connector.connector", "TieredKVConnector"
        )
        _log_like_vllm()


def _log_like_vllm() -> None:
    """Our lines go where vLLM's go: it gives its own logger a handler, and no other."""
    ours, theirs = logging.getLogger("kvtiers"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = not ours.handlers
