"""Triton's interpreter, made to spend its time on the kernels."""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """Exchange the functions of `triton.language` once per launch, not again at each call of a function by a kernel
    (nearly half of the time that a kernel takes): what is exchanged already stays so. And look types up once."""
    try:
        from triton import language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    exchange, exchanged = interpreter._patch_lang, set[int]()
    languages = {id(tl), id(tl.core)}

    class Launch:
        """What the first exchange of a launch gives back at its end, those of its functions' modules besides."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            self._scope.restore()
            exchanged.clear()

    class Nothing:
        def restore(self) -> None:
            """There is nothing to give back."""

    def once(fn: Any) -> Any:
        wanted = languages.intersection(map(id, fn.__globals__.values()))
        if wanted and wanted <= exchanged:
            return Nothing()
        scope = exchange(fn)
        exchanged.update(wanted)
        return Launch(scope)

    interpreter._patch_lang = once
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)


def _by_name(look_up: Any) -> Any:
    """The same, asked once for each type of one element: a block or a pointer has no hash."""
    found: dict[str, Any] = {}

    def known(type_: Any) -> Any:
        scalar = type_.scalar
        if scalar.name not in found:
            found[scalar.name] = look_up(scalar)
        return found[scalar.name]

    return known
