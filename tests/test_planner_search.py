"""The search: it proposes only plans that fit, compiles likely plans first, and reads XLA's schedule."""

import functools
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from support.failing import fails
from support.planning import machine, one_row, own_cache, recorded_plan, small  # noqa: F401 (fixture)
from support.running import IGNORED
from support.suite import sampled

from configs import losses
from planner import clusters, targets
from planner import compile as compiling
from planner.bounds import Bounds, bounds
from planner.candidates import Candidate, all_candidates, of_config, of_strategies
from planner.predict import Machine
from planner.replay import replay
from planner.search import FittingCandidates, search
from sharding.hlo_program import parse_program
from training.experiment import Experiment, make_experiment
from training.memory import Memory

pytestmark = IGNORED
AVERAGES = {"local_sgd.inner_steps": "10", **dict(zip(losses.OUTER_STEP, ("1.0", "0.0"), strict=True))}
INT8, BF16, INT4 = ({"compression.all_reduce": codec} for codec in ("int8", "bf16", "int4"))
MUON = INT4 | {"optimizer.name": "muon"}


class AtOnce:
    """A pool without threads: what is submitted is done, so that programs are made in the order of their choice."""

    def __init__(self, *_: int) -> None: ...

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except ValueError as error:
            done.set_exception(error)
        return done


@pytest.fixture(autouse=True)
def without_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("slow"):
        monkeypatch.setattr("planner.search.ThreadPoolExecutor", AtOnce)


class Compiler:
    """Compiles nothing: steps have made-up memory and time. `made` lists the candidates in the order of their turn."""

    def __init__(
        self,
        total: Callable[[Candidate], float] = lambda candidate: 1.0,
        seconds: Callable[[Candidate], float] = lambda candidate: 1.0,
        capacity: float = 1e12,
    ) -> None:
        self.made: list[Candidate] = []
        self._total, self._seconds, self._capacity = total, seconds, capacity
        self._like = recorded_plan().best

    def __call__(self, candidate: Candidate, _: Any, machine: Machine) -> Any:
        self.made.append(candidate)
        parts = dict.fromkeys(("parameters", "gradients", "optimizer", "batch"), 0.0)
        memory = Memory(**parts, temporaries=self._total(candidate), capacity=self._capacity)
        prediction = replace(self._like, candidate=candidate, memory=memory, step_s=self._seconds(candidate))
        compiled = SimpleNamespace(from_cache=False)
        return SimpleNamespace(compiled=compiled, machine=machine, memory=lambda: memory, prediction=lambda: prediction)

    @property
    def changes(self) -> list[dict[str, str]]:
        return [candidate.change for candidate in self.made]


def only(monkeypatch: pytest.MonkeyPatch, candidates: Sequence[Candidate], *, with_changes: bool = False) -> None:
    """Makes these the only strategies that a search looks at."""
    monkeypatch.setattr("planner.options.all_candidates", lambda *_: candidates)
    monkeypatch.setattr("planner.options.exact_variants", lambda *_, **__: [])
    if not with_changes:
        monkeypatch.setattr("planner.options.changes", lambda *_: [])


def estimate(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Experiment], tuple[float, float]]) -> None:
    """Makes up the bounds of each experiment: the least seconds of a step, and the estimated ones."""

    def estimated(one: Experiment, *_: Any) -> Bounds:
        least_s, estimate_s = seconds(one)
        return Bounds(state_bytes=1, least_bytes=1, estimate_bytes=1, least_s=least_s, estimate_s=estimate_s)

    monkeypatch.setattr("planner.options.bounds", estimated)


def cluster_with(memory_bytes: float) -> Machine:
    device = replace(clusters.CPU, memory_bytes=memory_bytes, is_shared=False)
    return machine(replace(clusters.EMULATED, device=device))


