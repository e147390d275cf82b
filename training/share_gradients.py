"""A share of a step of independent replicas as gradients, and the update by the sums of all shares.

The gradients leave the compiled share layer by layer, while its last backward pass goes on. Those of parameters with
one dim per layer travel unencoded, with the means: they must not share a scale with those of matrices.
"""

import queue
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from elastic.replicas.payloads import Float32, Payload, make_payload, pieces
from sharding.gradients import accumulated
from sharding.shares import FlatGradients, HandOut, build_share, build_update, gradient_shapes
from sharding.step import TrainState
from sharding.trees import Batch, GradsR
from training.experiment import Experiment
from training.replica_state import by_waiting, waiting_in, with_waiting

Put = Callable[[int, np.ndarray], object]  # takes a piece, f32 [N], of the share that is being computed


class Handed(NamedTuple):
    """What a share's backward pass has handed out of one layer, on one device."""

    share: "Share"
    name: str
    device: Any
    layer: Any
    leaves: Any


class Share:
    """A share that is being computed: its gradients, as they come."""

    def __init__(self, put: Put, size: int, pieces: int, handings: int) -> None:
        """`handings` are the layers, of each device, that are handed out."""
        self.put, self.left, self.is_whole = put, handings, threading.Event()
        self.flat = np.empty(size, np.float32)
        self.filled = [0] * pieces


