"""One file per published format of codes. `STORED_FORMATS`: those whose matrices can stay as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.registry import Registry

if TYPE_CHECKING:
    from penstock.weights.stored.words import WordMatrix

STORED_FORMATS: Registry[type[WordMatrix], None] = Registry("stored format")
"""`families.checkpoint.Codes.layout` -> a subclass of `weights.stored.words.WordMatrix`."""
STORED_FORMATS.add("awq", "penstock.weights.stored.awq:AwqMatrix")
STORED_FORMATS.add("gptq", "penstock.weights.stored.gptq:GptqMatrix")