@pytest.mark.parametrize("seed", sampled(range(10), 0))
def test_a_search_proposes_only_what_fits(seed: int) -> None:
    draw = random.Random(seed)
    here = machine(
        replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=8 * 10 ** draw.uniform(5, 6.5)))
    )
    needs = functools.cache(lambda candidate: 10 ** draw.uniform(4.5, 6.5))
    compiler = Compiler(needs, lambda candidate: draw.uniform(0.1, 10), here.capacity)
    most = draw.randint(1, 8)
    try:
        found = search(small(), here, jax.devices(), most=most, compile_one=compiler)
    except ValueError as error:
        assert "nothing fits 4 nodes of emulated" in str(error) and "what would help" in str(error)
        assert all(needs(c) > here.capacity for c in compiler.made if not c.change)
        return
    assert found.steps and len(compiler.made) <= most and len(compiler.made) == len({*compiler.made})
    for steps, is_changed in ((found.steps, False), (found.changed, True)):
        assert all(needs(p.candidate) <= here.capacity and bool(p.candidate.change) == is_changed for p, _ in steps)
        order = [(p.candidate.has_other_optimizer, p.step_s) for p, _ in steps]
        assert order == sorted(order)
    counts, fit = found.counts, len(found.steps) + len(found.changed)
    assert counts.compiled == len(compiler.made) == fit + counts.did_not_fit == len(found.too_large) + fit
    rest = counts.illegal + counts.too_large + counts.too_slow + counts.no_gain + counts.not_looked_at
    assert rest + counts.compiled == counts.candidates


def test_what_is_asked_for_is_priced_if_the_whole_device_could_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as fractions of the device, with 0.9 for a program; a search proposes only plans that surely fit."""
    shares = {"ddp": 0.95, "zero3": 1.05, "mics(2)": 0.85}
    every = of_strategies([*shares], small())
    here = cluster_with(1e9)
    compiler = Compiler(
        lambda candidate: shares[candidate.name] * 1e9, lambda candidate: 2 - shares[candidate.name], here.capacity
    )

    def searched(candidates: Sequence[Candidate]) -> FittingCandidates:
        return search(small(), here, jax.devices(), most=3, candidates=candidates, compile_one=compiler)

    found = searched(every)
    assert [prediction.candidate.name for prediction, _ in found.steps] == ["mics(2)", "ddp"]
    ends = ["does not fit, 1.05 GB of 900 MB", "may not fit, 950 MB of 900 MB; the device has 1.00 GB"]
    assert sorted(line.split(": ")[1] for line in found.too_large) == ends
    ((alone, _),) = searched(every[:1]).steps
    assert not alone.memory.fits
    only(monkeypatch, every)
    assert [prediction.candidate.name for prediction, _ in searched([]).steps] == ["mics(2)"]


@pytest.mark.slow  # it waits for a thread
def test_the_configs_own_program_is_compiled_while_the_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, compiler, own = Event(), Compiler(), of_config(small())

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        begun.set()
        return compiler(candidate, *_)

    def others(*_: Any) -> list[Candidate]:
        assert begun.wait(timeout=30)
        return [own]

    monkeypatch.setattr("planner.options.all_candidates", others)
    found = search(small(), machine(), jax.devices(), most=1, compile_one=compile_one)
    assert compiler.made == [own] and found.counts.compiled == 1


def test_two_names_of_one_program_are_one_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    for keys, name in (
        ({"strategy": "hsdp"}, "mics(2)"),
        ({"strategy": "mics", "partition_size": 8}, "zero3"),
        ({"strategy": "mics", "partition_size": 1}, "ddp"),
    ):
        config = small(**{"sharding__partition_size": 0} | {f"sharding__{key}": value for key, value in keys.items()})
        only(monkeypatch, of_strategies([name], config))
        found = search(config, machine(), jax.devices(), most=9, compile_one=Compiler())
        assert [prediction.candidate.name for prediction, _ in found.steps] == [name] and found.counts.candidates == 1


@pytest.mark.slow  # programs take real time
def test_what_a_search_looks_at_does_not_depend_on_which_program_is_ready_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two compiled plans the even ones take longer, or the odd ones; memory orders the rest."""
    every = of_strategies(["ddp", "zero3", "mics(2)", "mics(4)"], small(batch__global_size=64))
    only(monkeypatch, [replace(candidate, micro_size=size) for candidate in every for size in (1, 2, 4, 8)])
    here = machine(replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=1e8)))

    def searched(slow: int) -> tuple[set[Candidate], FittingCandidates]:
        draws = functools.cache(lambda candidate: random.Random(str(candidate)))
        compiler = Compiler(
            lambda candidate: draws(candidate).uniform(0.1, 2) * here.capacity,
            lambda candidate: draws(candidate).uniform(1, 2),
            here.capacity,
        )

        def compile_one(candidate: Candidate, *_: Any) -> Any:
            time.sleep(0.1 * (len(compiler.made) % 2 == slow))
            return compiler(candidate, *_)

        found = search(small(batch__global_size=64), here, jax.devices(), most=10, compile_one=compile_one)
        return {*compiler.made}, found

    (one, first), (other, second) = searched(0), searched(1)
    assert one == other and first.counts == second.counts and first.counts.did_not_fit > 0


