"""Operations and bytes of single kernels: what a fusion reads and writes, and the products inside it."""

from typing import Any

from support.tables import every_row

from planner.kernels import moved_bytes, products
from planner.kernels import products as of_kernel
from sharding.hlo_program import Program, parse_program


def kernel(line: str, more: str = "") -> Program:
    """Returns a module whose entry has parameters %stack, %row and %i, and the kernel %k."""
    return parse_program(f"""HloModule jit_step, is_scheduled=true

{more}
ENTRY %main (stack: f32[10,100], row: f32[1,100], i: s32[]) -> f32[] {{
  %stack = f32[10,100]{{1,0}} parameter(0)
  %row = f32[1,100]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %q = bf16[1,64,8,16]{{3,2,1,0}} parameter(3)
  ROOT %k = {line}
}}
""")


def moved(line: str, more: str = "") -> float:
    program = kernel(line, more)
    return moved_bytes(program.entry.by_name["k"], program.entry, program)


def flops(line: str, more: str = "") -> list[tuple[str, float]]:
    program = kernel(line, more)
    return [(product.dtype, product.flops) for product in products(program.entry.by_name["k"], program.entry, program)]


def fused(*lines: str) -> str:
    """Returns a computation %f of the parameters %a (a stack), %b (a row) and %c (an index)."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""%f (a: f32[10,100], b: f32[1,100], c: s32[]) -> f32[] {{
  %a = f32[10,100]{{1,0}} parameter(0)
  %b = f32[1,100]{{1,0}} parameter(1)
  %c = s32[] parameter(2)
  %zero = s32[] constant(0)
{body}
}}
"""


ROW, STACK, INDEX = 400, 4000, 4
FUSION = "fusion(%stack, %row, %i), kind=kLoop, calls=%f"
SLICE = "%s = f32[1,100] dynamic-slice(%a, %c, %zero), dynamic_slice_sizes={1,100}"


@every_row(
    ("lines", "expected"),
    [
        (("ROOT %n = f32[10,100] negate(%a)",), STACK + STACK),
        ((SLICE, "ROOT %n = f32[1,100] add(%s, %b)"), ROW + ROW + INDEX + ROW),
        (("%v = f32[1000] bitcast(%a)", "ROOT %s = f32[100] slice(%v), slice={[0:100]}"), ROW + ROW),
        (("ROOT %u = f32[10,100] dynamic-update-slice(%a, %b, %c, %zero)",), ROW + INDEX + ROW),
        (  # a layer's gradient is added into the stack of gradients
            (
                SLICE,
                "%n = f32[1,100] add(%s, %b)",
                "%u = f32[10,100] dynamic-update-slice(%a, %n, %c, %zero)",
                "ROOT %o = f32[1000] bitcast(%u)",
            ),
            ROW + ROW + INDEX + ROW,
        ),
        (
            (SLICE, "%m = f32[10,100] negate(%a)", "ROOT %t = (f32[1,100], f32[10,100]) tuple(%s, %m)"),
            9 * ROW + STACK + 4 + 2 * ROW,
        ),
        (("ROOT %z = f32[10,100] broadcast(%zero), dimensions={}",), STACK),
        (("ROOT %d = f32[10,100] dynamic-update-slice(%a, %a, %c, %zero)",), STACK + INDEX + STACK),
        (("%g = f32[2,100] gather(%a, %c)", "ROOT %n = f32[2,100] negate(%g)"), 2 * ROW + INDEX + 2 * ROW),
    ],
)
def test_a_fusion_moves_what_it_uses(lines: Any, expected: Any) -> None:
    assert moved(f"f32[] {FUSION}", fused(*lines)) == expected


