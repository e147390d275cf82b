"""The figures of plans: each has a source, and feeds what it says it does."""

from dataclasses import replace

import pytest

from planner import clusters, rates
from planner.rates import MissingRateError, Rates

ROWS = rates.rows()
FEEDS_ALL = ("GPU", "GPU nodes", "NCCL")


def test_without_a_figure_only_what_it_feeds_changes(subtests: pytest.Subtests) -> None:
    """A cluster that needs it is not offered, or has no price; all others are as before."""
    for row in ROWS:
        with subtests.test(row=row):
            left = clusters.all_clusters(Rates(other for other in ROWS if other is not row))
            changed = {name for name, cluster in clusters.CLUSTERS.items() if left.get(name) != cluster}
            gpus = {name: clusters.GPUS[gpu][0] for name, gpu in clusters.NODES.items()}
            fed = {name for name, names in gpus.items() if row.of in (name, *names, *FEEDS_ALL)}
            if row.of in ("H100", "A100"):  # of what H200 and A100-80GB have of their own the others' is not used
                own = {other.of for other in ROWS if other.figure == row.figure}
                fed = {name for name in fed if next(of for of in gpus[name] if of in own) == row.of}
            if row.of in ("CPU", "GLOO"):
                fed = {"emulated"}
            if row.of.startswith("fsdp on "):  # another system's
                fed = set()
            assert changed == fed
            is_price = row.figure in ("on demand", "spot") or row.figure.startswith("attention")
            assert (changed <= left.keys()) == (is_price or not fed)


def test_another_system_has_its_own_attention_and_hides_otherwise() -> None:
    ours = clusters.CLUSTERS["p5.48xlarge"]
    theirs = clusters.with_system(ours, "fsdp")
    assert theirs.device.attention == {"forward": 0.181, "backward": 0.181} != ours.device.attention
    assert replace(theirs, device=ours.device, hides=ours.hides) == ours
    assert [clusters.with_system(ours, system).hides for system in clusters.SYSTEMS] == ["schedule", "all", "nothing"]
    assert clusters.with_system(clusters.EMULATED, "ours") == clusters.EMULATED


def test_a_row_without_source_or_number_is_refused(subtests: pytest.Subtests) -> None:
    for line, message in [
        ("H100,products,0.5,share,,2024-01", "'products' of H100 has no source or date"),
        ("H100,products,half,share,somewhere,2024-01", "could not convert string to float: 'half'"),
    ]:
        with subtests.test(line=line, message=message), pytest.raises(ValueError, match=message):
            rates.read(f"of,figure,value,unit,source,date\n{line}")


def test_a_figure_that_is_missing_is_named() -> None:
    with pytest.raises(MissingRateError, match="rates.csv has no 'links' of B200 or GPU: add a row, with its source"):
        Rates(ROWS)("links", "B200", "GPU")
