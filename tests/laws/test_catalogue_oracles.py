"""Every catalogue row against the naive oracle written straight from its formula, in every form."""

import numpy as np
import pytest
import torch

import maclaurin
from maclaurin import catalogue, resolve
from maclaurin.testing import assert_same
from maclaurin.testing.oracles import GATES, ORACLES, random_case

SHAPES = [(1, 1, 1, 1, 3), (9, 4, 2, 3, 5), (17, 3, 3, 2, 4)]


def as_tensors(case):
    named = {n: getattr(case, n) for n in ("q", "k", "v", "input_gate", "log_forget", "output_gate")}
    named["denominator_gate"] = case.denominator_gate
    return {n: torch.from_numpy(np.asarray(a))[None] for n, a in named.items() if a is not None}


def test_every_row_has_an_oracle():
    assert [e.name for e in catalogue if not any(name in ORACLES for name in e.names)] == []


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_is_its_formula(name, shape):
    spec = resolve(name)
    assert set(spec.gates) == set(GATES[name])
    tokens, heads, kv_heads, d, e = shape
    case = random_case(name, tokens, heads, kv_heads, d, e, seed=tokens)
    expected = torch.from_numpy(ORACLES[name](case))[None]
    forms = ["parallel"]
    if not spec.has_finite_state or spec.features(d) < 1000:
        forms.append("chunked")
        forms += ["recurrent"] if spec.has_finite_state else []
    for form in forms:
        y = maclaurin.attention(**as_tensors(case), spec=name, form=form, chunk_size=4)
        assert_same(y, expected, f"{name} {form}")


def test_names_of_equal_formulas_lead_to_one_entry():
    for alias in ("softmax_divS_gate", "softmax_divS_gatev2", "gated_softmax_no_in_gate_no_norm"):
        assert catalogue[alias].name == "gate"
    assert catalogue["gated_softmax_out_gate_L2norm_nodivS_noclamp"].spec.simplified() == resolve("norm")
