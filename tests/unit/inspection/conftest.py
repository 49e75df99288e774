"""A model small enough to be written down by hand, and what an inspection says of it."""

import numpy as np
import pytest
import torch
from tests.unit.inspection.small import SETTINGS

from maclaurin.inspection.contexts import Contexts
from maclaurin.inspection.inspect_model import InspectionFolder, inspect_model
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM


@pytest.fixture(scope="package")
def model():
    torch.manual_seed(0)
    config = MaclaurinConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.35,
    )
    return MaclaurinForCausalLM(config).eval()


@pytest.fixture(scope="package")
def contexts():
    """Three contexts, the last one shorter."""
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 31, 42))
    return Contexts.of(tokens, 16)


@pytest.fixture(scope="package")
def inspection(model, contexts, tmp_path_factory):
    folder = InspectionFolder(tmp_path_factory.mktemp("out"))
    return inspect_model("tiny", model, contexts, SETTINGS, folder)
