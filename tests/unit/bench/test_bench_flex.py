"""FlexAttention, uncompiled, is the softmax it is said to be: the same scores, the same mask."""

import pytest
import torch
from tests.unit.bench.tiny import SETTING

from maclaurin import parse
from maclaurin.bench.judge import plain_output
from maclaurin.bench.peers import PeerMissing, flex_attention_of, flex_implementation, make_peer, softmax_of
from maclaurin.testing import relative_error
from maclaurin.testing.cases import Shape, draw_inputs

MEANINGS = {
    "exp/l2": "exp/sum",
    "exp(clamp=5)/len": "exp(clamp=5)/sum",
    "exp(clamp=0.5)/len": "exp(clamp=0.5)/sum",
    "exp*forget/sum": "exp*forget/sum",
    "poly(0)+window(16)/sum": "poly(0)+window(16)/sum",
    "sigmoid(-6.93)": "exp/sum",
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("notation", "meaning"), MEANINGS.items())
@pytest.mark.slow
def test_it_computes_what_it_is_said_to(notation, meaning):
    spec = parse(notation)
    assert str(softmax_of(spec)) == meaning
    case = draw_inputs(spec, Shape(2, 130, 2, 1, 16, 16), torch.float32, SETTING.device)
    implementation = flex_implementation(case, flex_attention_of(spec))
    assert implementation.means is not None
    expected = plain_output(implementation.means, case.tensors)
    assert relative_error(implementation.call(), expected) < 1e-6
    assert len(implementation.leaves) == 3 + ("log_forget" in spec.gates)


def test_on_a_processor_it_is_missing():
    case = draw_inputs(parse("exp/sum"), Shape(1, 8, 1, 1, 16, 16), torch.float32, SETTING.device)
    with pytest.raises(PeerMissing, match="fused on GPUs only"):
        make_peer("flex", case)