def test_what_did_not_fit_tells_what_fewer_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """105, 89 GB for 8 and 4 rows: 2 rows need 81 at least, and are not compiled; 1 row may do with 77."""
    config = small(batch__global_size=64, sharding__strategy="zero3", sharding__partition_size=0)
    needs = {8: 105e6, 4: 89e6, 2: 81e6, 1: 77e6}
    own = replace(of_config(config), micro_size=8)
    only(monkeypatch, [replace(own, micro_size=size) for size in needs])
    compiler = Compiler(lambda candidate: needs[candidate.micro_size], capacity=78e6)
    wide = replace(config, batch=replace(config.batch, micro_size=8))
    (found,) = search(wide, cluster_with(78e6 / 0.9), jax.devices(), most=9, compile_one=compiler).steps
    assert found[0].candidate.micro_size == 1 and 2 not in [candidate.micro_size for candidate in compiler.made]


@pytest.mark.slow
def test_what_should_fit_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(batch__global_size=64)
    own, bytes_of = of_config(config), {}
    for candidate in all_candidates(config, 4, 2):
        bytes_of[candidate] = bounds(make_experiment(candidate.applied(config)), clusters.EMULATED).estimate_bytes
    middle = sorted(bytes_of.values())[len(bytes_of) // 2]
    only(monkeypatch, [*all_candidates(config, 4, 2)])
    compiler = Compiler(lambda candidate: 0, lambda candidate: 1e9, middle)
    search(config, cluster_with(middle / 0.9), jax.devices(), most=100, compile_one=compiler)
    assert compiler.made.index(own) <= 1  # two are compiled at once
    too_large = [bytes_of[candidate] > middle for candidate in compiler.made if candidate != own]
    assert {*too_large} == {False, True}
    first = too_large.index(True)
    assert sum(too_large[first:]) >= len(too_large) - first - 1 and not any(too_large[: first - 1])


def test_the_best_mics_and_the_configs_strategy_are_looked_at_with_their_best_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though every micro-batch of zero3 is estimated to be faster than all of theirs."""
    config = small(batch__global_size=32, sharding__strategy="ddp", sharding__partition_size=0)
    every = of_strategies(["ddp", "zero3", "mics(2)"], config)
    only(monkeypatch, [replace(candidate, micro_size=size) for candidate in every for size in (1, 2, 4)])
    estimate(
        monkeypatch,
        lambda one: (0, (1 if one.config.sharding.strategy == "zero3" else 10) / one.config.batch.micro_size),
    )
    compiler = Compiler()
    search(config, machine(), jax.devices(), most=4, compile_one=compiler)
    found = {(candidate.name, candidate.micro_size) for candidate in compiler.made}
    assert found == {("ddp", 1), ("ddp", 4), ("zero3", 4), ("mics(2)", 4)}


def test_the_best_with_the_configs_rematerialisation_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimates of other policies are shorter, and may hide traffic that their programs expose."""
    only(monkeypatch, of_strategies(["zero3+remat=dots", "mics(4)+remat=dots", "mics(4)", "ddp"], small()))
    others = {"mics": 2.0, "ddp": 3.0, "zero3": 2.0}
    estimate(
        monkeypatch, lambda one: (0, 1 if one.config.model.remat == "dots" else others[one.config.sharding.strategy])
    )
    compiler = Compiler()
    search(small(), machine(), jax.devices(), most=3, compile_one=compiler)
    assert [candidate.name for candidate in compiler.made] == ["mics(2)", "mics(4)", "zero3+remat=dots"]


def test_tight_programs_are_compiled_exactly_until_the_two_best_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick programs of mics(4) and ddp are too fast; when they are exact, zero3 is among the best."""
    names = ["mics(4)", "ddp", "zero3", "mics(2)"]
    only(monkeypatch, of_strategies(names, small()))
    quick, exact = dict(zip(names, (1.0, 1.1, 1.2, 1.4))), dict(zip(names, (1.3, 1.15, 1.25, 9.9)))
    capacity = machine().capacity
    compiler = Compiler(total=lambda candidate: 0.9 * capacity, capacity=capacity)

    def compile_one(candidate: Candidate, ex: Experiment, machine: Machine) -> Any:
        made = compiler(candidate, ex, machine)
        prediction = replace(made.prediction(), step_s=(quick if machine.is_quick else exact)[candidate.name])
        return SimpleNamespace(**vars(made) | {"prediction": lambda: prediction})

    found = search(small(), replace(machine(), is_quick=True), jax.devices(), most=9, compile_one=compile_one)
    assert [(p.candidate.name, p.step_s) for p, _ in found.steps] == [
        ("ddp", 1.15),
        ("zero3", 1.25),
        ("mics(4)", 1.3),
        ("mics(2)", 1.4),
    ]
    assert [step.machine.is_quick for _, step in found.steps] == [False, False, False, True]
    assert found.counts.compiled == 4
    compiler = Compiler(total=lambda candidate: 0.5 * capacity, capacity=capacity)
    found = search(small(), replace(machine(), is_quick=True), jax.devices(), most=9, compile_one=compile_one)
    assert all(step.machine.is_quick for _, step in found.steps), "not tight"


# ---------------------------------------------------------------------------------------- changes of the result


def test_a_change_must_save_five_per_cent_but_int8_is_always_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, [], with_changes=True)
    monkeypatch.setattr("planner.candidates.TIMINGS", ({},))
    monkeypatch.setattr(losses, "rows", list)  # none
    for seconds, kept in (
        ({"bf16": 0.96}, set()),
        ({"bf16": 0.94}, {"bf16"}),
        ({"bf16": 0.94, "int4": 0.90}, {"bf16"}),  # less than 5 % better than a smaller change
        ({"bf16": 0.94, "int4": 0.89}, {"bf16", "int4"}),
        ({"bf16": 0.96, "int4": 0.94}, {"int4"}),
        ({"int8": 0.9, "int4": 0.89}, set()),
        ({"int8": 1.1}, set()),  # by an estimate, which may be wrong
    ):
        estimate(monkeypatch, lambda one, seconds=seconds: (0, seconds.get(one.config.compression.all_reduce, 1.0)))
        compiler = Compiler()
        search(small(), machine(), jax.devices(), most=9, compile_one=compiler)
        codecs = [candidate.pairs.get("all_reduce", "") for candidate in compiler.made]
        assert codecs.count("int8") == 1 and {*codecs} == kept | {"", "int8"}, seconds


def records_hold(monkeypatch: pytest.MonkeyPatch, rows: list[losses.RecordedLoss]) -> None:
    """Makes these the records, and lets them hold for runs of every size."""
    monkeypatch.setattr(losses, "rows", lambda: rows)
    monkeypatch.setattr("planner.options.checked_optimizer", lambda config, **_: losses.dense_optimizer(config))


def test_the_two_best_strategies_are_priced_with_int8_and_another_optimizer_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As 13 B parameters on 4 p4de at 25 Gbit/s: estimates hide traffic of groups over several nodes, programs do not.

    By its records Muon needs half of the steps. The config's optimizer with int8 is priced first all the same, and with
    the strategy whose estimate no program has contradicted.
    """
    config = small(sharding__strategy="zero3", sharding__partition_size=0)
    only(monkeypatch, of_strategies(["zero3", "mics(4)", "mics(2)", "ddp"], config), with_changes=True)
    rows = [one_row(setting=setting, steps=steps) for setting, steps in ((INT8, 1.0), (MUON, 0.54), (AVERAGES, 1.2))]
    records_hold(monkeypatch, rows)
    estimates = {("zero3", 0): 1.0, ("mics", 4): 1.0, ("mics", 2): 1.1, ("ddp", 0): 50.0}

    def seconds(one: Experiment) -> tuple[float, float]:
        sharding, is_dense = one.config.sharding, one.config.compression.all_reduce == "none"
        estimate_s = estimates[sharding.strategy, sharding.partition_size]
        estimate_s *= (
            2 if is_dense and sharding.partition_size == 2 else 1
        )  # the replica all-reduce without a codec is not hidden
        return 0.0, 0.5 * estimate_s if one.config.local_sgd.inner_steps else estimate_s

    estimate(monkeypatch, seconds)
    took = {"mics(4)+all_reduce=int8": 38.0, "mics(2)+all_reduce=int8": 23.6}
    others = [INT8, INT8, AVERAGES, MUON]
    monkeypatch.setattr("planner.candidates.TIMINGS", ({}, {"inner_steps": "10"}))
    for most, changes in ((2, others[:1]), (4, others[:2]), (8, others)):
        compiler = Compiler(seconds=lambda candidate: took.get(candidate.name, 10 if candidate.change else 38.4))
        found = search(config, machine(), jax.devices(), most=most, compile_one=compiler)
        assert [change for change in compiler.changes if change] == changes
        if most > 2:
            assert {candidate.name for candidate in compiler.made if candidate.change == INT8} == {*took}
    order = [(prediction.candidate.change, prediction.step_s) for prediction, _ in found.changed]
    assert order == [(AVERAGES, 10), (INT8, 23.6), (INT8, 38.0), (MUON, 10)]  # the config's optimizer first


def test_int8_that_does_not_fit_is_priced_with_another_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, of_strategies(["zero3", "mics(4)", "mics(2)", "ddp"], small()), with_changes=True)
    monkeypatch.setattr("planner.candidates.TIMINGS", ({},))
    estimate(monkeypatch, lambda one: (0.0, 1.0 if one.config.compression.all_reduce in ("none", "int8") else 2.0))
    compiler = Compiler(total=lambda candidate: 1e13 if candidate.change == INT8 else 1.0)
    search(small(), machine(), jax.devices(), most=20, compile_one=compiler)
    assert sum(change == INT8 for change in compiler.changes) == 3  # of mics(2), mics(4) and ddp


