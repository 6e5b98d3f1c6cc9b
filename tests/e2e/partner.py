"""A second connector under MultiConnector: it keeps the KV of whole prompts in memory.

It loads asynchronously, into blocks that another connector may still be reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

Blocks = list[list[int]]


@dataclass
class Steps(KVConnectorMetadata):
    """What a step computes, and what is to be loaded: prompt -> its blocks per group."""

    saves: dict[tuple[int, ...], Blocks] = field(default_factory=dict)
    loads: dict[str, tuple[tuple[int, ...], Blocks]] = field(default_factory=dict)


class PartnerConnector(KVConnectorBase_V1, SupportsHMA):
    """Remembers prompts that are computed in one step; loads all of their whole blocks.

    Attributes:
        learning: whether it remembers those that come now.
        blocks: that it loaded into last.

    """

    learning = True

    # Scheduler --------------------------------------------------------------

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = vllm_config.cache_config.block_size
        self._layers = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self.blocks: set[int] = set()
        self._known: set[tuple[int, ...]] = set()
        self._next = Steps()
        self._memory: dict[tuple[int, ...], dict[tuple[str, int], torch.Tensor]] = {}
        self._loaded: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        prompt = tuple(request.prompt_token_ids)
        if prompt not in self._known:
            return 0, False
        whole = (len(prompt) - 1) // self._block * self._block
        return max(0, whole - num_computed_tokens), whole > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            prompt = tuple(request.prompt_token_ids)
            whole = (len(prompt) - 1) // self._block
            ids = [[block.block_id for block in group[:whole]] for group in blocks.blocks]
            self._next.loads[request.request_id] = (prompt, ids)
            self.blocks = {block for group in ids for block in group if block}

    def build_connector_meta(self, scheduler_output: Any) -> Steps:
        steps, self._next = self._next, Steps()
        for request in scheduler_output.scheduled_new_reqs:
            prompt = tuple(request.prompt_token_ids)
            scheduled = scheduler_output.num_scheduled_tokens[request.req_id]
            if self.learning and scheduled == len(prompt):
                steps.saves[prompt] = [list(group) for group in request.block_ids]
                self._known.add(prompt)
        return steps

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    # Worker -----------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, (prompt, blocks) in self._connector_metadata.loads.items():
            saved = self._memory[prompt]
            for layer, index, block in self._places(blocks):
                self._caches[layer][block] = saved[layer, index]
            self._loaded.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for prompt, blocks in self._connector_metadata.saves.items():
            self._memory[prompt] = {
                (layer, index): self._caches[layer][block].clone()
                for layer, index, block in self._places(blocks)
            }

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        loaded, self._loaded = self._loaded, set()
        return set(), loaded

    def _places(self, blocks: Blocks) -> list[tuple[str, int, int]]:
        return [
            (layer, index, block)
            for group, ids in zip(self._layers, blocks, strict=True)
            for layer in group
            for index, block in enumerate(ids)
            if block
        ]


class TalkingPartner(PartnerConnector):
    """Its workers have something to say at start, as those of connectors between hosts do."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return KVConnectorHandshakeMetadata()
