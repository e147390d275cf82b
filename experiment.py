"""From a config to the parts of a run: model, sharded parameters, optimizer, state and compiled steps.

Used by the programs (train.py, sharding/table.py); everything here is the same for one process or many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from compression.by_config import OPTIMIZERS, CompressionConfig, behind, make_hop_two, make_wires
from compression.local_sgd import LocalSGDConfig, LocalState, drift, local_sgd
from compression.statistics import statistics
from configs.door import Config, settings
from input_pipeline import DataConfig
from optimizers import OptimizerConfig, make_optimizer, make_schedule, watched
from sharding.mesh import find_nodes, make_mesh
from sharding.scopes import ShardingConfig, make_layout
from sharding.spec import has_tensor_dims, place_all
from sharding.state import state_shardings
from sharding.step import (
    Sharded,
    TrainState,
    auto_gather,
    build_eval_step,
    build_train_step,
    layer_gather,
    run_manual,
)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The `mesh` section of a config (meanings: configs/base.py)."""

    num_cpu_devices: int
    devices_per_node: int
    tensor: int

    def __post_init__(self) -> None:
        for key in ("num_cpu_devices", "devices_per_node"):
            if getattr(self, key) < 0:
                raise ValueError(f"mesh.{key}={getattr(self, key)} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The `batch` section of a config: rows of the global batch, and of one device in one micro-step."""

    global_size: int
    micro_size: int

    def __post_init__(self) -> None:
        if self.global_size < 1 or self.micro_size < 1:
            raise ValueError(f"batch sizes must be at least 1, not {self.global_size} and {self.micro_size}")

    def accumulation(self, num_devices: int) -> int:
        """Returns the micro-steps of a step on `num_devices` data devices. ValueError if micro-batches stay empty."""
        most = -(-self.global_size // num_devices)
        if self.micro_size > most:
            raise ValueError(
                f"batch.micro_size={self.micro_size} on {num_devices} devices is more than batch.global_size="
                f"{self.global_size} has; at most {most} fit"
            )
        return -(-self.global_size // (num_devices * self.micro_size))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of a run on the devices that are there."""

    config: Config
    model: models.Model
    sharded: Sharded
    tx: optax.GradientTransformation
    schedule: optax.Schedule
    max_skipped: int  # non-finite updates in a row that end a run
    batch: BatchConfig
    data: DataConfig
    accumulation: int

    @property
    def rows_per_micro_step(self) -> int:
        """Rows of one micro-step over all devices."""
        return self.batch.micro_size * self.sharded.layout.shape.num_data_devices

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batch arrays `[accum, rows, ...]`."""
        return NamedSharding(self.sharded.mesh, self.sharded.batch_spec)

    @cached_property
    def local_rows(self) -> list[int]:
        """Rows of the (padded) global batch that the devices of this process own, in their order."""
        shape = (self.accumulation, self.rows_per_micro_step)
        columns = {
            row
            for _, rows in self.batch_sharding.addressable_devices_indices_map(shape).values()  # pyright: ignore[reportGeneralTypeIssues]
            for row in range(*rows.indices(shape[1]))
        }
        return [a * shape[1] + row for a in range(shape[0]) for row in sorted(columns)]

    def to_devices(self, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts this process' rows (those of `local_rows`) where they belong: global arrays `[accum, rows, ...]`."""
        return {
            name: jax.make_array_from_process_local_data(
                self.batch_sharding, x.reshape(self.accumulation, -1, *x.shape[1:]), self.batch_shapes[name].shape
            )
            for name, x in rows.items()
        }

    @cached_property
    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch, sharded."""
        rows = (self.accumulation, self.rows_per_micro_step)
        return {
            name: jax.ShapeDtypeStruct(rows + array.shape, array.dtype, sharding=self.batch_sharding)
            for name, array in self.data.row_arrays.items()
        }

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shapes of the state, sharded."""
        shapes = jax.eval_shape(self._new_state, jax.random.key(0))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            state_shardings(self.sharded, shapes),
        )

    def init_state(self) -> TrainState:
        """Returns the state before the first step: a function of the seed alone."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
        return self.settled(jax.jit(self._new_state, out_shardings=shardings)(jax.random.key(self.config.seed)))

    @property
    def train_step(self) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
        """The function `step(state, batch) -> (state, metrics)`."""
        hands_on = "update" if self.config.compression.hop_two in OPTIMIZERS else "grad"
        return build_train_step(self.model.loss, self.sharded, self.tx, partial(watch, hands_on=hands_on), drift)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compiles, once, `step(state, batch) -> (state, metrics)` for the shapes above; the state is donated."""
        return self._train_step

    @cached_property
    def _train_step(self) -> jax.stages.Compiled:
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
        jitted = jax.jit(self.train_step, donate_argnums=0, out_shardings=(shardings, self._replicated))
        return jitted.lower(self.state_shapes, self.batch_shapes).compile()

    def compile_eval_step(self) -> jax.stages.Compiled:
        """Compiles `evaluate(params, batch) -> sums`: those of the model by name, and `weight`."""
        step = build_eval_step(self.model.evaluate, self.sharded)
        jitted = jax.jit(step, out_shardings=self._replicated)
        return jitted.lower(self.state_shapes.params, self.batch_shapes).compile()

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step may be dispatched while one still runs.

        Not on CPUs: several virtual devices share one thread pool, and with two programs in flight their collectives
        can take all its threads and wait for each other for ever (seen in jax 0.10.2).
        """
        return jax.default_backend() != "cpu"

    def settled(self, results: Any) -> Any:
        """Returns the results of a step, after waiting for them on every device where steps may not run ahead."""
        return results if self.runs_ahead else jax.block_until_ready(results)

    @property
    def can_sample(self) -> bool:
        """Whether the model generates text."""
        return isinstance(self.model, models.Decoder)

    def generate(self, params: Any, prompt: np.ndarray, *, length: int, temperature: float) -> np.ndarray:
        """Returns `prompt` `[P]` continued to `[P + length]` ids; every data device samples, we take the first's."""
        assert isinstance(self.model, models.Decoder)
        model, layout = self.model, self.sharded.layout
        rows = layout.shape.num_data_devices
        batch = {
            "prompt": jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (1, rows, len(prompt))),
            "row": jnp.arange(rows)[None],
        }

        def sample(params: Any, batch: dict[str, jax.Array], gather: models.Gather) -> jax.Array:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.config.seed), batch["row"][0])
            out = model.generate(params, batch["prompt"][0], keys, gather, length=length, temperature=temperature)
            return out[None]

        def run(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
            if layout.partitioner == "auto":
                return sample(params, batch, auto_gather(self.sharded))
            gather = layer_gather(self.sharded.as_stored)
            return run_manual(self.sharded, lambda p, b: sample(p, b, gather), self.sharded.batch_spec)(params, batch)

        return np.asarray(jax.jit(run, out_shardings=self._replicated)(params, batch).addressable_data(0))[0, 0]

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self.sharded.mesh, PartitionSpec())

    def _new_state(self, key: jax.Array) -> TrainState:
        params = self.model.init(key)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=self.tx.init(params))


