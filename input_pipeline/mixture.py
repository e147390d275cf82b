"""Several text sources mixed by weight: a pure function of (seed, i) chooses the source of example `i`.

Blocks of B consecutive examples are shuffled separately. After b blocks component k has had `C_k(b)` examples. This is
its quota `q_k(b) = p_k b B`, rounded by the method of largest remainders, where `p_k` is its weight divided by the
total weight. Hence

- `C_k(b)` is `q_k(b)` rounded down or up, so that the proportion is exact to within one example after any number of
  blocks. The counts of all components add up to `b B`.
- With `p_k B >= 1`, `C_k(b + 1) >= floor(q_k(b) + 1) >= ceil(q_k(b)) >= C_k(b)`, so that no block has a negative count.
  (Smaller blocks could have one: the Alabama paradox of seats in a parliament.)

Nothing is counted from the start of the run, so a resumed run finds its position at once.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np

from input_pipeline import index
from input_pipeline.text import TextDataset

LEAST_BLOCK = 64  # examples; a power of two, so that steps often hold whole blocks
BLOCK_TAG = 1 << 63  # all other keys of `random_bits` begin with a smaller number


class Order:
    """Maps each example of a mixture to its component, and to its number in that component."""

    def __init__(self, weights: Sequence[Fraction], seed: int) -> None:
        unit = lcm(*(weight.denominator for weight in weights))
        self._parts = [int(weight * unit) for weight in weights]  # integers in the ratio of the weights
        self._total, self._seed = sum(self._parts), seed
        needed = -(-self._total // min(self._parts))
        self.block = max(LEAST_BLOCK, 1 << (needed - 1).bit_length())
        self._order = lru_cache(maxsize=4)(self._block_order)  # neighbouring steps read the same blocks

    def __call__(self, i: int) -> tuple[int, int]:
        """Returns (component, example of the component) of example `i`."""
        block, place = divmod(i, self.block)
        components, numbers = self._order(block)
        return int(components[place]), int(numbers[place])

    def counts(self, blocks: int) -> list[int]:
        """Returns the number of examples per component in the first `blocks` blocks."""
        quotas = [divmod(part * blocks * self.block, self._total) for part in self._parts]
        counts = [whole for whole, _ in quotas]
        by_remainder = sorted(range(len(quotas)), key=lambda k: -quotas[k][1])  # stable: ties go to the first component
        for k in by_remainder[: blocks * self.block - sum(counts)]:
            counts[k] += 1
        return counts

    def _block_order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns two int64 [B] arrays for a block: each example's component, and its number in that component."""
        first, end = np.array(self.counts(block)), np.array(self.counts(block + 1))
        places = np.argsort(index.random_bits((BLOCK_TAG + self._seed, block), (self.block,)), kind="stable")
        components, numbers = np.empty((2, self.block), np.int64)
        start = 0
        for k, count in enumerate(end - first):
            mine = np.sort(places[start : start + count])
            components[mine], numbers[mine] = k, np.arange(first[k], end[k])
            start += count
        return components, numbers


@dataclass(frozen=True, kw_only=True)
class MixedSource:
    """A component of a mixture: its name, its fraction of the examples, and its examples."""

    name: str
    share: float
    examples: TextDataset


class MixedDataset:
    """Examples `dataset[i]` for every i >= 0 from several text data sets with the same tokenizer and settings.

    The examples of a component come in the same order as in a run on that component alone. Validation uses `parts`, one
    component at a time.
    """

    def __init__(self, examples: Sequence[TextDataset], names: Sequence[str], weights: Sequence[Fraction]) -> None:
        first, total = examples[0], sum(weights)
        shares = [float(weight / total) for weight in weights]
        self.parts = tuple(
            MixedSource(name=n, share=s, examples=e) for n, s, e in zip(names, shares, examples, strict=True)
        )
        self.tokenizer, self.vocab_size, self.seed = first.tokenizer, first.vocab_size, first.seed
        self.row_arrays = first.row_arrays
        self.threads = max(part.examples.threads for part in self.parts)
        self.bytes_per_token = sum(part.share * part.examples.bytes_per_token for part in self.parts)
        self.filled = sum(part.share * part.examples.filled for part in self.parts)
        self.summary = "; ".join(filter(None, (part.examples.summary for part in self.parts)))
        self.skipped = [line for part in self.parts for line in part.examples.skipped]
        self._order = Order(weights, first.seed)
        settings = [[str(weight / total), one.fingerprint] for weight, one in zip(weights, examples, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps(["mixture", settings]).encode()).hexdigest()

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        component, number = self._order(int(i))
        return self.parts[component].examples[number]

    def epochs(self, num_examples: int) -> str:
        """Returns a line with each component's percentage and the number of times `num_examples` examples repeat it."""
        words = [
            f"{part.name} {part.share:.2%}, {part.share * num_examples / len(part.examples):.2f} epochs of "
            f"{len(part.examples)} rows"
            for part in self.parts
        ]
        return f"mixture: {'; '.join(words)}"
