"""One modeling file for every spec: Llama-2 blocks around `AttentionLayer`.

The attention of a model can be replaced, permanently or within a `with` block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from maclaurin.errors import InputError
from maclaurin.layers.attention import AttentionLayer, ResidualLinear
from maclaurin.layers.convolution import ShortConvolution
from maclaurin.layers.gates import GateFromToken, GateLinear
from maclaurin.layers.layer_memory import LayerMemory
from maclaurin.layers.layout import Layout
from maclaurin.layers.rotary import Rotary
from maclaurin.models.cache import MaclaurinCache, real_positions, weights_fingerprint
from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.spec.head_groups import LayerAttention


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ∘ W_up x)"""

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., hidden]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class MaclaurinBlock(GradientCheckpointingLayer):
    """x + attention(norm x), then x + swiglu(norm x)."""

    def __init__(self, config: MaclaurinConfig, attention: LayerAttention) -> None:
        super().__init__()
        self.self_attn = AttentionLayer(
            attention,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            rotary=Rotary(config.rope_theta, config.rope_frequencies, config.rope_scale),
            bias=config.attention_bias,
            output_bias=config.output_bias,
            norm_eps=config.rms_norm_eps if config.query_key_norm else None,
            key_offset=config.key_offset,
        )
        self.mlp = SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, layout: Layout, memory: LayerMemory | None = None) -> Tensor:
        """[B, T, hidden] → [B, T, hidden]."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), layout, memory)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MaclaurinPreTrainedModel(PreTrainedModel):
    """Initialisation, and attributes that Hugging Face's tools read."""

    config_class = MaclaurinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["MaclaurinBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """See MaclaurinConfig.initialization; the gates' own biases come after it."""
        if isinstance(module, nn.Linear | nn.Embedding):
            self._init_matrix(module)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, ShortConvolution | GateFromToken):
            module.reset()
        if isinstance(module, GateLinear):
            module.reset_bias()

    def _init_matrix(self, module: nn.Linear | nn.Embedding) -> None:
        if self.config.initialization == "torch":
            module.reset_parameters()
            return
        depth = 2 * self.config.num_hidden_layers if isinstance(module, ResidualLinear) else 1
        nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(depth))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class MaclaurinModel(MaclaurinPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MaclaurinBlock(config, each) for each in config.layer_attention())
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        seq_idx: Tensor | None = None,
        **unknown: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states [B, T, hidden] of tokens [B, T].

        They continue the text in `past_key_values`, which is changed. Without it, use_cache=True makes a new
        cache; else no state is computed. By default the configuration decides, and training uses no cache.
        Positions that restart within a row separate documents.
        """
        _refuse_unknown(unknown)
        documents = seq_idx if documents is None else documents  # TRL's name for the documents of packed rows
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if documents is None and attention_mask is None and past_key_values is None:
            documents = _documents_of(position_ids)
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training and documents is None
        cache = self._cache(past_key_values, use_cache, documents)
        if cache is None:
            if position_ids is None:
                position_ids = _positions(hidden, attention_mask)
            layout, memories = Layout.of(position_ids, attention_mask, documents), [None] * len(self.layers)
        else:
            layout, memories = cache.advance(hidden, position_ids, attention_mask), cache.memories
        layout = self._with_angles(layout, hidden)
        every = [hidden]
        for layer, memory in zip(self.layers, memories, strict=True):
            hidden = layer(hidden, layout, memory)
            every.append(hidden)
        hidden = self.norm(hidden)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*every[:-1], hidden) if wanted else None,  # type: ignore[arg-type]
        )
        return out if _as_object(self.config, return_dict) else out.to_tuple()

    def _with_angles(self, layout: Layout, hidden: Tensor) -> Layout:
        """The layout with the rotary angles, which all layers share."""
        layers: list[Any] = [block.self_attn for block in self.layers]
        device = hidden.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
        turned = {layer.key_size: layer.rotary for layer in layers if layer.extras.rotary}
        angles = {
            (size, dtype): rotary.angles(layout.positions, size, dtype) for size, rotary in turned.items()
        }
        return dataclasses.replace(layout, angles=angles)

    def _cache(
        self, given: Cache | None, use_cache: bool | None, documents: Tensor | None
    ) -> MaclaurinCache | None:
        if given is None and (not use_cache or (self.training and self.gradient_checkpointing)):
            return None
        if documents is not None:
            raise InputError(
                "documents within a row cannot be used with a cache: leave it out (use_cache=False)."
            )
        cache = MaclaurinCache(cast("MaclaurinConfig", self.config)) if given is None else given
        if not isinstance(cache, MaclaurinCache):
            raise InputError(
                f"past_key_values must be a MaclaurinCache, not a {type(cache).__name__}: leave it out, or "
                "make one with MaclaurinCache(model.config)."
            )
        if cache.fingerprint is None:
            cache.fingerprint = weights_fingerprint(self)
        return cache


class MaclaurinForCausalLM(MaclaurinPreTrainedModel, GenerationMixin):
    """The stack with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__(config)
        self.model = MaclaurinModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, vocabulary], and the loss if labels (the tokens themselves) are given."""
        of_loss = {name: more.pop(name) for name in _OF_LOSS if name in more}
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            documents=documents,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **more,
        )
        hidden = found.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **of_loss)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
        )
        return out if _as_object(self.config, return_dict) else out.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        """Called by generate(): make our cache, unless one is given or use_cache is off."""
        chunk = getattr(generation_config, "prefill_chunk_size", None)
        if chunk is not None and cast("MaclaurinConfig", self.config).prompt_attention is not None:
            raise InputError(
                f"a pressed prompt is read all at once, but with prefill_chunk_size={chunk} all but its "
                "first tokens are read in the small memory: leave prefill_chunk_size out, or use a converted "
                "model, which always reads in small memory."
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = MaclaurinCache(cast("MaclaurinConfig", self.config))
            return None
        above: Any = super()
        return above._prepare_cache_for_generation(generation_config, model_kwargs, *more, **named)


#: arguments that transformers passes on to the loss
_OF_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")
#: arguments of transformers' models that have no effect here
_WITHOUT_MEANING = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _refuse_unknown(given: dict[str, Any]) -> None:
    """Raise for arguments that would be ignored."""
    for name, value in given.items():
        if name in _WITHOUT_MEANING or value is None or value is False:
            continue
        if name == "output_attentions":
            raise InputError(
                "attention weights are never stored here, so output_attentions is not supported; "
                "maclaurin inspect shows what heads attend to."
            )
        raise TypeError(f"the model takes no argument {name!r}")


def _as_object(config: Any, return_dict: bool | None) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


def _documents_of(positions: Tensor | None) -> Tensor | None:
    """The document [B, T] of each token, if positions restart within a row; None if they do not.

    This is how padding-free batches of TRL separate their texts. Positions cannot be read while a
    graph is traced, so documents must be given there.
    """
    if positions is None or positions.shape[-1] < 2 or torch.compiler.is_compiling():
        return None
    begins = positions[:, 1:] <= positions[:, :-1]
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))


def _positions(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Positions that count real tokens."""
    if attention_mask is None or attention_mask.dim() != 2:
        return torch.arange(hidden.shape[1], device=hidden.device)[None]
    return real_positions(attention_mask.bool())


# ------------------------------------------------------------------------------------ another attention


def set_attention(model: MaclaurinForCausalLM, attention: Sequence[str]) -> None:
    """Set the attention of every layer, in the modules and in the configuration."""
    config = cast("MaclaurinConfig", model.config)
    config.attention = attention[0] if len(set(attention)) == 1 else list(attention)
    for block, layer in zip(model.model.layers, config.layer_attention(), strict=True):
        module: Any = block.self_attn
        module.groups = layer.groups


@contextmanager
def with_attention(model: MaclaurinForCausalLM, attention: Sequence[str]) -> Iterator[None]:
    """`set_attention` within a `with` block; caches created in the block use it too."""
    layers: list[Any] = [block.self_attn for block in model.model.layers]
    own, groups = model.config.attention, [layer.groups for layer in layers]
    try:
        set_attention(model, attention)
        yield
    finally:
        model.config.attention = own
        for layer, before in zip(layers, groups, strict=True):
            layer.groups = before
