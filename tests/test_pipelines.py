"""A pipeline over nodes: the numbers without a pipeline, the bytes of the formulas, and unsupported settings."""

import math
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import workload
from support.examples import example_methods  # noqa: F401 (fixture)
from support.running import SMALL, arguments, losses, run_here, stop_after
from support.suite import SLOW
from support.tables import every_row

from compression.methods import method_named
from configs import base
from configs.schema import Config
from planner import __main__ as planner
from sharding.hlo import Collective, read_collectives
from sharding.pipeline import evaluated, only_forward
from sharding.step import build_eval_step, in_turn
from training.experiment import make_experiment

LAYERS, STEPS = 4, 3
CASES: dict[str, dict[str, Any]] = {
    "ddp": dict(strategy="ddp"),
    "zero1": dict(strategy="zero1"),
    "zero2": dict(strategy="zero2"),
    "hsdp": dict(strategy="hsdp"),
    "mics1": dict(strategy="mics", partition_size=1),
    "mics4": dict(strategy="mics", partition_size=4),
    "zero3 flat": dict(strategy="zero3", hierarchical=False),
    "gathered once a micro-step": dict(strategy="hsdp", gather="micro_step"),
    "gathered once a step": dict(strategy="hsdp", gather="step"),
    "node/node/all": dict(parameters="node", gradients="node", optimizer="all"),
    "tensor": dict(strategy="mics", partition_size=2, tensor=2),
    "context": dict(strategy="hsdp", context=2),
}
OFTEN = [("decoder", 2, 4, "context"), ("encoder", 4, 8, "zero1")]  # in test-all
MORE = [(kind, 2, 2, case) for kind, case in zip(cycle(("decoder", "encoder")), CASES)]
MORE += [("decoder", 2, 1, "ddp"), ("encoder", 4, 2, "hsdp"), ("decoder packed", 2, 3, "hsdp")]
MORE += [("decoder", 4, 8, "hsdp"), ("decoder packed", 2, 3, "context")]
MORE += [(workload.GEMMA, 4, 2, "hsdp"), (workload.GEMMA, 2, 2, "tensor")]


def trained(kind: str, stages: int, accumulation: int, **how: Any) -> tuple[np.ndarray, Any]:
    """Returns the losses of three steps and the parameters after them."""
    sh = workload.plan(kind, stages=stages, num_layers=LAYERS, **how)
    step = workload.compiled_step(kind, sh, accumulation=accumulation, num_layers=LAYERS)
    found, state, _ = workload.run_steps(*step, STEPS)
    return found, jax.tree.map(np.asarray, state.params)


@pytest.mark.parametrize(
    ("kind", "stages", "accumulation", "case"),
    [
        *(pytest.param(*run, marks=SLOW) for run in OFTEN),
        *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE),
    ],
)
def test_numbers_are_those_of_no_pipeline(kind: str, stages: int, accumulation: int, case: str) -> None:
    """Losses and parameters of three steps of momentum SGD, for any stages, micro-batches and strategy."""
    found, params = trained(kind, stages, accumulation, **CASES[case])
    expected, expected_params = workload.single_device(kind, num_layers=LAYERS, num_steps=STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), params, expected_params)


def test_validation_is_that_of_no_pipeline() -> None:
    params, sums = workload.params("decoder", LAYERS), []
    for stages in (1, 4):
        sh = workload.plan("decoder", stages=stages, num_layers=LAYERS, strategy="hsdp")
        model = workload.model("decoder", LAYERS)
        step = jax.jit(build_eval_step(evaluated(model.staged_loss()) if stages > 1 else in_turn(model.evaluate), sh))
        placed = jax.device_put(params, sh.shardings(sh.layout.parameters))
        sums.append({name: float(x) for name, x in step(placed, workload.put_batch(sh, 3)).items()})
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)