@every_row(
    ("line", "expected"),
    [
        ("f32[10,100] copy(%stack)", 2 * STACK),
        ("f32[10,100] dynamic-update-slice(%stack, %row, %i, %i)", 2 * ROW),
        ("f32[1,100] dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,100}", 2 * ROW),
        ("(f32[10,100], f32[10,100], u32[]) copy-start(%stack)", 2 * STACK),
        ('(f32[10,10], s8[4096]) custom-call(%stack, %row), custom_call_target="__cublas$gemm"', STACK + 2 * ROW),
    ],
)
def test_a_kernel_alone_moves_its_operands_and_results(line: str, expected: Any) -> None:
    assert moved(line) == expected


CONVOLUTION = """HloModule jit_step, is_scheduled=true

ENTRY %main (image: f32[8,16,14,14], filter: f32[32,16,3,3], outputs: f32[8,32,7,7]) -> f32[] {
  %image = f32[8,16,14,14]{3,2,1,0} parameter(0)
  %filter = f32[32,16,3,3]{3,2,1,0} parameter(1)
  %outputs = f32[8,32,7,7]{3,2,1,0} parameter(2)
  ROOT %k = CALL
}
"""
LIBRARY = "custom-call(%stack, %stack), custom_call_target="
GEMM = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["%d"]}}}'
FLASH = 'custom-call(%%q, %%q), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "%s", num_stages = 2}'
ATTENTION = (
    'backend_config={"cudnn_fmha_backend_config":{"mask_type":"%s","intermediate_tensor_shape":'
    '{"element_type":"BF16","dimensions":["1","2","10","10"],"is_dynamic_dimension":[false]}}}'
)


@every_row(
    ("line", "expected"),
    [
        ("f32[10,10] dot(%stack, %stack), lhs_contracting_dims={1}, rhs_contracting_dims={1}", 2 * 10 * 10 * 100),
        (f'(f32[10,10], s8[1]) {LIBRARY}"__cublas$gemm", {GEMM % 1}', 20_000),
        (f'f32[100,100] {LIBRARY}"__cublas$lt$matmul", {GEMM % 0}', 200_000),
        (f'f32[10,100] {LIBRARY}"__cudnn$fmhaSoftmax", {ATTENTION % "NO_MASK"}', 4 * 200 * 100),
        (f'f32[10,100] {LIBRARY}"__cudnn$fmhaSoftmaxBackward", {ATTENTION % "CAUSAL"}', 5 * 200 * 100),
        (f"f32[10,100] {FLASH % 'flash_forward'}", 2 * 2 * 8 * 64 * 64 * 16),
        (f"f32[10,100] {FLASH % 'flash_queries_causal'}", 2 * 2 * 8 * 64 * 64 * 16 / 2),
        (f"f32[10,100] {FLASH % 'flash_keys_causal'}", 3 * 2 * 8 * 64 * 64 * 16 / 2),
        (f"f32[10,100] {FLASH.replace('%%q, %%q', '%%row, %%stack, %%stack') % 'grouped_rows'}", 2 * 10 * 100 * 100),
        ("f32[10,1] convolution(%stack, %row), dim_labels=bf_oi->bf", 2 * 10 * 100),
        ('f32[10,100] custom-call(%stack), custom_call_target="Sharding"', 0),
    ],
)
def test_products_count_a_multiplication_and_an_addition_a_term(line: str, expected: Any) -> None:
    assert sum(count for _, count in flops(line)) == expected


@every_row(
    ("result", "operands", "direction"),
    [
        ("f32[8,32,7,7]", "%image, %filter", "Forward"),
        ("f32[8,16,14,14]", "%outputs, %filter", "BackwardInput"),
        ("f32[32,16,3,3]", "%image, %outputs", "BackwardFilter"),
    ],
)
def test_a_strided_convolution_costs_the_same_in_all_directions(result: str, operands: str, direction: str) -> None:
    """Each of the 8 x 7 x 7 places of 32 outputs is a sum over 3 x 3 places of 16 inputs."""
    call = f'custom-call({operands}), dim_labels=bf01_oi01->bf01, custom_call_target="__cudnn$conv{direction}"'
    program = parse_program(CONVOLUTION.replace("CALL", f"({result}, u8[0]) {call}"))
    (found,) = products(program.entry.by_name["k"], program.entry, program)
    assert found.flops == 2 * (8 * 7 * 7) * 32 * (3 * 3 * 16)


