"""Copies to shared memory that a running matrix product reads are found in compiled loops, and only those."""

import pytest

from maclaurin.programs.triton.buffer_reuse import refilled_too_early

#: a pipelined loop with two products per iteration: a copy goes to slot {ahead} beyond the one that is read
LOOP = """
    %c-1_i32 = arith.constant -1 : i32 loc(#loc1)
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %c1_i32 = arith.constant 1 : i32 loc(#loc1)
    %slots = arith.constant {slots} : i32 loc(#loc1)
    %first_write = arith.constant {first_write} : i32 loc(#loc1)
    %x_36 = ttg.local_alloc : () -> !ttg.memdesc<{slots}x32x128xbf16> loc(#loc2)
    %z:3 = scf.for %n = %9 to %12 step %7 iter_args(%a.0 = %cst, %r = %c-1_i32, %w = %first_write) -> (i32) {{
      %1 = arith.addi %r, %c1_i32 : i32 loc(#loc3)
      %2 = arith.cmpi sge, %1, %slots : i32 loc(#loc3)
      %3 = arith.select %2, %c0_i32, %1 : i32 loc(#loc3)
      %x = ttg.memdesc_index %x_36[%3] : !ttg.memdesc loc(#loc3)
      %xt = ttg.memdesc_trans %x {{order = array<i32: 1, 0>}} : !ttg.memdesc
      %first = ttng.warp_group_dot %xt, %x, %a.0 {{isAsync = true}} : !ttg.memdesc loc(#loc3)
      %second = ttng.warp_group_dot %q, %x, %first {{isAsync = true}} : tensor loc(#loc3)
      %done:2 = ttng.warp_group_dot_wait %first, %second {{pendings = {pending} : i32}} : tensor loc(#loc3)
      %4 = arith.addi %w, %c1_i32 : i32 loc(#loc3)
      %5 = arith.cmpi sge, %4, %slots : i32 loc(#loc3)
      %6 = arith.select %5, %c0_i32, %4 : i32 loc(#loc3)
      %to = ttg.memdesc_index %x_36[%6] : !ttg.memdesc loc(#loc3)
      %copy = ttg.async_copy_global_to_local %at, %to mask %inside : tensor -> <32x128xbf16> loc(#loc3)
      scf.yield %done#0, %3, %6 : tensor<128xf32>, i32, i32 loc(#loc3)
    }} loc(#loc3)
"""


@pytest.mark.parametrize(
    ("slots", "ahead", "pending", "found"),
    [
        (1, 1, 2, True),  # the only slot is refilled while both products run
        (1, 1, 1, True),  # … and while one does
        (1, 1, 0, False),  # after both
        (2, 2, 2, True),  # two tiles ahead in two slots: the one that is read
        (2, 1, 1, False),  # the other one, whose product is over
        (2, 1, 3, True),  # the other one, which the second product of the last iteration still reads
        (3, 2, 2, False),
        (3, 2, 4, True),  # two tiles ahead of this iteration is one behind
    ],
)
def test_a_slot_is_refilled_only_after_its_products(slots, ahead, pending, found):
    code = LOOP.format(slots=slots, first_write=(ahead - 1) % slots, pending=pending)
    assert [line.split(" = ")[0] for line in refilled_too_early(code)] == (["%copy"] if found else [])


def test_other_loops_may_use_the_same_names():
    fine = LOOP.format(slots=3, first_write=1, pending=2)
    swapped = fine.replace("%to", "%there").replace("%x ", "%to ").replace("%x,", "%to,")
    assert refilled_too_early(fine + swapped.replace("%there", "%x")) == []


def test_a_store_into_a_new_tile_of_every_iteration_waits_too():
    code = LOOP.format(slots=1, first_write=0, pending=2).replace(
        "%copy = ttg.async_copy_global_to_local %at, %to mask %inside", "ttg.local_store %tile, %to"
    )
    assert len(refilled_too_early(code)) == 1
