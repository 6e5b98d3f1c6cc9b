from __future__ import annotations

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import from_layers, hybrid, model_kv, opaque, register
from kvtiers.connector.layout import TensorPlace, plan_row
from kvtiers.tiers.base import ALIGNMENT
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def vllm_places(kv_caches, layout, ranks):
    """Where vLLM's own shared region puts each tensor in a row."""
    # vLLM also reserves an area per rank where the ranks share one.
    row_stride = -(-ranks * layout.area_bytes // ALIGNMENT) * ALIGNMENT
    region = SharedOffloadRegion(
        engine_id=f"kvtiers-test-{os.getpid()}-{uuid.uuid4().hex}",
        num_chunks=2,
        rank=layout.rank,
        kv_bytes_per_chunk=row_stride,
        cpu_page_size=layout.area_bytes,
    )
    try:
        create = (
            region.create_next_canonical_view
            if layout.canonical
            else region.create_next_worker_view
        )
        base, places = region._base.data_ptr(), []
        for tensor, place in zip(kv_caches.tensors, layout.places, strict=True):
            page = place.page_bytes if layout.canonical else tensor.page_size_bytes
            view = create(page * layout.blocks_per_chunk)
            assert view.stride() == (row_stride, 1)
            places.append(TensorPlace(view.data_ptr() - base, page))
            del view
        return tuple(places)
    finally:
        region.cleanup()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_direct_rows_are_arranged_as_by_vllm(rank, per_chunk):
    kv_caches = hybrid()
    layout = plan_row(kv_caches, per_chunk, rank, 3, canonical=False)
    assert not layout.canonical
    assert not layout.portable
    assert layout.places == vllm_places(kv_caches, layout, 3)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_canonical_rows_are_arranged_as_by_vllm_and_equal_on_all_ranks(tp, per_chunk):
    model = model_kv(4)
    layouts = []
    for rank in range(tp):
        kv_caches = register(model, tp, rank)
        layout = plan_row(kv_caches, per_chunk, rank, tp, canonical=True)
        assert layout.places == vllm_places(kv_caches, layout, tp)
        layouts.append((layout.row_bytes, layout.area_bytes, layout.places))
    assert len(set(layouts)) == 1
    assert layouts[0] == layouts_of_one_rank(model, per_chunk)


def layouts_of_one_rank(model, per_chunk):
    alone = plan_row(register(model), per_chunk, 0, 1, canonical=True)
    return (alone.row_bytes, alone.area_bytes, alone.places)


@given(
    heads=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 5),
    per_chunk=st.integers(1, 4),
    ranks=st.integers(1, 4),
)
def test_places_of_all_ranks_fill_the_row_without_overlap(heads, layers, per_chunk, ranks):
    kv_caches = register(model_kv(heads, layers))
    spans = []
    for rank in range(ranks):
        layout = plan_row(kv_caches, per_chunk, rank, ranks, canonical=False)
        spans += [(p.offset, p.offset + p.page_bytes * per_chunk) for p in layout.places]
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert layout.row_bytes % ALIGNMENT == 0
    assert 0 <= layout.row_bytes - spans[-1][1] < ALIGNMENT


def test_the_canonical_layout_is_taken_where_vllm_maps_every_layer():
    assert plan_row(register(model_kv(4)), 1, 0, 1).canonical
    assert not plan_row(hybrid(), 1, 0, 1).canonical
    assert not plan_row(register(model_kv(4)), 1, 0, 1, canonical=False).canonical


def test_only_rows_that_any_parallelism_can_read_are_portable():
    layers = list(model_kv(4))
    fallback = from_layers(layers, [[0, 1, 2]], opaque(layers, 2, 1))
    assert plan_row(register(model_kv(4), 2, 1), 1, 1, 2).portable
    assert not plan_row(register(model_kv(4), 2, 1), 1, 1, 2, canonical=False).portable
    mixed = plan_row(fallback, 1, 1, 2)
    assert mixed.canonical
    assert not mixed.portable


def test_a_required_canonical_layout_that_vllm_lacks_says_what_to_set():
    with pytest.raises(ValueError, match=r"2 of the 2 KV cache tensors.*canonical_layout to false"):
        plan_row(hybrid(), 1, 0, 1, canonical=True)


def test_a_tensor_that_no_layer_uses_has_no_canonical_form():
    layers = list(model_kv(4))
    kv_caches = from_layers(layers, [[0, 2]], opaque(layers))
    assert not plan_row(kv_caches, 1, 0, 1).canonical
    with pytest.raises(ValueError, match=r"1 of the 3 KV cache tensors .the first is number 1"):
        plan_row(kv_caches, 1, 0, 1, canonical=True)


def test_groups_that_share_a_tensor_get_room_for_the_larger_page():
    layers = list(model_kv(4, layers=2))
    kv_caches = from_layers(layers, [[0, 1], [1, 0]], opaque(layers, ranks=2))
    for ref in kv_caches.group_data_refs[1]:
        ref.mapping = opaque(layers)[0]
    page = layers[0][0].nbytes
    places = plan_row(kv_caches, 3, 0, 2).places
    assert places == (TensorPlace(0, 2 * page), TensorPlace(6 * page, 2 * page))


@pytest.mark.parametrize(("per_chunk", "rank"), [(0, 0), (1, 2), (1, -1)])
def test_impossible_arguments_are_named(per_chunk, rank):
    with pytest.raises(ValueError, match=f"{per_chunk} blocks for rank {rank} of 2"):
        plan_row(register(model_kv(4)), per_chunk, rank, 2)
