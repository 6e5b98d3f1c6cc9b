"""Offline inference with tiers: the second run of this script loads what the first computed.

    python examples/offline.py MODEL

Prints how many tokens of the prompt came out of a tier: none the first time, nearly
all from then on.
"""

import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = "The tiers of a KV cache, from the nearest to the farthest, are these. " * 60


def main() -> None:
    transfer = KVTransferConfig(kv_connector="TieredKVConnector", kv_role="kv_both")
    llm = LLM(model=sys.argv[1], kv_transfer_config=transfer, enforce_eager=True)
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    total = len(output.prompt_token_ids or ())
    print(f"{output.num_cached_tokens} of {total} prompt tokens came from a tier")
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
