"""Training objectives, as modules around the model, and the same losses on held-out data.

N tokens, D width, V vocabulary
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from maclaurin.data.source import NOT_SCORED, Batch
from maclaurin.errors import InputError
from maclaurin.layers.watch_attention import record_layers
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.models.model_folder import load_model
from maclaurin.training.config import TrainConfig
from maclaurin.training.processes import Processes

#: logits computed at once; more would only take more memory
LOGITS_AT_ONCE = 1 << 26


class TokenLosses(NamedTuple):
    """Losses of each token of a batch [B, T]."""

    losses: Tensor  # 0 where nothing is scored
    right: Tensor | None  # whether the most likely answer is the right one; None where there are no answers


class Objective(nn.Module, ABC):
    """A model together with its training loss."""

    model: nn.Module

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        answers: Tensor | None = None,
        answers_at: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses of the scored tokens of a batch, with its gradients.

        answers       [B, T] or None: the weight of the loss of an answer, the same for all; 0 elsewhere
        answers_at    [n], their places in B · T: finding these on a GPU would wait for it
        """

    @abstractmethod
    def by_token(self, batch: Batch) -> TokenLosses:
        """The loss of each token, without gradients."""


def objective_of(config: TrainConfig, model: MaclaurinForCausalLM, processes: Processes) -> Objective:
    """The objective that the config names."""
    if config.objective == "next-token":
        return NextToken(model)
    if config.teacher is None:
        raise InputError(f"objective={config.objective} needs a teacher: the model to match.")
    if processes.world > 1:
        raise InputError(
            f"objective={config.objective} runs in one process only, since it also runs a second model: "
            "start it without torchrun."
        )
    teacher, _ = load_model(config.teacher)
    match = {"match-attention": MatchAttention, "match-logits": MatchLogits}[config.objective]
    return match(model, teacher.to(processes.device))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- next token


@final
class NextToken(Objective):
    """Cross-entropy of the next token."""

    def __init__(self, model: MaclaurinForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        answers: Tensor | None = None,
        answers_at: Tensor | None = None,
    ) -> Tensor:
        """Σ −log p(target); logits are computed in chunks and not kept."""
        hidden = _hidden(self.model, tokens, documents)
        return summed_cross_entropy(hidden.flatten(0, 1), _head(self.model), targets.flatten())

    @torch.no_grad()
    def by_token(self, batch: Batch) -> TokenLosses:
        """Losses, and whether the most likely token is the right one."""
        hidden, weight = _hidden(self.model, batch.tokens, batch.documents).flatten(0, 1), _head(self.model)
        rows = _rows_at_once(weight)
        losses, right = [], []
        for states, targets in zip(hidden.split(rows), batch.targets.flatten().split(rows), strict=True):
            logits = nn.functional.linear(states, weight).float()
            losses.append(
                nn.functional.cross_entropy(logits, targets, ignore_index=NOT_SCORED, reduction="none")
            )
            right.append(logits.argmax(-1) == targets)
        shape = batch.targets.shape
        return TokenLosses(torch.cat(losses).view(shape), torch.cat(right).view(shape))


def summed_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Σ cross_entropy(hidden Wᵀ, targets), hidden [N, D], weight [V, D], targets [N].

    No logits are kept for the backward pass: [N, V] fp32 would be the largest tensor of a small model.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss = _SummedCrossEntropy.apply(hidden, weight, targets, dtype, weight.requires_grad)
    return cast("Tensor", loss)


def _rows_at_once(weight: Tensor) -> int:
    return max(64, LOGITS_AT_ONCE // weight.shape[0])


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradient with the loss, chunk by chunk: ∂/∂logits = softmax(logits) − onehot(target)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, weight_too: bool
    ) -> Tensor:
        rows = _rows_at_once(weight)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_weight = torch.zeros_like(weight) if weight_too else None
        of_hidden = []
        vocabulary = torch.arange(weight.shape[0], device=weight.device)
        weight = weight.to(dtype)
        for states, answers in zip(hidden.to(dtype).split(rows), targets.split(rows), strict=True):
            scored = (answers != NOT_SCORED)[:, None]
            answers = answers.clamp(min=0)[:, None]
            logits = (states @ weight.t()).float()
            normalizer = logits.logsumexp(-1, keepdim=True)
            loss = loss + torch.where(scored, normalizer - logits.gather(-1, answers), 0.0).sum()
            slope = (logits - normalizer).exp()
            slope = torch.where(vocabulary == answers, slope - 1, slope)
            slope = torch.where(scored, slope, 0.0).to(dtype)
            of_hidden.append((slope @ weight).to(hidden.dtype))
            if of_weight is not None:
                of_weight += slope.t() @ states
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_kept_gradients(ctx, gradients[0]), None, None, None


