"""One spelling for one run, so that two studies that write it differently share it."""

from __future__ import annotations

from maclaurin.errors import MaclaurinError
from maclaurin.spec.catalogue import catalogue, resolve
from maclaurin.spec.extras import LayerExtras
from maclaurin.training.config import TrainConfig


def canonical_attention(text: str, *, strict: bool = True) -> str:
    """The notation; the catalogue's name where that also stands for a convolution or other extras.

    A text that means nothing is an error, or itself where the caller is not strict.
    """
    name = text.strip()
    if name in catalogue and catalogue[name].extras != LayerExtras():
        return catalogue[name].name
    try:
        return str(resolve(name))
    except MaclaurinError:
        if strict:
            raise
        return name


def canonical(config: TrainConfig, own_length: int, device: str) -> TrainConfig:
    """The run with every default written out that depends on something else."""
    attention = tuple(canonical_attention(text) for text in config.attention)
    return config.replace(
        attention=attention[:1] if len(set(attention)) == 1 else attention,
        length=config.length or own_length,
        decay_steps=config.decay_steps or config.steps,
        clip=config.clip or None,
        device=device,
    )
