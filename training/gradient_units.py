"""Work units of single steps: gradients of a part of a step's rows, and the update by the sums over all units.

The gradients leave the compiled program layer by layer, during its last backward pass. Gradients of parameters with one
dim per layer are sent unencoded, with the means: they must not share a scale with gradients of matrices.
"""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from elastic.replicas.payloads import LOSSLESS, Payload, pieces
from elastic.replicas.sums import Piece
from sharding.gradients import accumulated
from sharding.shares import FlatGradients, GradientCallback, build_share, build_update, gradient_shapes
from sharding.step import TrainState
from sharding.trees import Batch, GradsR
from training.experiment import Experiment
from training.replica_state import keeping_parameters, pending, with_pending


class LayerGradients(NamedTuple):
    """Gradients of one layer, on one device, that the program has handed out."""

    name: str
    device: jax.Array
    layer: jax.Array
    leaves: Sequence[jax.Array]


class GradientUnits:
    """The compiled programs of a unit and of the update. `RoundUnits` has the same public methods."""

    steps = 1  # of training in a step of the replicas

    def __init__(self, ex: Experiment) -> None:
        """Nothing is compiled yet."""
        self._ex, self._delays = ex, ex.config.compression.delayed
        self._handed_out: queue.SimpleQueue[LayerGradients | None] = queue.SimpleQueue()  # by the unit being computed
        self._out = GradientCallback(hand=self._hand)

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled unit; compiles the update too, because peers would wait for that later."""
        _ = self.apply
        if self._delays:
            _ = self.first_of_each
        return self.unit

    @cached_property
    def unit(self) -> jax.stages.Compiled:
        """The compiled `unit(params, batch) -> means`, which hands out gradients."""
        ex = self._ex
        program = build_share(accumulated(ex.model.objective), ex.plan, self._out)
        return ex.compiled(jax.jit(program).lower(ex.state_shapes.all_params, ex.batches.shapes))

    @cached_property
    def apply(self) -> jax.stages.Compiled:
        """The compiled `update(state, grads_R, means) -> (state, metrics)`, which donates the state.

        With `compression.delayed` the given state has nothing in the place of the pending gradients, and the result has
        the given parameters there, `[1, ...]`; the gradients are donated too.
        """
        ex, shapes = self._ex, self._ex.state_shapes
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        program, donated = build_update(ex.plan, ex.chain), (0,)
        if self._delays:
            program, donated, shapes = keeping_parameters(program), (0, 1), with_pending(shapes, None)
        jitted = jax.jit(program, donate_argnums=donated, out_shardings=(shardings, ex.replicated))
        means = dict.fromkeys(self.means, jax.ShapeDtypeStruct((), np.float32, sharding=ex.replicated))
        return ex.compiled(jitted.lower(shapes, gradient_shapes(ex.plan, shapes.params), means))

    @cached_property
    def first_of_each(self) -> jax.stages.Compiled:
        """The compiled function from parameters `[1, ...]`, in the place of gradients, to parameters `[...]`."""
        shapes = self._ex.state_shapes
        jitted = jax.jit(
            lambda tree: jax.tree.map(lambda x: x[0], tree),
            out_shardings=jax.tree.map(lambda x: x.sharding, shapes.params),
        )
        return jitted.lower(pending(shapes)).compile()

    @cached_property
    def means(self) -> list[str]:
        """The names of the means, in the order of the last piece."""
        program = build_share(accumulated(self._ex.model.objective), self._ex.plan, self._out)
        return sorted(jax.eval_shape(program, self._ex.state_shapes.all_params, self._ex.batches.shapes))

    @cached_property
    def flat(self) -> FlatGradients:
        """The order of the gradients."""
        _ = self.means  # traces the unit, which notes the order
        return FlatGradients.make(self._ex.plan, self._ex.state_shapes.params, self._out.order)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """The beginning and end of each piece of encoded gradients."""
        return pieces(self.flat.num_coded, self._ex.config.compression.block)

    @property
    def unit_layout(self) -> list[Piece]:
        """The pieces of a unit; the last one has the unencoded gradients, and the means."""
        compression = self._ex.config.compression
        payload = Payload(codec=compression.all_reduce, block=compression.block)
        unencoded = self.flat.size - self.flat.num_coded + len(self.means)
        return [*(Piece(stop - start, payload) for start, stop in self.bounds), Piece(unencoded, LOSSLESS)]

    def pieces(self, state: TrainState, batches: Iterator[Batch]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number and values of each piece of a unit, as soon as the backward pass has completed it."""
        program, batch, flat = self.unit, next(batches), np.empty(self.flat.size, np.float32)
        missing = [stop - start for start, stop in self.bounds]
        self._handed_out = queue.SimpleQueue()
        with ThreadPoolExecutor(1, thread_name_prefix="unit") as thread:  # it waits for the program
            running = thread.submit(lambda: jax.device_get(program(state.all_params, batch)))
            running.add_done_callback(lambda ended: self._handed_out.put(None) if ended.exception() else None)
            for _ in self.flat.slots:  # the means of one device may be here before another has handed out all
                if (layer := self._handed_out.get()) is None:
                    break
                start, stop = self.flat.put(flat, layer.name, int(layer.device), int(layer.layer), layer.leaves)
                for piece, (first, end) in enumerate(self.bounds):
                    if (common := min(stop, end) - max(start, first)) > 0:
                        missing[piece] -= common
                        if not missing[piece]:
                            yield piece, flat[first:end]
            means = running.result()
        unencoded = [flat[self.flat.num_coded :], [means[name] for name in self.means]]
        yield len(self.bounds), np.concatenate(unencoded, dtype=np.float32)

    def sums(self, total: np.ndarray) -> tuple[np.ndarray, dict[str, np.float32]]:
        """Returns the sums of the gradients, `f32 [N]`, and of the means, from the totals of all pieces."""
        flat, means = np.split(total, [self.flat.size])
        return flat, dict(zip(self.means, means, strict=True))

    def update(self, state: TrainState, total: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a step, and its metrics, from the totals of all pieces."""
        flat, means = self.sums(total)
        return self.apply(state, self.arrays(flat), means)

    def arrays(self, flat: np.ndarray) -> GradsR:
        """Returns the gradients `[1, ...]` that a vector `f32 [N]` holds."""
        return self.flat.arrays(flat, self._ex.state_shapes.params)

    def _hand(self, name: str, device: jax.Array, layer: jax.Array, leaves: Sequence[jax.Array]) -> None:
        """Takes gradients from the running program, in one of its threads: reading the arrays here may deadlock."""
        self._handed_out.put(LayerGradients(name, device, layer, leaves))
