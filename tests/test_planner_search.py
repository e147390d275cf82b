"""The search: it proposes only what fits, compiles what should fit first, and reads what XLA has scheduled."""

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from planning import a_step, machine, one_row, own_cache, small  # noqa: F401 (fixtures)
from running import IGNORED
from suite import sampled

from configs import losses
from planner import clusters
from planner import compile as compiling
from planner.bounds import Bounds, bounds
from planner.candidates import Candidate, all_candidates, of_config, of_strategies
from planner.predict import Step, compiled_step
from planner.replay import replay
from planner.search import Found, search
from sharding.hlo_program import parse_program
from training.experiment import Experiment, make_experiment
from training.memory import Memory

pytestmark = IGNORED


class Made:
    """A compiled step of made-up memory and time."""

    compiled = SimpleNamespace(from_cache=False)

    def __init__(self, candidate: Candidate, total: float, capacity: float, seconds: float, like: Step) -> None:
        memory = dict.fromkeys(("parameters", "gradients", "optimizer", "batch"), 0.0)
        self._memory = Memory(**memory, temporaries=total, capacity=capacity)
        self._prediction = replace(like.prediction(), candidate=candidate, memory=self._memory, step_s=seconds)

    def memory(self) -> Memory:
        return self._memory

    def prediction(self) -> Any:
        return self._prediction


def changed(candidate: Candidate) -> bool:
    return candidate.change != of_config(small()).change


@pytest.mark.parametrize("seed", sampled(range(12), *range(4)))
def test_a_search_proposes_only_what_fits(seed: int, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    device = replace(clusters.CPU, memory_bytes=8 * 10 ** draw.uniform(5, 6.5))
    here = machine(replace(clusters.EMULATED, device=device))
    made: list[Candidate] = []

    @functools.cache
    def needs_of(_: Candidate) -> float:
        return 10 ** draw.uniform(4.5, 6.5)

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate)
        return Made(candidate, needs_of(candidate), here.capacity, draw.uniform(0.1, 10), step)

    most = draw.randint(1, 8)
    try:
        found = search(small(), here, jax.devices(), most=most, compile_one=compile_one)
    except ValueError as error:
        assert "nothing fits 4 nodes of emulated" in str(error) and "what would help" in str(error)
        assert all(needs_of(c) > here.capacity for c in made if not changed(c))
        return
    assert found.steps and len(made) <= most and len(made) == len(set(made))
    for steps, is_changed in ((found.steps, False), (found.changed, True)):
        assert all(needs_of(p.candidate) <= here.capacity and changed(p.candidate) == is_changed for p, _ in steps)
        seconds = [prediction.step_s for prediction, _ in steps]
        assert seconds == sorted(seconds)
    counts, fit = found.counts, len(found.steps) + len(found.changed)
    assert counts.compiled == len(made) == fit + counts.did_not_fit == len(found.too_large) + fit
    rest = counts.illegal + counts.too_large + counts.too_slow + counts.no_gain + counts.not_looked_at
    assert rest + counts.compiled == counts.candidates


def test_what_is_asked_for_is_priced_if_the_whole_device_could_hold_it(step: Step) -> None:
    """Needs as shares of the device, of which a program can have 0.9; a search proposes what surely fits."""
    shares = {"ddp": 0.95, "zero3": 1.05, "mics(2)": 0.85}
    every = of_strategies([*shares], small())
    here = machine(replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=1e9, is_shared=False)))

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        share = shares.get(candidate.name, 0.95)
        return Made(candidate, share * 1e9, here.capacity, 2 - share, step)

    def searched(candidates: Sequence[Candidate]) -> Found:
        return search(small(), here, jax.devices(), most=3, candidates=candidates, compile_one=compile_one)

    found = searched(every)
    assert [prediction.candidate.name for prediction, _ in found.steps] == ["mics(2)", "ddp"]
    ends = ["does not fit, 1.05 GB of 900 MB", "may not fit, 950 MB of 900 MB; the device has 1.00 GB"]
    assert sorted(line.split(": ")[1] for line in found.too_large) == ends
    ((alone, _),) = searched(every[:1]).steps
    assert not alone.memory.fits
    assert all(prediction.memory.fits for prediction, _ in searched([]).steps)


def test_the_configs_own_program_is_compiled_while_the_others_are_made(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Event()

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate)
        begun.set()
        return Made(candidate, 1.0, 1e12, 1.0, step)

    def others(*_: Any) -> list[Candidate]:
        assert begun.wait(timeout=30)
        return [own]

    own, made = of_config(small()), list[Candidate]()
    monkeypatch.setattr("planner.search.all_candidates", others)
    found = search(small(), machine(), jax.devices(), most=1, compile_one=compile_one)
    assert made == [own] and found.counts.compiled == 1


