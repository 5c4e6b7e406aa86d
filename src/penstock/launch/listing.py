"""What a repository of the Hugging Face Hub has that a model needs; what the hub refuses, as a sentence."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.base.errors import ModelError
from penstock.families.folder import pickle_refusal
from penstock.families.registry import read_spec
from penstock.formats.files import quoted
from penstock.formats.gguf import is_first_part, part_names
from penstock.formats.json_file import read_json_object
from penstock.formats.safetensors import INDEX_NAME
from penstock.launch.aliases import HubModel
from penstock.launch.transfer import HubFile, RepoCache, is_unreachable

_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^@]+\.gguf))?")
_SINGLE_NAME = "model.safetensors"
# What `families.folder` looks at, besides the weights.
_SMALL = re.compile(
    r"(config|generation_config|hf_quant_config|tokenizer|tokenizer_config|vocab|encoder)\.json|tokenizer\.model|"
    r"merges\.txt|vocab\.bpe|chat_template\.(jinja|json)|additional_chat_templates/[\w-]+\.jinja|[\w.-]+\.tiktoken|rwkv_vocab_v\d{8}\.txt|"
    + re.escape(INDEX_NAME)
)  # fmt: skip
_MAX_FILES = 20_000
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Listing:
    """A commit of a repository: its files by name; `licence` as its card says it ("" if it does not)."""

    wanted: HubModel
    commit: str
    files: dict[str, HubFile]
    licence: str

    def cache(self) -> RepoCache:
        return RepoCache(self.wanted.repo, self.commit)

    @property
    def first(self) -> str:
        """What is opened: config.json, of a folder, or a GGUF file. Raises ModelError, UnsupportedError."""
        wanted = self.wanted
        has_weights = _SINGLE_NAME in self.files or INDEX_NAME in self.files
        if wanted.file is None and "config.json" in self.files and has_weights:
            return "config.json"
        return wanted.file or _only_gguf(self)

    def path(self) -> Path:
        """Of the model in the cache."""
        folder = self.cache().snapshot
        return folder if self.first == "config.json" else folder / self.first

    def small(self) -> list[HubFile]:
        """What says what the model is; no weights. Empty for a GGUF file, which says it itself."""
        if self.first != "config.json":
            return []
        return [file for name, file in self.files.items() if _SMALL.fullmatch(name)]

    def weights(self) -> list[HubFile]:
        """The files of weights, once those of `small` are there. Raises ModelError, UnsupportedError."""
        if self.first != "config.json":
            names = part_names(self.first)
        else:
            folder = self.cache().snapshot
            read_spec(folder / "config.json")  # what cannot be run is refused before its weights are downloaded
            names = _shards(folder, self)
        missing = [name for name in names if name not in self.files]
        if missing:
            raise ModelError(f"{quoted(self.wanted.repo)} has no file {quoted(missing[0])} on the Hugging Face Hub")
        return [self.files[name] for name in names]


def parse_id(text: str) -> HubModel | None:
    """`org/name`, `org/name@revision`, either with `/file.gguf` behind it; None if it is nothing of the kind."""
    match = _ID.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        return None
    return HubModel(match["repo"], match["revision"], match["file"])


def list_files(wanted: HubModel) -> Listing:
    """Ask the hub. Raises ModelError for names that lead out of the repository, the library's errors for the rest
    (`sentences` makes sentences of them)."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(wanted.repo, revision=wanted.revision, files_metadata=True, timeout=_TIMEOUT_S)
    siblings = info.siblings or []
    if len(siblings) > _MAX_FILES:
        raise ModelError(f"{quoted(wanted.repo)} lists {len(siblings):,} files, more than a model has")
    files = {}
    for item in siblings:
        name = item.rfilename
        if leads_out(name):
            raise ModelError(f"{quoted(wanted.repo)} lists {quoted(name)}, a name that leads out of it; it is not used")
        digest = item.lfs.sha256 if item.lfs else item.blob_id or ""
        files[name] = HubFile(name, int(item.size or 0), digest)
    licence = getattr(info.card_data, "license", None) or ""
    return Listing(wanted, info.sha or "", files, ", ".join(licence) if isinstance(licence, list) else str(licence))


def leads_out(name: str) -> bool:
    """Whether a file's name is absolute, climbs, or is no name of a file at all."""
    plain = str(PurePosixPath(name)) == name and not name.startswith(("/", "~")) and name.isprintable()
    return not plain or not {"", ".", ".."}.isdisjoint(name.split("/")) or "\\" in name


def cached(wanted: HubModel, error: Exception) -> tuple[Path, bool]:
    """What an earlier download left, when the hub cannot be asked, and whether that was forbidden (HF_HUB_OFFLINE).

    Whether it is whole, `open_model` says. Raises ModelError if there is nothing.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import OfflineModeIsEnabled

    offline = isinstance(error, OfflineModeIsEnabled)
    found = try_to_load_from_cache(wanted.repo, wanted.file or "config.json", revision=wanted.revision)
    if isinstance(found, str):
        return (Path(found) if wanted.file is not None else Path(found).parent), offline
    if wanted.file is None and (folder := _cached_folder(constants.HF_HUB_CACHE, wanted)) is not None:
        return folder, offline
    why = "HF_HUB_OFFLINE is set" if offline else f"the Hugging Face Hub cannot be reached ({type(error).__name__})"
    raise ModelError(
        f"{quoted(wanted.repo)} is not in the cache {quoted(constants.HF_HUB_CACHE)}, and {why}; download it "
        "first, or give the path of a folder"
    ) from None


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


def _shards(folder: Path, listing: Listing) -> list[str]:
    """As `families.folder` chooses: the single file before the shards that an index names."""
    if _SINGLE_NAME in listing.files:
        return [_SINGLE_NAME]
    named: Any = read_json_object(folder / INDEX_NAME).get("weight_map")
    shards = {str(name) for name in named.values()} if isinstance(named, dict) else set()
    missing = sorted(shards - listing.files.keys())
    if missing:
        first = quoted(missing[0])
        raise ModelError(
            f"{quoted(listing.wanted.repo)} lacks {len(missing)} of its {len(shards)} shards, first {first}"
        )
    return sorted(shards)


def _only_gguf(listing: Listing) -> str:
    """The one GGUF model of a repository without safetensors."""
    repo = listing.wanted.repo
    models = sorted(name for name in listing.files if name.endswith(".gguf") and is_first_part(name))
    if len(models) == 1:
        return models[0]
    if models:
        listed = ", ".join(models[:6]) + (", ..." if len(models) > 6 else "")
        raise ModelError(f"{quoted(repo)} holds {len(models)} GGUF models ({listed}): name one, as {repo}/{models[0]}")
    raise pickle_refusal(Path(repo), sorted(listing.files)) or ModelError(
        f"{quoted(repo)} on the Hugging Face Hub holds neither a config.json with safetensors nor a GGUF file"
    )


@contextmanager
def sentences(wanted: HubModel) -> Iterator[None]:
    """What the library raises, as one sentence that says what to do. Mutates nothing."""
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
    except Exception as error:
        if not is_unreachable(error):
            raise
        raise ModelError(
            f"{name} could not be downloaded: the connection broke off ({type(error).__name__}); try again, what has "
            "arrived is kept"
        ) from None
