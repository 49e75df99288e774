"""Every published variant of the field as data: a short name, a spec, layer extras, a source.

The aliases are the `attention_type` strings of the paper's public code, where they exist; rows of
that code with equal formulas share one entry. Where the code differs from what the paper
describes, the entry is what the paper describes, and its note records the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from maclaurin.errors import MaclaurinError, NotationError
from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.notation import parse
from maclaurin.spec.part import Argument, Recipe, reserve_names
from maclaurin.wording import did_you_mean


@final
@dataclass(frozen=True, slots=True)
class LayerExtras:
    """The layer settings of a published variant, which its spec does not hold."""

    rotary: bool = True
    #: width of a depthwise causal convolution on q, k and v before the heads; 0 for none
    convolution: int = 0
    #: whether SiLU follows that convolution
    convolution_silu: bool = False
    #: tokens of zeros put in front of the text and dropped at the end
    extra_tokens: int = 0
    #: size of q and k per head where it is not the head size; 0 for the head size
    feature_size: int = 0
    #: γ·LayerNorm(u) + β on q and k before the kernel
    query_key_affine: bool = False
    #: recipes that replace the arguments' own: (name, recipe)
    gates: tuple[tuple[str, Recipe], ...] = ()

    def recipe(self, argument: Argument) -> Recipe:
        """How the layer makes this argument."""
        return dict(self.gates).get(argument.name, argument.recipe)


#: "On the Expressiveness of Softmax Attention: A Recurrent Neural Network Perspective"
PAPER = "arXiv 2507.23632"
#: "2Mamba", by the same authors
FOLLOW_UP = "arXiv 2602.17363"


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One published variant."""

    name: str
    notation: str
    source: str
    aliases: tuple[str, ...] = ()
    note: str = ""
    extras: LayerExtras = field(default_factory=LayerExtras)

    @property
    def spec(self) -> AttentionSpec:
        """The spec of its attention, without the layer around it."""
        return parse(self.notation)

    @property
    def formula(self) -> str:
        """Its formula as text."""
        return self.spec.formula

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return (self.name, *self.aliases)


