"""The inspection of a loaded model: every head first, then the whole model with other attentions (`trials`).

An interrupted inspection continues where it stopped, from the sums in its folder (`InspectionFolder`).
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.errors import InputError, SpecError
from maclaurin.evaluation.likelihood import perplexity, summed_loss
from maclaurin.files import require_writable_folder, write_file
from maclaurin.inspection.contexts import Contexts
from maclaurin.inspection.heads import Tally, state_ranks, tally_heads
from maclaurin.inspection.inspection_record import (
    FILE_NAME,
    About,
    Inspection,
    Kind,
    ModelRecord,
    PerplexityRecord,
    TextRecord,
    read_inspection,
    write_inspection,
)
from maclaurin.layers.attention import AttentionLayer
from maclaurin.layers.watch_attention import AttentionCall, attention_layers, watch_attention
from maclaurin.machine import provenance
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.models.cache import weights_fingerprint
from maclaurin.models.modeling import with_attention
from maclaurin.plain_data import read_json, to_plain, write_json
from maclaurin.spec import AttentionSpec, Kernel, Part, Poly, SlidingWindow, Taylor, Window
from maclaurin.spec.polynomials import HIGHEST_ORDER
from maclaurin.wording import first_line

ORDERS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
WINDOWS = (32, 64, 128)
#: highest order of tails used with a window: states of higher orders are too large to be useful
HIGHEST_TAIL = 4
LONGEST_CONTEXT = 1024
#: time for the heads of a layer, relative to a forward pass through it
HEADS_COST = 15

#: called with the share of the work done so far, and a description
Progress = Callable[[float, str], None]


@final
@dataclass(frozen=True)
class Settings:
    """Everything that affects the numbers, and the device.

    tokens      of the text that are read; 0 for all
    context     tokens read at a time; None: the model's length, at most LONGEST_CONTEXT
    orders      tried on the whole model; heads are measured up to the highest of them
    windows     tried on the whole model, alone and with tails
    sinks       first tokens that stay exact with a window
    tolerance   error of a head's output that counts as small
    weights     precision the weights are rounded to first
    chunk       queries in memory at a time
    """

    tokens: int = 512
    context: int | None = None
    orders: tuple[int, ...] = ORDERS
    windows: tuple[int, ...] = WINDOWS
    sinks: int = 1
    tolerance: float = 0.01
    weights: str = "float32"
    chunk: int = 128
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.orders:
            raise InputError("`orders`: none given; give some, such as 1,2,4,8.")
        if self.orders[-1] > HIGHEST_ORDER:
            raise InputError(
                f"`orders`: {self.orders[-1]} is over {HIGHEST_ORDER}, the last one with a finite factorial."
            )
        if self.windows and self.windows[0] < 1:
            raise InputError("windows: a window holds at least 1 token.")
        if self.weights not in ("float32", "bfloat16", "float16"):
            raise InputError(f"weights: float32, bfloat16 or float16, not {self.weights!r}.")
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance: must lie between 0 and 1, got {self.tolerance}.")
        if self.context is not None and self.context < 2:
            raise InputError(f"context: at least 2 tokens are needed to predict one, got {self.context}.")

    @property
    def tail_orders(self) -> tuple[int, ...]:
        """Orders of the tails used with a window."""
        return tuple(order for order in self.orders if 0 < order <= HIGHEST_TAIL)


def context_length(model: MaclaurinForCausalLM, asked: int | None) -> int:
    """The requested length, else the model's, but at most LONGEST_CONTEXT."""
    return min(model.config.max_position_embeddings, LONGEST_CONTEXT) if asked is None else asked


def inspect_model(
    name: str,
    model: MaclaurinForCausalLM,
    contexts: Contexts,
    settings: Settings,
    folder: InspectionFolder,
    *,
    report: Progress = lambda share, what: None,
) -> Inspection:
    """Measure a model on a text; progress is saved in `folder`, which must not belong to another model."""
    fingerprint = weights_fingerprint(model)
    folder.require_same_model(name, fingerprint)
    check_layers(name, attention_layers(model))
    model = _prepared(model, settings)
    return _Work(name, model, fingerprint, contexts, settings, folder, report).done()


