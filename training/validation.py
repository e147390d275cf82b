"""Measures a model on validation data."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from configs.schema import Config
from input_pipeline import Dataset, ImageDataset, MixedDataset, TextDataset
from input_pipeline.batches import batch_at
from runtime.files.run_directory import METRICS
from runtime.phases import Phase
from training.experiment import Experiment
from training.log import announced, say
from training.metrics.run_files import read_run

LOSS = "validation_loss"


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one validation."""

    loss: float  # mean nats per predicted token or per image, over the same rows every time
    bits_per_byte: float | None = None  # of causal models of text
    accuracy: float | None = None  # of classifiers: share of the images whose class is the most likely one
    dropped_share: float | None = None  # of models with experts: share of the tokens' choices that found no room
    by_source: Mapping[str, float] = field(default_factory=dict)  # the losses on a mixture's sources, and on named sets

    def scalars(self) -> dict[str, float]:
        """Returns the metrics by their keys in `metrics.jsonl`."""
        keys = ("loss", "bits_per_byte", "accuracy", "dropped_share")
        found = {f"validation_{key}": value for key in keys if (value := getattr(self, key)) is not None}
        return found | {f"validation_loss/{name}": loss for name, loss in self.by_source.items()}

    @property
    def message(self) -> str:
        """The message for the user."""
        if self.accuracy is not None:
            said = f"nats per image, accuracy {self.accuracy:.2%}"
        elif self.bits_per_byte is None:
            said = "nats per masked token"
        else:
            dropped = "" if self.dropped_share is None else f", {self.dropped_share:.1%} of the choices dropped"
            said = f"nats per token, {self.bits_per_byte:.4f} bits per byte{dropped}"
        sources = ", ".join(f"{name} {loss:.4f}" for name, loss in self.by_source.items())
        return f"validation loss {self.loss:.4f} {said}{sources and f'; {sources}'}"


class Validator:
    """Measures a model on the first rows of validation sets by name, which are read anew each time.

    The first set is the main one, and the losses of named sets are added to its result. For a mixture these are the
    first rows of every source; the loss is the mean of the sources' losses by their shares.
    """

    def __init__(
        self,
        experiment: Experiment,
        sets: Mapping[str, Dataset],
        num_batches: int,
        enter: Callable[[Phase], object] = lambda phase: None,
    ) -> None:
        """`enter` gets the phase of the main thread, for each batch anew."""
        self._experiment, self._sets, self._num_batches, self._enter = experiment, sets, num_batches, enter
        self._evaluate: jax.stages.Compiled | None = None

    def compile(self, say: Callable[[str], None] = say) -> jax.stages.Compiled:
        """Compiles the program of a call; otherwise the first call compiles it."""
        if self._evaluate is None:
            self._enter(Phase.COMPILING)
            with announced("compiling the validation", say):
                self._evaluate = self._experiment.compile_eval_step()
        return self._evaluate

    def __call__(self, params: object, say: Callable[[str], None] = say) -> Validation:
        """Returns the result for `params`, sharded like the training state's."""
        results = {name: self._measured(params, data, say) for name, data in self._sets.items()}
        main = next(iter(results.values()))
        losses = {name: result.loss for name, result in results.items() if name}
        return replace(main, by_source={**main.by_source, **losses})

    def _measured(self, params: object, data: Dataset, say: Callable[[str], None]) -> Validation:
        """Returns the result for one set."""
        ex, evaluate = self._experiment, self.compile(say)
        parts = {part.name: part for part in data.parts} if isinstance(data, MixedDataset) else {}
        sources = [part.examples for part in parts.values()] if isinstance(data, MixedDataset) else [data]
        shares = {name: part.share for name, part in parts.items()} or {"": 1.0}
        sums = [self._sums(evaluate, params, source) for source in sources]
        means = dict(zip(shares, map(_means, sums), strict=True))
        loss = sum(share * means[name]["loss"] for name, share in shares.items())
        drops = all("dropped_share" in mean for mean in means.values())
        bits_per_byte = None
        if not isinstance(data, ImageDataset) and ex.config.data.objective == "causal":
            bits_per_byte = loss / math.log(2) / data.bytes_per_token
        return Validation(
            loss=loss,
            bits_per_byte=bits_per_byte,
            accuracy=means[""].get("correct") if isinstance(data, ImageDataset) else None,
            dropped_share=sum(shares[name] * means[name]["dropped_share"] for name in shares) if drops else None,
            by_source={name: mean["loss"] for name, mean in means.items() if name},
        )

    def _sums(
        self, evaluate: jax.stages.Compiled, params: object, source: TextDataset | ImageDataset
    ) -> list[dict[str, object]]:
        """Returns the sums of each batch, of which one at a time is on the devices."""
        ex, found = self._experiment, []
        size, threads = ex.batches.global_size, max(1, min(ex.config.data.prefetch, source.threads))
        end = min(len(source), self._num_batches * size)  # rows beyond the split are padding, not the next epoch's
        for step in range(-(-end // size)):
            self._enter(Phase.READING)
            rows = batch_at(source, step, global_size=size, rows=ex.batches.local_rows, end=end, threads=threads)
            self._enter(Phase.VALIDATING)
            found.append(jax.device_get(ex.block(evaluate(params, ex.batches.to_devices(rows)))))
        return found


def _means(sums: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the weighted means over some batches, by name."""
    weight = sum(float(batch["weight"]) for batch in sums)
    return {name: sum(float(batch[name]) for batch in sums) / weight for name in sums[0]}


class EarlyStopping:
    """Whether the validation loss has not fallen for `patience` validations; 0: it never ends the run.

    A hook after `Validate`. It follows from the validations so far, so that a resumed run stops at the same step.
    """

    def __init__(self, patience: int, losses: Sequence[tuple[int, float]]) -> None:
        """`losses` are the steps and losses of the validations before this attempt."""
        self._patience, self._losses = patience, [*losses]

    def __call__(self, step: int, state: object, metrics: Mapping[str, Any]) -> None:
        if LOSS in metrics:
            self._losses.append((step, float(metrics[LOSS])))

    @property
    def message(self) -> str:
        """A line that says why the run ends now; "" if it continues."""
        if not self._patience or not self._losses:
            return ""
        losses = [math.inf if math.isnan(loss) else loss for _, loss in self._losses]
        number = losses.index(loss := min(losses))
        if (waited := len(losses) - 1 - number) < self._patience:
            return ""
        step = self._losses[number][0]
        return (
            f"stopped early: {waited} validations without a lower loss than {loss:.4f} of step {step} (eval.patience)"
        )


def past_losses(config: Config, workdir: Path, step: int) -> list[tuple[int, float]]:
    """Returns step and loss of each validation up to `step` that the run in `workdir` has logged.

    Validations with another main set than the config's are left out. Nothing is read if no validation ends the run.
    """
    main = next(iter(config.validation_data()), "")
    if not config.eval.patience or not (workdir / METRICS).exists():
        return []

    def is_of_main(row: Mapping[str, Any]) -> bool:
        names = [key for key in row if key.startswith(f"{LOSS}/") and row[key] == row[LOSS]]
        return not names or f"{LOSS}/{main}" in names

    rows = read_run(workdir).rows
    return [(row["step"], row[LOSS]) for row in rows if row["step"] <= step and LOSS in row and is_of_main(row)]
