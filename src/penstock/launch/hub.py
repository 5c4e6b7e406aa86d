"""Models named by their id on the Hugging Face Hub: only the files that are needed, from the cache where possible.

`huggingface_hub` does the transfers and keeps the cache, so HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE mean what
they mean everywhere. It is an extra (`penstock[hub]`) and is imported only when an id has to be looked up.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, ModelError
from penstock.families.folder import pickle_refusal
from penstock.families.registry import read_spec
from penstock.formats.files import quoted
from penstock.formats.gguf import is_first_part, part_names
from penstock.formats.json_file import read_json_object
from penstock.formats.safetensors import INDEX_NAME
from penstock.launch.bundled import bundled_model

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^@]+\.gguf))?")
_SINGLE_NAME = "model.safetensors"
# What `families.folder` looks at, besides the weights.
_SMALL = re.compile(
    r"(config|generation_config|hf_quant_config|tokenizer|tokenizer_config|vocab|encoder)\.json|tokenizer\.model|"
    r"merges\.txt|vocab\.bpe|chat_template\.(jinja|json)|additional_chat_templates/[\w-]+\.jinja|[\w.-]+\.tiktoken|rwkv_vocab_v\d{8}\.txt|"
    + re.escape(INDEX_NAME)
)  # fmt: skip
_WORKERS = 4
_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubModel:
    """`file`: one GGUF file of the repository, instead of its model folder."""

    repo: str
    revision: str | None = None
    file: str | None = None


def parse_id(text: str) -> HubModel | None:
    """`org/name`, `org/name@revision`, either with `/file.gguf` behind it; None if it is nothing of the kind."""
    match = _ID.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        return None
    return HubModel(match["repo"], match["revision"], match["file"])


def local_path(
    model: str, revision: str | None = None, progress: Progress | None = None, *, weights: bool = True
) -> Path:
    """The path of a model that may be named by an id; what exists here wins, then what comes with the package.

    What is missing in the cache is downloaded; `weights` off: not the weights. If the hub cannot be reached, what the
    cache has is used. Raises ModelError (one sentence) if it cannot be had, UnsupportedError if its config.json names
    what Penstock does not run (before weights are downloaded), ConfigError if `revision` contradicts the id.
    """
    inside = None if os.path.exists(model) else bundled_model(model)
    if inside is not None and revision is None:
        return inside
    found = None if os.path.exists(model) else parse_id(model)
    if found is None:
        if revision is not None:
            raise ConfigError(f"revision: {model!r} is no id on the Hugging Face Hub; leave it away", field="revision")
        return Path(model)
    if revision is not None and found.revision not in (None, revision):
        raise ConfigError(f"revision: {revision!r} contradicts {model!r}", field="revision")
    found = HubModel(found.repo, found.revision or revision, found.file)
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise ModelError(
            f"there is no folder {quoted(model)} here; to download models by their ids: pip install 'penstock[hub]'"
        ) from None
    with _sentences(found):
        return _download(found, progress or (lambda done, total: None), weights)


def _download(wanted: HubModel, progress: Progress, weights: bool) -> Path:
    from huggingface_hub import HfApi

    try:
        sizes, commit = _listing(HfApi(), wanted)
    except Exception as error:
        if not _is_unreachable(error):
            raise
        return _cached(wanted, error)
    if wanted.file is None and "config.json" in sizes and _has_safetensors(sizes):
        first, small = "config.json", [name for name in sizes if _SMALL.fullmatch(name)]
        folder = _fetch(wanted, commit, [first, *small], sizes, progress)
        read_spec(folder / first)  # what cannot be run is refused before its weights are downloaded
        if weights:
            _fetch(wanted, commit, _shards(folder, wanted, sizes), sizes, progress)
        return folder
    file = wanted.file or _only_gguf(wanted, sizes)
    if file not in sizes:
        raise ModelError(f"{quoted(wanted.repo)} has no file {quoted(file)} on the Hugging Face Hub")
    parts = part_names(file)
    missing = [name for name in parts if name not in sizes]
    if missing:
        raise ModelError(f"{quoted(wanted.repo)} has no file {quoted(missing[0])} on the Hugging Face Hub")
    return _fetch(wanted, commit, parts, sizes, progress) / file


def _is_unreachable(error: Exception) -> bool:
    """No network, no answer, or none but that the hub is out of order; the library's errors carry the answer."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return int(status) >= 500
    transport = type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests", "urllib3")
    return transport or isinstance(error, OSError)


def _listing(api: HfApi, wanted: HubModel) -> tuple[dict[str, int], str]:
    """Name -> bytes of every file, and the commit."""
    info = api.model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=_TIMEOUT_S)
    # A name that leads elsewhere is none of a model's.
    siblings = [item for item in info.siblings or [] if not {"", ".", ".."} & set(item.rfilename.split("/"))]
    files = {item.rfilename: item.size or 0 for item in siblings}
    return files, info.sha or "main"


def _has_safetensors(sizes: dict[str, int]) -> bool:
    return _SINGLE_NAME in sizes or INDEX_NAME in sizes


def _shards(folder: Path, wanted: HubModel, sizes: dict[str, int]) -> list[str]:
    """As `families.folder` chooses: the single file before the shards that an index names."""
    if _SINGLE_NAME in sizes:
        return [_SINGLE_NAME]
    named = read_json_object(folder / INDEX_NAME).get("weight_map")
    shards = {str(name) for name in named.values()} if isinstance(named, dict) else set()
    missing = sorted(shards - sizes.keys())
    if missing:
        first = quoted(missing[0])
        raise ModelError(f"{quoted(wanted.repo)} lacks {len(missing)} of its {len(shards)} shards, first {first}")
    return sorted(shards)


