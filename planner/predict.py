"""Predicts a step of a candidate on a cluster: memory, bytes by network level, times by part, throughput and cost.

The program is compiled for the cluster's devices and its schedule replayed. With local SGD, traffic of one step in H
counts as an H-th in each step.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

from configs.schema import Config, DecoderConfig, ImageConfig, TransformerConfig
from configs.schema.own import OWN
from planner import compile as compiling
from planner import targets
from planner.bounds import HLO_DTYPES, flops_per_row, forward_share
from planner.candidates import Candidate
from planner.clusters import ALL, Cluster, DeviceSpec
from planner.links import Network
from planner.replay import Timeline, replay
from runtime.files.json_objects import JsonMapping
from sharding.hlo import Collective, behind_warm_up, program_collectives
from sharding.hlo_program import Program, parse_program
from training.batches import fitted
from training.experiment import Experiment
from training.intervals import Interval
from training.memory import Memory, memory_of

TOKENS = 1e9  # cost is given per this number


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """One kind of collective on its slower level, in a step."""

    name: str
    level: str
    busy_s: float
    exposed_s: float  # the rest is hidden by the compute


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of one candidate."""

    candidate: Candidate
    nodes: int
    accumulation: int
    inner_steps: int
    memory: Memory
    inter_bytes: float  # bytes that a device sends per step
    intra_bytes: float
    compute_s: float
    traffic: tuple[StepTraffic, ...]
    step_s: float
    rows_per_s: float
    tokens_per_s: float | None
    flops_per_device: float  # model FLOP/s, without recomputation
    mfu: float
    usd_on_demand: float | None  # per billion tokens
    usd_spot: float | None

    @property
    def exposed_s(self) -> float:
        """The part of the step in which kernels wait for the network."""
        return sum(part.exposed_s for part in self.traffic)

    @classmethod
    def from_dict(cls, values: JsonMapping) -> "Prediction":
        """Returns the prediction of a JSON form."""
        parts = {
            "candidate": Candidate(**values["candidate"]),
            "memory": Memory(**values["memory"]),
            "traffic": tuple(StepTraffic(**part) for part in values["traffic"]),
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The planned cluster, and how its programs are compiled."""

    cluster: Cluster
    nodes: int
    config_words: tuple[str, ...]  # --config=FILE and the overrides of the command line
    target: str  # a100, h100 or cpu
    xla_flags: str = ""
    is_quick: bool = False  # whether programs are compiled without fused norms (planner.compile.QUICK)

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.cluster.devices_per_node

    @property
    def capacity(self) -> float:
        """Memory for a program on each device."""
        return self.cluster.usable_bytes(self.num_devices)

    @property
    def device_bytes(self) -> float:
        """All memory of each device. A larger program certainly does not fit."""
        return self.capacity / self.cluster.device.usable_share

    def fitted(self, config: Config) -> Config:
        """Returns the config with the micro-batch of each device, which names candidates."""
        data_devices = max(1, self.num_devices // (config.mesh.tensor * config.mesh.context))
        return replace(config, batch=fitted(config.batch, data_devices, config.rows_together))

    def request(self, candidate: Candidate, config: Config) -> dict[str, Any]:
        """Returns the arguments of `compile_step`."""
        keys = candidate.overrides() | {
            "mesh.num_cpu_devices": 0,
            "mesh.devices_per_node": self.cluster.devices_per_node,
        }
        if isinstance(config.model, TransformerConfig):
            keys["model.attention"] = self.attention(config)
        return {
            "config": (*self.config_words, *(f"--config.{key}={value}" for key, value in keys.items())),
            "nodes": self.nodes,
            "devices_per_node": self.cluster.devices_per_node,
            "xla_flags": f"{compiling.QUICK} {self.xla_flags}".strip() if self.is_quick else self.xla_flags,
            "target": self.target,
            "memory_bytes": self.cluster.device.memory_bytes
            if self.cluster.is_gpu and self.target != targets.CPU
            else 0,
        }

    def attention(self, config: Config) -> str:
        """Returns the attention that a program is compiled with: models/flash.py replaces cuDNN's; on TPUs splash.

        cuDNN's attention needs a GPU to compile. Neither holds scores in memory, and both are priced by their
        operations.
        ValueError for a kernel that the GPU does not run.
        """
        gpu, model = self.cluster.device, config.model
        assert isinstance(model, TransformerConfig)
        if self.target in targets.TPUS and model.attention == "auto" and config.ablation.partitioner != "auto":
            return "splash" if model.takes_splash(config.data.seq_len, config.mesh.tensor) else "xla"
        if model.attention == "pallas" and self.cluster.is_gpu and not gpu.attention:
            raise ValueError(f"model.attention=pallas: no rate of it on {gpu.name} is known; set model.attention=xla")
        is_fused = model.attention == "cudnn" or (model.attention == "auto" and model.compute_dtype == "bfloat16")
        if not (self.cluster.is_gpu and (is_fused or model.attention == "pallas")):
            return model.attention
        is_cut = config.ablation.partitioner == "auto"  # by XLA, which cannot cut this kernel
        can_stand_in = not is_cut and model.takes_flash(config.data.seq_len, config.mesh.tensor)
        return "pallas" if gpu.attention and self.target != targets.CPU and can_stand_in else "xla"

    def device(self, config: Config) -> DeviceSpec:
        """Returns the device of a replay. A GPU's step that was compiled for CPUs computes in f32.

        For models/flash.py its measured rate is used, if any. Otherwise it computes seven products in the backward pass
        where a library computes five. Kernels count all pairs of a causal mask, and windows reduce them to a fraction.
        """
        foreign = self.target == targets.CPU and self.cluster.is_gpu
        device = self.cluster.compute(self.num_devices, HLO_DTYPES[config.model.compute_dtype] if foreign else "")
        if not (isinstance(config.model, TransformerConfig) and device.attention):
            return device
        rates = device.attention
        if config.model.attention == "pallas":
            rates = self.cluster.device.flash or {**rates, "backward": 5 / 7 * rates["backward"]}
        seen = _share_seen(config.model, config.data.seq_len)
        return replace(device, attention={part: rate / seen for part, rate in rates.items()})


@dataclass(frozen=True, kw_only=True)
class ReplayableStep:
    """A compiled step of a candidate that can be replayed on any device and network."""

    candidate: Candidate
    experiment: Experiment
    machine: Machine
    compiled: compiling.CompiledStep

    @cached_property
    def program(self) -> Program:
        """The compiled program, read once, as after the warm-up of the replica all-reduce."""
        return behind_warm_up(parse_program(self.compiled.text))

    @cached_property
    def collectives(self) -> list[Collective]:
        """Its collectives."""
        return program_collectives(self.program, self.compiled.shape)

    def timeline(self, device: DeviceSpec | None = None, network: Network | None = None) -> Timeline:
        """Returns the replay, by default on the cluster's device and network."""
        device = device or self.machine.device(self.experiment.config)
        network = (network or self.machine.cluster.network()).placed(self.compiled.places)
        hides = self.machine.cluster.hides
        found = replay(self.program, self.compiled.shape, device, network, hides)
        return self._with_early_all_reduce(found) if hides == ALL else found

    def _with_early_all_reduce(self, timeline: Timeline) -> Timeline:
        """Returns the timeline of a system that averages a layer's gradients over replicas during the backward pass.

        The compiled program may average all layers after it. The last backward pass hides as much as it lasts, except
        the average of the last layer (PyTorch's FSDP with hybrid sharding).
        """
        use = timeline.use("replica_all_reduce")
        backward_s = (1 - forward_share(self.experiment)) * timeline.compute_s / self.experiment.batches.accumulation
        layers = getattr(self.experiment.model.config, "num_layers", 1)
        exposed_s = min(use.exposed_s, max(use.busy_s / layers, use.busy_s - backward_s))
        share = exposed_s / use.exposed_s if use.exposed_s else 1.0
        uses = {
            key: replace(one, exposed_s=share * one.exposed_s) if key[0] == "replica_all_reduce" else one
            for key, one in timeline.uses.items()
        }
        return replace(timeline, step_s=timeline.step_s - use.exposed_s + exposed_s, uses=uses)

    def seconds(self, timeline: Timeline) -> float:
        """Returns the seconds of a step, or their mean if replicas do not sync in every step."""
        return timeline.step_s - timeline.use("replica_all_reduce").exposed_s * (
            1 - 1 / max(1, self.interval(timeline))
        )

    def interval(self, timeline: Timeline) -> int:
        """Returns the steps between syncs, or 0 if every step syncs or streaming local SGD sends a part in every step.

        With a registered `local_sgd.interval` it is the interval that a run would choose.
        """
        local, meeting_s = self.experiment.config.local_sgd, timeline.use("replica_all_reduce").exposed_s
        interval: Interval | None = OWN["interval"].get(local.interval)
        if interval:
            return interval.planned(local, timeline.step_s - meeting_s, meeting_s)
        return 0 if local.streaming else local.inner_steps

    def memory(self) -> Memory:
        """Returns the memory of a device, by part."""
        compiled = self.compiled
        return memory_of(self.experiment, compiled.argument_bytes, compiled.temporary_bytes, self.machine.capacity)

    def prediction(self) -> Prediction:
        """Returns the prediction of the step."""
        config, timeline, machine = self.experiment.config, self.timeline(), self.machine
        interval = self.interval(timeline)
        shares = {"replica_all_reduce": 1 / max(1, interval)}  # fraction of the program's traffic per step
        collectives = [(c, c.times * shares.get(c.label, 1.0)) for c in self.collectives]
        step_s = self.seconds(timeline)
        rows_per_s = config.batch.global_size / step_s
        tokens_per_s = None if isinstance(config.model, ImageConfig) else rows_per_s * config.data.seq_len
        flops = flops_per_row(self.experiment) * rows_per_s

        def usd(price: float | None) -> float | None:
            if price is None or tokens_per_s is None:
                return None
            return price * machine.nodes * TOKENS / tokens_per_s / 3600

        return Prediction(
            candidate=self.candidate,
            nodes=machine.nodes,
            accumulation=self.experiment.batches.accumulation,
            inner_steps=interval,
            memory=self.memory(),
            inter_bytes=sum(c.inter_bytes * times for c, times in collectives),
            intra_bytes=sum(c.intra_bytes * times for c, times in collectives),
            compute_s=timeline.compute_s,
            traffic=tuple(
                StepTraffic(
                    name=name,
                    level=level,
                    busy_s=use.busy_s * shares.get(name, 1.0),
                    exposed_s=use.exposed_s * shares.get(name, 1.0),
                )
                for (name, level), use in timeline.uses.items()
            ),
            step_s=step_s,
            rows_per_s=rows_per_s,
            tokens_per_s=tokens_per_s,
            flops_per_device=flops / machine.num_devices,
            mfu=flops / machine.cluster.peak(HLO_DTYPES[config.model.compute_dtype], machine.num_devices),
            usd_on_demand=usd(machine.cluster.on_demand),
            usd_spot=usd(machine.cluster.spot),
        )


def _share_seen(model: TransformerConfig, length: int) -> float:
    """Returns the fraction of a causal mask's pairs inside windows, in sequences of `length`, averaged over layers."""
    if not isinstance(model, DecoderConfig) or not 0 < model.window < length:
        return 1.0
    window = model.window / length
    whole = model.num_layers // model.global_every / model.num_layers if model.global_every else 0.0
    return whole + (1 - whole) * window * (2 - window)


def compiled_step(candidate: Candidate, experiment: Experiment, machine: Machine) -> ReplayableStep:
    """Compiles the step of a candidate, or reads it from the cache.

    A quick program that does not fit although XLA rematerialises is compiled again with all kernels.
    """
    compiled = compiling.compile_step(**machine.request(candidate, experiment.config))
    step = ReplayableStep(candidate=candidate, experiment=experiment, machine=machine, compiled=compiled)
    if machine.is_quick and not step.memory().fits:
        return compiled_step(candidate, experiment, replace(machine, is_quick=False))
    return step


def what_helps(step: ReplayableStep) -> dict[str, float]:
    """Returns the seconds of the step with better hardware, one change at a time, the most helpful first."""
    network, device = step.machine.cluster.network(), step.machine.device(step.experiment.config)
    changes: dict[str, Any] = {}  # arguments of `Step.timeline`
    if step.machine.nodes > 1:
        for name, factor in {"a node link twice as fast": 2.0, "a node link without limit": inf}.items():
            changes[name] = {"network": replace(network, node_bandwidth=factor * network.node_bandwidth)}
    if step.machine.cluster.devices_per_node > 1:
        faster = replace(network, intra_bandwidth=2 * network.intra_bandwidth)
        changes["links inside the nodes twice as fast"] = {"network": faster}
    if step.machine.num_devices > 1:
        changes["links without latency"] = {"network": replace(network, intra_latency_s=0.0, inter_latency_s=0.0)}
    peak = {dtype: 2 * flops for dtype, flops in device.peak_flops.items()}
    faster = replace(device, peak_flops=peak, memory_bandwidth=2 * device.memory_bandwidth)
    changes["devices twice as fast"] = {"device": faster}
    seconds = {name: step.seconds(step.timeline(**change)) for name, change in changes.items()}
    return dict(sorted(seconds.items(), key=lambda item: item[1]))
