"""The vLLM plugin. Importing this package imports neither vLLM nor torch."""


def register() -> None:
    """Make ``TieredKVConnector`` known to vLLM. vLLM calls it at start in every process."""