def test_a_change_that_reaches_the_loss_is_discarded_only_for_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both changes take 1.398 * 1.1 = 1.54 s, more than the 1.4 of one alone, which never gets there."""
    only(monkeypatch, [], with_changes=True)
    monkeypatch.setattr("planner.candidates.BETWEEN_NODES", (("all_reduce",),))
    # no step of Muon's takes less than twice the exact one's time, and half as many do
    ways = [(AVERAGES, None), (AVERAGES | INT4, 1.398), (BF16, 1.0), (MUON, 0.5)]
    rows = [one_row(setting=setting, steps=steps) for setting, steps in ways]
    records_hold(monkeypatch, rows)
    seconds = {("none", 10): 1.4, ("int4", 10): 1.1, ("bf16", 0): 4}

    def seconds_of(one: Experiment) -> tuple[float, float]:
        estimate_s = seconds.get((one.config.compression.all_reduce, one.config.local_sgd.inner_steps), 10)
        return 2.0 if one.config.optimizer.name == "muon" else 0.0, estimate_s

    estimate(monkeypatch, seconds_of)
    compiler = Compiler()
    search(small(), machine(), jax.devices(), most=9, compile_one=compiler)
    assert compiler.changes == [{}, INT8, BF16, AVERAGES | INT4, MUON, AVERAGES]
    rows.append(one_row(setting=INT4, steps=9))
    seconds |= {("int4", 0): 1.4}
    compiler = Compiler()
    search(small(compression__delayed=True), machine(), jax.devices(), most=9, compile_one=compiler)
    # the records compare with dense runs, and have no codec together with `delayed`
    assert compiler.changes == [{}, INT8, INT4, BF16]


def test_a_search_looks_at_recorded_settings_by_their_time_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the programs are changes: after int8, the changes that reach the loss, by their time to it."""
    only(monkeypatch, of_strategies(["mics(2)", "zero3"], small()), with_changes=True)
    ways = [(MUON, 0.5), (AVERAGES, 1.2), (INT8, None), ({"compression.rank": "3"}, 0.1)]
    rows = [one_row(setting=setting, steps=steps) for setting, steps in ways]
    records_hold(monkeypatch, rows)
    here = machine(clusters.with_rate(clusters.EMULATED, 1e5))  # all is traffic, of which int4 leaves an eighth
    for optimizer, wanted in (("adamw", [AVERAGES, MUON]), ("lamb", [])):
        compiler = Compiler(seconds=lambda candidate: 1e9)  # nothing is slower
        search(small(optimizer__name=optimizer), here, jax.devices(), most=8, compile_one=compiler)
        recorded = [change for change in compiler.changes if change in (AVERAGES, MUON)]
        assert compiler.changes.count(INT8) == 1 and recorded[: len(wanted)] == wanted
        assert optimizer == "adamw" or MUON not in recorded  # the record compares with dense runs of AdamW