@pytest.mark.parametrize(
    ("keys", "same"),
    [
        ({"strategy": "hsdp"}, {"partition_size": 2}),
        ({"partition_size": 8}, {"strategy": "zero3", "partition_size": 0}),
        ({"partition_size": 1}, {"strategy": "ddp", "partition_size": 0}),
    ],
)
def test_two_names_of_one_program_are_one_candidate(step: Step, keys: dict[str, Any], same: dict[str, Any]) -> None:
    counts, names = [], []
    for changes in ({"strategy": "mics", "partition_size": 0} | each for each in (keys, same)):
        config = small(**{f"sharding__{key}": value for key, value in changes.items()})
        compile_one = lambda candidate, *_: Made(candidate, 1.0, 1e12, 1.0, step)
        found = search(config, machine(), jax.devices(), most=1, compile_one=compile_one)
        counts.append(found.counts)
        names.append([prediction.candidate.name for prediction, _ in found.steps])
    assert counts[0] == counts[1] and names[0] == names[1]


def test_what_a_search_looks_at_does_not_depend_on_which_program_is_ready_first(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are compiled the even ones take longer, or the odd ones; what each needs orders the rest."""
    every = of_strategies(["ddp", "zero3", "mics(2)", "mics(4)"], small(batch__global_size=64))
    sizes = [replace(candidate, micro_size=size) for candidate in every for size in (1, 2, 4, 8)]
    monkeypatch.setattr("planner.search.all_candidates", lambda *_: sizes)
    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.search.changes", lambda *_: [])
    here = machine(replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=1e8)))

    def searched(slow: int) -> tuple[set[Candidate], Found]:
        made: list[Candidate] = []

        def compile_one(candidate: Candidate, *_: Any) -> Any:
            made.append(candidate)
            time.sleep(0.1 * (len(made) % 2 == slow))
            needs = random.Random(str(candidate))
            return Made(candidate, needs.uniform(0.1, 2) * here.capacity, here.capacity, needs.uniform(1, 2), step)

        found = search(small(batch__global_size=64), here, jax.devices(), most=10, compile_one=compile_one)
        return {*made}, found

    (one, first), (other, second) = searched(0), searched(1)
    assert one == other and first.counts == second.counts and first.counts.did_not_fit > 0


def test_what_did_not_fit_tells_what_fewer_rows_need(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """105, 89 GB for 8 and 4 rows: 2 rows need 81 at least, and are not compiled; 1 row may do with 77."""
    config = small(batch__global_size=64, sharding__strategy="zero3", sharding__partition_size=0)
    device = replace(clusters.CPU, memory_bytes=78e6 / 0.9, is_shared=False)
    needs = {8: 105e6, 4: 89e6, 2: 81e6, 1: 77e6}
    monkeypatch.setattr("planner.search.all_candidates", lambda *_: [replace(own, micro_size=m) for m in needs])
    own, made = replace(of_config(config), micro_size=8), []

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate.micro_size)
        return Made(candidate, needs[candidate.micro_size], 78e6, 1.0, step)

    here = machine(replace(clusters.EMULATED, device=device))
    wide = replace(config, batch=replace(config.batch, micro_size=8))
    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.search.changes", lambda *_: [])
    (found,) = search(wide, here, jax.devices(), most=9, compile_one=compile_one).steps
    assert found[0].candidate.micro_size == 1 and 2 not in made


@pytest.mark.slow
def test_what_should_fit_is_compiled_first(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(batch__global_size=64)
    own, bytes_of = of_config(config), {}
    for candidate in all_candidates(config, 4, 2):
        bytes_of[candidate] = bounds(make_experiment(candidate.applied(config)), clusters.EMULATED).estimate_bytes
    middle = sorted(bytes_of.values())[len(bytes_of) // 2]
    device = replace(clusters.CPU, memory_bytes=middle / 0.9, is_shared=False)
    made: list[Candidate] = []

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate)
        return Made(candidate, 0, middle, 1e9, step)

    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.search.changes", lambda *_: [])
    here = machine(replace(clusters.EMULATED, device=device))
    search(config, here, jax.devices(), most=100, compile_one=compile_one)
    assert made.index(own) <= 1  # two are compiled at once
    too_large = [bytes_of[candidate] > middle for candidate in made if candidate != own]
    assert {*too_large} == {False, True}
    first = too_large.index(True)
    assert sum(too_large[first:]) >= len(too_large) - first - 1 and not any(too_large[: first - 1])


def test_the_best_mics_and_the_configs_strategy_are_looked_at_with_their_best_micro_batch(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though every micro-batch of zero3 is estimated to be faster than all of theirs."""
    config = small(batch__global_size=32, sharding__strategy="ddp", sharding__partition_size=0)
    every = of_strategies(["ddp", "zero3", "mics(2)"], config)
    sizes = [replace(candidate, micro_size=size) for candidate in every for size in (1, 2, 4)]

    def estimated(one: Experiment, *_: Any) -> Bounds:
        seconds = (1 if one.config.sharding.strategy == "zero3" else 10) / one.config.batch.micro_size
        return Bounds(state_bytes=1, least_bytes=1, estimate_bytes=1, least_s=0, estimate_s=seconds)

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate)
        return Made(candidate, 1.0, 1e12, 1.0, step)

    made: list[Candidate] = []
    monkeypatch.setattr("planner.search.bounds", estimated)
    monkeypatch.setattr("planner.search.all_candidates", lambda *_: sizes)
    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.search.changes", lambda *_: [])
    search(config, machine(), jax.devices(), most=4, compile_one=compile_one)
    assert {(c.name, c.micro_size) for c in made} == {("ddp", 1), ("ddp", 4), ("zero3", 4), ("mics(2)", 4)}


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ({"bf16": 0.96}, set()),
        ({"bf16": 0.94}, {"bf16"}),
        ({"bf16": 0.94, "int8": 0.90}, {"bf16"}),  # less than 5 % over what changes less
        ({"bf16": 0.94, "int8": 0.89}, {"bf16", "int8"}),
        ({"bf16": 0.96, "int8": 0.94}, {"int8"}),
    ],
)
def test_a_change_must_save_five_per_cent(
    seconds: dict[str, float], kept: set[str], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimated(one: Experiment, *_: Any) -> Bounds:
        estimate_s = seconds.get(one.config.compression.hop_two, 1.0)
        return Bounds(state_bytes=1, least_bytes=1, estimate_bytes=1, least_s=0, estimate_s=estimate_s)

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate.pairs.get("hop_two", ""))
        return Made(candidate, 1.0, 1e12, 1.0, step)

    made: list[str] = []
    monkeypatch.setattr("planner.search.bounds", estimated)
    monkeypatch.setattr("planner.search.all_candidates", lambda *_: [])
    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.candidates.TIMINGS", ({},))
    monkeypatch.setattr(losses, "rows", list)  # none
    search(small(), machine(), jax.devices(), most=9, compile_one=compile_one)
    assert {*made} - {""} == kept


