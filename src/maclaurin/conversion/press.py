"""Read prompts with full attention, then keep only a small memory of them.

    with press(model, "poly(0)+window(64,sinks=4,kept=256)/sum"):
        model.generate(prompt, …)

That is easier than reading in small memory, as a converted model does: every token of the prompt still saw
all earlier ones, and the keys to keep are chosen when the whole prompt is known (forms/kept.py). It
saves no memory while the prompt is read, only afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.modeling import with_attention
from maclaurin.spec.head_groups import specs_in


@contextmanager
def press(model: MaclaurinForCausalLM, attention: str | Sequence[str]) -> Iterator[MaclaurinForCausalLM]:
    """The model with caches that keep only the memory of this attention: one for all layers, or one each.

    A prompt is the first piece that a new cache reads, all at once; later tokens are read in the small
    memory. Text read without a cache is read with this attention, as in `maclaurin.convert`.
    """
    config = _config_of(model)
    own = {spec for layer in config.layer_attention() for spec in layer.specs}
    if len(own) > 1 or config.prompt_attention is not None:
        raise InputError(
            "press needs a model whose heads all have one attention: use the original, not a converted model."
        )
    each = [attention] * config.num_hidden_layers if isinstance(attention, str) else list(attention)
    if len(each) != config.num_hidden_layers:
        raise InputError(
            f"`attention` lists {len(each)} layers, but the model has {config.num_hidden_layers}: give one "
            "notation for all layers, or one for each. A plan fits only the model it was chosen for."
        )
    for spec in (spec for text in each for spec in specs_in(text)):
        if spec.gates:
            raise InputError(
                f"{spec} has gates, but this model has no weights for them: use one without gates."
            )
    with with_attention(model, each):
        config.prompt_attention = str(own.pop())
        try:
            yield model
        finally:
            config.prompt_attention = None


def _config_of(model: object) -> MaclaurinConfig:
    """The configuration; raises if the model is not one of this library."""
    config = getattr(model, "config", None)
    if not isinstance(config, MaclaurinConfig):
        raise InputError(
            f"press needs a model of this library (MaclaurinForCausalLM), not {type(model).__name__}. Load "
            "the same folder with maclaurin.models.load_model(name): it returns the model and its tokenizer. "
            "For a model that always has a small memory, also while it reads, use maclaurin.convert."
        )
    return config