# ------------------------------------------------------------------------------------------- what does not work


def test_what_is_too_large_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, of_strategies(["ddp", "zero3", "mics(2)"], small()))

    with pytest.raises(ValueError, match=r"nothing fits .* needs at least .* what would help: --nodes=\d+ with"):
        search(small(), cluster_with(1e5), jax.devices(), most=9, compile_one=fails(AssertionError, "it cannot fit"))


def test_what_xla_refuses_does_not_end_a_search() -> None:
    every = of_strategies(["ddp", "zero3", "mics(2)"], small())

    def searched(refused: set[str]) -> FittingCandidates:
        compiler = Compiler()

        def compile_one(candidate: Candidate, *_: Any) -> Any:
            if candidate.name in refused:
                raise ValueError(f"XLA cannot compile {candidate.name}")
            return compiler(candidate, *_)

        return search(small(), machine(), jax.devices(), most=3, candidates=every, compile_one=compile_one)

    found = searched({"zero3"})
    assert {prediction.candidate.name for prediction, _ in found.steps} == {"ddp", "mics(2)"}
    assert [line.partition(": ")[2] for line in found.refused] == ["XLA cannot compile zero3"]
    assert (found.counts.illegal, found.counts.compiled, found.counts.candidates) == (1, 2, 3)
    with pytest.raises(ValueError, match=r"^XLA cannot compile mics"):  # the config's own comes first
        searched({candidate.name for candidate in every})