@final
class _Work:
    """The two stages of one inspection."""

    def __init__(
        self,
        name: str,
        model: MaclaurinForCausalLM,
        fingerprint: str,
        contexts: Contexts,
        settings: Settings,
        folder: InspectionFolder,
        report: Progress,
    ) -> None:
        self.name, self.model, self.fingerprint = name, model, fingerprint
        self.contexts, self.settings, self.folder = contexts, settings, folder
        self.layers = attention_layers(model)
        self.trials = trials(
            [layer.spec for layer in self.layers],
            orders=settings.orders,
            tail_orders=settings.tail_orders,
            windows=tuple(size for size in settings.windows if size < contexts.length),
            sinks=settings.sinks,
        )
        self.passes = [trial for trial in self.trials if trial.specs is not None]
        self._report, self._done, self._total = report, 0.0, 1.0

    def done(self) -> Inspection:
        """Do the remaining work and return the whole inspection."""
        continued = self.folder.begin(self._plan())
        heads_read, tallies, ranks = self.folder.heads()
        losses = self.folder.losses()
        per_context = HEADS_COST + sum(trial.cost for trial in self.passes)
        found = HEADS_COST * heads_read + sum(
            trial.cost * losses.get(_key(trial), (0, 0.0))[0] for trial in self.passes
        )
        self._total = max(len(self.contexts) * per_context - found, 1e-9)
        if continued:
            self._report(0.0, "continuing the interrupted inspection")
        tallies, mean_ranks = self._heads(heads_read, tallies, ranks)
        self._losses(losses)
        return self._inspection(tallies, mean_ranks, losses)

    def _advance(self, cost: float, what: str) -> None:
        self._done += cost
        self._report(self._done / self._total, what)

    def _heads(self, read: int, tallies: list[Tally], ranks: Tensor | None) -> tuple[list[Tally], Tensor]:
        """The tally of each layer, and ranks [layers, 2, Hkv] averaged over contexts."""
        for number, context in enumerate(self.contexts):
            if number < read:
                continue
            here, ranks_here = self._heads_of(context, f"heads, context {number + 1}")
            tallies = [a + b for a, b in zip(tallies, here, strict=True)] if tallies else here
            ranks = ranks_here if ranks is None else ranks + ranks_here
            self.folder.save_heads(number + 1, tallies, ranks)
        assert ranks is not None
        return tallies, ranks / len(self.contexts)

    def _heads_of(self, context: Tensor, what: str) -> tuple[list[Tally], Tensor]:
        tallies: list[Tally] = []
        ranks: list[Tensor] = []
        highest, sinks, chunk = max(self.settings.orders), self.settings.sinks, self.settings.chunk

        def watch(call: AttentionCall) -> None:
            q, k, v = call.q[0], call.k[0], call.v[0]
            tally = tally_heads(call.layer.spec, q, k, v, highest=highest, sinks=sinks, chunk=chunk)
            tallies.append(tally.cpu())
            ranks.append(state_ranks(k, v, chunk).cpu())
            self._advance(HEADS_COST / len(self.layers), f"{what}, layer {call.number + 1}")

        with watch_attention(self.model, watch), torch.inference_mode():
            self.model.model(input_ids=context[None].to(self.settings.device), use_cache=False)
        return tallies, torch.stack(ranks)

    def _losses(self, losses: dict[str, tuple[int, float]]) -> None:
        """Fill in trial → (contexts read, summed loss)."""
        for trial in self.passes:
            read, loss = losses.get(_key(trial), (0, 0.0))
            for number, context in enumerate(self.contexts):
                if number < read:
                    continue
                with with_attention(self.model, [str(spec) for spec in trial.specs or ()]):
                    loss += summed_loss(self.model, context.to(self.settings.device))
                losses[_key(trial)] = (number + 1, loss)
                self.folder.save_losses(losses)
                self._advance(trial.cost, trial.attention)

    def _plan(self) -> dict[str, Any]:
        """What must be equal for an interrupted inspection to continue."""
        chosen = to_plain(self.settings)
        for free in ("device", "chunk"):
            chosen.pop(free)
        plan = {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "config": self.model.config.to_json_string(),
            "text": self.contexts.sha256,
            "read": len(self.contexts.tokens),
            "length": self.contexts.length,
            **chosen,
        }
        return json.loads(json.dumps(plan))

    def _inspection(
        self, tallies: list[Tally], ranks: Tensor, losses: dict[str, tuple[int, float]]
    ) -> Inspection:
        predicted = self.contexts.predicted
        return Inspection(
            made=provenance(),
            model=self._model_record(),
            text=_text_record(self.contexts),
            orders=self.settings.orders,
            windows=self.settings.windows,
            sinks=self.settings.sinks,
            tolerance=self.settings.tolerance,
            heads=tuple(
                record for layer, tally in enumerate(tallies) for record in tally.records(layer, ranks[layer])
            ),
            perplexity=tuple(_perplexity_record(trial, losses, predicted) for trial in self.trials),
        )

    def _model_record(self) -> ModelRecord:
        first = self.layers[0]
        return ModelRecord(
            name=self.name,
            layers=len(self.layers),
            heads=first.heads,
            kv_heads=first.kv_heads,
            key_size=first.key_size,
            parameters=sum(p.numel() for p in self.model.parameters()),
            attention=tuple(str(layer.spec) for layer in self.layers),
            weights=self.settings.weights,
            fingerprint=self.fingerprint,
        )


