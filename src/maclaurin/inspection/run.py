"""An inspection of a loaded model: heads first, then the whole model, going on where it stopped."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from maclaurin.inspection.capture import attention_layers, watched
from maclaurin.inspection.display import Display
from maclaurin.inspection.measure import measured
from maclaurin.inspection.perplexity import perplexity, summed_loss
from maclaurin.inspection.rank import state_ranks
from maclaurin.inspection.records import head_records
from maclaurin.inspection.schema import Inspection, ModelRecord, PerplexityRecord, TextRecord
from maclaurin.inspection.settings import LONGEST_CONTEXT, Settings
from maclaurin.inspection.stages import Stages
from maclaurin.inspection.tally import Tally
from maclaurin.inspection.text import Contexts
from maclaurin.inspection.trials import Trial, check_layers, exchanged, trials
from maclaurin.layers.attention import AttentionLayer
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.training.run_folder import machine_facts

#: how long all heads of a layer take, a pass of the model through one layer being 1
HEADS_COST = 15


def context_length(model: MaclaurinForCausalLM, asked: int | None) -> int:
    """As asked, else what the model was made for, but no more than LONGEST_CONTEXT."""
    return min(model.config.max_position_embeddings, LONGEST_CONTEXT) if asked is None else asked


def inspect_model(
    name: str,
    model: MaclaurinForCausalLM,
    contexts: Contexts,
    settings: Settings,
    out: Path,
    *,
    quiet: bool = False,
) -> Inspection:
    """Look at a model reading a text; progress is kept in `out` until it is written."""
    model = _prepared(model, settings)
    check_layers(name, attention_layers(model))
    work = _Work(name, model, contexts, settings, Stages(out, _plan(name, model, contexts, settings)))
    return work.done(quiet)


@final
class _Work:
    """The two stages of one inspection."""

    def __init__(
        self, name: str, model: MaclaurinForCausalLM, contexts: Contexts, settings: Settings, stages: Stages
    ) -> None:
        self.name, self.model, self.contexts = name, model, contexts
        self.settings, self.stages = settings, stages
        self.layers = attention_layers(model)
        self.trials = trials([layer.spec for layer in self.layers], settings, contexts.length)
        self.passes = [trial for trial in self.trials if trial.specs is not None]

    def done(self, quiet: bool) -> Inspection:
        """All of it."""
        again = self.stages.begin()
        per_context = len(self.layers) * (HEADS_COST + sum(trial.cost for trial in self.passes))
        with Display(len(self.contexts) * per_context, quiet=quiet) as display:
            if again:
                display.say("going on where the last inspection stopped")
            tallies, ranks = self._heads(display)
            losses = self._losses(display)
        return self._inspection(tallies, ranks, losses)

    def _heads(self, display: Display) -> tuple[list[Tally], Tensor]:
        """Tally of each layer and the mean ranks [layers, 2, Hkv]."""
        begun, tallies, ranks = self.stages.heads()
        display.found(begun * HEADS_COST * len(self.layers))
        for number, context in enumerate(self.contexts):
            if number < begun:
                continue
            here, ranks_here = self._heads_of(context, display, f"heads, context {number + 1}")
            tallies = [a + b for a, b in zip(tallies, here, strict=True)] if tallies else here
            ranks = ranks_here if ranks is None else ranks + ranks_here
            self.stages.save_heads(number + 1, tallies, ranks)
        assert ranks is not None
        return tallies, ranks / len(self.contexts)

    def _heads_of(self, context: Tensor, display: Display, what: str) -> tuple[list[Tally], Tensor]:
        tallies: list[Tally] = []
        ranks: list[Tensor] = []
        settings = self.settings

        def watch(number: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> None:
            tally = measured(
                layer.spec,
                q[0],
                k[0],
                v[0],
                highest=max(settings.orders),
                sinks=settings.sinks,
                chunk=settings.chunk,
            )
            tallies.append(tally.cpu())
            ranks.append(state_ranks(k[0], v[0], settings.chunk).cpu())
            display.advance(HEADS_COST, f"{what}, layer {number + 1}")

        with watched(self.model, watch), torch.inference_mode():
            self.model.model(input_ids=context[None].to(settings.device), use_cache=False)
        return tallies, torch.stack(ranks)

    def _losses(self, display: Display) -> dict[str, tuple[int, float]]:
        """Trial → predictions and their summed loss."""
        losses = self.stages.losses()
        for trial in self.passes:
            key = _key(trial)
            begun, loss = losses.get(key, (0, 0.0))
            display.found(begun * trial.cost * len(self.layers))
            for number, context in enumerate(self.contexts):
                if number < begun:
                    continue
                with exchanged(self.layers, trial.specs or ()):
                    loss += summed_loss(self.model, context.to(self.settings.device))
                losses[key] = (number + 1, loss)
                self.stages.save_losses(losses)
                display.advance(trial.cost * len(self.layers), trial.attention)
        return losses

    def _inspection(
        self, tallies: list[Tally], ranks: Tensor, losses: dict[str, tuple[int, float]]
    ) -> Inspection:
        predicted = self.contexts.predicted
        return Inspection(
            made={
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                **machine_facts(),
            },
            model=_model_record(self.name, self.model, self.layers, self.settings),
            text=_text_record(self.contexts),
            orders=self.settings.orders,
            windows=self.settings.windows,
            sinks=self.settings.sinks,
            tolerance=self.settings.tolerance,
            heads=tuple(
                record
                for layer, tally in enumerate(tallies)
                for record in head_records(layer, tally, ranks[layer])
            ),
            perplexity=tuple(_perplexity_record(trial, losses, predicted) for trial in self.trials),
        )


def _prepared(model: MaclaurinForCausalLM, settings: Settings) -> MaclaurinForCausalLM:
    """On its device, computing in fp32 with weights rounded as asked."""
    model = model.to(settings.device).eval()  # type: ignore[arg-type]
    rounded = getattr(torch, settings.weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(rounded).float())
    return model.float()


def _plan(name: str, model: MaclaurinForCausalLM, contexts: Contexts, settings: Settings) -> dict[str, Any]:
    """What must be the same for two inspections to be parts of one."""
    chosen = dataclasses.asdict(settings)
    for free in ("device", "chunk"):
        chosen.pop(free)
    return {
        "model": name,
        "config": model.config.to_json_string(),
        "weights": _weight_sum(model),
        "text": contexts.sha256,
        "tokens": len(contexts.tokens),
        "context": contexts.length,
        **chosen,
    }


@torch.no_grad()
def _weight_sum(model: MaclaurinForCausalLM) -> float:
    """Tells models of one configuration apart."""
    return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in model.parameters()))


def _key(trial: Trial) -> str:
    return f"{trial.kind} {trial.attention}"


def _model_record(
    name: str, model: MaclaurinForCausalLM, layers: list[AttentionLayer], settings: Settings
) -> ModelRecord:
    return ModelRecord(
        name=name,
        layers=len(layers),
        heads=layers[0].heads,
        kv_heads=layers[0].kv_heads,
        key_size=layers[0].key_size,
        parameters=sum(p.numel() for p in model.parameters()),
        attention=tuple(str(layer.spec) for layer in layers),
        weights=settings.weights,
    )


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
