"""`Experiment`: the parts of a run that a config describes, and their compiled programs.

Used by train.py and planner/table.py; the code is the same for one process and for many.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models
from compression.chosen_codecs import make_codecs
from compression.methods import method_named
from configs.schema import Config, TransformerConfig
from configs.schema.combinations import Facts, complaint, refuse
from input_pipeline.noise import NOISE
from input_pipeline.tokenizers import with_vocab_size
from models.hugging_face import Weights
from models.peft import Adapters
from runtime.command_line import check_installed
from runtime.consensus import all_gather, new_key
from sharding.frozen import part_frozen, part_like
from sharding.gradients import accumulated
from sharding.mesh import Device, find_nodes, in_torus_order, make_mesh
from sharding.padding import padded
from sharding.pipeline import StagedLoss, evaluated, through_stages
from sharding.plan import ShardingPlan
from sharding.scopes import Layout, make_layout
from sharding.spec import EXPERTS_DIM, TENSOR_DIMS, has_dims, is_placement, place_all
from sharding.state import in_files, state_shardings
from sharding.step import Timing, TrainState, build_eval_step, build_train_step, first_state, in_turn
from sharding.trees import Batch, Means, Params, PyTree
from training.batches import BatchLayout, batches_of
from training.optimizer_chain import cut_of, make_chain
from training.optimizers import follows_schedule, make_schedule
from training.overlap import GpuMemory, OptionValue, memory_of_run, users_xla_flags, xla_options

BASE = "base_fingerprint"  # the name of the hash in checkpoints


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The parts of a run on the available devices."""

    config: Config
    model: models.Model
    plan: ShardingPlan
    chain: Timing  # the replica all-reduce and the optimizer
    schedule: optax.Schedule | None  # the learning rate by step; None: the optimizer has another one
    batches: BatchLayout  # rows of a step; with independent replicas rows of a share
    num_shares: int = 1  # shares of a step, with independent replicas

    @cached_property
    def state_shapes(self) -> TrainState:
        """Shapes and shardings of the state."""
        shapes = jax.eval_shape(self._state_of, self.model.shapes)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            state_shardings(self.plan, shapes, cut_of(self.config.optimizer.name)),
        )

    def init_state(self) -> TrainState:
        """Returns the state before the first step, which depends on the seed only, or on the seed and `model.weights`.

        ValueError for weights that do not fit the model.
        """
        shapes = self.state_shapes
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        weights, adapters = self.open_weights(), self.open_adapters()
        if not (weights or adapters):
            return self.block(jax.jit(self._new_state, out_shardings=shardings)(jax.random.key(self.config.seed)))
        frozen = self.frozen_params()
        source = adapters if frozen else weights
        params = source.load(shapes.params) if source else self._initial("params")
        if weights and frozen and not adapters:  # embeddings that are trained next to adapters
            whole = {name: x for name, x in shapes.params.items() if name != "layers"}
            params = Params({**params, **weights.load(Params(whole))})
        begin = jax.jit(partial(first_state, self.chain), out_shardings=shardings, donate_argnums=(0, 1))
        return self.block(begin(params, frozen))

    def frozen_params(self) -> Params:
        """Returns the frozen parameters, from `model.weights` or else from the seed; {} without any.

        A checkpoint does not hold them. ValueError for weights that do not fit the model.
        """
        shapes = self.state_shapes.frozen
        if not shapes:
            return Params({})
        weights = self.open_weights()
        return weights.load(shapes) if weights else self._initial("frozen")

    @cached_property
    def base_fingerprint(self) -> Mapping[str, str]:
        """The hash of `model.weights` by its name in checkpoints, if a frozen base is read from there at every start.

        Every process must ask for it. ValueError if theirs differ, or do not fit the model.
        """
        weights = self.same_weights() if self.plan.frozen else None
        return {BASE: weights.fingerprint()} if weights else {}

    def same_weights(self) -> Weights | None:
        """Returns `open_weights()`. ValueError if the processes' differ: an array's parts would be of several models.

        Every process must ask for it.
        """
        weights = self.open_weights()
        if weights and len({*all_gather(new_key("weights"), weights.fingerprint())}) > 1:
            raise ValueError(f"model.weights={weights.folder} differs between processes; give all the same files")
        return weights

    def _initial(self, part: str) -> Params:
        """Returns a part of the state as the seed gives it."""
        shardings = jax.tree.map(lambda x: x.sharding, getattr(self.state_shapes, part))
        new = jax.jit(lambda key: getattr(self._new_state(key), part), out_shardings=shardings)
        return self.block(new(jax.random.key(self.config.seed)))

    @property
    def has_weights(self) -> bool:
        """Whether the run starts from a checkpoint of transformers."""
        return isinstance(self.model.config, TransformerConfig) and bool(self.model.config.weights)

    def open_weights(self) -> Weights | None:
        """Returns the checkpoint of `model.weights`, headers only, if any. ValueError if it does not fit the model."""
        model = self.model.config
        if not isinstance(model, TransformerConfig) or not model.weights:
            return None
        return Weights(self.model, model.weights)

    def open_adapters(self) -> Adapters | None:
        """Returns the adapters of `model.lora_weights`, if any. ValueError if they do not fit the model."""
        model = self.model.config
        if not isinstance(model, TransformerConfig) or not model.lora_weights:
            return None
        return Adapters(self.model, model.lora_weights)

    @property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Means]]:
        """The function `step(state, batch) -> (state, metrics)`."""
        staged = self._staged
        micro_steps = partial(through_stages, staged) if staged else accumulated(self.model.objective)
        return build_train_step(micro_steps, self.plan, self.chain)

    def compile_train_step(self) -> jax.stages.Compiled:
        """Compiles `step(state, batch) -> (state, metrics)`, which donates the state."""
        return self.compiled(self.lower_train_step())

    def compiled(self, program: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program of training steps."""
        return program.compile(compiler_options={**self.train_options(self.memory_of_run)})

    def lower_train_step(self) -> jax.stages.Lowered:
        """Returns `step(state, batch) -> (state, metrics)` as XLA gets it."""
        shardings = jax.tree.map(lambda x: x.sharding, self.state_shapes)
        metrics = None if self.drifts_apart else self.replicated
        jitted = jax.jit(self.train_step, donate_argnums=0, out_shardings=(shardings, metrics))
        return jitted.lower(self.state_shapes, self.batches.shapes)

    @property
    def argument_bytes(self) -> int:
        """Bytes of the state and the batch on each device, the arguments of a step."""
        leaves = jax.tree.leaves((self.state_shapes, self.batches.shapes))
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)

    @property
    def memory_of_run(self) -> GpuMemory | None:
        """The memory of a GPU of this run, and of a step's arguments in it; None for other devices."""
        return memory_of_run(self.plan.mesh.local_devices[0], self.argument_bytes)

    def train_options(self, memory: GpuMemory | None) -> dict[str, OptionValue]:
        """The options that XLA gets for training steps, besides the user's XLA_FLAGS."""
        return self._options(pipelined=self.plan.overlap, memory=memory)

    def _options(self, *, pipelined: bool, memory: GpuMemory | None) -> dict[str, OptionValue]:
        """Returns the options of a program.

        `pipelined`: the program's loops over layers are pipelined as they are written.
        """
        return xla_options(
            self.plan.mesh.devices.flat[0].platform,
            wanted=self.config.sharding.overlap != "off",
            pipelined=pipelined,
            exact=self.config.sharding.replicas == "independent",
            memory=memory,
            xla_flags=users_xla_flags(),
        )

    def compile_eval_step(self) -> jax.stages.Compiled:
        """Compiles `evaluate(params, batch) -> sums`: the model's sums by name, and `weight`."""
        staged = self._staged
        step = build_eval_step(evaluated(staged) if staged else in_turn(self.model.evaluate), self.plan)
        jitted = jax.jit(step, out_shardings=self.replicated)
        shapes = {name: x for name, x in self.batches.shapes.items() if name != NOISE}  # a validation has no dropout
        lowered = jitted.lower(self.state_shapes.all_params, shapes)
        return lowered.compile(compiler_options={**self._options(pipelined=False, memory=None)})

    def learning_rates(self) -> np.ndarray | None:
        """Returns the learning rate of each step, [num_steps]; None if the optimizer has its own."""
        return self.schedule and np.asarray(jax.jit(jax.vmap(self.schedule))(np.arange(self.config.num_steps)))

    @property
    def _staged(self) -> StagedLoss | None:
        """The loss in pieces for the stages of a pipeline; None without a pipeline."""
        return self.model.staged_loss() if self.config.mesh.stages > 1 else None

    @property
    def drifts_apart(self) -> bool:
        """Whether a step has separate metrics for each replica, `[R]`."""
        return self.config.local_sgd.inner_steps > 0 and self.config.sharding.replicas != "independent"

    @property
    def dispatches_asynchronously(self) -> bool:
        """Whether the next step may be dispatched while one still runs.

        Not on CPUs: virtual devices share one thread pool, and the collectives of two programs in flight can occupy all
        its threads and deadlock (seen in jax 0.10.2).
        """
        return jax.default_backend() != "cpu"

    def block(self, results: PyTree) -> PyTree:
        """Returns the results of a step; waits for them first, unless steps may be dispatched ahead."""
        return results if self.dispatches_asynchronously else jax.block_until_ready(results)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of fully replicated values."""
        return NamedSharding(self.plan.mesh, PartitionSpec())

    def _new_state(self, key: jax.Array) -> TrainState:
        return self._state_of(self.model.init(key))

    def _state_of(self, params: models.Params) -> TrainState:
        plan = self.plan
        stored = jax.tree.map(padded, plan.all_placements, params, is_leaf=is_placement)
        return first_state(self.chain, *part_like(stored, plan.placements))

    def in_files(self, state: TrainState) -> TrainState:
        """Returns the part of a state that checkpoints and snapshots hold, in the form in which they take it."""
        return in_files(self.plan, state.checkpoint_state)


def make_experiment(config: Config, devices: Sequence[Device] = (), like: Sequence[Experiment] = ()) -> Experiment:
    """Returns the parts of a run on all devices or those given, for programs other than train.py.

    The model is taken from the first experiment in `like` with an equal one, which is traced already. ValueError for
    unsupported settings.
    """
    config = with_vocab_size(config)
    section = models.with_attention(config)
    model = next((ex.model for ex in like if ex.model.config == section), None) or models.build(section)
    mesh, layout = lay_out(config, devices or jax.devices())
    plan = make_plan(config, model, mesh, layout)
    return assemble(config, model, plan, make_chain(config, plan, model.trained_specs()))


def lay_out(config: Config, devices: Sequence[Device]) -> tuple[Mesh, Layout]:
    """Returns the mesh of `devices`, and the scopes of the config's strategy on it.

    ValueError for a strategy that these devices cannot have; WorldTooSmallError if more nodes would do.
    """
    nodes = find_nodes(devices, config.mesh.devices_per_node)
    layout = make_layout(
        config.sharding,
        config.ablation,
        num_nodes=len(nodes),
        devices_per_node=len(nodes[0]),
        context=config.mesh.context,
        tensor=config.mesh.tensor,
        stages=config.mesh.stages,
    )
    return make_mesh(layout.shape, in_torus_order(nodes, layout.shape)), layout


def make_plan(config: Config, model: models.Model, mesh: Mesh, layout: Layout) -> ShardingPlan:
    """Returns how the model's parameters lie on the mesh. ValueError for settings that do not go together there."""
    _check_supported(config, model, layout)
    specs, frozen = part_frozen(model.param_specs())
    gather_codecs, reduce_scatter_codecs, expert_codecs, difference_codecs = make_codecs(config.compression)
    return ShardingPlan(
        mesh=mesh,
        layout=layout,
        placements=place_all(specs, layout),
        frozen=place_all(frozen, layout),
        compute_dtype=jnp.dtype(model.config.compute_dtype),
        reduce_dtype=jnp.float32 if config.sharding.reduce_dtype == "float32" else None,
        gather_codecs=gather_codecs,
        reduce_scatter_codecs=reduce_scatter_codecs,
        expert_codecs=expert_codecs,
        difference_codecs=difference_codecs,
        overlap=_overlaps(config),
    )


def assemble(config: Config, model: models.Model, plan: ShardingPlan, chain: Timing) -> Experiment:
    """Returns the experiment of these parts. ValueError if its batch cannot be divided among the devices."""
    batches, num_shares = batches_of(config, plan)
    follows = follows_schedule(config.optimizer, model.trained_specs())
    return Experiment(
        config=config,
        model=model,
        plan=plan,
        chain=chain,
        schedule=make_schedule(config.optimizer, config.num_steps) if follows else None,
        batches=batches,
        num_shares=num_shares,
    )


def _check_supported(config: Config, model: models.Model, layout: Layout) -> None:
    """Raises ValueError for settings that do not go together with the model on these devices, or lack a package."""
    if config.sink == "wandb":
        check_installed("wandb", "sink=wandb")
    is_independent = config.sharding.replicas == "independent"
    method = method_named("none" if is_independent else config.compression.all_reduce)
    specs = model.param_specs()
    facts = Facts(
        **layout.facts,
        takes_over=method.takes_over,
        goes_by_group=method.primitive is not None,
        model_splits=has_dims(specs, TENSOR_DIMS),
        model_has_experts=has_dims(specs, [EXPERTS_DIM]),
        model_has_pieces=model.staged_loss() is not None,
    )
    refuse(config.values | asdict(facts))


def _overlaps(config: Config) -> bool:
    """Whether the step's loops over layers are pipelined: with `auto` wherever they can be."""
    if config.sharding.overlap != "auto":
        return config.sharding.overlap == "on"
    return not complaint(config.values | {"sharding.overlap": "on"})
