"""Measures, on a worker, what the end of a prompt attends to.

vLLM's attention layers are reached through the forward context of its configuration, and
``layer.impl.forward`` is wrapped for the one call that is measured: after it has run,
queries are at hand and the keys are in the paged cache. On a GPU the wrapper runs in eager
steps and between the pieces of piecewise graphs, which is where prompts are computed, not in
replayed full graphs. Nothing waits for the GPU but the first measurement of each layer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from kvtiers.connector import compat
from kvtiers.connector.heat import (
    NO_REPORT,
    NOT_MEASURED,
    HeatJob,
    HeatReport,
    HeatSettings,
    HeatStep,
    Readings,
    layers_at,
)
from kvtiers.connector.heat_clock import HeatClock, Mark
from kvtiers.connector.heat_mass import attention_mass
from kvtiers.connector.heat_views import Keys, keys_of

logger = logging.getLogger(__name__)

# Elements of keys that are gathered at once: the engine has laid claim to most of the
# memory already.
_MOST_KEYS = 1 << 22
# Logits of a measurement that one thread computes by itself on the CPU, in some milliseconds:
# of a team, each would wait for whom the machine lets run last, and burn its core meanwhile.
_ALONE = 1 << 21


@dataclass(eq=False)
class _Layer:
    """An attention layer that can be measured.

    Attributes:
        module: vLLM's layer.
        number: which layer of the model it is.
        keys: gets keys out of its cache.
        trusted: whether ``keys`` was seen to give what was stored.
        wrapped: what was put in the place of its ``forward``.
        own: what was there, None for that of its class.

    """

    module: Any
    number: int
    keys: Keys
    trusted: bool = False
    wrapped: Callable[..., Any] | None = None
    own: Callable[..., Any] | None = None


@dataclass(frozen=True)
class _Measured:
    """What is on its way to the host, and whether its row was found in the batch."""

    key: tuple[int, int, int]
    mass: torch.Tensor
    found: torch.Tensor
    ready: Callable[[], bool]


class HeatProbe:
    """One worker's probe. All methods run on the worker's thread.

    What can't be measured is told once, and the probe is off from then on: a fault here
    must not end the engine.

    Args:
        settings: how much is measured.
        layers: vLLM's attention layers by name, of the group that is measured.
        rank: of this worker, which tells its KV heads from those of others.
        device: vLLM's type of the worker's device.

    """

    def __init__(
        self, settings: HeatSettings, layers: Mapping[str, Any], rank: int, device: str
    ) -> None:
        self._settings = settings
        self._clock = HeatClock(device)
        self._began: Mark | None = None
        self._prefill = 0.0
        self._modules, self._rank = layers, rank
        self._layers: list[_Layer] | None = None
        self._jobs: dict[_Layer, list[HeatJob]] = {}
        self._measured: list[_Measured] = []
        self._off = False

    @classmethod
    def of_worker(
        cls, settings: HeatSettings | None, vllm_config: Any, kv_cache_config: Any
    ) -> HeatProbe | None:
        """For the layers of a worker's model; None if heat is not measured."""
        number = compat.full_attention_group(kv_cache_config)
        if settings is None or number is None:
            return None
        modules = vllm_config.compilation_config.static_forward_context
        names = kv_cache_config.kv_cache_groups[number].layer_names
        layers = {name: modules[name] for name in names if name in modules}
        rank: int = vllm_config.parallel_config.rank
        return cls(settings, layers, rank, vllm_config.device_config.device_type)

    def begin(self, step: HeatStep) -> None:
        """A step begins, at whose end its jobs can be measured."""
        self._drop()
        self._began = None
        if not step.prefill or self._off:
            return
        try:
            begin = self._clock.now()
            self._began, self._prefill = self._clock.mark(), step.prefill
            self._clock.posted(step.post_s)
            if step.jobs:
                self._prepare(step.jobs)
            self._clock.prepared(begin)
        except Exception as error:  # noqa: BLE001  # a probe's fault must not end the engine
            self._turn_off(f"preparing it failed: {error}", error)

    def report(self) -> HeatReport:
        """The step is over: the jobs of which all has arrived since the last call, and the cost.

        What the report itself takes is in the next one.
        """
        if self._began is None and not self._measured and not self._clock.waits:
            return NO_REPORT
        try:
            return self._report()
        except Exception as error:  # noqa: BLE001  # a probe's fault must not end the engine
            self._measured.clear()
            self._turn_off(f"reading what was measured failed: {error}", error)
            return NO_REPORT

    def _report(self) -> HeatReport:
        begin = self._clock.now()
        self._drop()
        readings = self._arrived()
        if self._began is not None:
            self._clock.computed(self._began, self._prefill)
            self._began = None
        cost = self._clock.take()
        self._clock.prepared(begin)
        return HeatReport(readings, cost)

    def _arrived(self) -> Readings:
        late = {measured.key[0] for measured in self._measured if not measured.ready()}
        taken = {
            measured.key: measured.mass.numpy()
            for measured in self._measured
            if measured.key[0] not in late and bool(measured.found)
        }
        self._measured = [measured for measured in self._measured if measured.key[0] in late]
        return taken

    # Layers -----------------------------------------------------------------

    def _prepare(self, jobs: Sequence[HeatJob]) -> None:
        if self._layers is None:
            self._layers = self._known()
        for job in jobs:
            for index in layers_at(job.turn, self._settings.layers, len(self._layers)):
                self._jobs.setdefault(self._layers[index], []).append(job)
        for layer in self._jobs:
            self._wrap(layer)

    def _known(self) -> list[_Layer]:
        layers: list[_Layer] = []
        refused: dict[str, str] = {}
        for name, module in self._modules.items():
            keys = _keys_of(module)
            if isinstance(keys, str):
                refused[name] = keys
            else:
                layers.append(_Layer(module, _number(name), keys))
        layers.sort(key=lambda layer: layer.number)
        if not layers:
            reasons = sorted(set(refused.values())) or ["no layer of this rank has full attention"]
            self._turn_off("; ".join(reasons))
        return layers

    def _wrap(self, layer: _Layer) -> None:
        """For this step only, so that no other call goes through it."""
        impl = layer.module.impl
        forward = impl.forward

        @functools.wraps(forward)
        def measured(
            module: Any,
            query: Any,
            key: Any,
            value: Any,
            cache: Any,
            metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            output = forward(module, query, key, value, cache, metadata, *args, **kwargs)
            if layer in self._jobs and metadata is not None:
                self._try_measure(layer, query, key, cache, metadata)
            return output

        layer.wrapped, layer.own = measured, vars(impl).get("forward")
        impl.forward = measured

    def _unwrap(self, layer: _Layer) -> None:
        impl = layer.module.impl
        if vars(impl).get("forward") is not layer.wrapped:
            return  # somebody has wrapped ours, which does nothing any more
        if layer.own is None:
            del impl.forward
        else:
            impl.forward = layer.own

    def _drop(self) -> None:
        """What was not measured won't be."""
        jobs, self._jobs = self._jobs, {}
        for layer in jobs:
            self._unwrap(layer)

    def _turn_off(self, why: str, error: Exception | None = None) -> None:
        self._off = True
        self._drop()
        logger.warning(NOT_MEASURED, why, exc_info=error)

    # Measuring --------------------------------------------------------------

    def _try_measure(
        self, layer: _Layer, query: torch.Tensor, key: Any, cache: torch.Tensor, metadata: Any
    ) -> None:
        begin = self._clock.mark()
        try:
            jobs = self._jobs.pop(layer)
            self._unwrap(layer)
            for job in jobs:
                with _threads(layer, query, job):
                    self._measure(layer, job, query, key, cache, metadata)
            self._clock.probed(begin)
        except Exception as error:  # noqa: BLE001  # a probe's fault must not end the engine
            self._turn_off(f"measuring layer {layer.number} failed: {error}", error)

    def _measure(
        self,
        layer: _Layer,
        job: HeatJob,
        query: torch.Tensor,
        key: Any,
        cache: torch.Tensor,
        metadata: Any,
    ) -> None:
        found, row, blocks = _locate(job, cache, metadata)
        last = metadata.query_start_loc.index_select(0, row + 1) - 1
        if not layer.trusted and not self._check(layer, job, key, last, found, cache, blocks):
            return
        index = last - torch.arange(job.queries - 1, -1, -1, device=last.device)
        size = layer.module.head_size
        mass = _mass_of(
            layer, query.index_select(0, index).view(job.queries, -1, size), job, cache, blocks
        )
        self._send((job.number, layer.number, self._rank), mass, found)

    def _check(
        self,
        layer: _Layer,
        job: HeatJob,
        key: Any,
        last: torch.Tensor,
        found: torch.Tensor,
        cache: torch.Tensor,
        blocks: torch.Tensor,
    ) -> bool:
        """Whether the cache's last key is the one that this step has put there."""
        if not bool(found):
            return False
        size = layer.module.head_size
        ours = layer.keys(cache, blocks[-1:], size)[:, :, (job.tokens - 1) % cache.shape[2]]
        stored = key.index_select(0, last).view(-1, size)
        layer.trusted = torch.equal(ours, stored)
        if not layer.trusted:
            self._turn_off(
                f"the KV cache of {layer.module.attn_backend.get_name()} is not arranged as "
                "kvtiers knows it"
            )
        return layer.trusted

    def _send(self, key: tuple[int, int, int], mass: torch.Tensor, found: torch.Tensor) -> None:
        if mass.device.type == "cpu":
            self._measured.append(_Measured(key, mass, found, lambda: True))
            return
        here = mass.to("cpu", non_blocking=True)
        found_here = found.to("cpu", non_blocking=True)
        event = torch.Event(mass.device.type)
        event.record()
        self._measured.append(_Measured(key, here, found_here, event.query))


@contextmanager
def _threads(layer: _Layer, query: torch.Tensor, job: HeatJob) -> Iterator[None]:
    """On the CPU, one thread for what is not worth more.

    One, or all as before: a team of some would end the others, and with them what cores
    vLLM has bound them to. For that, vLLM makes the public function do nothing.
    """
    usual = torch.get_num_threads()
    heads = query[0].numel() // layer.module.head_size
    if query.device.type != "cpu" or heads * job.queries * job.tokens > _ALONE:
        yield
        return
    torch._C.set_num_threads(1)  # noqa: SLF001 - see above
    try:
        yield
    finally:
        torch._C.set_num_threads(usual)  # noqa: SLF001 - see above


def _keys_of(module: Any) -> Keys | str:
    """How to get at a layer's keys, or why there is no way."""
    backend: str = module.attn_backend.get_name()
    impl = module.impl
    if module.sliding_window is not None:
        return "layers with a sliding window see a part only"
    if getattr(impl, "alibi_slopes", None) is not None or getattr(impl, "sinks", None) is not None:
        return "its attention has ALiBi slopes or learned sinks"
    if module.kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        return f"the KV cache is quantised ({module.kv_cache_dtype})"
    if getattr(impl, "dcp_world_size", 1) > 1:
        return "decode context parallelism spreads the keys of a head over ranks"
    kernel = getattr(module, "isa", "")
    known = keys_of(backend, kernel)
    if known is None:
        return f"the arrangement of {backend}'s KV cache is not known" + f" ({kernel})" * bool(
            kernel
        )
    return known


def _number(name: str) -> int:
    """Which layer of the model: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


def _locate(
    job: HeatJob, cache: torch.Tensor, metadata: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the job's request is in the batch: whether it is, its row, its blocks.

    A backend's blocks may be parts of the KV-cache manager's.
    """
    tokens = cache.shape[2]
    parts = job.block_tokens // tokens
    at = (job.tokens - 1) // tokens
    expected = job.last_block * parts + at % parts
    table = metadata.block_table
    rows = min(len(table), len(metadata.seq_lens))
    same = (metadata.seq_lens[:rows] == job.tokens) & (table[:rows, at] == expected)
    row = same.int().argmax().view(1)
    blocks = table.index_select(0, row)[0, : at + 1]
    return same.any(), row, blocks


def _mass_of(
    layer: _Layer, query: torch.Tensor, job: HeatJob, cache: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """``[kv_heads, chunks]``, few heads at a time."""
    module, heads = layer.module, cache.shape[1]
    group = query.shape[1] // heads
    step = max(1, _MOST_KEYS // (len(blocks) * cache.shape[2] * module.head_size))
    parts = []
    for begin in range(0, heads, step):
        count = min(step, heads - begin)
        keys = layer.keys(cache.narrow(1, begin, count), blocks, module.head_size)
        parts.append(
            attention_mass(
                query.narrow(1, begin * group, count * group),
                keys,
                job.tokens - job.queries,
                module.impl.scale,
                job.chunk_tokens,
                _softcap(module.impl),
            )
        )
    return torch.cat(parts)


def _softcap(impl: Any) -> float:
    return float(getattr(impl, "logits_soft_cap", None) or 0.0)
