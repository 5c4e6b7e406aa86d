"""`ops="native"`: models are compiled as a whole (`model.native`); what is called op by op is the reference."""

from __future__ import annotations

from penstock.ops.ref import REF

NATIVE = REF.replaced("native", {})
