"""What is refused at start, as far as a configuration alone shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.config_settings import Settings
from kvtiers.connector.engine_checks import check_chunks, check_engine


def _groups(*, states: bool) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    specs: list[Any] = [
        FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    ]
    if states:
        specs.append(MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,)))
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (Settings(blocks_per_chunk=2), "blocks_per_chunk is 2, but layers of this model keep"),
        (Settings(chunk_size=32), "chunk_size is 32 tokens, which are 2 blocks, but layers"),
    ],
)
def test_several_blocks_a_chunk_are_refused_for_layers_with_a_state(
    settings: Settings, named: str
) -> None:
    check_chunks(settings, 2, _groups(states=False))
    check_chunks(settings, 1, _groups(states=True))
    with pytest.raises(ConfigError, match=named):
        check_chunks(settings, 2, _groups(states=True))


def test_an_engine_without_prefix_cache_is_told_who_may_have_switched_it_off() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))
    with pytest.raises(ConfigError, match=r"Remove --no-enable-prefix-caching or, where vLLM"):
        check_engine(config)
