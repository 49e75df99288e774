"""Output projections scaled so that every attention adds as much at the start as softmax."""

import pytest
import torch

from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.training.model import start_as_softmax


def model_of(attention):
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), attention, 64)
    model = MaclaurinForCausalLM(config)
    start_as_softmax(model, tokens(), seed=0)
    return model


def tokens():
    return torch.randint(64, (6, 40), generator=torch.Generator().manual_seed(1))


def added(model):
    """The rms of what attention adds in each layer."""
    found = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda m, i, o: found.append(o.square().mean().sqrt()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(tokens()[:4])
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


@pytest.mark.parametrize("attention", ["exp/rms", "exp/len*out", "linear-elu", "taylor(1)/l2"])
def test_every_attention_adds_as_much_as_softmax(attention):
    assert torch.allclose(added(model_of(attention)), added(model_of("exp/sum")), rtol=1e-4)


def test_norms_that_differ_in_scale_alone_start_as_one_model():
    with torch.no_grad():
        l2, rms = (model_of(attention)(tokens()).logits for attention in ("exp/l2", "exp/rms"))
    assert torch.allclose(l2, rms, rtol=1e-4, atol=1e-5)


def test_softmax_stays_as_it_is():
    torch.manual_seed(0)
    config = MaclaurinConfig.of_size(size_named("pico"), "exp/sum", 64)
    with torch.no_grad():
        before = MaclaurinForCausalLM(config)(tokens()).logits
        after = model_of("exp/sum")(tokens()).logits
    assert torch.allclose(before, after, rtol=1e-5, atol=1e-6)
