"""Load pretrained Llama-like models as ours: the same weights under the same names, with any attention.

Llama, SmolLM2, Mistral and Qwen 2/3 differ from each other in biases, a norm of queries and keys, and
rotary frequencies. Their softmax is exp/sum; a sliding window is poly(0)+window(n)/sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from transformers import PreTrainedModel

from maclaurin.errors import InputError
from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.models.modeling import MaclaurinForCausalLM


@final
@dataclass(frozen=True)
class Family:
    """Features of a family in addition to the plain blocks; None: its configuration decides."""

    attention_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    query_key_norm: bool = False


FAMILIES = {
    "llama": Family(attention_bias=None, output_bias=None, mlp_bias=None),
    "mistral": Family(),
    "qwen2": Family(attention_bias=True),
    "qwen3": Family(attention_bias=None, output_bias=None, query_key_norm=True),
}
#: rotary embeddings whose frequencies do not change with the length of the text
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")


def adopted(foreign: PreTrainedModel, attention: str | list[str] | None = None) -> MaclaurinForCausalLM:
    """The same model with this attention (its own by default), sharing no memory with the foreign one."""
    config = adopted_config(foreign, attention)
    with torch.device("meta"):
        model = MaclaurinForCausalLM(config)
    weights = {name: t.detach().clone() for name, t in foreign.state_dict().items()}
    if not config.tie_word_embeddings and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model.to_empty(device=next(iter(weights.values())).device)
    model.to(foreign.dtype)  # type: ignore[arg-type]
    missing, unknown = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or unknown:
        raise InputError(
            f"this kind of {foreign.config.model_type} model is not supported: "
            f"missing {missing[:4]}, unexpected {unknown[:4]}."
        )
    model.tie_weights()
    model.generation_config = foreign.generation_config
    return model.eval()


def adopted_config(foreign: PreTrainedModel, attention: str | list[str] | None = None) -> MaclaurinConfig:
    """The configuration of `adopted`."""
    config: Any = foreign.config
    family = _family(config)
    frequencies, scale = _rotary(foreign, config)
    bias = bool(getattr(config, "attention_bias", False))
    return MaclaurinConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rope_frequencies=frequencies,
        rope_scale=scale,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=bias if family.attention_bias is None else family.attention_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        query_key_norm=family.query_key_norm,
        attention=_own_attention(config) if attention is None else attention,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        use_cache=True,
    )


def _family(config: Any) -> Family:
    if config.model_type not in FAMILIES:
        raise InputError(
            f"a model of type {config.model_type!r} is not a plain Llama-like one; supported are "
            f"{', '.join(FAMILIES)} (SmolLM2 is a llama) and maclaurin itself."
        )
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise InputError(
            f"this {config.model_type} has the activation {activation!r}; only silu is supported."
        )
    return FAMILIES[config.model_type]


def _rotary(foreign: PreTrainedModel, config: Any) -> tuple[list[float], float]:
    """Frequencies and scale as the model itself has them."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _FIXED_ROTARY:
        raise InputError(
            f"rotary embedding of type {kind!r} changes with the length of the text, which a state cannot "
            f"follow; supported are {', '.join(_FIXED_ROTARY)}."
        )
    rotary: Any = foreign.get_submodule("model.rotary_emb")
    return [float(f) for f in rotary.inv_freq], float(getattr(rotary, "attention_scaling", 1.0))


def _own_attention(config: Any) -> str | list[str]:
    """exp/sum, or a window if the model has one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or []
    if not window or not (kinds or config.model_type == "mistral"):
        return "exp/sum"
    sliding = f"poly(0)+window({window})/sum"
    if not kinds:
        return sliding
    specs = [sliding if kind == "sliding_attention" else "exp/sum" for kind in kinds]
    return specs[0] if len(set(specs)) == 1 else specs
