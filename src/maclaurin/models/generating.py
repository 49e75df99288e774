"""Generate text token by token, keeping only the cache (generate() also keeps every token).

`Conversation` does this turn by turn, with the chat template of an instruct model. `TextWriter` goes from
text to text: it passes on each piece as it is generated, and measures the speed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from transformers import TextStreamer

from maclaurin.errors import InputError
from maclaurin.models.cache import MaclaurinCache
from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.models.modeling import MaclaurinForCausalLM
from maclaurin.models.recorded_step import RecordedStep, can_record, fixed_shapes
from maclaurin.stop_request import StopRequest
from maclaurin.wording import first_line

#: for fewer steps, recording a CUDA graph costs more than it saves
_STEPS_BEFORE_RECORDING = 8
#: a streamer decodes a line again with each new token; lines with more tokens are decoded in pieces
_MOST_DECODED_AGAIN = 256


@final
@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled: at temperature 0 the most likely, else among the top k and top p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"a temperature is 0 (the most likely token) or more, got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k is a number of tokens, at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p is a share of the probability, above 0 and up to 1, got {self.top_p}.")

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """One token [B] from logits [B, vocabulary]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            probabilities = _nucleus(probabilities, self.top_p)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _nucleus(probabilities: Tensor, share: float) -> Tensor:
    """The most likely tokens that together have this probability; the result is not normalised."""
    falling, order = probabilities.sort(descending=True)
    before = falling.cumsum(-1) - falling
    return torch.zeros_like(probabilities).scatter(-1, order, falling.masked_fill(before >= share, 0.0))