class Catalogue:
    """Entries by name or alias: catalogue["based"], `in`, iteration, `names()`."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self._entries = entries
        self._by_name = {name: entry for entry in entries for name in entry.names}
        if len(self._by_name) != sum(len(entry.names) for entry in entries):
            raise MaclaurinError("two catalogue entries share a name.")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Entry:
        if name not in self._by_name:
            raise MaclaurinError(
                f"the catalogue has no {name!r}; `maclaurin list` shows it."
                + did_you_mean(name, list(self._by_name))
            )
        return self._by_name[name]

    def names(self) -> list[str]:
        """Every name and alias."""
        return list(self._by_name)


def resolve(text: str) -> AttentionSpec:
    """The spec of a catalogue name or a notation; the error for a typo suggests the nearest of both."""
    name = text.strip()
    if name in catalogue:
        return catalogue[name].spec
    try:
        return parse(text)
    except NotationError as problem:
        if any(mark in name for mark in "(/*+"):
            raise
        near = did_you_mean(name, catalogue.names())
        reason = f"{problem.reason} It is not a name in the catalogue either.{near}"
        raise NotationError(text, problem.position, reason) from None


_CONVOLUTION_4 = LayerExtras(convolution=4, convolution_silu=True)
_STEP_GATES = (("input_gate", Recipe.STEP_SIZE), ("log_forget", Recipe.MINUS_STEP_SIZE))
_MAMBA_2 = LayerExtras(
    rotary=False,
    convolution=4,
    convolution_silu=True,
    gates=_STEP_GATES,
)

_PAPER_ROWS = (
    Entry("softmax", "exp/sum", PAPER, note="the baseline"),
    Entry("floored-sum", "exp(clamp=5)/sum(floor=1)", PAPER, ("softmax_clamp_denom",)),
    Entry(
        "detached-sum",
        "exp(clamp=5)/sum(floor=1,detach)",
        PAPER,
        ("softmax_detach_denom",),
        "the floor is in the paper's code only",
    ),
    Entry(
        "detached-sum-gate",
        "exp(clamp=5)/sum(eps=0.0001,detach)*out",
        PAPER,
        ("softmax_detach_denom_gate",),
    ),
    Entry("length", "exp(clamp=5)/len", PAPER, ("softmax_divs", "gated_softmax_no_gate_no_norm")),
    Entry("bare-gate", "exp(clamp=5)*out", PAPER, ("softmax_gate",)),
    Entry(
        "gate",
        "exp(clamp=5)/len*out",
        PAPER,
        ("softmax_divS_gate", "softmax_divS_gatev2", "gated_softmax_no_in_gate_no_norm"),
        "the paper's gate; its code has it three times, with the gate on the weights or the output",
    ),
    Entry(
        "length-rms",
        "exp(clamp=5)/len/rms",
        PAPER,
        ("softmax_divS_norm", "gated_softmax_no_gate_rmsnorm"),
        "the length cancels in the norm",
    ),
    Entry(
        "taylor-80",
        "taylor(80)/sum",
        PAPER,
        ("softmax_taylor_80terms",),
        "the code's 80 terms end at the odd order 79, whose row sum can vanish, and it forgets to use "
        "the denominator it computes; this is order 80 over its row sum",
    ),
    Entry(
        "in-out-layer",
        "exp(clamp=5)*in/len*out/layer",
        PAPER,
        ("gated_softmax",),
        "the output gate and the length cancel in the norm",
    ),
    Entry("in-out", "exp(clamp=5)*in/len*out", PAPER, ("gated_softmax_no_norm",)),
    Entry(
        "out-layer",
        "exp(clamp=5)/len*out/layer",
        PAPER,
        ("gated_softmax_no_in_gate",),
        "the output gate and the length cancel in the norm",
    ),
    Entry("in-layer", "exp(clamp=5)*in/len/layer", PAPER, ("gated_softmax_no_out_gate",)),
    Entry("in-gate", "exp(clamp=5)*in/len", PAPER, ("gated_softmax_no_out_gate_no_norm",)),
    Entry(
        "relu-gate",
        "linear(relu,clamp=5)/len*out",
        PAPER,
        ("gated_relu_no_in_gate_no_norm",),
        "the clamp takes away its recurrent form",
    ),
    Entry("length-layer", "exp(clamp=5)/len/layer", PAPER, ("gated_softmax_no_gate",)),
    Entry("clamped-rms", "exp(clamp=5)/rms", PAPER, ("gated_softmax_no_gate_rmsnorm_nodivS",)),
    Entry("clamped-l2", "exp(clamp=5)/l2", PAPER, ("gated_softmax_no_gate_L2norm_nodivS",)),
    Entry(
        "norm",
        "exp/l2",
        PAPER,
        ("gated_softmax_no_gate_L2norm_nodivS_noclamp",),
        "the paper's norm",
    ),
    Entry("relu-l2", "linear(relu)/l2", PAPER, ("gated_ReLU_no_gate_L2norm_nodivS_noclamp",)),
    Entry(
        "norm-gated-before",
        "exp/len*out/l2",
        PAPER,
        ("gated_softmax_out_gate_L2norm_nodivS_noclamp",),
        "the gate and the length cancel: equal to norm",
    ),
    Entry(
        "norm-gated",
        "exp/len/l2*out",
        PAPER,
        ("gated_softmax_post_out_gate_L2norm_nodivS_noclamp",),
        "the gate stands after the norm, so it counts; the length cancels",
    ),
    Entry(
        "length-scaled-l2",
        "exp(clamp=5)/len/l2(scale=dim)",
        PAPER,
        ("gated_softmax_no_gate_customnorm",),
    ),
    Entry(
        "running",
        "exp(clamp=5)/running(floor=1)",
        PAPER,
        ("gated_softmax_cumgate",),
        "a learned running denominator",
    ),
    Entry(
        "running-length",
        "exp(clamp=5)/running(len)",
        PAPER,
        ("cumulative_gated_softmax",),
        "the code sums over an axis of length 1 by mistake; this sums over the tokens so far",
    ),
    Entry(
        "conv-in-out-layer",
        "exp(clamp=5)*in/len*out/layer",
        PAPER,
        ("gated_softmax_plusplus",),
        "in-out-layer behind a short convolution",
        _CONVOLUTION_4,
    ),
    Entry(
        "conv-extra-tokens",
        "exp(clamp=5)*in/len*out/layer",
        PAPER,
        ("gated_softmax_plusplus_extratoks",),
        "conv-in-out-layer with three extra tokens in front",
        LayerExtras(convolution=4, convolution_silu=True, extra_tokens=3),
    ),
    Entry(
        "decay",
        "exp(clamp=5)*in*forget/len*out/layer",
        PAPER,
        ("gated_softmax_decay",),
        extras=LayerExtras(rotary=False, gates=(("log_forget", Recipe.LINEAR_1024),)),
    ),
    Entry(
        "linear-elu",
        "linear(elu1)/sum",
        "Katharopoulos et al. 2020",
        ("linear_elu", "elu-linear-attention"),
        "features after the rotary embedding",
    ),
    Entry("linear-relu", "linear(relu,scale=1)/sum(eps=1e-08)", PAPER, ("linear_relu",)),
    Entry(
        "linear-cosine",
        "linear(cosine)*in",
        PAPER,
        ("linear_cosine",),
        "the code normalises over the heads by mistake; this is over the key size. The input gate is "
        "s^−σ(p) with a learned p per head",
        LayerExtras(gates=(("input_gate", Recipe.LENGTH_POWER),)),
    ),
    Entry(
        "mamba-2",
        "linear(identity)*in*forget/rms(heads)",
        "Dao & Gu 2024",
        ("linear_mamba",),
        "the Mamba-2 block in these terms",
        _MAMBA_2,
    ),
)

_FIELD_ROWS = (
    *(
        Entry(
            f"taylor-{n}",
            f"taylor({n})/sum" if n % 2 == 0 else f"taylor({n})/l2",
            PAPER,
            note="" if n % 2 == 0 else "an odd order's row sum can vanish, so it is normed instead",
        )
        for n in range(11)
    ),
    Entry(
        "based",
        "taylor(2)/sum",
        "Arora et al. 2024",
        note="small keys; the source alternates it with convolution and window layers",
        extras=LayerExtras(feature_size=16),
    ),
    Entry(
        "rebased",
        "power(2)/sum",
        "Aksenov et al. 2024",
        note="a learned affine map of the normalised q and k before squaring",
        extras=LayerExtras(feature_size=16, query_key_affine=True),
    ),
    Entry("power-retention", "power(2)*forget/sum", "Buckman et al. 2025", note="any even power"),
    Entry(
        "2mamba",
        "power(2)*forget/sum",
        FOLLOW_UP,
        extras=LayerExtras(rotary=False, convolution=2, gates=(("log_forget", Recipe.MINUS_SOFTPLUS),)),
    ),
    Entry(
        "2mamba-e",
        "exp*forget/sum",
        FOLLOW_UP,
        ("gated_softmax_plusplus_mamba", "gated_softmax_plusplus_mamba2"),
        extras=LayerExtras(rotary=False, gates=(("log_forget", Recipe.MINUS_SOFTPLUS),)),
    ),
    Entry(
        "forgetting-transformer",
        "exp*forget/sum",
        "Lin et al. 2025",
        extras=LayerExtras(rotary=False),
    ),
    Entry(
        "mamba-2s",
        "linear(identity)*in*forget/rms(heads)",
        FOLLOW_UP,
        extras=LayerExtras(
            rotary=False,
            convolution=2,
            gates=_STEP_GATES,
        ),
    ),
    Entry(
        "retnet",
        "linear(identity)*forget/rms",
        "Sun et al. 2023",
        extras=LayerExtras(gates=(("log_forget", Recipe.FIXED_DECAY),)),
    ),
    Entry(
        "simple-gla",
        "linear(identity)*forget/rms*out",
        "Yang et al. 2024",
        extras=LayerExtras(
            rotary=False, gates=(("log_forget", Recipe.LOG_SIGMOID_16), ("output_gate", Recipe.SILU))
        ),
    ),
    Entry(
        "cottention",
        "linear(cosine)*out",
        "Mongaras et al. 2024",
        note="the length power divides the row, so it is an output gate t^−σ(p)",
        extras=LayerExtras(gates=(("output_gate", Recipe.LENGTH_POWER),)),
    ),
    Entry(
        "sigmoid-attention",
        "sigmoid(-6.93)",
        "Ramapuram et al. 2024",
        note="the source sets b = −ln n for training length n; −6.93 is −ln 1024",
    ),
)

catalogue = Catalogue((*_PAPER_ROWS, *_FIELD_ROWS))
reserve_names(catalogue.names(), "a name of the catalogue")
