"""Tables of operations on tensors: with rows by themselves, and with one product for all rows of a step."""

from __future__ import annotations

from penstock.backends.gpu import ops
from penstock.backends.gpu.cache_ops import CACHE_OPS
from penstock.backends.gpu.connection_ops import CONNECTION_OPS, CONNECTIONS_BY_ROW
from penstock.backends.gpu.encoder_ops import ENCODER_OPS
from penstock.backends.gpu.entry_ops import ENTRY_OPS
from penstock.backends.gpu.expert_ops import experts, experts_by_row
from penstock.backends.gpu.index_ops import INDEX_OPS
from penstock.backends.gpu.state_ops import STATE_OPS
from penstock.backends.gpu.stream_ops import ROWED, STREAM_OPS
from penstock.ops.table import OpTable

_SHARED = STATE_OPS | CACHE_OPS | INDEX_OPS | STREAM_OPS | ENTRY_OPS | CONNECTION_OPS | ENCODER_OPS
_BY_ROW = {op.__name__: ops.by_row(op, n) for op, n in ROWED.items()} | CONNECTIONS_BY_ROW

PLAIN = OpTable("torch", ops.PLAIN | _SHARED | {"experts": experts}, batch_invariant=False)
EXACT = OpTable("torch", ops.EXACT | _SHARED | _BY_ROW | {"experts": experts_by_row})
