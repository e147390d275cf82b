"""MiCS section 3: the cost formulas and the savings of the hierarchical gather, counted in compiled programs."""

from paper import published
from paper.records import Records, Step
from paper.tables import Row, Section, comparison, fixed

NODES, K, N, ACCUM = 8, 8, 64, 4  # of the compiled cluster: 8 nodes of 8 devices, four micro-steps
SPANNING = (16, 32, 64)  # groups of more than one node
of_m = fixed(4, " M")
times = fixed(3, " x")
percent = fixed(1, " %")


def section(records: Records) -> Section:
    """Returns the section."""
    return Section(
        title="MiCS section 3: what crosses the network",
        blocks=[
            f"{published.MICS}. M is the bytes of the model, n = {N} devices in {NODES} nodes of k = {K}, p the "
            f"devices of a partition group, s = {ACCUM} micro-steps a step. Ours are counted in the compiled programs "
            "of the quickstart's model: every collective, its bytes and how often it runs. *Flat* is one ring over "
            "the group, *hierarchical* gathers between nodes first. Hop one is the reduce-scatter of the gradients; "
            "it passes over the whole model once a micro-step, so that the formulas of the gather hold for it as "
            "they are.",
            comparison(_passes(records), "formula"),
            "The gather passes over the layers twice a micro-step (forward, and again to recompute them), but over the "
            "embedding and the head only once, which is why a micro-step of ZeRO-3 takes a little less than 3 M.",
            "**Saved between nodes by the hierarchical gather**, (1 - (p-k)/(p-1)); the paper prints the first and the "
            "last, the others are its formula.",
            comparison(_savings(records)),
            "**Two hops against an all-reduce in every micro-step.** The paper counts hop two as if each device "
            "all-reduced the whole model, 2M(n-p)/n; a device really holds the p-th part. Counted like the paper, "
            "with all bandwidths equal, ours stays above the paper's bound of "
            f"{published.ALTERNATIVE_OVER_TWO_HOP:.3f} (n and p without end), and is {_least(records):.3f} at least; "
            "counted as sent, two hops win by more.",
            comparison(_two_hop(records)),
        ],
    )


def _step(records: Records, strategy: str) -> Step:
    return records.step(strategy, nodes=NODES, accum=ACCUM)


def _passes(records: Records) -> list[Row]:
    rows = []
    for p in (8, *SPANNING):
        one = _step(records, f"mics({p})")
        whole_pass = one.sent("hop one") / ACCUM / one.model_bytes
        what = f"one pass, all that a device sends: (p-1)M/p, p = {p}"
        rows.append(_row(what, (p - 1) / p, whole_pass, f"mics({p}), hop one"))
    for p in SPANNING:
        flat = _step(records, f"mics({p}) flat")
        between = flat.link("hop one") / ACCUM / flat.model_bytes
        what = f"one pass between nodes, flat: (p-1)M/p, p = {p}"
        rows.append(_row(what, (p - 1) / p, between, f"mics({p}) flat, hop one, of a node"))
    for p in (8, *SPANNING):
        one = _step(records, f"mics({p})")
        between = one.link("hop one") / ACCUM / one.model_bytes
        what = f"one pass between nodes, hierarchical: (p-k)M/p, p = {p}"
        rows.append(_row(what, (p - K) / p, between, f"mics({p}), hop one, of a node"))
    zero3 = _step(records, "mics(64) flat")
    sent = zero3.sent("gather", "hop one") / ACCUM / zero3.model_bytes
    rows.append(_row("ZeRO-3, a micro-step: 3(n-1)M/n", 3 * (N - 1) / N, sent, "mics(64) flat, gathers and hop one"))
    for p in (8, 16, 32):
        one = _step(records, f"mics({p})")
        what = f"hop two, a step: 2(M/p)(R-1)/R with R = n/p, p = {p}"
        rows.append(_row(what, 2 * (N - p) / (N * p), one.sent("hop two") / one.model_bytes, f"mics({p}), hop two"))
    return rows


def _row(what: str, formula: float, ours: float, how: str) -> Row:
    return Row(what=what, published=formula, ours=ours, how=f"compiled, {how}", form=of_m)


def _savings(records: Records) -> list[Row]:
    rows = []
    for p in SPANNING:
        hierarchical, flat = _step(records, f"mics({p})"), _step(records, f"mics({p}) flat")
        formula = 100 * (1 - (p - K) / (p - 1))
        for name in ("gather", "hop one"):
            rows.append(
                Row(
                    what=f"p = {p}, {name}{'' if p in published.SAVING_PERCENT else ' (formula)'}",
                    published=published.SAVING_PERCENT.get(p, formula),
                    ours=100 * (1 - hierarchical.link(name) / flat.link(name)),
                    how=f"compiled, bytes of a node, mics({p}) beside mics({p}) flat",
                    form=percent,
                    points=True,
                )
            )
    return rows


def _two_hop(records: Records) -> list[Row]:
    rows = []
    for p in (8, 16, 32):
        two, off = _step(records, f"mics({p})"), _step(records, f"mics({p}) two-hop off")
        alternative, hop_one, hop_two = off.sent("hop one", "hop two"), two.sent("hop one"), two.sent("hop two")
        formula = 2 * ACCUM * (N - 1) / N / (ACCUM * (p - 1) / p + 2 * (N - p) / N)
        counted, sent = alternative / (hop_one + p * hop_two), alternative / (hop_one + hop_two)
        how = f"compiled, mics({p}) two-hop off / mics({p})"
        what = f"p = {p}, counted like the paper (formula)"
        rows.append(Row(what=what, published=formula, ours=counted, how=f"{how}, hop two times p", form=times))
        rows.append(Row(what=f"p = {p}, as sent", published=None, ours=sent, how=how, form=times))
    return rows


def _least(records: Records) -> float:
    """Returns the least ratio of those counted like the paper."""
    return min(row.ours for row in _two_hop(records) if row.ours is not None and row.published is not None)
