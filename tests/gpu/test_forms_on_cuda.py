"""The plain forms on a GPU: the same answers as float64 on the CPU, to the precision of the dtype."""

import pytest
import torch

from maclaurin import catalogue, parse
from maclaurin.testing import Shape, random_tensors, relative_error

pytestmark = pytest.mark.gpu

SPECS = [
    *dict.fromkeys(str(e.spec) for e in catalogue if not e.spec.orders or max(e.spec.orders) <= 4),
    "taylor(2,about=mean)/sum",
    "taylor(2,about=mean)+window(8,sinks=1)*forget/sum",
    "hermite(3)/len",
]


@pytest.mark.parametrize("notation", SPECS)
def test_forms_on_cuda(notation):
    spec = parse(notation)
    case = random_tensors(spec, Shape(tokens=65, d=8, e=16), 0, torch.float32)
    wide = case.map(torch.Tensor.double).output(form="parallel")
    forms = ["parallel", "chunked", *(["recurrent"] if spec.has_finite_state else [])]
    for form in forms:
        y = case.map(lambda t: t.cuda()).output(form=form, chunk_size=16)
        assert y.is_cuda
        allowed = max(4 * relative_error(case.output(form=form, chunk_size=16), wide), 2e-5)
        assert relative_error(y.cpu(), wide) <= allowed, form


@pytest.mark.parametrize(
    "notation", ["exp/sum", "exp/l2", "taylor(2)/sum", "linear(identity)*forget/rms*out"]
)
def test_bf16_with_padding_packing_and_state_on_cuda(notation):
    spec = parse(notation)
    case = random_tensors(spec, Shape(batch=1, tokens=100, d=16, e=16), 0, torch.bfloat16, device="cuda")
    wide = case.map(lambda t: t.double().cpu())
    mask = torch.rand(1, 100) > 0.3
    cu = torch.tensor([0, 30, 31, 100])
    for options in ({}, {"key_padding_mask": mask}, {"cu_seqlens": cu}):
        on_gpu = {n: t.cuda() for n, t in options.items()}
        assert relative_error(case.output(**on_gpu).cpu(), wide.output(**options)) < 2e-2
    if spec.has_finite_state:
        state = case.tokens(0, 60).state()
        y = case.tokens(60, 100).output(state=state)
        assert relative_error(y.cpu(), wide.output()[:, 60:]) < 2e-2
