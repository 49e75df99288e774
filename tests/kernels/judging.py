"""A fused program is judged by the plain form's own error in the same dtype, around float64."""

import torch

from maclaurin import plan
from maclaurin.forms.attend import Form, attend
from maclaurin.forms.stream import Inputs
from maclaurin.testing import random_tensors, relative_error

#: how much larger than the plain form's an error may be
SLACK = 1.5
#: how much more where rows are rounded on the way that the plain form keeps (see `slack`)
ROUNDED_ROWS = 4 / 3
#: what storing a log-sum-exp or a result in the dtype costs; errors below it are not compared
ROUNDING = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def plain(case, *, causal=True):
    """The parallel form in plain torch."""
    inputs = inputs_of(case)
    scale = case.spec.kernel.default_scale(inputs.q.shape[3])
    y, _ = attend(
        case.spec,
        inputs,
        Form.PARALLEL,
        scale=scale,
        causal=causal,
        chunk=64,
        state=None,
        return_state=False,
    )
    return y


def inputs_of(case):
    """The tensors of a case as programs take them."""
    tensors = {**case.tensors}
    q, k, v = (tensors.pop(name) for name in "qkv")
    return Inputs(q, k, v, tensors)


def outputs_and_gradients(case, run, direction):
    leaves = case.with_gradients()
    y = run(leaves)
    gradients = leaves.gradients((y.to(direction.dtype) * direction).sum())
    return {"output": y.detach(), **gradients}


def ratios(spec, shape, dtype, device, backend, *, draws=None, seed=0, **options):
    """Per tensor: error of the fused program over what it may be, in several draws where text is short."""
    if draws is None:
        draws = 4 if shape.tokens < 8 or (device == "cuda" and shape.tokens < 256) else 1
    pairs = [errors(spec, shape, dtype, device, backend, seed=seed + i, **options) for i in range(draws)]
    return {
        name: sum(pair[name][0] ** 2 for pair in pairs) ** 0.5
        / sum(pair[name][1] ** 2 for pair in pairs) ** 0.5
        for name in pairs[0]
    }


def errors(
    spec,
    shape,
    dtype,
    device,
    backend,
    *,
    size=1.0,
    causal=True,
    seed=0,
    form="parallel",
    layout=None,
    **options,
):
    """Per tensor: the error of the fused program and what it may be; `layout`: axes as they lie in memory."""
    case = random_tensors(spec, shape, seed, dtype, device=device, size=size)
    if layout is not None:
        case = case.with_tensors(**{name: laid_out(case.tensors[name], layout) for name in "qkv"})
    tensors = [case.tensors[name] for name in "qkv"]
    found_backend = plan(*tensors, spec, causal=causal, form=form).backend
    assert found_backend == backend, f"{spec} runs on {found_backend}"
    wide = case.map(torch.Tensor.double)
    direction = torch.randn(
        shape.batch, shape.tokens, shape.heads, shape.e, dtype=torch.float64, device=device
    )
    gold = outputs_and_gradients(wide, lambda c: plain(c, causal=causal), direction)
    known = outputs_and_gradients(case, lambda c: plain(c, causal=causal), direction)
    found = outputs_and_gradients(case, lambda c: c.output(form=form, causal=causal, **options), direction)
    largest = max(float(g.norm()) for name, g in gold.items() if name != "output")
    result = {}
    for name, reference in gold.items():
        floor = 1e-3 if name == "output" else max(1e-3, largest / 10)
        allowed = max(relative_error(known[name], reference, floor), ROUNDING[dtype])
        result[name] = (relative_error(found[name], reference, floor), allowed)
    return result


def laid_out(tensor, layout):
    """The same numbers, axes in memory as ordered."""
    back = sorted(range(len(layout)), key=layout.__getitem__)
    return tensor.permute(layout).contiguous().permute(back)


def slack(spec, shape):
    """Stock programs take values with their gate rounded, and δ from rounded outputs, which few keys do not
    average out; a window beside a tail hands the row's gradient to two programs, rounded for each; weights
    without a constant term are small where scores are, so that rounding them and their gradients counts for
    more (power(2)/sum with bf16 roundings and nothing else wrong takes 1.65). Each of these may cost a third
    more: exp*in/l2 in five tokens, which has two of them, takes 2.5 on an H200."""
    vanishing = bool(spec.orders) and min(spec.orders) > 0
    beside = spec.window is not None and bool(spec.orders)
    reasons = (bool(spec.value_gates), shape.tokens < 8, beside, vanishing)
    return SLACK * ROUNDED_ROWS ** sum(map(bool, reasons))


def assert_as_right_as_plain(spec, shape, *arguments, **options):
    found = ratios(spec, shape, *arguments, **options)
    rounded = {name: round(value, 2) for name, value in found.items()}
    assert max(found.values()) <= slack(spec, shape), rounded
