"""One file per published format of codes. `STORED_FORMATS`: those whose matrices can stay as they are stored."""

from __future__ import annotations

from penstock.base.registry import Registry

STORED_FORMATS = Registry("stored format")
"""`families.checkpoint.Codes.layout` -> a subclass of `weights.stored.words.WordMatrix`."""
STORED_FORMATS.add("awq", "penstock.weights.stored.awq:AwqMatrix")
STORED_FORMATS.add("gptq", "penstock.weights.stored.gptq:GptqMatrix")