def _prepared(model: MaclaurinForCausalLM, settings: Settings) -> MaclaurinForCausalLM:
    """The model on its device in fp32, with weights rounded as in the settings."""
    model = model.to(settings.device).eval()  # type: ignore[arg-type]
    rounded = getattr(torch, settings.weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded).float())
    return model.float()


def _key(trial: Trial) -> str:
    return f"{trial.kind} {trial.attention}"


def _text_record(contexts: Contexts) -> TextRecord:
    return TextRecord(
        name=contexts.name,
        sha256=contexts.sha256,
        tokens=len(contexts.tokens),
        predicted=contexts.predicted,
        context=contexts.length,
        contexts=len(contexts),
        prefix=contexts.prefix,
    )


def _perplexity_record(
    trial: Trial, losses: dict[str, tuple[int, float]], predicted: int
) -> PerplexityRecord:
    loss = losses[_key(trial)][1] / predicted if trial.specs is not None else None
    return PerplexityRecord(
        kind=trial.kind,
        attention=trial.attention,
        order=trial.order,
        about=trial.about,
        window=trial.window,
        sinks=trial.sinks,
        loss=loss,
        perplexity=None if loss is None else perplexity(loss),
        note=trial.note,
    )


# ------------------------------------------------------------------------ the attentions that are tried


@final
@dataclass(frozen=True)
class Trial:
    """One attention for all layers that support it; if none does, `specs` is None and `note` says why."""

    kind: Kind
    attention: str
    specs: tuple[AttentionSpec, ...] | None
    order: int | None = None
    about: About | None = None
    window: int | None = None
    sinks: int | None = None
    note: str = ""

    @property
    def cost(self) -> float:
        """Estimated time, relative to the model's own attention."""
        return 1 + (self.order or 0) * (0.1 if self.about == "mean" else 0.04) + (0.5 if self.window else 0)


def check_layers(name: str, layers: list[AttentionLayer]) -> None:
    """Raise unless the kernel of every layer is exp or a polynomial that approximates it."""
    for number, layer in enumerate(layers):
        kernel = layer.spec.kernel
        if kernel.feature_map is not None or not (kernel.is_exact_exp or kernel.expands_exp):
            raise InputError(
                f"{name}: layer {number} has the attention {layer.spec}. Its kernel is neither exp nor a "
                "series of exp, so there are no orders to measure. Inspect a model with exp or taylor(N)."
            )


def trials(
    specs: list[AttentionSpec],
    *,
    orders: tuple[int, ...],
    tail_orders: tuple[int, ...],
    windows: tuple[int, ...],
    sinks: int,
) -> list[Trial]:
    """The model's own attention; every order about zero and about the mean; every window with each tail."""
    found = [Trial("own", _name(tuple(specs)), tuple(specs))]
    if not any(_can_change(spec) for spec in specs):
        return found
    abouts: tuple[About, ...] = ("zero", "mean")
    found += [_trial("order", specs, order, about) for about in abouts for order in orders]
    found += [
        _trial("window", specs, order, None if order is None else "mean", SlidingWindow(size, sinks=sinks))
        for size in windows
        for order in (None, *tail_orders)
    ]
    return found


def _can_change(spec: AttentionSpec) -> bool:
    """Whether the layer takes another attention; one that has a window keeps it: its memory is constant."""
    return spec.window is None


