"""Packed sequences on a GPU: nothing waits for their lengths."""

import pytest
import torch

import maclaurin
from maclaurin.programs.plan_cache import forget_plans
from maclaurin.testing import Shape, random_tensors

pytestmark = pytest.mark.gpu

SPECS = ["taylor(2)/sum", "taylor(4)*in/sum", "poly(1,0.5,0.25)/len*out", "taylor(2)/l2", "sigmoid(-1)"]
SPECS += ["taylor(2,about=mean)/sum", "hermite(2)/len"]
SPECS += ["exp/sum", "exp/l2", "exp/len*out", "exp(clamp=5)/len", "poly(0)+window(64,sinks=1)/sum"]


@pytest.fixture
def waiting_is_an_error():
    """To be switched on when everything is compiled."""
    known = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(known)


@pytest.mark.parametrize("max_seqlen", [None, 700])
@pytest.mark.parametrize("notation", SPECS)
def test_nothing_waits_for_the_lengths(notation, max_seqlen, waiting_is_an_error):
    shape = Shape(batch=1, tokens=1000, kv_heads=2, group=2, d=64, e=64)
    case = random_tensors(maclaurin.parse(notation), shape, 0, torch.bfloat16, device="cuda").with_gradients()
    cuts = torch.tensor([0, 1, 1, 300, 1000], device="cuda")

    def both_passes():
        y = case.output(cu_seqlens=cuts, max_seqlen=max_seqlen)
        return torch.autograd.grad(y.float().sum(), list(case.tensors.values()), allow_unused=True)

    both_passes()
    torch.cuda.synchronize()
    waiting_is_an_error()
    both_passes()
    forget_plans()
    both_passes()


def test_a_copy_to_rows_with_max_seqlen_does_not_wait_either(waiting_is_an_error):
    """Heads of 192 are too large for the programs that read in place."""
    q, k, v = (torch.randn(1, 100, 2, 192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cuts = torch.tensor([0, 40, 100], device="cuda")
    assert maclaurin.plan(q, k, v, "exp/l2", cu_seqlens=cuts, max_seqlen=60).copies
    maclaurin.attention(q, k, v, "exp/l2", cu_seqlens=cuts, max_seqlen=60)
    torch.cuda.synchronize()
    waiting_is_an_error()
    maclaurin.attention(q, k, v, "exp/l2", cu_seqlens=cuts, max_seqlen=60)
