"""The recurrent form: one token at a time, a state of fixed size.

S_t = f_t S_{t−1} + φ(k_t) [i_t v_t, 1]ᵀ,        y_t reads a·φ(q_t)ᵀ S_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from maclaurin.forms.chunked import read_state
from maclaurin.forms.features import symmetric_powers
from maclaurin.forms.stream import Rows, Stream, split_count, values_with_count
from maclaurin.spec import AttentionSpec, RowStatistics


def recurrent_rows(
    spec: AttentionSpec, stream: Stream, moments: Tensor
) -> tuple[Rows, RowStatistics | None, Tensor]:
    """(rows, row statistics of the last token, final moments), token by token."""
    columns, orders = values_with_count(spec, stream), spec.orders
    sums: list[Tensor] = []
    statistics = None
    for t in range(stream.k.shape[-2]):
        if stream.log_forget is not None:
            moments = moments * stream.log_forget[..., t, None, None].exp()
        key = symmetric_powers(stream.k[..., t, :], orders)
        moments = moments + key[..., :, None] * columns[..., t, None, :]
        query = symmetric_powers(stream.q[..., t : t + 1, :], orders)
        read, statistics = read_state(spec, query, moments[:, :, None], stream.key_size)
        sums.append(read)
    return Rows(*split_count(spec, torch.cat(sums, dim=-2))), statistics, moments