def _trial(
    kind: Kind,
    specs: list[AttentionSpec],
    order: int | None,
    about: About | None,
    window: Window | None = None,
) -> Trial:
    """taylor(order) in every layer that supports it, alone or with a window; order None: a window alone."""
    kernel: Kernel = Poly((0.0,)) if order is None else Taylor(order, about=about or "zero")
    size, sinks = (None, None) if window is None else (window.size, window.sinks)
    try:
        changed = tuple(
            AttentionSpec.of(kernel, window, *_around(spec)) if _can_change(spec) else spec for spec in specs
        )
    except SpecError as problem:
        added = f"+{window}" if window else ""
        reason = first_line(problem)
        return Trial(kind, f"{kernel}{added}", None, order, about, size, sinks, reason)
    return Trial(kind, _name(changed), changed, order, about, size, sinks)


def _around(spec: AttentionSpec) -> list[Part]:
    """The parts of a spec other than its kernel and its window."""
    return [part for part in spec.parts if part not in (spec.kernel, spec.window)]


def _name(specs: tuple[AttentionSpec, ...]) -> str:
    return " | ".join(dict.fromkeys(map(str, specs)))


# ------------------------------------------------------------------------------- the folder of an inspection

UNFINISHED = "unfinished"
PAGE = "index.html"


@final
class InspectionFolder:
    """Holds inspection.json and index.html, and until they are complete the sums so far in `unfinished`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path / UNFINISHED

    def require_same_model(self, name: str, fingerprint: str) -> None:
        """Raise if the folder cannot be written or holds the inspection of another model."""
        require_writable_folder(self.path)
        held = self._held_model()
        if held is not None and (held[1] != fingerprint if held[1] else held[0] != name):
            other = f"{held[0]}, with other weights" if held[0] == name else held[0]
            raise InputError(
                f"{self.path} holds the inspection of {other}; this one is of {name}. Choose another `out`, "
                "or remove the folder."
            )

    def _held_model(self) -> tuple[str, str] | None:
        """Name and fingerprint of the model whose inspection is here, finished or not."""
        if (self.path / FILE_NAME).is_file():
            model = read_inspection(self.path).model
            return model.name, model.fingerprint
        plan = self._plan()
        return None if plan is None else (str(plan.get("model")), str(plan.get("fingerprint", "")))

    def _plan(self) -> dict[str, Any] | None:
        plan = read_json(self._unfinished / "plan.json")
        return plan if isinstance(plan, dict) else None

    # ------------------------------------------------------------------------------ while unfinished

    def begin(self, plan: dict[str, Any]) -> bool:
        """Whether the folder holds an interrupted inspection of this plan; one of another plan is removed."""
        if self._plan() == plan:
            return True
        shutil.rmtree(self._unfinished, ignore_errors=True)
        write_json(self._unfinished / "plan.json", plan)
        return False

    def heads(self) -> tuple[int, list[Tally], Tensor | None]:
        """Contexts read, the tally of each layer, and the ranks [layers, 2, Hkv] summed over contexts."""
        file = self._unfinished / "heads.pt"
        if not file.is_file():
            return 0, [], None
        data = torch.load(file, weights_only=True)
        return data["contexts"], [Tally.from_tensors(layer) for layer in data["layers"]], data["ranks"]

    def save_heads(self, contexts: int, layers: list[Tally], ranks: Tensor) -> None:
        """Replace the saved tallies."""
        content = io.BytesIO()
        tensors = [layer.to_tensors() for layer in layers]
        torch.save({"contexts": contexts, "layers": tensors, "ranks": ranks}, content)
        write_file(self._unfinished / "heads.pt", content.getvalue())

    def losses(self) -> dict[str, tuple[int, float]]:
        """Trial → contexts read and their summed loss."""
        found = read_json(self._unfinished / "losses.json") or {}
        return {name: (contexts, loss) for name, (contexts, loss) in found.items()}

    def save_losses(self, losses: dict[str, tuple[int, float]]) -> None:
        """Replace the saved losses."""
        write_json(self._unfinished / "losses.json", losses, indent=None)

    # ---------------------------------------------------------------------------------- when complete

    def write(self, inspection: Inspection, pages: Mapping[str, str]) -> Path:
        """Write the records and the pages by name, then remove unfinished files; returns the page's path."""
        write_inspection(inspection, self.path / FILE_NAME)
        for name, text in pages.items():
            write_file(self.path / name, text)
        shutil.rmtree(self._unfinished, ignore_errors=True)
        return self.path / PAGE
