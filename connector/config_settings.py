"""The top-level keys beside ``tiers`` and ``policy``."""

from __future__ import annotations

from typing import Annotated, Literal

from kvtiers.connector.config_record import RecordOption
from kvtiers.connector.heat import HeatChoice
from kvtiers.policies.placement import Admission, Placement, WriteWhen
from kvtiers.tiers.units import Portion, Share
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

WARM_CACHE_RATIO = 0.5
"""Half of the free memory leaves room for the page cache that other tiers read through."""

# Of free memory. The engine goes on allocating after the start, and is killed if it can't.
MOST_OF_MEMORY = 0.95

# Of the GPU's blocks.
MOST_FAVOURED = 0.5


def _as_text(value: object) -> object:
    # No float: from JSON 1.10 arrives as 1.1, and nobody can see how it was written.
    return str(value) if type(value) is int else value


VersionText = Annotated[str, BeforeValidator(_as_text)]
"""A text; a whole number is taken for one."""


class Settings(BaseModel):
    """What can be set beside the tiers and the policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    blocks_per_chunk: int | None = Field(
        default=None, ge=1, description="the number of vLLM blocks that move as one, 1 if not set"
    )
    chunk_size: int | None = Field(
        default=None, ge=1, description="the number of tokens that move as one"
    )
    offload_prompt_only: bool = Field(
        default=True, description="whether only prompts are kept, and no generated tokens"
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="the longest prefix of a request that is stored, in tokens, without limit if "
        "not set; what tiers hold beyond it is used all the same",
    )
    offload_threshold: Share = Field(
        default=0.0,
        description="the share of the GPU's blocks that must be in use or hold cached KV before "
        "anything is stored",
    )
    prefetch_window: int | None = Field(
        default=None,
        ge=0,
        description="the number of tokens of a prefix that are promoted before the scheduler "
        "considers its request; 0 for none, without limit if not set",
    )
    load_or_recompute: Literal["auto", "always_load"] = Field(
        default="auto",
        description="whether chunks are computed where loading them would take longer, going by "
        "the measured speed of tiers and engine; or loaded always",
    )
    admission: Admission = Field(
        default="all",
        description="what the tiers below cpu take: 'all' new chunks; those that were 'reused', "
        "so that a second request asked for them; or those that are 'worth' it, going by how "
        "often such chunks are used again and by the measured speed of tiers and engine",
    )
    write: WriteWhen = Field(
        default="through",
        description="when they take it: as soon as it is admitted ('through'), or when the cpu "
        "tier evicts it",
    )
    gpu_favour: Share = Field(
        default=0.1,
        description="the share of the GPU's blocks, at most 0.5, that are evicted last: prefixes "
        "of requests in the queue, and what the policy favours; 0 for none",
    )
    warm_cache_ratio: Share | None = Field(
        default=None,
        description="the share of free host memory that the cpu tier takes if it has no "
        f"'capacity', {WARM_CACHE_RATIO} if not set",
    )
    tenant_quota: Portion = Field(
        default=None,
        description="the most that each tenant (cache_salt) may hold of each tier that has no "
        "'tenant_quota' of its own, without limit if not set",
    )
    attention_heat: HeatChoice = Field(
        default="auto",
        description="whether, and how, it is measured which chunks prompts attend to; with 'auto', "
        "if the policy asks for it",
    )
    record: RecordOption = Field(
        default=None,
        description="the folder that what the cache sees of each request is recorded in, for "
        "`kvtiers simulate`; no text of any prompt is",
    )
    canonical_layout: Literal["auto", True, False] = Field(
        default="auto",
        description="whether KV is stored independently of the tensor-parallel shape",
    )
    weights_version: VersionText | None = Field(
        default=None, description="a text that changes when the weights do"
    )
    self_describing_kv_events: bool = Field(
        default=False, description="whether KV events carry the tokens of their blocks"
    )

    @property
    def placement(self) -> Placement:
        """How the tiers below the first are filled."""
        return Placement(self.admission, self.write)

    @field_validator("gpu_favour")
    @classmethod
    def _leaves_most_to_vllm(cls, value: float) -> float:
        if value <= MOST_FAVOURED:
            return value
        raise ValueError(
            f"it must be at most {MOST_FAVOURED}: what is favoured does not age, and requests "
            "would find little else of what was computed before them"
        )

    @field_validator("warm_cache_ratio")
    @classmethod
    def _leaves_memory(cls, value: float | None) -> float | None:
        if value is None or 0 < value <= MOST_OF_MEMORY:
            return value
        raise ValueError(
            f"it must be above 0 and at most {MOST_OF_MEMORY}: the engine needs a part of the "
            "memory that is free when the server starts"
        )

    @model_validator(mode="after")
    def _one_chunk_size(self) -> Settings:
        if self.blocks_per_chunk is not None and self.chunk_size is not None:
            raise ValueError(
                f"blocks_per_chunk is {self.blocks_per_chunk} and chunk_size is "
                f"{self.chunk_size}, and both say how large a chunk is. Keep one of them"
            )
        return self
