"""Parts of the user's own: Python files and modules that register policies, drafters, selectors and the like.

Each process that looks names up imports them: the front, which refuses what does not exist; the engine, also one that
is begun again; and a rank. They run with all that Penstock may do, so only the command line, the environment and the
TOML file name them, never a request.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.formats.files import quoted


def load_plugins(named: str | None) -> None:
    """Import what `plugin` names: files (FILE.py) and modules, with commas between them; each once in a process.

    Raises ConfigError with one sentence: it is not there, its name belongs to another module, or it fails.
    """
    for name in filter(None, (part.strip() for part in (named or "").split(","))):
        if name.endswith(".py") or "/" in name or "\\" in name:
            _load_file(name)
        else:
            _load_module(name)


def _load_file(name: str) -> None:
    path = Path(name).resolve()
    module = path.stem
    if not path.is_file() or path.suffix != ".py":
        raise _refused(f"{quoted(name)} is no Python file; name a FILE.py, or a module that can be imported")
    if not module.isidentifier():
        raise _refused(f"{quoted(name)} cannot be the name of a module; use letters, digits and _ before .py")
    # Registries, and speculative_config's `function`, find its parts by the file's name.
    known = sys.modules.get(module)
    spec = find_spec(module) if known is None else known.__spec__
    found = getattr(known, "__file__", None) or (spec.origin if spec is not None else None)
    if (known is not None or spec is not None) and not (found and Path(found).resolve() == path):
        raise _refused(f"{quoted(name)} is called like another module ({module}); rename the file")
    if known is not None:
        return
    spec = spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[module] = made
    try:
        spec.loader.exec_module(made)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[module]
        raise _failed(name, error, path) from error


def _load_module(name: str) -> None:
    if not all(part.isidentifier() for part in name.split(".")):
        raise _refused(f"{quoted(name)} is no name of a module; name a FILE.py, or package.module")
    try:
        import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(name, error) from error  # something that it imports is not there
        raise _refused(f"there is no module {quoted(name)}; put its folder on PYTHONPATH, or name a FILE.py") from None
    except BaseException as error:  # whatever a file does when it is run, to its SystemExit
        raise _failed(name, error) from error


def _failed(name: str, error: BaseException, path: Path | None = None) -> ConfigError:
    """In one sentence, with the line of a file that failed."""
    line, trace = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None, error.__traceback__
    while trace is not None:
        if path is not None and trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" (line {line})" if line is not None else ""
    said = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return _refused(f"{quoted(name)} fails when it is imported: {type(error).__name__}: {said[:300]}{where}")


def _refused(why: str) -> ConfigError:
    return ConfigError(f"plugin: {why}", field="plugin")
