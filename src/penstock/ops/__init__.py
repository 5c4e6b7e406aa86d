"""L6: the list of operations a model is made of, and their implementations."""

from penstock.base.registry import Registry

OP_TABLES = Registry("op table")
OP_TABLES.add("ref", "penstock.ops.ref:REF")
OP_TABLES.add("blas", "penstock.ops.blas:BLAS")
OP_TABLES.add("native", "penstock.ops.native.table:NATIVE")
