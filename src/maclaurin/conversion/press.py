"""Prompts read with full attention and then forgotten but for a small memory.

    with press(model, "poly(0)+window(64,sinks=4,kept=256)/sum"):
        model.generate(prompt, …)

That is easier than reading in small memory, as a converted model does: every token of the prompt still saw
all of those before it. It saves nothing while the prompt is read, and everything after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from maclaurin.conversion.measure import having
from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.spec.head_groups import specs_in


@contextmanager
def press(model: MaclaurinForCausalLM, attention: str | Sequence[str]) -> Iterator[MaclaurinForCausalLM]:
    """The model with caches that keep of a prompt what this attention keeps: one for all layers, or one each.

    A prompt is the first piece that a new cache reads, all at once; what comes after is read in the small
    memory. Text read without a cache is read with this attention, as in `maclaurin.convert`.
    """
    config = cast("MaclaurinConfig", model.config)
    own = {spec for layer in config.layer_attention() for spec in layer.specs}
    if len(own) > 1 or config.prompt_attention is not None:
        raise InputError(
            "a model is pressed whose heads all have one attention: take the original, not a converted model."
        )
    each = [attention] * config.num_hidden_layers if isinstance(attention, str) else list(attention)
    for spec in (spec for text in each for spec in specs_in(text)):
        if spec.gates:
            raise InputError(f"{spec} has gates, and this model has no weights for them: use a spec without.")
    with having(model, each):
        config.prompt_attention = str(own.pop())
        try:
            yield model
        finally:
            config.prompt_attention = None