def test_a_change_that_reaches_the_loss_is_discarded_only_for_one_that_does(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both changes take 1.398 * 1.1 = 1.54 s, more than the 1.4 of one alone, which never gets there."""
    averages = {"local_sgd.inner_steps": "10", **dict(zip(losses.OUTER_STEP, ("1.0", "0.0"), strict=True))}
    bf16, int4 = {"compression.hop_two": "bf16"}, {"compression.hop_two": "int4"}
    muon = int4 | {"optimizer.name": "muon"}  # no step takes less than twice the exact one's time, and half as many do
    ways = [(averages, None), (averages | int4, 1.398), (bf16, 1.0), (muon, 0.5)]
    rows = [one_row(setting=setting, steps=steps) for setting, steps in ways]
    seconds = {("none", 10): 1.4, ("int4", 10): 1.1, ("bf16", 0): 4}

    def estimated(one: Experiment, *_: Any) -> Bounds:
        estimate_s = seconds.get((one.config.compression.hop_two, one.config.local_sgd.inner_steps), 10)
        least_s = 2.0 if one.config.optimizer.name == "muon" else 0.0
        return Bounds(state_bytes=1, least_bytes=1, estimate_bytes=1, least_s=least_s, estimate_s=estimate_s)

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate.change)
        return Made(candidate, 1.0, 1e12, 1.0, step)

    made: list[dict[str, str]] = []
    monkeypatch.setattr("planner.search.bounds", estimated)
    monkeypatch.setattr("planner.search.all_candidates", lambda *_: [])
    monkeypatch.setattr("planner.search.exact_variants", lambda *_, **__: [])
    monkeypatch.setattr("planner.candidates.BETWEEN_NODES", (("hop_two",),))
    monkeypatch.setattr(losses, "rows", lambda: rows)
    search(small(), machine(), jax.devices(), most=9, compile_one=compile_one)
    assert made == [{}, bf16, muon, averages | int4, averages]
    made.clear()
    rows.append(one_row(setting=int4, steps=9))
    seconds |= {("int4", 0): 1.4}
    search(small(compression__delayed=True), machine(), jax.devices(), most=9, compile_one=compile_one)
    assert made == [{}, int4, bf16]  # the records, beside dense runs, say nothing of what is delayed as well


def test_what_is_too_large_is_not_compiled() -> None:
    tiny = machine(replace(clusters.EMULATED, device=replace(clusters.CPU, memory_bytes=1e5, is_shared=False)))

    def compile_one(*_: Any) -> Any:
        raise AssertionError("it cannot fit")

    with pytest.raises(ValueError, match=r"nothing fits .* needs at least .* what would help: --nodes=\d+ with"):
        search(small(), tiny, jax.devices(), most=9, compile_one=compile_one)


def refusing(refused: set[str], like: Step) -> Any:
    """Compiles as XLA does that refuses the programs of some strategies."""

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        if candidate.name in refused:
            raise ValueError(f"XLA cannot compile {candidate.name}")
        return Made(candidate, 1.0, 1e12, 1.0, like)

    return compile_one


def test_what_xla_refuses_does_not_end_a_search(step: Step) -> None:
    every = of_strategies(["ddp", "zero3", "mics(2)"], small())

    def searched(refused: set[str]) -> Found:
        made = refusing(refused, step)
        return search(small(), machine(), jax.devices(), most=3, candidates=every, compile_one=made)

    found = searched({"zero3"})
    assert {prediction.candidate.name for prediction, _ in found.steps} == {"ddp", "mics(2)"}
    assert [line.partition(": ")[2] for line in found.refused] == ["XLA cannot compile zero3"]
    assert (found.counts.illegal, found.counts.compiled, found.counts.candidates) == (1, 2, 3)
    with pytest.raises(ValueError, match=r"^XLA cannot compile mics"):  # the config's own comes first
        searched({candidate.name for candidate in every})


@pytest.mark.parametrize(("quick_bytes", "flags"), [(1, ["Q U"]), (10**12, ["Q U", "U"])])
def test_a_quick_program_that_does_not_fit_is_compiled_again(
    quick_bytes: int, flags: list[str], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_step(**request: Any) -> Any:
        asked.append(request["xla_flags"])
        return replace(step.compiled, temporary_bytes=quick_bytes if "Q" in asked[-1] else 1)

    asked: list[str] = []
    monkeypatch.setattr(compiling, "QUICK", "Q")
    monkeypatch.setattr(compiling, "compile_step", compile_step)
    found = compiled_step(step.candidate, step.experiment, replace(machine(), xla_flags="U", is_quick=True))
    assert asked == flags and found.memory().fits


def test_a_search_looks_at_recorded_settings_by_their_time_to_the_loss(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of four programs are changes: those with the least estimated time to the loss, of those that reach it."""
    muon = {"compression.hop_two": "int4", "optimizer.name": "muon"}
    averages = {
        "local_sgd.inner_steps": "10",
        "local_sgd.outer_learning_rate": "1.0",
        "local_sgd.outer_momentum": "0.0",
    }
    ways = [(muon, 0.5), (averages, 1.2), ({"compression.hop_two": "int8"}, None), ({"compression.rank": "3"}, 0.1)]
    rows = [one_row(setting=setting, steps=steps) for setting, steps in ways]
    monkeypatch.setattr(losses, "rows", lambda: rows)
    made: list[Candidate] = []

    def compile_one(candidate: Candidate, *_: Any) -> Any:
        made.append(candidate)
        return Made(candidate, 1.0, 1e12, 1e9, step)  # nothing is slower

    here = machine(clusters.with_rate(clusters.EMULATED, 1e5))  # all is traffic, of which int4 leaves an eighth
    search(small(), here, jax.devices(), most=4, compile_one=compile_one)
    assert [candidate.change for candidate in made if changed(candidate)] == [muon, averages]
    made.clear()
    search(small(optimizer__name="lamb"), here, jax.devices(), most=4, compile_one=compile_one)
    assert muon not in [candidate.change for candidate in made]  # the record is beside dense runs of AdamW


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
    with pytest.raises(ValueError, match="its format is another one"):
        compiling.buffer_bytes("BufferAssignment:\n")


@pytest.mark.slow
@pytest.mark.skipif(not compiling.WHEELS.exists(), reason="XLA for GPUs is not installed: make .venv/h100/installed")
def test_the_program_before_machine_code_is_that_of_the_whole_compilation() -> None:
    """Without a dump there is nothing to read before the end."""
    gpu = machine(clusters.CLUSTERS["p5.48xlarge"], nodes=2)
    candidate = of_config(small())
    wide = make_experiment(candidate.applied(small()))
    request = gpu.request(candidate, wide.config) | {"target": "h100"}
    early, whole = (compiling.compile_step(**request | {"xla_flags": flags}) for flags in ("", "--xla_dump_to="))
    assert early.argument_bytes == whole.argument_bytes and early.temporary_bytes == whole.temporary_bytes
    device, network = gpu.cluster.compute(16), gpu.cluster.network()
    first, second = (replay(parse_program(step.text), step.shape, device, network) for step in (early, whole))
    assert replace(first, intervals=()) == replace(second, intervals=())
