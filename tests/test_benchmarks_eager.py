"""Eager updates, which the laboratory compares with local SGD's timings, against the paper's rule in numpy."""

import numpy as np
import optax
from support import workload
from support.local_replicas import LEARNING_RATE, inner
from support.numpy_oracles import REPLICAS, SEED, STEPS, flat, noise, program, replicas_on

from compression.exchange import exchange
from configs.schema import LocalSGDConfig
from lab.benchmarks.eager_updates import EagerLocalSGD
from training.optimizers import guarded

INNER_STEPS = 4


def test_eager_updates_are_the_paper_s_rule() -> None:
    """Each replica has outer parameters and a velocity; its gradient is its own one and the others' of a round ago."""
    plan, (rate, momentum), rng = replicas_on(REPLICAS), (0.7, 0.9), np.random.default_rng(SEED)
    settings = LocalSGDConfig(inner_steps=INNER_STEPS, outer_learning_rate=rate, outer_momentum=momentum)
    timing = EagerLocalSGD(exchange(plan), guarded(inner()), settings, REPLICAS, last=STEPS)
    states, update = program(plan, timing)
    params = workload.params("tensors")
    first = flat(params)[0]
    starts = np.tile(first, (REPLICAS, 1))  # each replica's outer parameters
    now, means = starts, []
    momenta = velocities = before = np.zeros_like(starts)
    for step in range(1, STEPS + 1):
        grads = noise(rng)
        moves, states = update(grads, states, params)
        params = optax.apply_updates(params, moves)
        g_R = flat(grads, REPLICAS)
        momenta = 0.9 * momenta + g_R * np.minimum(1, 0.8 / np.linalg.norm(g_R, axis=1, keepdims=True))
        now = now - LEARNING_RATE * momenta
        if step % INNER_STEPS == 0:
            delta = starts - now
            gradients = before.mean(0) + (delta - before) / REPLICAS
            velocities = momentum * velocities + gradients
            now = starts = starts - rate * (gradients + momentum * velocities)
            before = delta
            means.append(delta.mean(0))
        if step < STEPS:
            replicas = flat(params)[0] + flat(states[1].drift.tree, REPLICAS)
            np.testing.assert_allclose(replicas, now, rtol=0, atol=3e-6, err_msg=str(step))
    assert np.abs(starts - starts.mean(0)).max() > 1e-3
    shared, velocity = first, np.zeros_like(first)
    for mean in means:  # the last sync waits for its own exchange
        velocity = momentum * velocity + mean
        shared = shared - rate * (mean + momentum * velocity)
    np.testing.assert_allclose(flat(params)[0], shared, rtol=0, atol=3e-6)
