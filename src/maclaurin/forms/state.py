"""The state of attention as a recurrent network, of a fixed size per head.

    moments   S = Σ_s D_s φ(k_s) [i_s v_s, 1]ᵀ     symmetric-packed, fp32 or fp64
    count     how many keys it has seen

States are additive: the state of a concatenation is the sum of the states (`merge`), after the
first has been decayed by the second's forget gates; dropping the last tokens is a subtraction
(`rollback`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maclaurin.errors import InputError, load_extra
from maclaurin.files import new_file
from maclaurin.forms.certificate import Certificate
from maclaurin.forms.exact_keys import ExactKeys, merge_exact
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.stream import Inputs, Stream, gated_values, values_with_count, working_dtype
from maclaurin.spec import AttentionSpec, parse

FILE_VERSION = 1
#: bytes between tensors that share a storage, for their alignment
_MOST_PADDING = 32


@dataclass(frozen=True, eq=False)
class State:
    """What `attention` keeps of the tokens so far. It is never changed in place."""

    spec: AttentionSpec
    moments: Tensor  # [B, K, F, e] or [B, K, F, e+1] with the row sum's column last
    count: Tensor  # [B]
    log_decay: Tensor | None = None  # [B, K], ln of all forget gates so far
    running: Tensor | None = None  # [B, heads], ln Σ e^g of the running argument so far
    exact: ExactKeys | None = None
    #: whether window and sinks are known to be full; read from the GPU once, since that synchronises
    is_full: bool = False
    #: for exp run as a series: the certificate of its order, and the norm of the longest key so far
    certificate: Certificate | None = None
    key_bound: float = 0.0

    @staticmethod
    def empty(spec: AttentionSpec, stream: Stream, heads: int, dtype: torch.dtype) -> State:
        """The state before the first token, shaped for the stream; `dtype` is the dtype of the inputs.

        Exact keys keep that dtype; so do values, unless a gate has changed them.
        """
        batch, kv_heads = stream.k.shape[:2]
        columns = stream.value_size + int(spec.needs_row_sum)
        new = stream.k
        return State(
            spec,
            new.new_zeros(batch, kv_heads, spec.features_of_mapped(stream.key_size), columns),
            torch.zeros(batch, dtype=torch.int64, device=new.device),
            new.new_zeros(batch, kv_heads) if spec.decay_gates else None,
            _nothing_yet(spec, new, heads),
            ExactKeys.empty(spec.window, stream, dtype, new.dtype if spec.value_gates else dtype)
            if spec.window
            else None,
        )

    @staticmethod
    def on_meta(spec: AttentionSpec, inputs: Inputs) -> State:
        """A state for such inputs on the meta device, without data, for planning."""
        dtype = working_dtype(inputs.q.dtype)
        q, k, v = (u.to("meta", dtype).transpose(1, 2) for u in (inputs.q, inputs.k, inputs.v))
        decay = k[..., 0] if spec.decay_gates else None
        k = k[..., :1].expand(*k.shape[:-1], spec.kernel.key_size(k.shape[-1]))
        stream = Stream(q.unflatten(1, (k.shape[1], -1)), k, v, decay)
        return dataclasses.replace(State.empty(spec, stream, q.shape[1], inputs.q.dtype), is_full=True)

    @staticmethod
    def bytes_for(spec: AttentionSpec, inputs: Inputs) -> int:
        """Bytes of a state for such inputs, without making one."""
        return State.on_meta(spec, inputs).nbytes

    # ----------------------------------------------------------------------------- its tensors

    def signature(self) -> tuple[Any, ...]:
        """The properties that the choice of a program depends on."""
        moments, running, exact = self.moments, self.running, self.exact
        heads = None if running is None else running.shape
        dtypes = None if exact is None else (exact.recent_k.dtype, exact.recent_v.dtype)
        return (
            self.spec, moments.shape, moments.dtype, moments.device, heads, dtypes, self.is_full,
            self.has_gradient,
        )  # fmt: skip

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient will flow through it."""
        if not torch.is_grad_enabled():
            return False
        return any(t.requires_grad for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor it holds, by name."""
        named = {n: getattr(self, n) for n in ("moments", "count", "log_decay", "running")}
        if self.exact is not None:
            fields = dataclasses.fields(self.exact)
            named |= {f"exact.{f.name}": getattr(self.exact, f.name) for f in fields}
        return {n: t for n, t in named.items() if t is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """Apply `change` to every tensor."""
        return dataclasses.replace(
            self,
            moments=change(self.moments),
            count=change(self.count),
            log_decay=None if self.log_decay is None else change(self.log_decay),
            running=None if self.running is None else change(self.running),
            exact=None if self.exact is None else self.exact.map(change),
        )

    @property
    def batch_size(self) -> int:
        """The number of sequences it holds."""
        return self.count.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors; the same however many tokens it has seen."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def device(self) -> torch.device:
        return self.moments.device

    def to(self, device: torch.device | str) -> State:
        """The state on another device."""
        return self.map(lambda t: t.to(device))

    def clone(self) -> State:
        """A copy that shares no memory: a snapshot, a fork."""
        return self.map(torch.clone)

    def compact(self) -> State:
        """The same numbers; tensors are copied if they are views of more than the state's own tensors."""
        tensors = self.tensors().values()
        if all(t.untyped_storage().nbytes() <= t.nbytes for t in tensors):
            return self
        own: dict[int, int] = {}  # bytes of the state's tensors by the address of their storage
        for t in tensors:
            place = t.untyped_storage().data_ptr()
            own[place] = own.get(place, 0) + t.nbytes

        def is_own(t: Tensor) -> bool:
            storage = t.untyped_storage()
            return storage.nbytes() <= own[storage.data_ptr()] + _MOST_PADDING

        return self.map(lambda t: t if is_own(t) else t.clone())

    def detach(self) -> State:
        """The same numbers without their autograd history."""
        return self.map(torch.Tensor.detach)

    def __getitem__(self, batch: int | slice | list[int] | Tensor) -> State:
        """Some of its sequences: state[2], state[1:3], state[[0, 0, 2]] (as beam search does)."""
        index = batch if isinstance(batch, slice) else _as_indices(batch, self.device)
        return self.map(lambda t: t[index])

    reorder = __getitem__

    @staticmethod
    def stack(states: list[State]) -> State:
        """The sequences of several states in one batch."""
        first = states[0]
        for other in states[1:]:
            first.require_same_kind(other)
        merged = {n: torch.cat([s.tensors()[n] for s in states]) for n in first.tensors()}
        bound = max(s.key_bound for s in states)
        return dataclasses.replace(first._with_tensors(merged), key_bound=bound)

    # -------------------------------------------------------------------------------- its algebra

    def merge(self, later: State) -> State:
        """The state of this text followed by the later one; both began with an empty state.

        S = (Π f of the later) S_this + S_later
        """
        self.require_same_kind(later)
        self._require_mergeable()
        if self.batch_size != later.batch_size:
            raise InputError(
                f"a state of {self.batch_size} sequences cannot be followed by one of {later.batch_size}."
            )
        decay = later.log_decay
        exact = None
        if self.exact is not None and later.exact is not None:
            moments, exact = merge_exact(
                self.spec,
                (self.count, self.moments, self.exact),
                (later.count, later.moments, later.exact),
                decay,
            )
        else:
            kept = self.moments if decay is None else self.moments * decay[..., None, None].exp()
            moments = kept + later.moments
        return dataclasses.replace(
            self,
            moments=moments,
            count=self.count + later.count,
            log_decay=None if self.log_decay is None or decay is None else self.log_decay + decay,
            running=None
            if self.running is None or later.running is None
            else torch.logaddexp(self.running, later.running),
            exact=exact,
            is_full=self.is_full or later.is_full,
            key_bound=max(self.key_bound, later.key_bound),
        )

    def rollback(
        self, k: Tensor, v: Tensor, *, gates: Mapping[str, Tensor] | None = None, **named_gates: Tensor
    ) -> State:
        """The state without its last m tokens, given what they were: k [B, m, Hkv, d], v, and their gates.

        A decay gate or a window discards what a rollback would need: keep a `clone()` from before
        those tokens and read those that remain again, as a cache with rollback=… does.
        """
        self._require_invertible()
        self._require_holds(k, v)
        dropped = self._of_tokens(k, v, {**(gates or {}), **named_gates})
        return dataclasses.replace(
            self,
            moments=self.moments - dropped.moments,
            count=self.count - dropped.count,
            running=self._running_without(dropped),
        )

    def _running_without(self, dropped: State) -> Tensor | None:
        """ln(e^running − e^dropped), −∞ where nothing is left."""
        if self.running is None or dropped.running is None:
            return None
        left = (self.count > dropped.count)[:, None]
        share = torch.where(left, (dropped.running - self.running).exp(), 1.0).clamp(max=1.0)
        lost = left & (share > 1 - 1e3 * torch.finfo(share.dtype).eps)
        if bool(lost.any()):
            raise InputError(
                "the tokens to drop make up the running sum up to rounding, so the sum of "
                "the tokens before them cannot be recovered. Keep state.clone() from before and return to it."
            )
        return self.running + torch.log1p(-share)

    def _of_tokens(self, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> State:
        """The state of tokens k [B, m, Hkv, d], v [B, m, Hkv, e] alone, without decay."""
        spec, dtype = self.spec, self.moments.dtype
        for argument in spec.arguments:
            if argument.tokens == "key" and argument.name not in gates:
                raise InputError(f"{spec} takes {argument.name}: pass it for these tokens too.")
        v = gated_values(spec, v.to(dtype), gates).transpose(1, 2)
        k = spec.kernel.mapped(k.to(dtype).transpose(1, 2))
        stream = Stream(k[:, :, None], k, v)
        running = spec.running_argument
        return dataclasses.replace(
            self,
            moments=symmetric_powers(k, spec.orders).mT @ values_with_count(spec, stream),
            count=torch.full_like(self.count, k.shape[-2]),
            running=None if running is None else gates[running.name].to(dtype).logsumexp(1),
        )

    def require_same_kind(self, other: State) -> None:
        """Raise unless the two are states of one spec with the same heads."""
        if self.spec != other.spec:
            raise InputError(f"these are states of different specs: {self.spec} and {other.spec}.")
        for name, mine in self.tensors().items():
            theirs = other.tensors()[name]
            if mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
                raise InputError(
                    f"these states differ in {name}: {mine.dtype} {list(mine.shape)} and {theirs.dtype} "
                    f"{list(theirs.shape)}."
                )

    def _require_holds(self, k: Tensor, v: Tensor) -> None:
        """Raise unless k and v can be the last tokens of this state."""
        batch, kv_heads, features, columns = self.moments.shape
        fits = (
            k.dim() == v.dim() == 4
            and k.shape[:3] == v.shape[:3]
            and (k.shape[0], k.shape[2]) == (batch, kv_heads)
            and self.spec.features(k.shape[3]) == features
            and v.shape[3] + int(self.spec.needs_row_sum) == columns
        )
        if not fits:
            raise InputError(
                f"k {list(k.shape)} and v {list(v.shape)} cannot be the last tokens of a state with moments "
                f"{list(self.moments.shape)}: pass k [{batch}, m, {kv_heads}, d] and v of those tokens."
            )
        if int(self.count.min()) < k.shape[1]:
            raise InputError(
                f"{k.shape[1]} tokens cannot be dropped from a state of {int(self.count.min())}."
            )

    def _require_invertible(self) -> None:
        part = self.spec.irreversible_part
        if part is not None:
            raise InputError(
                f"a state of {self.spec} cannot be rolled back: {part.mark}{part} has discarded what "
                "a rollback would need. Keep state.clone() from before the tokens, return to it and read "
                "those that remain again; MaclaurinCache(config, rollback=…) does that for a whole model."
            )

    def _require_mergeable(self) -> None:
        window = self.spec.window
        if window is not None and window.kept:
            raise InputError(
                f"states of {self.spec} cannot be merged: {window.mark}{window} keeps keys by the attention "
                "they received. The queries of the later text have not seen the keys of the earlier one, and "
                "states do not hold queries. Continue from the earlier state with the later text instead."
            )

    def __repr__(self) -> str:
        tokens = "on the meta device" if self.count.is_meta else f"{self.count.tolist()} tokens"
        return f"State({self.spec}, {self.batch_size} sequences of {tokens}, {self.nbytes:,} bytes)"

    # ------------------------------------------------------------------------------------- files

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file, atomically."""

        write_state(path, self.tensors(), self._metadata())

    @staticmethod
    def load(path: str | Path, device: torch.device | str = "cpu") -> State:
        """Read what `save` wrote."""

        tensors, metadata = read_state_file(path, str(device), FILE_VERSION)
        certificate = metadata.get("certificate")
        blank = State(
            parse(metadata["spec"]),
            tensors["moments"],
            tensors["count"],
            certificate=Certificate(**certificate) if certificate else None,
            key_bound=metadata["key_bound"],
        )
        return blank._with_tensors(tensors)

    def _metadata(self) -> dict[str, str]:
        certificate = dataclasses.asdict(self.certificate) if self.certificate else None
        data = {"spec": str(self.spec), "certificate": certificate, "key_bound": self.key_bound}
        return {"maclaurin": json.dumps({"version": FILE_VERSION, **data})}

    def _with_tensors(self, tensors: dict[str, Tensor]) -> State:
        prefix = "exact."
        exact: dict[str, Any] = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
        return dataclasses.replace(
            self,
            **{n: tensors.get(n) for n in ("moments", "count", "log_decay", "running")},
            exact=ExactKeys(**exact) if exact else None,
        )


def _as_indices(batch: object, device: torch.device) -> Tensor:
    """Indices of sequences, or a mask over them, as a tensor with one axis."""
    index = torch.as_tensor(batch, device=device)
    if index.dim() > 1 or index.is_floating_point():
        raise InputError(f"a state is indexed by sequence numbers, a slice or a mask, not by {batch!r}.")
    return index.reshape(-1)


def _nothing_yet(spec: AttentionSpec, like: Tensor, heads: int) -> Tensor | None:
    """Initial running log-sum (−∞) per head, where the spec has a running argument."""
    argument = spec.running_argument
    if argument is None:
        return None
    return like.new_full((like.shape[0], heads if argument.heads == "query" else like.shape[1]), -torch.inf)


def _safetensors() -> Any:
    load_extra("safetensors.torch", "state", "saving and loading states")
    return load_extra("safetensors", "state", "saving and loading states")


def write_state(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write the file atomically: a failed write leaves the old file."""
    path = Path(path)
    contiguous = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    data = _safetensors().torch.save(contiguous, metadata)
    with new_file(path) as temporary:
        temporary.write_bytes(data)


def read_state_file(path: str | Path, device: str, version: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the metadata of a file that write_state wrote."""
    library = _safetensors()
    try:
        with library.safe_open(str(path), framework="pt", device=device) as file:
            stored = (file.metadata() or {}).get("maclaurin")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except library.SafetensorError as problem:
        raise InputError(f"{path} is not a complete safetensors file: {problem}.") from None
    if stored is None:
        raise InputError(f"{path} is a safetensors file, but not a saved maclaurin state.")
    metadata = json.loads(stored)
    if metadata["version"] > version:
        raise InputError(
            f"{path} has state format {metadata['version']}, but this maclaurin reads up to {version}: "
            "upgrade maclaurin."
        )
    return tensors, metadata