def _only_gguf(wanted: HubModel, sizes: dict[str, int]) -> str:
    """The one GGUF model of a repository without safetensors."""
    models = sorted(name for name in sizes if name.endswith(".gguf") and is_first_part(name))
    if len(models) == 1:
        return models[0]
    if models:
        listed = ", ".join(models[:6]) + (", ..." if len(models) > 6 else "")
        raise ModelError(
            f"{quoted(wanted.repo)} holds {len(models)} GGUF models ({listed}): name one, as {wanted.repo}/{models[0]}"
        )
    raise pickle_refusal(Path(wanted.repo), sorted(sizes)) or ModelError(
        f"{quoted(wanted.repo)} on the Hugging Face Hub holds neither a config.json with safetensors nor a GGUF file"
    )


def _fetch(wanted: HubModel, commit: str, names: list[str], sizes: dict[str, int], progress: Progress) -> Path:
    """The folder of the cache that has these files, after they were downloaded as far as necessary."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    names = list(dict.fromkeys(names))
    cached = [name for name in names if isinstance(try_to_load_from_cache(wanted.repo, name, revision=commit), str)]
    total = sum(sizes[name] for name in names)
    bar = _Counter(progress, sum(sizes[name] for name in cached), total)
    _check_space(wanted, total - bar.done)

    def one(name: str, revision: str | None = commit) -> Path:
        path = Path(hf_hub_download(wanted.repo, name, revision=revision, tqdm_class=bar.file))
        return path.parents[name.count("/")]

    # The first by the name of the revision: that is how the cache learns which commit it was, for times without a
    # network.
    folder = one(names[0], wanted.revision)
    if folder.name != commit:  # it moved in between
        folder = one(names[0])
    with ThreadPoolExecutor(_WORKERS) as pool:
        list(pool.map(one, names[1:]))
    return folder


class _Counter:
    """Sums the bytes of files that come in side by side; `file` stands in for the library's progress bar of one."""

    def __init__(self, progress: Progress, done: int, total: int) -> None:
        self.done = done
        counter = self

        class File:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.update(kwargs.get("initial") or 0)

            def __enter__(self) -> File:
                return self

            def __exit__(self, *args: object) -> None:
                return None

            def update(self, num_bytes: float | None = 1) -> None:
                counter.done = min(total, counter.done + int(num_bytes or 0))
                progress(counter.done, total)

            def __getattr__(self, name: str) -> Callable[..., None]:  # whatever else it says to a bar
                return lambda *args, **kwargs: None

        self.file: Any = File


def _check_space(wanted: HubModel, needed: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(
            f"{quoted(wanted.repo)} needs {needed / 1e9:.1f} GB on the disk, but {quoted(place)} has "
            f"{free / 1e9:.1f} GB free; make room, or set HF_HOME to another place"
        )


def _cached(wanted: HubModel, error: Exception) -> Path:
    """What an earlier download left, when the hub cannot be asked. Whether it is whole, `open_model` says."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    offline = isinstance(error, OfflineModeIsEnabled)
    found = try_to_load_from_cache(wanted.repo, wanted.file or "config.json", revision=wanted.revision)
    if isinstance(found, str):
        path = Path(found)
    elif wanted.file is None and (folder := _cached_folder(constants.HF_HUB_CACHE, wanted)) is not None:
        path = folder
    else:
        why = "HF_HUB_OFFLINE is set" if offline else f"the Hugging Face Hub cannot be reached ({type(error).__name__})"
        raise ModelError(
            f"{quoted(wanted.repo)} is not in the cache {quoted(constants.HF_HUB_CACHE)}, and {why}; download it "
            "first, or give the path of a folder"
        ) from None
    if not offline:
        _log.warning("the Hugging Face Hub cannot be reached: using %s from the cache", wanted.repo)
    return path if wanted.file is not None or path.is_dir() else path.parent


def _cached_folder(cache: str, wanted: HubModel) -> Path | None:
    """The snapshot of a repository that has no config.json: a GGUF file alone."""
    repo = Path(cache) / f"models--{wanted.repo.replace('/', '--')}"
    revision = wanted.revision or "main"
    try:
        commit = (repo / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = repo / "snapshots" / commit
    return folder if folder.is_dir() else None


@contextmanager
def _sentences(wanted: HubModel) -> Iterator[None]:
    """What the library raises, as one sentence that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = quoted(wanted.repo)
    try:
        yield
    except GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its conditions on its page of the Hugging Face Hub, then set HF_TOKEN to a token "
            "of the account that did"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"there is neither a folder {name} here nor such a model on the Hugging Face Hub; if it is private, set "
            "HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {quoted(wanted.revision)} on the Hugging Face Hub") from None
    except HFValidationError as error:
        raise ModelError(f"{name} is no id on the Hugging Face Hub: {quoted(str(error).splitlines()[0])}") from None
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", "no")
        raise ModelError(f"the Hugging Face Hub answered {status} when asked for {name}; try again later") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full; {name} could not be downloaded whole") from None
        reason = error.strerror or "the connection broke off"
        raise ModelError(f"{name} could not be downloaded: {reason}; try again, what has arrived is kept") from None