class Generation:
    """A text being generated: `cache` holds what was read, `pending` [B, n] the tokens still to be read.

    On a GPU, steps are recorded once and replayed; they then write to the tensors of the cache, so keep a
    fork() of it rather than its tensors. `recording=False` turns that off.
    """

    def __init__(
        self,
        model: MaclaurinForCausalLM,
        cache: MaclaurinCache | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        recording: bool = True,
    ) -> None:
        self.model = model
        self.cache = MaclaurinCache(cast("MaclaurinConfig", model.config)) if cache is None else cache
        self.sampling = Sampling() if sampling is None else sampling
        self.generator = torch.Generator(device=model.device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self.pending = self.cache.pending
        self._recording, self._steps = recording, 0
        self._recorded: RecordedStep | None = None

    def add(self, tokens: Tensor) -> None:
        """Text [B, n] to read before the next token is drawn."""
        tokens = tokens.to(self.model.device)
        self.pending = tokens if self.pending is None else torch.cat([self.pending, tokens], dim=1)

    def read(self, at_once: int | None = None) -> Iterator[int]:
        """Read the pending tokens except the last, some at a time; yields how many are left."""
        while self.pending is not None and self.pending.shape[1] > 1:
            left = self.pending.shape[1] - 1
            yield left
            size = left if at_once is None else min(at_once, left)
            self._forward(self.pending[:, :size])
            self.pending = self.pending[:, size:]

    def step(self) -> Tensor:
        """Read the last pending token and draw the next, [B]."""
        if self.pending is None or self.pending.shape[1] == 0:
            raise InputError("there is no text to continue: give a prompt of at least one token.")
        if self.pending.shape[1] > 1:
            for _ in self.read():
                pass
        logits = self._next_logits(self.pending)
        drawn = self.sampling.draw(logits, self.generator)
        self.pending = drawn[:, None]
        return drawn

    def save(self, path: str) -> None:
        """Save the cache together with the pending tokens."""
        self.cache.pending = self.pending
        self.cache.save(path)

    def _next_logits(self, token: Tensor) -> Tensor:
        """Logits [B, vocabulary] after one token [B, 1], from a recorded step if possible."""
        if self._recorded is not None:
            logits = self._recorded(token) if self._recorded.supports(self.model, self.cache) else None
            if logits is not None:
                return logits
            self._recorded, self._steps = None, 0
        self._steps += 1
        if not self._recording or not _is_time(self._steps) or not can_record(self.model, self.cache):
            return self._forward(token)
        before = fixed_shapes(self.cache)
        logits = self._forward(token)
        if before == fixed_shapes(self.cache):
            self._record()
        return logits

    def _record(self) -> None:
        """Record the step for later tokens; if that fails, warn and continue without."""
        try:
            self._recorded = RecordedStep(self.model, self.cache)
        except RuntimeError as problem:  # out of memory, or an operation that cannot be captured
            self._recording = False
            first = first_line(problem)
            warnings.warn(
                f"the step could not be recorded as a CUDA graph, so it runs unrecorded: {first}",
                stacklevel=3,
            )

    @torch.no_grad()
    def _forward(self, tokens: Tensor) -> Tensor:
        out = self.model(input_ids=tokens, past_key_values=self.cache, logits_to_keep=1)
        assert out.logits is not None
        return out.logits[:, -1]


def _is_time(steps: int) -> bool:
    """Whether to check if the cache's shapes are constant: after 8, 16, 32, … steps."""
    return steps >= _STEPS_BEFORE_RECORDING and steps & (steps - 1) == 0


#: stands for a reply when only the text after it is needed
_REPLY = "\x00reply\x00"


@final
class Conversation:
    """Adds each message to a Generation as the tokenizer's chat template writes it.

    Earlier turns are in the cache already and are not read again, so a turn costs the same however long the
    conversation is.
    """

    def __init__(self, generation: Generation, tokenizer: Any, system: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "this model's tokenizer has no chat template: only models that are trained on conversations "
                "have one. Continue a text instead."
            )
        self._generation, self._tokenizer = generation, tokenizer
        self._before = [] if system is None else [{"role": "system", "content": system}]
        self._is_begun = generation.cache.seen > 0

    def ask(self, message: str) -> None:
        """Add a message of the user and the beginning of the reply."""
        asked = {"role": "user", "content": message}
        if self._is_begun:
            earlier = [{"role": "user", "content": "…"}, {"role": "assistant", "content": _REPLY}]
            text = self._written([*self._before, *earlier, asked]).partition(_REPLY)[2]
        else:
            text = self._written([*self._before, asked])
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        pending = self._generation.pending
        if self._is_begun and pending is not None and ids and int(pending[0, -1]) == ids[0]:
            ids = ids[1:]  # the reply ended with the token that ends a turn
        self._generation.add(torch.tensor([ids], dtype=torch.long))
        self._is_begun = True

    def _written(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@dataclass
class Figures:
    """Tokens and seconds of the texts so far."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False


@final
class TextWriter:
    """Continues texts, or answers messages, until an end token, the limit or Ctrl-C.

    write       receives the text in pieces, as it is generated
    state       file of a saved cache, from which every text continues
    ends        tokens that end a text
    """

    def __init__(
        self,
        model: MaclaurinForCausalLM,
        tokenizer: Any,
        write: Callable[[str], None],
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        state: Path | None = None,
        max_new_tokens: int = 200,
        prefill_chunk: int | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self._model, self._tokenizer, self._write = model, tokenizer, write
        self._sampling, self._seed, self._state = sampling, seed, state
        self._most, self._chunk, self._ends = max_new_tokens, prefill_chunk, ends
        self.figures = Figures()

    def continue_text(self, prompt: str) -> Generation:
        """Write what follows the prompt."""
        generation = self._new()
        self._add(generation, prompt)
        self._write_text(generation)
        return generation

    def talk(self, messages: Iterable[str], system: str | None = None) -> Generation:
        """Write an answer to each message of one conversation."""
        generation = self._new()
        conversation = Conversation(generation, self._tokenizer, system)
        for message in messages:
            conversation.ask(message)
            self._write_text(generation)
            if self.figures.interrupted:
                break
        return generation

    def _new(self) -> Generation:
        cache = None if self._state is None else MaclaurinCache.load(self._state, self._model)
        return Generation(self._model, cache, self._sampling, self._seed)

    def _add(self, generation: Generation, prompt: str) -> None:
        """Add the prompt's tokens; a new text gets the tokens with which the tokenizer starts one."""
        is_new = self._state is None
        ids = self._tokenizer(prompt, add_special_tokens=is_new)["input_ids"] if prompt or is_new else []
        begin = self._tokenizer.bos_token_id
        if not ids and is_new and begin is not None:
            ids = [begin]
        if ids:
            generation.add(torch.tensor([ids], dtype=torch.long))
        if generation.pending is None:
            raise InputError("there is nothing to continue: give a `prompt`.")
        if generation.pending.shape[0] != 1:
            raise InputError(
                f"this state holds {generation.pending.shape[0]} texts; only one can be continued."
            )

    def _write_text(self, generation: Generation) -> None:
        """Read the prompt, then write text until the end."""
        figures, streamer = self.figures, PieceStreamer(self._tokenizer, self._write)
        assert generation.pending is not None
        figures.prompt_tokens += generation.pending.shape[1]
        with StopRequest("SIGINT") as stop:
            start = time.perf_counter()
            for _ in generation.read(self._chunk):
                if stop.is_set:
                    break
            begun = time.perf_counter()
            figures.prompt_seconds += begun - start
            for _ in range(self._most):
                if stop.is_set:
                    break
                token = int(generation.step()[0])
                figures.tokens += 1
                if token in self._ends:
                    break
                streamer.put(torch.tensor([token]))
            figures.seconds += time.perf_counter() - begun
            figures.interrupted = stop.is_set
        streamer.end()
        self._write("\n")


def end_tokens(model: MaclaurinForCausalLM, tokenizer: Any) -> set[int]:
    """The tokens that end a text, by the model's generation config and by the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in [*several, tokenizer.eos_token_id] if token is not None}


@final
class PieceStreamer(TextStreamer):
    """transformers' streamer, with a bound on how much of a long line it decodes again."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._write = write

    def put(self, value: Any) -> None:
        """One more token."""
        super().put(value)
        held = self.token_cache
        if len(held) >= _MOST_DECODED_AGAIN and not str(self.tokenizer.decode(held[-8:])).endswith("�"):
            self.end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on a piece of text."""
        self._write(text)
