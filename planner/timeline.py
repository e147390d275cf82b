"""What a replayed step took: compute, each kind of traffic on each level of the network, and bars for a picture."""

from dataclasses import dataclass

# what is printed for the labels of a step's collectives
NAMES = {"gather": "gathers", "hop_one": "hop one", "hop_two": "hop two"}
NAMES |= {"gradient_scope": "gradient scope", "orthogonalise": "Muon's matrices", "parameter_scope": "parameters"}
NAMES["experts"] = "tokens to experts"


REPEATED = "repeated"  # the lane of iterations that stand for several, named `x 8`


@dataclass(frozen=True)
class Interval:
    """A bar of the picture, in seconds of a step from which the repeated iterations of its loops are cut out."""

    lane: str  # compute, stream, intra, inter, or REPEATED
    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Use:
    """What the collectives of one kind take on one level, in a step."""

    times: int = 0
    busy_s: float = 0.0  # of the link
    exposed_s: float = 0.0  # that the compute stream waits for it

    def __add__(self, other: "Use") -> "Use":
        return Use(self.times + other.times, self.busy_s + other.busy_s, self.exposed_s + other.exposed_s)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step: `step_s` is `compute_s` and all that is exposed.

    A collective that uses both levels is counted on the one that takes longer, "inter" or "intra". Kernels on other
    streams are ("kernels", "stream"): busy beside the compute, exposed where that waits for them.
    """

    step_s: float
    compute_s: float
    uses: dict[tuple[str, str], Use]  # by label (the kind, where the program has lost the label) and level
    intervals: tuple[Interval, ...]
    peak_bytes: int | None = None  # of one device, as the compiler says

    def use(self, *names: str, level: str | None = None) -> Use:
        """Returns the sum over these names, or over all if none is given, on one level or both."""
        found = [u for (name, at), u in self.uses.items() if name in (names or (name,)) and level in (None, at)]
        return sum(found, Use())
