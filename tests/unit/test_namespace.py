import copy
import enum
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvtiers.connector.namespace import (
    build_namespace,
    explain_mismatch,
    kernel_facts,
    shareable_hash,
)
from kvtiers.tiers.base import Namespace

WEIGHTS = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Spec:
    """Stands in for one of vLLM's KVCacheSpecs: a dataclass with defaults."""

    block_size: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    dtype: str = ""
    sliding_window: int | None = None
    page_size_padded: int | None = None


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def engine() -> SimpleNamespace:
    """All that build_namespace is told, of a small Llama at TP 1."""
    hf = HfConfig(
        hidden_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        transformers_version="5.0",
        _name_or_path="/models/tiny",
    )
    model = SimpleNamespace(
        model="/models/tiny",
        architecture="LlamaForCausalLM",
        hf_config=hf,
        hf_overrides={},
        dtype="bfloat16",
        quantization=None,
        model_impl="auto",
        max_model_len=256,
    )
    cache = SimpleNamespace(
        block_size=16,
        cache_dtype="auto",
        kv_cache_dtype_skip_layers=[],
        prefix_caching_hash_algo="sha256",
    )
    offloading = SimpleNamespace(
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l.0", "l.1"))],
        cache=SimpleNamespace(blocks_per_chunk=4, tokens_per_hash=16),
        parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        kv_cache_layout="LBHNC",
        worker_kv_bytes_per_block=4096,
        engine_id="engine-a",
    )
    spec = Spec(block_size=16, num_kv_heads=4, head_size=16, dtype="bfloat16")
    return SimpleNamespace(
        config=SimpleNamespace(model_config=model, cache_config=cache, speculative_config=None),
        kv=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]),
        offloading=offloading,
        options={"weights": WEIGHTS, "kernel": {"device": "cuda"}, "environ": {}},
    )


def name(facts: SimpleNamespace) -> Namespace:
    return build_namespace(facts.config, facts.kv, facts.offloading, **facts.options)


def at(path: str, value: Any) -> Callable[[SimpleNamespace], None]:
    """A change of one attribute or item, by its dotted path."""

    def change(facts: SimpleNamespace) -> None:
        *parents, last = path.split(".")
        node: Any = facts
        for part in parents:
            node = node[part] if isinstance(node, dict) else getattr(node, part)
        if isinstance(node, dict):
            node[last] = value
        else:
            setattr(node, last, value)

    return change


def spec(**values: Any) -> Callable[[SimpleNamespace], None]:
    def change(facts: SimpleNamespace) -> None:
        group = facts.kv.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, **values)

    return change


def tensor_parallel(facts: SimpleNamespace) -> None:
    facts.offloading.parallel.tp_size = facts.offloading.parallel.world_size = 2
    facts.offloading.worker_kv_bytes_per_block = 2048
    spec(num_kv_heads=2)(facts)


def drafter(method: str) -> SimpleNamespace:
    return SimpleNamespace(method=method, draft_model_config=None)


