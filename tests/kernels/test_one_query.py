"""One query over many keys on the fused program, against softmax in float64 written out here."""

import pytest
import torch

from maclaurin import attention, plan
from maclaurin.programs.triton import INSTALLED
from tests.kernels import interpreted_bfloat16
from tests.kernels.conftest import INTERPRETED, ON_GPU

if not INSTALLED:
    pytest.skip("needs triton", allow_module_level=True)

if INTERPRETED:
    interpreted_bfloat16.correct()

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def by_hand(q, k, v, mask):
    """Softmax over the present keys [B, 1, H, e]; zeros where there is none."""
    q, k, v = (u.double() for u in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (u.repeat_interleave(group, 2) for u in (k, v))
    x = torch.einsum("bqhd,bshd->bhqs", q, k) * q.shape[3] ** -0.5
    p = x.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhqs,bshe->bqhe", p, v)


def drawn(batch, keys, heads, kv_heads, d, e, dtype, device):
    shapes = (1, heads, d), (keys, kv_heads, d), (keys, kv_heads, e)
    return tuple(torch.randn(batch, *shape, dtype=dtype, device=device) for shape in shapes)


def error(y, expected):
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "keys", "heads", "kv_heads", "d", "e"),
    [(1, 1, 2, 2, 16, 16), (2, 63, 4, 2, 16, 24), (1, 64, 3, 1, 64, 64), (3, 700, 6, 2, 20, 16)],
)
def test_all_keys_present(batch, keys, heads, kv_heads, d, e, dtype, device, poisoned):
    q, k, v = drawn(batch, keys, heads, kv_heads, d, e, dtype, device)
    assert plan(q, k, v, "exp/sum").program.name == "one query"
    everywhere = torch.ones(batch, keys, dtype=torch.bool, device=device)
    assert error(attention(q, k, v, "exp/sum"), by_hand(q, k, v, everywhere)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_absent_keys_are_not_read(dtype, device, poisoned):
    """Padding on the left, on the right and in between, with NaN in it."""
    q, k, v = drawn(3, 300, 4, 2, 16, 16, dtype, device)
    mask = torch.ones(3, 300, dtype=torch.bool, device=device)
    mask[0, :130], mask[1, 40:170], mask[2, ::3] = False, False, False
    k, v = (u.masked_fill(~mask[..., None, None], torch.nan) for u in (k, v))
    clean = (u.nan_to_num() for u in (k, v))
    y = attention(q, k, v, "exp/sum", key_padding_mask=mask)
    assert error(y, by_hand(q, *clean, mask)) < LIMIT[dtype]


def test_a_text_without_any_key_gives_zeros(device, poisoned):
    q, k, v = drawn(2, 80, 2, 2, 16, 16, torch.float32, device)
    mask = torch.ones(2, 80, dtype=torch.bool, device=device)
    mask[0] = False
    y = attention(q, k, v, "exp/sum", key_padding_mask=mask)
    assert bool((y[0] == 0).all())
    assert error(y[1:], by_hand(q[1:], k[1:], v[1:], mask[1:])) < 2e-6


def test_large_scores_and_a_norm(device, poisoned):
    q, k, v = drawn(1, 200, 2, 2, 16, 16, torch.float32, device)
    y = attention(100 * q, k, v, "exp/l2")
    expected = by_hand(100 * q, k, v, torch.ones(1, 200, dtype=torch.bool, device=device))
    assert error(y, torch.nn.functional.normalize(expected, dim=-1)) < 2e-6


def test_views_of_a_longer_buffer(device, poisoned):
    """Heads out of order and keys at the start of a longer buffer."""
    q, k, v = drawn(2, 150, 4, 4, 16, 16, torch.float32, device)
    found = attention(q[:, :, 1:3], k[:, :90, 1:3], v[:, :90, 1:3], "exp/sum")
    mask = torch.ones(2, 90, dtype=torch.bool, device=device)
    assert error(found, by_hand(q[:, :, 1:3], k[:, :90, 1:3], v[:, :90, 1:3], mask)) < 2e-6


def test_backward_uses_another_program(device):
    q, k, v = drawn(1, 20, 2, 2, 16, 16, torch.float32, device)
    assert plan(q.requires_grad_(), k, v, "exp/sum").program.name != "one query"