@pytest.mark.slow
def test_encoded_all_reduce_inside_the_stages() -> None:
    """int8 with error feedback: near the losses without a codec; a residual for each stage's layers and replicas."""
    sh = workload.plan("decoder", stages=2, num_layers=LAYERS, strategy="hsdp")
    how = workload.setup(sh, "int8", kind="decoder", block=64)
    all_reduce = method_named("int8").transform(how)
    step = workload.compiled_step("decoder", sh, accumulation=4, num_layers=LAYERS, all_reduce=all_reduce)
    found, state, metrics = workload.run_steps(*step, STEPS)
    np.testing.assert_allclose(found, workload.single_device_losses("decoder", num_layers=LAYERS)[:STEPS], rtol=2e-3)
    assert metrics["all_reduce_ratio"] > 2 and metrics["residual_norm"] > 0
    residual = state.all_reduce.residual.tree["layers"]["up"]["weight"]
    assert residual.shape[:2] == (2, LAYERS) and residual.sharding.shard_shape(residual.shape)[:2] == (1, LAYERS // 2)


@pytest.mark.slow
@pytest.mark.usefixtures("muon_in_float32", "example_methods")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(optimizer__name="adafactor"), marks=pytest.mark.release),
        dict(optimizer__name="muon"),
        dict(compression__all_reduce="power_sgd"),
        pytest.param(dict(local_sgd__inner_steps=2), marks=pytest.mark.release),
        dict(local_sgd__inner_steps=2, mesh__context=2),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_optimizers_see_the_whole_stack(changes: dict[str, Any]) -> None:
    """Norms, factored moments, orthogonalisation and low ranks are of the global arrays, wherever their layers lie."""
    found = []
    for stages in (1, 2):
        how = dict(mesh__stages=stages, sharding__strategy="hsdp", sharding__partition_size=0, num_steps=4)
        experiment = make_experiment(config(**how, **changes), jax.devices()[: 4 * stages])  # two replicas
        layout, rng = experiment.batches, np.random.default_rng(0)
        shape = (layout.accumulation * layout.rows_per_micro_step, experiment.config.data.seq_len)
        tokens = rng.integers(0, 250, shape).astype(np.int32)
        rows = {"tokens": tokens, "targets": np.roll(tokens, 1, axis=1), "weights": np.ones(shape, np.float32)}
        step = experiment.compile_train_step(), experiment.init_state(), layout.to_devices(rows)
        found.append(workload.run_steps(*step, STEPS)[0])
    np.testing.assert_allclose(*found, rtol=1e-5)


# -------------------------------------------------------------------------------------------- the compiled program


@cache
def read(stages: int, accumulation: int, **how: Any) -> list[Collective]:
    sh = workload.plan("decoder", stages=stages, num_layers=LAYERS, **how)
    step, _, _ = workload.compiled_step("decoder", sh, accumulation=accumulation, num_layers=LAYERS)
    return read_collectives(step.as_text(), sh.layout.shape)


def elements(name: str) -> int:
    specs = workload.model("decoder", LAYERS).param_specs()[name]
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=lambda x: hasattr(x, "dims")))


@pytest.mark.parametrize(
    ("stages", "accumulation", "dropped"),
    [pytest.param(2, 1, 2, marks=pytest.mark.slow), pytest.param(2, 4, 1, marks=pytest.mark.slow), (4, 4, 0)],
)
def test_program_sends_the_formulas_bytes_between_stages(stages: int, accumulation: int, dropped: int) -> None:
    """Forward and backward A + S - 1 activations over each of S - 1 links, and once the sum of embedding and head.

    The last ones go nowhere; XLA drops them where a loop has one iteration.
    """
    found = [c for c in read(stages, accumulation, strategy="hsdp") if c.label == "pipeline"]
    assert all(c.axes == ("stage",) for c in found)
    hidden, rows = workload.model("decoder").config.hidden, -(-workload.ROWS // accumulation) // (8 // stages)
    activations = 4 * rows * workload.SEQ_LEN * hidden
    handed_on = [c for c in found if c.kind == "collective-permute"]
    assert {c.payload_bytes for c in handed_on} == {activations}
    ticks = accumulation + stages - 1
    sent = 2 * ticks - dropped
    assert sum(c.times for c in handed_on) == sent
    by_device = sum(c.inter_bytes * c.times for c in handed_on)
    assert by_device == pytest.approx(sent * activations * (stages - 1) / stages)
    shard = 4 * (elements("embed") + elements("head")) / 2  # per node of two devices
    summed = sum(c.inter_bytes * c.times for c in found if c.kind == "all-reduce")
    # XLA combines the sums of the norms with it, two numbers for each parameter at most
    assert (
        0 <= summed - 2 * shard * (stages - 1) / stages <= 2 * 4 * 2 * len(jax.tree.leaves(workload.params("decoder")))
    )
    assert all(c.loop_depth == 0 for c in found if c.kind == "all-reduce")


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "group"), [(1, 4), (2, 2), (4, 2)])
def test_nodes_send_what_the_formulas_of_the_papers_page_say(stages: int, group: int) -> None:
    """Within 2 %; 10 % for two stages, because XLA drops the unused work of the last tick. 4 nodes of 2, all in f32."""
    accum = 2 * stages
    ticks, replicas = accum + stages - 1, 8 // (stages * group)
    layers, ends = elements("layers") / stages, elements("embed") + elements("head")
    passes = (3 * layers + 2 * ends) if stages == 1 else (4 * layers + 3 * ends)
    gathers = 4 * ticks * max(0, group - 2) / group * passes
    all_reduce = 2 * 2 * 4 * (layers + ends) / group * (replicas - 1) / replicas
    rows, hidden = workload.ROWS * stages // (8 * accum), workload.model("decoder").config.hidden
    handed_on = 2 * ticks * 4 * rows * workload.SEQ_LEN * hidden + 2 * 4 * ends / group
    found = [c for c in read(stages, accum, strategy="mics", partition_size=group) if c.num_elements > 40]
    between = 2 * handed_on * (stages - 1) / stages
    for labels, formula in (
        (("gather", "group_reduce_scatter"), gathers),
        (("replica_all_reduce",), all_reduce),
        (("pipeline",), between),
    ):
        sent = 2 * sum(c.inter_bytes * c.times for c in found if c.label in labels)
        assert sent == pytest.approx(formula, rel=0.1 if stages == 2 else 0.02), labels