CHANGES = {
    "weights": at("options.weights", "f" * 32),
    "weights_version": at("options.weights_version", "2026-07"),
    "model configuration": at("config.model_config.hf_config.values.hidden_size", 65),
    "architecture": at("config.model_config.architecture", "MistralForCausalLM"),
    "rope": at(
        "config.model_config.hf_config.values.rope_parameters",
        {"rope_type": "default", "rope_theta": 5e5},
    ),
    "hf_overrides": at("config.model_config.hf_overrides", {"rope_theta": 5e5}),
    "dtype": at("config.model_config.dtype", "float16"),
    "quantization": at("config.model_config.quantization", "fp8"),
    "drafter": at("config.speculative_config", drafter("eagle")),
    "processing of images": at(
        "config.model_config.multimodal_config",
        SimpleNamespace(mm_processor_kwargs={"num_crops": 4}),
    ),
    "dtype of the image encoder": at(
        "config.model_config.multimodal_config", SimpleNamespace(mm_encoder_attn_dtype="fp8")
    ),
    "pruning of videos": at(
        "config.model_config.multimodal_config",
        SimpleNamespace(video_pruning_rate=0.5, video_pruning_method="evs"),
    ),
    "another pruning of videos": at(
        "config.model_config.multimodal_config",
        SimpleNamespace(video_pruning_rate=0.5, video_pruning_method="other"),
    ),
    "dtype of a sparse indexer": at(
        "config.attention_config", SimpleNamespace(indexer_kv_dtype="mxfp4")
    ),
    "modules of adapters": at(
        "config.lora_config", SimpleNamespace(target_modules=["o_proj"], lora_dtype="bfloat16")
    ),
    "dtype of adapters": at(
        "config.lora_config", SimpleNamespace(target_modules=None, lora_dtype="float16")
    ),
    "KV dtype": at("config.cache_config.cache_dtype", "fp8"),
    "layers with another KV dtype": at("config.cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "block size": at("config.cache_config.block_size", 32),
    "chunk size": at("offloading.cache.blocks_per_chunk", 8),
    "tokens per hash": at("offloading.cache.tokens_per_hash", 8),
    "layers of a group": at(
        "offloading.groups",
        [SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l.1", "l.0"))],
    ),
    "sliding window": spec(sliding_window=128),
    "heads": spec(num_kv_heads=8),
    "page padding": spec(page_size_padded=8192),
    "kv_cache_layout": at("offloading.kv_cache_layout", "LBNHC"),
    "tensor parallel size": tensor_parallel,
    "pipeline parallel size": at("offloading.parallel.pp_size", 2),
    "rank count": at("offloading.parallel.world_size", 2),
    "hash algorithm": at("config.cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "hash seed": at("options.environ", {"PYTHONHASHSEED": "0"}),
    "hash lookahead": at("config.num_hash_lookahead_tokens", 1),
    "instruction set": at("options.kernel", {"device": "cpu", "isa": ["amx"]}),
}


def test_every_single_fact_makes_another_namespace() -> None:
    ids = {"unchanged": name(engine()).id}
    for what, change in CHANGES.items():
        facts = engine()
        change(facts)
        ids[what] = name(facts).id
    assert len(set(ids.values())) == len(ids)


@pytest.mark.parametrize(
    "change",
    [
        at("config.model_config.model", "/elsewhere/tiny"),
        at("config.model_config.hf_config.values._name_or_path", "/elsewhere/tiny"),
        at("config.model_config.hf_config.values.transformers_version", "5.1"),
        at("config.model_config.max_model_len", 128),
        at("offloading.engine_id", "engine-b"),
        at("options.environ", {"HOME": "/root"}),
        at("config.speculative_config", drafter("ngram")),
        at("config.lora_config", SimpleNamespace(target_modules=None, lora_dtype="bfloat16")),
        at("config.model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs=None)),
        at(
            "config.model_config.multimodal_config",
            SimpleNamespace(video_pruning_rate=None, video_pruning_method="evs"),
        ),
        at("config.attention_config", SimpleNamespace(indexer_kv_dtype="auto")),
    ],
)
def test_what_does_not_change_the_bytes_changes_no_id(
    change: Callable[[SimpleNamespace], None],
) -> None:
    facts = engine()
    change(facts)
    assert name(facts) == name(engine())


def test_max_model_len_counts_where_it_bends_the_rope() -> None:
    ids = set()
    for length in (4096, 8192):
        facts = engine()
        at(
            "config.model_config.hf_config.values.rope_parameters",
            {"full_attention": {"rope_type": "longrope"}},
        )(facts)
        facts.config.model_config.max_model_len = length
        ids.add(name(facts).id)
    assert len(ids) == 2


def test_tp_sizes_share_canonical_chunks_only() -> None:
    pytest.importorskip("vllm")
    ids = {}
    for portable in (True, False):
        one, two = engine(), engine()
        tensor_parallel(two)
        for facts in (one, two):
            facts.options["portable"] = portable
        ids[portable] = {name(one).id, name(two).id}
    assert len(ids[True]) == 1
    assert len(ids[False]) == 2
    assert not ids[True] & ids[False]


def test_unknown_weights_are_shared_with_nobody() -> None:
    ids = set()
    for engine_id in ("engine-a", "engine-b"):
        facts = engine()
        facts.options["weights"] = None
        facts.offloading.engine_id = engine_id
        namespace = name(facts)
        assert not namespace.shareable
        ids.add(namespace.id)
    assert len(ids) == 2
    assert name(engine()).shareable


def test_a_field_that_a_release_adds_with_a_default_changes_no_id() -> None:
    @dataclass(frozen=True)
    class NewerSpec(Spec):
        compressed: bool = False

    NewerSpec.__name__ = "Spec"
    newer = engine()
    old = newer.kv.kv_cache_groups[0].kv_cache_spec
    newer.kv.kv_cache_groups[0].kv_cache_spec = NewerSpec(**vars(old))
    assert name(newer) == name(engine())


def test_groups_with_a_spec_per_layer_are_told_apart() -> None:
    @dataclass(frozen=True)
    class Uniform:
        kv_cache_specs: dict[str, Spec]
        block_size: int = 16

    ids = set()
    for dtype in ("bfloat16", "fp8"):
        facts = engine()
        layers = {"l.0": Spec(16, 4, 16, "bfloat16"), "l.1": Spec(16, 4, 16, dtype)}
        facts.kv.kv_cache_groups[0].kv_cache_spec = Uniform(layers)
        ids.add(name(facts).id)
    assert len(ids) == 2


def test_facts_are_plain_json_and_say_what_differs() -> None:
    class Impl(enum.Enum):
        AUTO = "auto"

    facts = engine()
    facts.config.model_config.model_impl = Impl.AUTO
    facts.config.model_config.hf_overrides = {"b", "a"}
    facts.config.model_config.quantization_config = object()
    namespace = name(facts)
    assert json.loads(json.dumps(namespace.facts)) == namespace.facts
    assert " at 0x" not in json.dumps(namespace.facts)

    other = copy.deepcopy(namespace.facts)
    other["cache"]["block_size"] = 32
    del other["weights_version"]
    other["groups"][0]["layers"] = ["l.0"]
    assert explain_mismatch(namespace.facts, other) == [
        "cache.block_size: 16 here, 32 there",
        'groups[0].layers: ["l.0", "l.1"] here, ["l.0"] there',
        "weights_version: null here, (absent) there",
    ]
    assert explain_mismatch(namespace.facts, namespace.facts) == []


def test_ids_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = "import test_namespace as t; print(t.name(t.engine()).id)"
    env = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": str(Path(__file__).parent)}
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == name(engine()).id
    assert len(name(engine()).id) == 32


def test_a_seed_is_not_readable_from_the_facts() -> None:
    facts = engine()
    facts.options["environ"] = {"PYTHONHASHSEED": "31415926"}
    assert "31415926" not in json.dumps(name(facts).facts)


@pytest.mark.parametrize(
    ("algorithm", "environ", "fine"),
    [
        ("sha256", {}, True),
        ("sha256_cbor", {}, True),
        ("xxhash", {}, False),
        ("xxhash_cbor", {}, False),
        ("xxhash", {"PYTHONHASHSEED": "7"}, True),
        ("builtin", {}, False),
    ],
)
def test_hashes_with_a_random_seed_are_refused(
    algorithm: str, environ: dict[str, str], fine: bool
) -> None:
    facts = engine()
    facts.config.cache_config.prefix_caching_hash_algo = algorithm
    reason = shareable_hash(facts.config, environ)
    assert (reason is None) == fine
    if reason is not None:
        assert algorithm in reason
        assert "PYTHONHASHSEED" in reason
        assert "sha256" in reason


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """vLLM's own configuration of a tiny Llama, without an engine."""
    pytest.importorskip("vllm")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import LlamaConfig
    from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )

    folder = str(tmp_path_factory.mktemp("llama"))
    llama = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        architectures=["LlamaForCausalLM"],
    )
    llama.save_pretrained(folder)
    model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True)
    config = VllmConfig(
        model_config=model,
        kv_transfer_config=KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"),
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    layer = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    layers = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    kv = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, layer)],
    )
    return SimpleNamespace(config=config, kv=kv)


def test_a_real_configuration_of_vllm_has_a_namespace(real: SimpleNamespace) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )

    offloading = build_offloading_config(real.config, real.kv)
    kernel = kernel_facts(real.config, real.kv)
    ids = set()
    for portable in (False, True):
        namespace = build_namespace(
            real.config, real.kv, offloading, weights=WEIGHTS, portable=portable, kernel=kernel
        )
        assert namespace.facts["model"]["dtype"] == "torch.bfloat16"
        assert namespace.facts["groups"][0]["spec"]["kind"] == "FullAttentionSpec"
        assert " object" not in json.dumps(namespace.facts)
        ids.add(namespace.id)
    assert len(ids) == 2
    if kernel["device"] == "cpu":
        assert kernel["isa"]
