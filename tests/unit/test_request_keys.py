"""Keys of requests with a LoRA adapter, as the hierarchy sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvtiers.connector.manager import Adapter, RequestKeys
from vllm.v1.kv_offload.base import get_offload_group_idx, make_offload_key

hashes = st.one_of(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
groups = st.integers(0, 70000)
contents = st.binary(min_size=16, max_size=16)


@given(hashes, groups, contents)
def test_a_key_gets_the_content_and_loses_it_again(
    block_hash: bytes, group: int, content: bytes
) -> None:
    key = make_offload_key(block_hash, group)
    known = RequestKeys({}, adapter=Adapter(1, content))
    inner = known.inner(key)
    assert known.outer(inner) == key
    assert get_offload_group_idx(inner) == group, "metrics and copies go by the group"
    assert len(inner) <= 64


@given(hashes, groups, st.lists(contents, min_size=2, max_size=4, unique=True))
def test_no_two_contents_share_a_key_nor_one_with_the_model(
    block_hash: bytes, group: int, several: list[bytes]
) -> None:
    key = make_offload_key(block_hash, group)
    adapters = [None, *(Adapter(1, content) for content in several)]
    inner = {RequestKeys({}, adapter=adapter).inner(key) for adapter in adapters}
    assert len(inner) == len(adapters)


def test_a_request_whose_adapter_is_unknown_neither_loads_nor_stores() -> None:
    known = RequestKeys({}, adapter=Adapter(1, None))
    assert not known.loads
    assert not known.stores