@pytest.mark.slow
def test_bfloat16_activations_take_half_the_bytes() -> None:
    program = make_experiment(config(model__compute_dtype="bfloat16"))
    found = read_collectives(program.compile_train_step().as_text(), program.plan.layout.shape)
    assert {c.dtype for c in found if c.kind == "collective-permute"} == {"u16"}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_micro_batches() -> None:
    """1F1B keeps the inputs of 2 S - 3 micro-batches: 32 micro-batches need the temporaries of 8, but for the rows."""

    def temporaries(accumulation: int) -> int:
        sh = workload.plan("decoder", stages=4, num_layers=LAYERS, strategy="ddp")
        step, _, _ = workload.compiled_step(
            "decoder", sh, accumulation=accumulation, rows=2 * accumulation, num_layers=LAYERS
        )
        return step.memory_analysis().temp_size_in_bytes

    hidden = workload.model("decoder").config.hidden
    assert temporaries(32) - temporaries(8) < 4 * workload.SEQ_LEN * hidden  # one micro-batch's activations


# -------------------------------------------------------------------------------------------------- state, refusals


@pytest.mark.slow
def test_run_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    """Parameters and moments keep their global shapes: 4 nodes as 2 stages, then as one; validated in both."""
    assert run_here(*arguments(tmp_path / "run", mesh__stages=2, eval__every=4), hooks=[stop_after(5)]) == 75
    assert run_here(*arguments(tmp_path / "run", eval__every=4)) == 0
    assert run_here(*arguments(tmp_path / "whole", eval__every=4)) == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-5)


def config(**changes: Any) -> Config:
    """A small config of two stages on 8 devices in 4 nodes."""
    made = base.get_config()
    own = {"mesh__stages": 2, "mesh__num_cpu_devices": 8, "mesh__devices_per_node": 2, "sharding__strategy": "hsdp"}
    keys = {key.replace(".", "__"): value for key, value in SMALL.items()} | own | changes
    for key, value in keys.items():
        section, _, name = key.rpartition("__")
        setattr(made[section] if section else made, name, value)
    return base.typed(made)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers": (
        {"model__num_layers": 3},
        "^mesh.stages=2 does not divide the 3 layers; set it to one of 1, 3$",
    ),
    "nodes": (
        {"mesh__devices_per_node": 8},
        "^mesh.stages=2 does not divide the 1 node: a stage is made of whole nodes; set mesh.stages to 1$",
    ),
    "a group beyond the stage": (
        {"sharding__strategy": "mics", "sharding__partition_size": 8},
        "needs 4 nodes of 2 in each of the 2 stages, 4 more than are here",
    ),
}


@every_row("case", REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(ValueError, match=words) as error:
        make_experiment(config(**changes))
    assert "\n" not in str(error.value)


def test_planner_refuses_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["planner", "--config=configs/quickstart.py", "--config.mesh.stages=2",
                         "--config.sample.length=0"]) == 2  # fmt: skip
    assert capsys.readouterr().err.startswith("error: mesh.stages=2: the planner does not price pipelines")


def test_stages_run_only_what_lies_before_them() -> None:
    """Each stage multiplies by its own factor: after S stages each micro-batch was multiplied by all, in order."""
    sh = workload.plan("decoder", stages=4, num_layers=LAYERS, strategy="ddp")
    batch = {"weights": jnp.arange(3.0)}

    def on_device(x: jax.Array) -> jax.Array:
        stage = jax.lax.axis_index("stage")

        def forward(x: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
            y = 10 * jnp.where(stage == 0, rows["weights"], x) + stage
            return y, y

        zeros = jax.lax.pcast(x, ("stage",), to="varying")
        return jax.lax.psum(only_forward(forward, batch, zeros), "stage")

    run = jax.shard_map(on_device, mesh=sh.mesh, in_specs=jax.P(), out_specs=jax.P())
    assert float(jax.jit(run)(jnp.zeros(()))) == sum(10_000 * i + 123 for i in range(3))
