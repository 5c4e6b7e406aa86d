"""How stored weights are held on a device, and who multiplies with them: said before a weight is read.

This module can be imported without torch.
"""

from __future__ import annotations

from penstock.core.matrix_format import MatrixFormat


def product_why_not(form: MatrixFormat, shape: tuple[int, int]) -> str | None:
    """What keeps the kernels `product_int4` and `product_int8` from a matrix whose codes are on the device, as an end
    of a sentence."""
    if form.code not in ("int", "uint", "e2m1", "e4m3"):
        return "codes are indices into a table"
    if form.ordered:
        return "inputs are in an order of their own"
    columns = shape[1]
    group = form.group or columns
    if columns % group:
        return f"groups of {group} do not divide {columns} inputs"
    paired = is_paired(form, columns)
    least = 32 if paired else 16
    if (group < columns or paired or form.zeros) and group % least:
        return f"groups are of {group} inputs, and the kernel takes multiples of {least}"
    return None


def is_paired(form: MatrixFormat, columns: int) -> bool:
    """Whether two codes lie in a byte."""
    return form.bits <= 4 and form.code != "int" and columns % 2 == 0
