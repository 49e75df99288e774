"""Registers written under a running matrix product are found in machine code, and only those."""

import pytest

from maclaurin.programs.triton import INSTALLED

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

from maclaurin.programs.triton.compiled_code import (
    instructions,
    overwritten_operands,
    spills_in_loops,
    unset_operands,
)

LOOP = """
    /*0100*/ {first} ; /* 0x0 */
    /*0110*/ HMUL2.BF16_V2 R28, R12, R64.H0_H0 ; /* 0x0 */
    /*0120*/ WARPGROUP.ARRIVE ; /* 0x0 */
    /*0130*/ HGMMA.64x64x16.F32.BF16 R56, R28, gdesc[UR12].tnspB, R56, gsb0 ; /* 0x0 */
    /*0140*/ HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR12].tnspB, R56, gsb0 ; /* 0x0 */
    /*0150*/ WARPGROUP.DEPBAR.LE gsb0, 0x{left} ; /* 0x0 */
    /*0160*/ @!P0 BRA 0x100 ; /* 0x0 */
"""


@pytest.mark.parametrize(
    ("first", "left", "found"),
    [
        ("IADD3 R24, P5, R52, UR6, RZ", 1, True),  # the second product may run on, and reads R24 to R27
        ("IADD3 R24, P5, R52, UR6, RZ", 0, False),  # both are over
        ("IADD3 R28, P5, R52, UR6, RZ", 1, False),  # the first is over
        ("LDG.E.128 R20, desc[UR4][R2.64]", 1, False),  # R20 to R23
        ("LDS.128 R22, [R4]", 1, True),  # R22 to R25
        ("IMAD.WIDE R26, R47, 0x2, R44", 1, True),
        ("STS.64 [R11+UR32], R24", 1, False),  # reads
        ("LDGSTS.E.BYPASS.128 [R24], desc[UR4][R2.64]", 1, False),
    ],
)
def test_what_the_last_turn_still_reads_is_not_written(first, left, found):
    code = instructions(LOOP.format(first=first, left=left))
    assert (first in {text.strip() for text in overwritten_operands(code)}) is found


def test_spills_are_counted_where_products_are():
    code = instructions(LOOP.format(first="LDL R3, [R1+0x8]", left=0))
    assert spills_in_loops(code) == 1
    assert spills_in_loops(instructions("        /*0100*/   STL [R1], R3 ;   /* 0x0 */")) == 0


UNIFORM = """
    /*0100*/ ULDC.64 UR30, c[0x0][0x208] ; /* 0x0 */
    /*0110*/ {first} ; /* 0x0 */
    /*0120*/ LDG.E R92, desc[UR30][R42.64+0x18a0] ; /* 0x0 */
    /*0130*/ UMOV UR8, URZ ; /* 0x0 */
    /*0140*/ UMOV UR9, 0x40000040 ; /* 0x0 */
    /*0150*/ UIADD3.64 UR10, UR8, 0x2, URZ ; /* 0x0 */
    /*0160*/ HGMMA.64x32x16.F32.BF16 R88, gdesc[UR8], R88 ; /* 0x0 */
    /*0170*/ HGMMA.64x32x16.F32.BF16 R88, R60, gdesc[UR{products}].tnspB, R88, gsb0 ; /* 0x0 */
    /*0180*/ STS.U16 [R114+UR9+0x3000], R81 ; /* 0x0 */
"""


@pytest.mark.parametrize(
    ("first", "products", "found"),
    [
        ("UMOV UR26, URZ", 8, []),
        ("UIADD3 UR26, UP1, UR11, 0x2, URZ", 8, ["UIADD3 UR26, UP1, UR11, 0x2, URZ"]),  # ptxas of CUDA 12.8
        ("UMOV UR26, UR31", 8, []),  # the second of a pair
        ("UMOV UR26, URZ", 24, ["HGMMA.64x32x16.F32.BF16 R88, R60, gdesc[UR24].tnspB, R88, gsb0"]),  # UR27
    ],
)
def test_uniform_registers_are_set_before_they_are_read(first, products, found):
    code = instructions(UNIFORM.format(first=first, products=products))
    assert [text.strip() for text in unset_operands(code)] == found