# -------------------------------------------------------------------------------------- match logits


@final
class MatchLogits(Objective):
    """KL(teacher ‖ student) of the next token: Σ_x p(x) (ln p(x) − ln p_student(x)), p the teacher's.

    Of answers to questions (data/recall_rows.py) it is −ln p_student(answer), with a weight.
    """

    def __init__(self, model: MaclaurinForCausalLM, teacher: MaclaurinForCausalLM) -> None:
        super().__init__()
        self.model = model
        self._teacher = (teacher.eval().requires_grad_(False),)  # a tuple: not a submodule
        if model.config.vocab_size != teacher.config.vocab_size:
            raise InputError(
                f"the teacher has a vocabulary of {teacher.config.vocab_size} tokens and the model one of "
                f"{model.config.vocab_size}, so their predictions cannot be compared: use the same tokenizer."
            )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        answers: Tensor | None = None,
        answers_at: Tensor | None = None,
    ) -> Tensor:
        """Σ of the divergences at scored tokens; logits are computed in chunks and not kept.

        Answers get their cross-entropy times their weight instead: the original may not know them.
        """
        hidden, own, known, weight = self._states(tokens, documents)
        scored = (targets != NOT_SCORED).flatten()
        if answers is None:
            return summed_divergence(hidden, own, known, weight, scored)
        assert answers_at is not None, "answers come with their places"
        asked = hidden.index_select(0, answers_at)
        of_answers = summed_cross_entropy(asked, own, targets.flatten().index_select(0, answers_at))
        of_text = summed_divergence(hidden, own, known, weight, scored.index_fill(0, answers_at, False))
        return of_text + answers.amax() * of_answers

    @torch.no_grad()
    def by_token(self, batch: Batch) -> TokenLosses:
        """Divergences; there are no right answers."""
        hidden, own, known, weight = self._states(batch.tokens, batch.documents)
        rows = _rows_at_once(own)
        parts = [
            _divergence(nn.functional.linear(student, own), nn.functional.linear(wanted, weight))[0]
            for student, wanted in zip(hidden.split(rows), known.split(rows), strict=True)
        ]
        found = torch.cat(parts).view(batch.targets.shape)
        return TokenLosses(torch.where(batch.targets != NOT_SCORED, found, 0.0), None)

    def _states(self, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states [N, D] and head [V, D] of the model, and of the teacher."""
        (teacher,) = self._teacher
        with torch.no_grad():
            known = _hidden(teacher, tokens, documents)
        hidden = _hidden(self.model, tokens, documents)
        return hidden.flatten(0, 1), _head(self.model), known.flatten(0, 1), _head(teacher)


def summed_divergence(
    hidden: Tensor, weight: Tensor, known: Tensor, known_weight: Tensor, scored: Tensor
) -> Tensor:
    """Σ KL(softmax(known Kᵀ) ‖ softmax(hidden Wᵀ)) over the scored rows of N; known has no gradient.

    No logits are kept for the backward pass.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss = _SummedDivergence.apply(hidden, weight, known, known_weight, scored, dtype, weight.requires_grad)
    return cast("Tensor", loss)


class _SummedDivergence(torch.autograd.Function):
    """Computes the gradient with the loss, chunk by chunk: ∂/∂logits = softmax(logits) − softmax(known)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        known: Tensor,
        known_weight: Tensor,
        scored: Tensor,
        dtype: torch.dtype,
        weight_too: bool,
    ) -> Tensor:
        rows = _rows_at_once(weight)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if weight_too else None
        of_hidden, own_dtype = [], weight.dtype
        weight, known_weight = weight.to(dtype), known_weight.to(dtype)
        parts = zip(
            hidden.to(dtype).split(rows), known.to(dtype).split(rows), scored.split(rows), strict=True
        )
        for states, wanted, counts in parts:
            found, slope = _divergence(states @ weight.t(), wanted @ known_weight.t())
            loss = loss + torch.where(counts, found, 0.0).sum()
            slope = torch.where(counts[:, None], slope, 0.0).to(dtype)
            of_hidden.append((slope @ weight).to(hidden.dtype))
            if of_weight is not None:
                of_weight += slope.t() @ states
        of_weight = None if of_weight is None else of_weight.to(own_dtype)
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_kept_gradients(ctx, gradients[0]), None, None, None, None, None


def _divergence(logits: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """KL(known ‖ logits) of every row [N], and its slope at the logits, for logits [N, V]."""
    found, wanted = logits.float().log_softmax(-1), known.float().log_softmax(-1)
    shares = wanted.exp()
    return (shares * (wanted - found)).sum(-1), found.exp() - shares


def _kept_gradients(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden states and weight from the forward pass, times the incoming gradient."""
    of_hidden, of_weight = ctx.saved_tensors
    of_weight = None if of_weight is None else of_weight * slope.to(of_weight.dtype)
    return of_hidden * slope.to(of_hidden.dtype), of_weight


def _hidden(model: Any, tokens: Tensor, documents: Tensor | None) -> Tensor:
    return model.base_model(input_ids=tokens, documents=documents, use_cache=False).last_hidden_state


def _head(model: Any) -> Tensor:
    return model.get_output_embeddings().weight


# ----------------------------------------------------------------------------------- match attention


@final
class MatchAttention(Objective):
    """Mean over layers of ‖student's attention(x) − teacher's‖² / mean ‖teacher's‖², on the teacher's x.

    Layers with the same attention as the teacher are left out; only the attention of the others is trained.
    """

    def __init__(self, model: MaclaurinForCausalLM, teacher: MaclaurinForCausalLM) -> None:
        super().__init__()
        self.model = model
        self._teacher = (teacher.eval().requires_grad_(False),)  # a tuple: not a submodule
        pairs = list(zip(_attentions(teacher), _attentions(model), strict=True))
        self.layers = [n for n, (old, new) in enumerate(pairs) if old.groups != new.groups]
        if not self.layers:
            raise InputError(
                "every layer has the teacher's attention, so there is nothing to match: convert a layer."
            )
        _freeze_all_but([_attentions(model)[n] for n in self.layers], model)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        answers: Tensor | None = None,
        answers_at: Tensor | None = None,
    ) -> Tensor:
        """Σ of the distances of scored tokens."""
        return self._distances(tokens, targets, documents).sum()

    @torch.no_grad()
    def by_token(self, batch: Batch) -> TokenLosses:
        """Distances; there are no right answers."""
        return TokenLosses(self._distances(batch.tokens, batch.targets, batch.documents), None)

    def _distances(self, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        (teacher,) = self._teacher
        with torch.no_grad(), record_layers(_attentions(teacher)) as calls:
            teacher.base_model(input_ids=tokens, documents=documents, use_cache=False)
        students, distances = _attentions(self.model), []
        for n in self.layers:
            call = calls[n]
            found = students[n](*call.arguments, **call.named).float()
            wanted = call.output.float()
            size = wanted.square().sum(-1).mean()
            distances.append((found - wanted).square().sum(-1) / size)
        return torch.where(targets != NOT_SCORED, torch.stack(distances).mean(0), 0.0)


def _attentions(model: Any) -> list[Any]:
    return [block.self_attn for block in model.base_model.layers]


def _freeze_all_but(parts: list[nn.Module], model: nn.Module) -> None:
    """Freeze every other parameter, so that the optimizer gets only those the loss depends on."""
    reached = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in reached:
            parameter.requires_grad_(False)


# --------------------------------------------------------------------------------- on held-out data


@final
@dataclass(frozen=True)
class Evaluation:
    """Means over the scored tokens of held-out data."""

    loss: float
    tokens: int
    accuracy: float
    #: None at positions where nothing is scored
    loss_by_position: list[float | None]

    @property
    def perplexity(self) -> float:
        """e^loss, of the mean loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    objective: Objective, batches: Iterable[Batch], processes: Processes, length: int
) -> Evaluation | None:
    """Loss, accuracy and loss by position over all batches of all processes; None if nothing is scored."""
    was_training = objective.training
    objective.eval()
    sums = torch.zeros(length, dtype=torch.float64, device=processes.device)
    counts, hits = torch.zeros_like(sums), torch.zeros_like(sums)
    for batch in batches:
        here = batch.to(processes.device, non_blocking=True)
        found = objective.by_token(here)
        scored = here.targets != NOT_SCORED
        sums += found.losses.double().sum(0)
        counts += scored.sum(0)
        if found.right is not None:
            hits += (found.right & scored).sum(0)
    objective.train(was_training)
    sums, counts, hits = (processes.total(t) for t in (sums, counts, hits))
    tokens = int(counts.sum())
    if not tokens:
        return None
    by_position = [
        total / count if count else None for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
    ]
    return Evaluation(float(sums.sum()) / tokens, tokens, float(hits.sum()) / tokens, by_position)
