"""What plans must know of a backend before it is asked to do anything."""

from __future__ import annotations

import msgspec


class BackendTraits(msgspec.Struct, frozen=True):
    """`widens`: products widen 16-bit weights at every step, so they are widened once where memory allows; and steps
    run token by token, so that large ones only add latency. `batch_invariant`: a row's result does not depend, bit for
    bit, on its company. `quantizes`: takes `quantization`, by native panels. `rounds`: takes
    those that leave activations alone. `in_batches`: the backend that does the same with one product for all rows of a
    step, for those who only measure; "" if it does so itself."""

    widens: bool = True
    batch_invariant: bool = True
    quantizes: bool = False
    rounds: bool = False
    in_batches: str = ""


REFERENCE = BackendTraits(in_batches="blas")
