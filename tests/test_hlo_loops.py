"""Trip counts of loops, in the forms in which XLA writes the counter, its step and its limit."""

import pytest

from sharding.hlo_program import Site, parse_program, trip_count

KNOWN = 'backend_config={"known_trip_count":{"n":"%s"},"known_init_step":{"init":"1","step":"2"}}'


def count(text: str, loop: str = "w") -> int:
    program = parse_program(text)
    entry = program.entry
    return trip_count(entry.by_name[loop], Site(computation=entry), program)


def program(
    *,
    start: str = "%start = s32[] constant(0)",
    step: str = "%one = s32[] constant(1)\n  %next = s32[] add(%i, %one)",
    limit: str = "%limit = s32[] constant(7)",
    test: str = "ROOT %go = pred[] compare(%j, %limit), direction=LT",
    kept: str = "%n",
    more: str = "",
    attributes: str = "",
) -> str:
    """Returns a module with a loop %w whose tuple is (an array, the counter, a number %n that the loop may read)."""
    return f"""HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[8]{{0}})->f32[8]{{0}}}}

{more}
%body (b: (f32[8], s32[], s32[])) -> (f32[8], s32[], s32[]) {{
  %b = (f32[8]{{0}}, s32[], s32[]) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %n = s32[] get-tuple-element(%b), index=2
  {step}
  ROOT %r = (f32[8]{{0}}, s32[], s32[]) tuple(%x, %next, {kept})
}}

%cond (c: (f32[8], s32[], s32[])) -> pred[] {{
  %c = (f32[8]{{0}}, s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=1, metadata={{op_name="jit(step)/while/cond, x=(1{{"}}
  {limit}
  {test}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  {start}
  %thirty = s32[] constant(30)
  %t = (f32[8]{{0}}, s32[], /*index=2*/s32[]) tuple(%p, %start, %thirty)
  %w = (f32[8]{{0}}, s32[], s32[]) while(%t), condition=%cond, body=%body{attributes}
  ROOT %out = f32[8]{{0}} get-tuple-element(%w), index=0
}}
"""


PASSED = "%limit = s32[] get-tuple-element(%c), index=2"
FUSED_TEST = """%fused_compare (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %constant_576_1 = s32[] constant(7)
  ROOT %compare.6.1 = pred[] compare(%a, %constant_576_1), direction=LT
}
"""
FUSED_STEP = """%fused_add (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%a, %two)
}
"""
FUSED = "ROOT %f = pred[] fusion(%j), kind=kLoop, calls=%fused_compare"
BY_TWO = "%next = s32[] fusion(%i), kind=kLoop, calls=%fused_add"


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ({}, 7),
        ({"attributes": ", " + KNOWN % 63}, 63),
        ({"start": "%zero = s32[] constant(3)\n  %start = s32[] copy(%zero)"}, 4),
        ({"start": "%start = s32[] constant(-2)"}, 9),
        ({"start": "%start = s32[] constant(7)"}, 0),
        ({"limit": "", "test": FUSED, "more": FUSED_TEST}, 7),
        ({"limit": "", "test": FUSED, "more": FUSED_TEST + "\n" + FUSED_STEP, "step": BY_TWO}, 4),
        ({"step": BY_TWO, "more": FUSED_STEP, "start": "%start = s32[] constant(1)"}, 3),
        ({"limit": PASSED}, 30),
        ({"test": "ROOT %go = pred[] compare(%j, %limit), direction=LE"}, 8),
        ({"test": "ROOT %go = pred[] compare(%limit, %j), direction=GT"}, 7),
        (
            {
                "start": "%start = s32[] constant(10)",
                "step": "%minus = s32[] constant(-1)\n  %next = s32[] add(%i, %minus)",
                "test": "ROOT %go = pred[] compare(%j, %limit), direction=GE",
            },
            4,
        ),
        ({"limit": "%limit = s32[] constant(1000000)"}, 10**6),
    ],
)
def test_trip_counts(changes: dict[str, str], trips: int) -> None:
    assert count(program(**changes)) == trips


@pytest.mark.parametrize(
    "changes",
    [
        {"test": "ROOT %go = pred[] compare(%j, %limit), direction=NE", "start": "%start = s32[] constant(8)"},
        {"start": "%start = s32[] custom-call(%p)"},
        {"step": "%next = s32[] multiply(%i, %i)", "start": "%start = s32[] constant(2)"},
        {"step": "%next = s32[] add(%i, %n)", "limit": PASSED, "kept": "%i"},
        {"test": "%f = f32[] convert(%j)\n  ROOT %go = pred[] is-finite(%f)"},
    ],
)
def test_a_loop_that_cannot_be_counted_is_named(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^%w = while\(t\) has no trip count that can be read: "):
        count(program(**changes))


OUTER = """%outer_body (b: (s32[], s32[])) -> (s32[], s32[]) {
  %b = (s32[], s32[]) parameter(0)
  %o = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %p = f32[8]{0} constant({...})
  %start = s32[] constant(5)
  %t = (f32[8]{0}, s32[], s32[]) tuple(%p, %start, %n)
  %w = (f32[8]{0}, s32[], s32[]) while(%t), condition=%cond, body=%body
  %one = s32[] constant(1)
  %next = s32[] add(%o, %one)
  ROOT %r = (s32[], s32[]) tuple(%next, %n)
}
"""


def test_a_limit_may_come_through_the_loop_around() -> None:
    outside = "%v = (s32[], s32[]) while(%u), condition=%cond, body=%outer_body, " + KNOWN % 3
    text = program(
        limit=PASSED, more=OUTER, start=f"%start = s32[] constant(0)\n  %u = (s32[], s32[]) tuple()\n  {outside}"
    )
    text = text.replace(
        "%u = (s32[], s32[]) tuple()", "%n = s32[] constant(12)\n  %u = (s32[], s32[]) tuple(%start, %n)"
    )
    parsed = parse_program(text)
    around = Site(computation=parsed.entry)
    body = parsed.computations["outer_body"]
    inside = Site(computation=body, caller=parsed.entry.by_name["v"], outer=around)
    assert trip_count(body.by_name["w"], inside, parsed) == 12 - 5
    with pytest.raises(ValueError, match="no trip count"):
        trip_count(body.by_name["w"], Site(computation=body), parsed)  # nobody says what %n is