@every_row(
    ("image", "weights", "result", "how", "terms"),
    [
        # [8, 16] times [16, 2, 32], and 6 products of [8, 16] and [16, 32], as XLA for TPUs writes them
        ("8,16,1", "16,2,32", "8,2,32", "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_i0o->b0f", 8 * 2 * 32),
        ("6,8,16", "6,16,32", "6,8,32", "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf", 6 * 8 * 32),
        # 14 windows of 3 places, of which the first and the last have 2
        ("8,16,14", "32,16,3", "8,32,14", "window={size=3 pad=1_1}, dim_labels=bf0_oi0->bf0", 8 * 32 * (14 * 3 - 2)),
        # 7 windows of 3 places with stride 2, of which the last has 2, and the transpose of this convolution
        ("8,16,14", "32,16,3", "8,32,7", "window={size=3 stride=2 pad=0_1}, dim_labels=bf0_oi0->bf0", 8 * 32 * 20),
        ("8,16,7", "32,16,3", "8,32,14", "window={size=3 pad=2_1 lhs_dilate=2}, dim_labels=bf0_oi0->bf0", 8 * 32 * 20),
    ],
)
def test_padding_of_a_convolution_costs_nothing(image: str, weights: str, result: str, how: str, terms: int) -> None:
    """Each term is a sum over 16 inputs."""
    text = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (image: f32[{image}], weights: f32[{weights}]) -> f32[{result}] {{
  %image = f32[{image}] parameter(0)
  %weights = f32[{weights}] parameter(1)
  ROOT %k = f32[{result}] convolution(%image, %weights), {how}
}}
"""
    program = parse_program(text)
    (found,) = products(program.entry.by_name["k"], program.entry, program)
    assert found.flops == 2 * 16 * terms


def test_products_are_found_inside_fusions() -> None:
    dot = "ROOT %d = f32[10,10] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}"
    assert flops(f"f32[10,10] {FUSION}", fused(dot)) == [("f32", 20_000)]


@every_row(
    ("name", "masked", "fused", "products"),
    [
        ("splash_mha_fwd_residuals", True, False, 2),
        ("splash_mha_fwd_residuals", False, False, 2),
        ("splash_mqa_dq_no_residuals", True, False, 3),
        ("splash_mha_dkv_no_residuals", True, False, 4),
        ("splash_mha_dkv_no_residuals", True, True, 5),
    ],
)
def test_splash_kernels_count_the_pairs_that_a_mask_leaves(name: str, masked: bool, fused: bool, products: int) -> None:
    """4 heads of 8, 16 positions; a causal mask leaves half. A kernel of both gradients has one more product."""
    operands = f"{'%blocks, %blocks, ' * masked}%heads, %heads, %heads, %sums"
    metadata = f'"x":"{{\\"use_fused_bwd_kernel\\": {str(fused).lower()}}}"'
    text = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (heads: bf16[4,16,8]) -> bf16[4,16,8] {{
  %heads = bf16[4,16,8] parameter(0)
  %blocks = s8[1,2,2] parameter(1)
  %sums = f32[4,16] parameter(2)
  ROOT %{name}.7 = bf16[4,16,8] custom-call({operands}), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
{metadata}
}}}}
}}
"""
    program = parse_program(text)
    (found,) = of_kernel(program.entry.by_name[f"{name}.7"], program.entry, program)
    assert found.flops == 2 * products * 4 * 16 * 16 * 8 / (2 if masked else 1)
    assert (found.dtype, found.part) == ("bf16", "forward" if "fwd" in name else "backward")
