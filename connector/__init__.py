"""The vLLM plugin. Importing this package imports neither vLLM nor torch."""


def register() -> None:
    """Make ``TieredKVConnector`` known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may load plugins more than once in a process, and its registry refuses
    # a name that it knows.
    if "TieredKVConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - no public look-up
        KVConnectorFactory.register_connector(
            "TieredKVConnector", "kvtiers.connector.connector", "TieredKVConnector"
        )
