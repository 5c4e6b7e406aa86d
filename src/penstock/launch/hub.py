"""The path of a model, by whatever name: a path, a bundled model, a name that was pulled, a name of the table, an id.

`huggingface_hub` says what there is and `transfer` brings it, so HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean
what they mean everywhere. The library is imported only when the hub has to be asked.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from penstock.base.errors import ConfigError, ModelError
from penstock.formats.files import quoted
from penstock.launch.aliases import ALIASES, HubModel
from penstock.launch.bundled import bundled_model
from penstock.launch.listing import cached, list_files, parse_id, sentences
from penstock.launch.pull import nearest, pull
from penstock.launch.store import NAME, ModelStore
from penstock.launch.transfer import Progress, check_space, is_unreachable

_log = logging.getLogger(__name__)


def _silent(done: int, total: int) -> None:
    """Tells nobody."""


def local_path(
    model: str, revision: str | None = None, progress: Progress | None = None, *, weights: bool = True,
    store: ModelStore | None = None,
) -> Path:  # fmt: skip
    """The path of a model; what exists here wins, then what comes with the package, then what was pulled.

    What is missing is downloaded; `weights` off: not the weights of an id. If the hub cannot be reached, what the cache
    has is used. Raises ModelError (one sentence) if it cannot be had, UnsupportedError if its config.json names what
    Penstock does not run (before weights are downloaded), ConfigError if `revision` contradicts the id.
    """
    if os.path.exists(model):
        found = None
    elif revision is None and (inside := bundled_model(model)) is not None:
        return inside
    else:
        store = store or ModelStore()
        record = store.get(model)
        if record is not None and record.whole and revision in (None, record.revision, record.commit):
            gone = record.missing()
            if gone is None:
                return Path(record.path)
            if not record.repo:
                raise ModelError(f"{quoted(gone)}, a file of {model}, is gone or was changed; name the model again")
        if revision is None and model in ALIASES:
            return Path(pull(store, model, progress=progress or _silent).path)
        found = parse_id(model)
        file = model.endswith((".gguf", ".bin", ".json"))
        if found is None and revision is None and NAME.fullmatch(model) and not file:
            raise ModelError(
                f"there is no model {quoted(model)}: no folder or file of this name is here, and none was pulled; "
                f"{nearest(store, model)}"
            )
    if found is None:
        if revision is not None:
            raise ConfigError(f"revision: {model!r} is no id on the Hugging Face Hub; leave it away", field="revision")
        return Path(model)
    if revision is not None and found.revision not in (None, revision):
        raise ConfigError(f"revision: {revision!r} contradicts {model!r}", field="revision")
    found = HubModel(found.repo, found.revision or revision, found.file)
    with sentences(found):
        return _download(found, progress or _silent, weights)


def _download(wanted: HubModel, progress: Progress, weights: bool) -> Path:
    try:
        listing = list_files(wanted)
    except Exception as error:
        if not is_unreachable(error):
            raise
        path, offline = cached(wanted, error)
        if not offline:
            _log.warning("the Hugging Face Hub cannot be reached: using %s from the cache", wanted.repo)
        return path
    cache, files = listing.cache(), listing.small()
    check_space(wanted.repo, cache.root, cache.missing_bytes(files))
    cache.fetch(files, _silent)
    if weights or not files:
        files = [*files, *listing.weights()]
        check_space(wanted.repo, cache.root, cache.missing_bytes(files))
        cache.fetch(files, progress)
    cache.remember(wanted.revision)
    return listing.path()
