"""One attention per group of key-value heads:  `0,2: exp/sum; 1: poly(0)+window(64,sinks=1,kept=256)/sum`.

layer := spec | group {";" group}
group := heads ":" spec
heads := "*" | range {"," range}          * is every head that no other group names
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from maclaurin.errors import SpecError
from maclaurin.spec.attention_spec import AttentionSpec
from maclaurin.spec.catalogue import LayerExtras, catalogue, resolve
from maclaurin.spec.part import after_registration


@final
@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Key-value heads of a layer, with the query heads that read them, and their attention."""

    heads: tuple[int, ...]
    spec: AttentionSpec

    @property
    def written_heads(self) -> str:
        """The heads as the notation writes them: 0-2,5"""
        return _written(self.heads)


@final
@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of every key-value head of a layer, and the extras of the layer."""

    groups: tuple[HeadGroup, ...]
    extras: LayerExtras = LayerExtras()

    @staticmethod
    def read(text: str, kv_heads: int) -> LayerAttention:
        """Parse the notation of a layer with `kv_heads` key-value heads."""
        return _read(text, kv_heads) if isinstance(text, str) else LayerAttention._parse(text, kv_heads)

    @staticmethod
    def _parse(text: str, kv_heads: int) -> LayerAttention:
        pieces = _pieces(text)
        if pieces is None:
            return LayerAttention((HeadGroup(tuple(range(kv_heads)), resolve(text)),), _extras(text))
        named: set[int] = set()
        groups: list[tuple[tuple[int, ...] | None, str]] = []
        for heads, notation in pieces:
            numbers = _numbers(heads, kv_heads, text)
            if twice := sorted(named & set(numbers or ())):
                raise SpecError(f"{text!r} gives head {twice[0]} two attentions: name every head once.")
            if numbers is None and any(n is None for n, _ in groups):
                raise SpecError(f"{text!r} has two groups for *, the other heads: write * once.")
            named |= set(numbers or ())
            groups.append((numbers, notation))
        others = tuple(sorted(set(range(kv_heads)) - named))
        if others and all(numbers is not None for numbers, _ in groups):
            raise SpecError(
                f"{text!r} leaves out {_written(others)} of {kv_heads} key-value heads: name every head, or "
                "add '; *: …' for the others."
            )
        of_groups = {_extras(notation) for _, notation in groups}
        if len(of_groups) > 1:
            raise SpecError(
                f"{text!r} mixes variants that need different layers around them, such as a convolution: "
                "heads of one layer share it."
            )
        found = [
            HeadGroup(others if heads is None else heads, resolve(notation)) for heads, notation in groups
        ]
        return LayerAttention(tuple(g for g in found if g.heads), of_groups.pop())._checked(text)

    def _checked(self, text: str) -> LayerAttention:
        for group in self.groups:
            norm = group.spec.norm
            if len(self.groups) > 1 and norm is not None and not norm.per_head:
                raise SpecError(
                    f"{text!r}: {norm} is over all heads of a layer, which differ here: use a norm per head, "
                    "or one attention for all heads."
                )
        return self

    @property
    def is_uniform(self) -> bool:
        """Whether all heads have the same attention."""
        return len(self.groups) == 1

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each group."""
        return tuple(group.spec for group in self.groups)

    @property
    def by_head(self) -> tuple[AttentionSpec, ...]:
        """The attention of each key-value head."""
        found = {head: group.spec for group in self.groups for head in group.heads}
        return tuple(found[head] for head in sorted(found))

    @staticmethod
    def of_heads(specs: Sequence[AttentionSpec], extras: LayerExtras | None = None) -> LayerAttention:
        """The attention of a layer, from the spec of each of its key-value heads."""
        groups = [
            HeadGroup(tuple(n for n, s in enumerate(specs) if s == spec), spec)
            for spec in dict.fromkeys(specs)
        ]
        return LayerAttention(tuple(groups), extras or LayerExtras())

    def with_rotary(self, rotary: bool | None) -> LayerAttention:
        """The same with rotary embedding on or off; None: unchanged."""
        if rotary is None:
            return self
        return dataclasses.replace(self, extras=dataclasses.replace(self.extras, rotary=rotary))

    def __str__(self) -> str:
        if self.is_uniform:
            return str(self.groups[0].spec)
        return "; ".join(f"{group.written_heads}: {group.spec}" for group in self.groups)


@lru_cache(maxsize=1024)
def _read(text: str, kv_heads: int) -> LayerAttention:
    """Cached, because every new cache parses the attention of every layer."""
    return LayerAttention._parse(text, kv_heads)


after_registration(_read.cache_clear)


def specs_in(text: str) -> tuple[AttentionSpec, ...]:
    """Every attention in the notation of a layer, without its heads."""
    pieces = _pieces(text)
    return (resolve(text),) if pieces is None else tuple(resolve(notation) for _, notation in pieces)


def with_each_spec(text: str, change: Callable[[str], str]) -> str:
    """The notation of a layer with `change` applied to each attention in it."""
    pieces = _pieces(text)
    if pieces is None:
        return change(text)
    return "; ".join(f"{heads}: {change(notation)}" for heads, notation in pieces)


def _pieces(text: str) -> list[tuple[str, str]] | None:
    """(heads, notation) of every group; None if all heads share one attention."""
    if not isinstance(text, str) or ":" not in text:
        return None
    found = []
    for piece in text.split(";"):
        heads, mark, notation = piece.partition(":")
        if not mark:
            raise SpecError(
                f"{text!r}: {piece.strip()!r} does not say which heads it is for; a group is written "
                "heads: spec, as in '0,2: exp/sum; *: poly(0)+window(64)/sum'."
            )
        found.append((heads.strip(), notation.strip()))
    return found


def _numbers(heads: str, kv_heads: int, text: str) -> tuple[int, ...] | None:
    """The numbers of '0,2-3'; None for *."""
    if heads == "*":
        return None
    found: list[int] = []
    for piece in heads.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if match is None:
            raise SpecError(f"{text!r}: heads are comma-separated numbers and ranges, or *, not {heads!r}.")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    beyond = [n for n in found if n >= kv_heads]
    if beyond or not found or len(set(found)) < len(found):
        raise SpecError(
            f"{text!r}: a layer has the key-value heads 0 to {kv_heads - 1}, each named once; got {heads!r}."
        )
    return tuple(sorted(found))


def _written(heads: Sequence[int]) -> str:
    """0,1,2,5 → '0-2,5'"""
    runs: list[list[int]] = []
    for head in heads:
        if runs and head == runs[-1][-1] + 1:
            runs[-1].append(head)
        else:
            runs.append([head])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _extras(text: str) -> LayerExtras:
    return catalogue[text].extras if text in catalogue else LayerExtras()