def make_experiment(config: Config) -> Experiment:
    """Returns the parts of the run that `config` describes, on all devices. ValueError names what cannot be."""
    mesh_config = settings(MeshConfig, config.mesh, "mesh")
    sharding_config = settings(ShardingConfig, config.sharding, "sharding")
    batch = settings(BatchConfig, config.batch, "batch")
    data = settings(DataConfig, config.data, "data")
    model = models.build(_resolved(config.model))
    check_fit(model, data)
    nodes = find_nodes(jax.devices(), mesh_config.devices_per_node)
    layout = make_layout(
        sharding_config, num_nodes=len(nodes), devices_per_node=len(nodes[0]), tensor=mesh_config.tensor
    )
    if layout.gather in ("layer", "node") and layout.parameters and model.config.remat == "none":
        raise ValueError(
            f"sharding.gather={layout.gather} with model.remat=none would keep every gathered layer for the backward "
            "pass; use model.remat=full or dots, or sharding.gather=micro_step"
        )
    specs = model.param_specs()
    if mesh_config.tensor > 1 and not has_tensor_dims(specs):
        raise ValueError(f"mesh.tensor={mesh_config.tensor} cannot split a {model.config.kind}; set mesh.tensor=1")
    compression = settings(CompressionConfig, config.compression, "compression")
    gathers, scatters = make_wires(compression, layout)
    sharded = Sharded(
        mesh=make_mesh(layout.shape, nodes),
        layout=layout,
        placements=place_all(specs, layout),
        compute_dtype=jnp.dtype(model.config.compute_dtype),
        gathers=gathers,
        scatters=scatters,
    )
    optimizer = settings(OptimizerConfig, config.optimizer, "optimizer")
    return Experiment(
        config=config,
        model=model,
        sharded=sharded,
        tx=make_tx(config, sharded, specs, compression, optimizer),
        schedule=make_schedule(optimizer, config.num_steps),
        max_skipped=optimizer.max_skipped,
        batch=batch,
        data=data,
        accumulation=batch.accumulation(layout.shape.num_data_devices),
    )