# ------------------------------------------------------------------------------------------------ compiled programs

ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 13, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <12 p @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 30, parameter 2, shape |f32[5]| at ShapeIndex {}:
allocation 2: size 4, constant:
allocation 3: size 7000, preallocated-temp:
 value: <13 t @0> (size=7000,offset=0): f32[100]{0}
"""


def test_bytes_of_a_buffer_assignment() -> None:
    assert compiling.buffer_bytes(ASSIGNMENT) == (430, 7000)
    of_jax_0_12 = re.sub(r": size (\d+), ", r": size \1, page 0, ", ASSIGNMENT)
    assert compiling.buffer_bytes(of_jax_0_12) == (430, 7000)
    with pytest.raises(ValueError, match="its format is another one"):
        compiling.buffer_bytes("BufferAssignment:\n")


@pytest.mark.release
@pytest.mark.skipif(not targets.WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
def test_the_program_before_machine_code_is_that_of_the_whole_compilation() -> None:
    """Without a dump no program can be read before the end."""
    gpu = machine(clusters.CLUSTERS["p5.48xlarge"], nodes=2)
    candidate = of_config(small())
    wide = make_experiment(candidate.applied(small()))
    request = gpu.request(candidate, wide.config) | {"target": "h100"}
    early, whole = (compiling.compile_step(**request | {"xla_flags": flags}) for flags in ("", "--xla_dump_to="))
    assert early.argument_bytes == whole.argument_bytes and early.temporary_bytes == whole.temporary_bytes
    device, network = gpu.cluster.compute(16), gpu.cluster.network()
    first, second = (replay(parse_program(step.text), step.shape, device, network) for step in (early, whole))
    assert replace(first, intervals=()) == replace(second, intervals=())
