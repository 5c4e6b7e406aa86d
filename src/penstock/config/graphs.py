"""`cudagraph_capture_sizes`, parsed."""

from __future__ import annotations

from penstock.base.errors import ConfigError

FIELD = "cudagraph_capture_sizes"
_MOST = 1024


def parse_sizes(text: str) -> tuple[int, ...] | None:
    """Numbers of rows, ascending; None: auto. Raises: ConfigError for what is neither."""
    if text.strip() == "auto":
        return None
    try:
        sizes = sorted({int(part) for part in text.strip("[] ").split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1 or sizes[-1] > _MOST:
        raise ConfigError(
            f"{FIELD}: {text!r} is neither auto nor numbers of rows from 1 to {_MOST} with commas, such as 1,2,4,8; "
            "for no graphs use enforce_eager",
            field=FIELD,
        )
    return tuple(sizes)


def sizes_up_to(most: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Those of `given` (None: powers of two, and `most`) that steps of up to `most` rows can use, ascending."""
    wanted = given or (*(1 << i for i in range(most.bit_length()) if 1 << i < most), most)
    return tuple(n for before, n in zip((0, *wanted), wanted, strict=False) if before < most)