def check_fit(model: models.Model, data: DataConfig) -> None:
    """Raises ValueError if the model cannot learn from examples such as the data's."""
    kind = model.config.kind
    wanted = {"decoder": "causal", "encoder": "masked", "resnet": "classify"}[kind]
    if data.objective != wanted:
        raise ValueError(f"data.objective={data.objective} does not fit model.kind={kind}; it must be {wanted}")
    if isinstance(model, models.Transformer) and data.seq_len > model.config.max_len:
        raise ValueError(f"data.seq_len={data.seq_len} is longer than model.max_len={model.config.max_len}")
    if isinstance(model, models.ResNet) and data.channels != model.config.channels:
        raise ValueError(f"data.channels={data.channels} differs from model.channels={model.config.channels}")


def make_tx(
    config: Config, sharded: Sharded, specs: Any, compression: CompressionConfig, optimizer: OptimizerConfig
) -> optax.GradientTransformation:
    """Returns hop two and the optimizer behind it, or around it with local SGD. ValueError for what does not fit."""
    hop_two = make_hop_two(compression, sharded, specs, optimizer)
    rest = behind(compression, optimizer)
    if rest is not optimizer and compression.warmup_steps >= config.num_steps:
        raise ValueError(
            f"compression.warmup_steps={compression.warmup_steps} is the whole run of num_steps={config.num_steps}: "
            f"{compression.hop_two} would never get past its warm-up; set it lower"
        )
    make = partial(make_optimizer, rest, config.num_steps, specs, local=on_each_device(sharded.mesh))
    local = settings(LocalSGDConfig, config.local_sgd, "local_sgd")
    if not local.inner_steps:
        return make(hop_two)
    local.check(sharded.layout, config.num_steps)
    if rest is not optimizer or compression.delayed or optimizer.name == "muon":
        raise ValueError(
            "local_sgd keeps an optimizer in each replica: it goes with no compression.hop_two that is one itself "
            f"({compression.hop_two}), nor with compression.delayed or optimizer.name=muon"
        )
    return local_sgd(hop_two, make(optax.identity()), local, sharded.layout.num_replicas)


def watch(opt_state: Any, *, hands_on: str = "grad") -> dict[str, jax.Array]:
    """Returns the scalars of the optimizer's state that a run reports; with local SGD the highest of all replicas.

    `hands_on`: what hop two hands on, and the guard takes the norm of, `grad` or `update`.
    """
    guard = opt_state.inner["local"] if isinstance(opt_state, LocalState) else opt_state
    return {name: jnp.max(x) for name, x in watched(guard, hands_on=hands_on).items()} | statistics(opt_state)


def on_each_device(mesh: Mesh) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the wrapper that runs a function on whole arrays, on each device of `mesh` by itself."""
    return lambda function: jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())


def _resolved(section: Config) -> dict[str, Any]:
    """Returns the model section with `attention=auto` decided: cuDNN's fused kernel on GPUs in half precision."""
    values = section.to_dict()
    if values.get("attention") == "auto":
        fused = jax.default_backend() == "gpu" and values.get("compute_dtype") == "bfloat16"
        values["attention"] = "cudnn" if fused else "xla"
    return values