class Gradients:
    """The compiled programs of a share and of the update. Close it when the run ends."""

    steps = 1  # of training in a step of the replicas

    def __init__(self, ex: Experiment) -> None:
        """Nothing is compiled yet."""
        self._ex, self._delays = ex, ex.config.compression.delayed
        self._handed: queue.SimpleQueue[Handed | None] = queue.SimpleQueue()
        self._out = HandOut(hand=self._hand)
        self._taking: threading.Thread | None = None
        self.current: Share | None = None
        self.error: BaseException | None = None

    def compile(self) -> jax.stages.Compiled:
        """Returns the compiled share; compiles the update too, so that nobody waits for that once it has entered."""
        _ = self.apply
        if self._delays:
            _ = self.first_of_each
        return self.share

    @cached_property
    def share(self) -> jax.stages.Compiled:
        """The compiled `share(params, batch) -> means`."""
        ex = self._ex
        program = build_share(accumulated(ex.model.objective), ex.plan, self._out)
        return ex.compiled(jax.jit(program).lower(ex.state_shapes.all_params, ex.batches.shapes))

    @cached_property
    def apply(self) -> jax.stages.Compiled:
        """The compiled `update(state, grads_R, means) -> (state, metrics)`, which donates the state.

        With `compression.delayed` the state given has nothing in the place of the gradients that wait, and the one
        returned the parameters given, `[1, ...]`; it donates the gradients too.
        """
        ex, shapes = self._ex, self._ex.state_shapes
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        program, donated = build_update(ex.plan, ex.chain), (0,)
        if self._delays:
            program, donated, shapes = by_waiting(program), (0, 1), with_waiting(shapes, None)
        jitted = jax.jit(program, donate_argnums=donated, out_shardings=(shardings, ex.replicated))
        means = dict.fromkeys(self.means, jax.ShapeDtypeStruct((), np.float32, sharding=ex.replicated))
        return ex.compiled(jitted.lower(shapes, gradient_shapes(ex.plan, shapes.params), means))

    @cached_property
    def first_of_each(self) -> jax.stages.Compiled:
        """The compiled function from parameters `[1, ...]`, where gradients lie, to parameters `[...]`."""
        shapes = self._ex.state_shapes
        jitted = jax.jit(
            lambda tree: jax.tree.map(lambda x: x[0], tree),
            out_shardings=jax.tree.map(lambda x: x.sharding, shapes.params),
        )
        return jitted.lower(waiting_in(shapes)).compile()

    @cached_property
    def means(self) -> list[str]:
        """The names of the means, in the order of the last piece."""
        program = build_share(accumulated(self._ex.model.objective), self._ex.plan, self._out)
        return sorted(jax.eval_shape(program, self._ex.state_shapes.all_params, self._ex.batches.shapes))

    @cached_property
    def flat(self) -> FlatGradients:
        """The order of the gradients."""
        _ = self.means  # traces the share, which notes it
        return FlatGradients.make(self._ex.plan, self._ex.state_shapes.params, self._out.order)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """Where the pieces of the coded gradients begin and end."""
        return pieces(self.flat.num_coded, self._ex.config.compression.block)

    @property
    def forms(self) -> list[tuple[int, Payload]]:
        """Of each piece its values, and how they travel; the last has the other gradients, and the means."""
        compression = self._ex.config.compression
        payload, last = make_payload(compression.all_reduce, compression.block), self.flat.size - self.flat.num_coded
        return [*((stop - start, payload) for start, stop in self.bounds), (last + len(self.means), Float32())]

    def begin(self, fail: Callable[[], object]) -> None:
        """Begins to take what shares hand out; `fail` is called where that fails."""
        self._taking = threading.Thread(target=self._take, args=(fail,), name="gradients", daemon=True)
        self._taking.start()

    def close(self) -> None:
        """Ends that, and waits for it: Python, ending, would abort in a thread that drops arrays just then."""
        self._handed.put(None)
        if self._taking:
            self._taking.join()

    def compute(self, state: TrainState, read: Callable[[int], Batch], put: Put) -> None:
        """Computes a share, and puts its pieces; `read(0)` returns its rows on the devices."""
        batch = read(0)
        share = self.current = Share(put, self.flat.size, len(self.bounds), len(self.flat.slots))
        means = jax.device_get(self.share(state.all_params, batch))
        share.is_whole.wait()  # the means of one device may be here while another one still hands out
        if self.error:
            raise self.error
        last = [share.flat[self.flat.num_coded :], [means[name] for name in self.means]]
        put(len(self.bounds), np.concatenate(last, dtype=np.float32))

    def sums(self, total: np.ndarray) -> tuple[np.ndarray, dict[str, np.float32]]:
        """Returns the sums over all shares of the gradients, `f32 [N]`, and of the means, from those of all pieces."""
        flat, means = np.split(total, [self.flat.size])
        return flat, dict(zip(self.means, means, strict=True))

    def update(self, state: TrainState, total: np.ndarray) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state after a step, and its metrics, from the sums of all pieces over all shares."""
        flat, means = self.sums(total)
        return self.apply(state, self.arrays(flat), means)

    def arrays(self, flat: np.ndarray) -> GradsR:
        """Returns the gradients `[1, ...]` that a vector `f32 [N]` holds."""
        return self.flat.arrays(flat, self._ex.state_shapes.params)

    def _hand(self, name: str, device: Any, layer: Any, leaves: Any) -> None:
        """Is called in the middle of the program, in a thread that computes: reading the arrays here may deadlock."""
        assert self.current
        self._handed.put(Handed(self.current, name, device, layer, leaves))

    def _take(self, fail: Callable[[], object]) -> None:
        """Puts what is handed out into the sums, piece by piece."""
        try:
            while (handed := self._handed.get()) is not None:
                share = handed.share
                device, layer = int(handed.device), int(handed.layer)
                start, stop = self.flat.put(share.flat, handed.name, device, layer, handed.leaves)
                for piece, (first, end) in enumerate(self.bounds):
                    common = min(stop, end) - max(start, first)
                    if common > 0:
                        share.filled[piece] += common
                        if share.filled[piece] == end - first:
                            share.put(piece, share.flat[first:end])
                share.left -= 1
                if not share.left:
                    share.is_whole.set()
        except BaseException as error:
            self.error = error
            fail()
            if self.current:
                self.current.is_whole.set()
