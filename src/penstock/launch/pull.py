"""Getting a model by name, and getting rid of it."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from penstock.base.errors import ModelError
from penstock.families.checkpoint import Checkpoint
from penstock.families.registry import open_model
from penstock.formats.files import quoted
from penstock.launch.aliases import ALIASES, HubModel, KnownModel
from penstock.launch.bundled import bundled_model
from penstock.launch.listing import Listing, list_files, parse_id, sentences
from penstock.launch.store import NAME, ModelStore, NamedModel, StoredFile
from penstock.launch.transfer import HubFile, Progress, RepoCache, check_space, digest_of

Say = Callable[[str], None]
_LABEL = re.compile(r"(?<![a-z0-9])(i?q\d(_[a-z0-9]+)*|tq\d_\d|mxfp4|bf16|f16|f32)(?![a-z0-9])", re.IGNORECASE)


def pull(
    store: ModelStore,
    model: str,
    *,
    max_bytes: int | None = None,
    accept_terms: bool = False,
    progress: Progress = lambda done, total: None,
    say: Say = lambda text: None,
) -> NamedModel:
    """Bring a model of the table or of the Hugging Face Hub, and remember it under `model`.

    `max_bytes`: what all that was pulled may take on the disk, this one included. `say`: told what people wait for.

    Raises ModelError, UnsupportedError: one sentence that says what to do. What has arrived stays for the next call.
    """
    alias = ALIASES.get(model)
    wanted = parse_id(model) if alias is None else alias.model
    if wanted is None and bundled_model(model) is not None:
        raise ModelError(f"{model} comes with Penstock: penstock serve {model}")
    if wanted is None:
        raise ModelError(f"{quoted(model)} is no name that can be pulled: {nearest(store, model)}")
    if alias is not None and alias.terms and not accept_terms:
        raise ModelError(f"{model} comes under {alias.terms}: read them, then pull it with --accept-terms")
    with sentences(wanted), store.pulling(model, lambda: say(f"another process is pulling {model}; waiting for it")):
        return _pull(store, model, wanted, alias, max_bytes, progress, say)


def _pull(
    store: ModelStore, name: str, wanted: HubModel, alias: KnownModel | None, max_bytes: int | None, progress: Progress,
    say: Say,
) -> NamedModel:  # fmt: skip
    before = store.get(name)
    if before is not None and before.whole and before.commit == wanted.revision and before.missing() is None:
        return before  # a revision that is a commit does not change: the hub need not be asked
    listing = list_files(wanted)
    _check_known(name, alias, listing)
    if before is not None and before.commit != listing.commit and store.in_use(name):
        raise ModelError(f"{name} is in use, and the Hugging Face Hub has a newer one; stop it first (penstock ps)")
    old = before if before is not None and before.commit == listing.commit else None
    record = NamedModel(
        name=name, path=str(listing.path()), repo=wanted.repo, revision=wanted.revision or "", commit=listing.commit,
        licence=listing.licence or (alias.licence if alias is not None else ""), files={} if old is None else old.files,
    )  # fmt: skip
    cache = listing.cache()
    small = listing.small()
    present = {name for name, file in listing.files.items() if cache.has(file)}
    _check_room(store, record, cache, _likely(listing), max_bytes)

    def made(file: HubFile) -> None:
        record.files[file.name] = StoredFile(file.num_bytes, file.digest, made=True)
        store.save(record)

    store.save(record)
    cache.fetch(small, lambda done, total: None, made)
    files = [*small, *listing.weights()]
    _check_room(store, record, cache, files, max_bytes)
    cache.fetch(files, progress, made)
    cache.remember(wanted.revision)
    for file in files:
        if file.name in present and (found := cache.wrong(file)) is not None:
            raise ModelError(
                f"{quoted(cache.snapshot / file.name)} was there already and is not what the hub lists: its hash is "
                f"{found}, not {file.digest}; remove it, then pull again"
            )
        # A blob that a newer commit still has was brought by the pull of the older one.
        brought = before is not None and any(f.made and f.digest == file.digest for f in before.files.values())
        record.files.setdefault(file.name, StoredFile(file.num_bytes, file.digest, made=brought))
    checkpoint = open_model(record.path)
    record.quantization, record.whole, record.pulled_s = quantization_of(checkpoint), True, time.time()
    store.save(record)
    if before is not None and old is None:
        _drop_files(store, before)
    return record


def _likely(listing: Listing) -> list[HubFile]:
    """What will come, as far as it can be told before the index of the shards is here."""
    if listing.first != "config.json":
        return listing.weights()
    single = listing.files.get("model.safetensors")
    shards = [file for name, file in listing.files.items() if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)]
    return [*listing.small(), *([single] if single is not None else shards)]


def _check_known(name: str, alias: KnownModel | None, listing: Listing) -> None:
    """Raises ModelError if the hub lists another file than the table knows."""
    file = listing.files.get(listing.first)
    if alias is not None and alias.sha256 and file is not None and file.digest != alias.sha256:
        raise ModelError(
            f"{name}: the Hugging Face Hub lists {quoted(file.name)} with the SHA-256 {file.digest}, known is "
            f"{alias.sha256}; name the file itself ({alias.model.repo}/{file.name}) if the new one is what you want"
        )


def _check_room(
    store: ModelStore, record: NamedModel, cache: RepoCache, files: list[HubFile], max_bytes: int | None
) -> None:
    """Before the first byte. Raises ModelError."""
    if max_bytes is not None:
        others = sum(other.num_bytes for other in store.all() if other.name != record.name and other.repo)
        needed = sum(file.num_bytes for file in files)
        if others + needed > max_bytes:
            raise ModelError(
                f"{record.name} takes {needed / 1e9:.2f} GB and the models that were pulled {others / 1e9:.2f} GB, "
                f"more than --max-disk allows ({max_bytes / 1e9:.2f} GB); raise it, or remove one (penstock list)"
            )
    check_space(record.name, cache.root, cache.missing_bytes(files))


def name_local(store: ModelStore, path: Path, name: str | None) -> NamedModel:
    """Give a folder or file of the user's a name; it stays where it is, and `remove` forgets the name only.

    Raises ModelError, UnsupportedError for what is no model and for names that cannot be given.
    """
    checkpoint = open_model(path)
    name = name or path.resolve().name
    if not NAME.fullmatch(name):
        raise ModelError(f"{quoted(name)} cannot be a name: letters, digits and . _ - with one : at most (--name)")
    if bundled_model(name) is not None:
        raise ModelError(f"{name} comes with Penstock; choose another --name")
    before = store.get(name)
    if before is not None and before.repo:
        raise ModelError(f"{name} was pulled already; choose another --name, or remove it first (penstock rm {name})")
    root = path if path.is_dir() else path.parent
    if path.is_dir():
        files = [p for p in path.rglob("*") if p.is_file()]
    else:
        files = [Path(p) for p in sorted({ref.tensor.path for ref in checkpoint.weights.values()})] or [path]
    known = ALIASES.get(name)
    if known is not None and (path.is_dir() or not known.sha256 or digest_of(path) != known.sha256):
        raise ModelError(f"{name} is the name of another model; choose another --name")
    record = NamedModel(
        name=name, path=str(path.resolve()), whole=True, pulled_s=time.time(),
        quantization=quantization_of(checkpoint), licence=known.licence if known is not None else "",
        files={os.path.relpath(p, root): StoredFile(p.stat().st_size) for p in files},
    )  # fmt: skip
    if known is not None:
        record.files = {path.name: StoredFile(path.stat().st_size, known.sha256)}
    store.save(record)
    return record


def remove(store: ModelStore, name: str) -> tuple[NamedModel, int]:
    """Forget a name and remove the files that Penstock brought for it and nobody else needs; the bytes of these.

    Raises ModelError for a name that is none, and for a model in use.
    """
    record = store.get(name)
    if record is None:
        if bundled_model(name) is not None:
            raise ModelError(f"{name} comes with Penstock and stays")
        raise ModelError(f"no model of the name {quoted(name)} was pulled: {nearest(store, name, here=True)}")

    def waits() -> None:
        raise ModelError(f"{name} is being pulled by another process; end that first")

    with store.pulling(name, waits), store.alone(name) as alone:
        if not alone:
            raise ModelError(f"{name} is in use; stop what runs it first (penstock ps, penstock stop {name})")
        num_bytes = _drop_files(store, record)
        store.forget(name)
    return record, num_bytes


def _drop_files(store: ModelStore, record: NamedModel) -> int:
    if not record.repo:
        return 0
    cache = RepoCache(record.repo, record.commit)
    others = [o for o in store.all() if o.name != record.name and (o.repo, o.commit) == (record.repo, record.commit)]
    dropped = 0
    for file_name, file in record.files.items():
        heirs = [other for other in others if file_name in other.files]
        if file.made and heirs:
            heirs[0].files[file_name] = file  # it goes with the last name
            store.save(heirs[0])
        elif file.made and cache.drop(file_name, file.digest):
            dropped += file.num_bytes
    if not record.whole:
        cache.drop_partials()
    cache.tidy()
    return dropped


def quantization_of(checkpoint: Checkpoint) -> str:
    """What people call it: the label in the name of a GGUF file, else how most bytes of matrices are stored."""
    label = _LABEL.search(checkpoint.path.stem) if checkpoint.path.suffix == ".gguf" else None
    if label is not None:
        return label[0].upper()
    counted: Counter[str] = Counter()
    for name, ref in checkpoint.weights.items():
        stored = checkpoint.stored.get(name)
        layout = "" if stored is None else stored.layout or f"{stored.bits}-bit"
        counted[layout or ref.tensor.dtype] += ref.tensor.nbytes
    return counted.most_common(1)[0][0] if counted else checkpoint.spec.dtype


def nearest(store: ModelStore, name: str, *, here: bool = False) -> str:
    """The names most like `name`, as the end of a sentence; `here`: those that were pulled."""
    from difflib import get_close_matches

    from penstock.launch.bundled import bundled_names

    pulled = [record.name for record in store.all()]
    known = pulled if here else [*pulled, *ALIASES, *bundled_names()]
    near = get_close_matches(name.lower(), dict.fromkeys(known), n=3, cutoff=0.5)
    near += [other for other in known if other.split(":")[0] == name.split(":")[0].lower() and other not in near]
    if near:
        return f"nearest are {', '.join(near[:4])}" if len(near) > 1 else f"did you mean {near[0]}?"
    return "see penstock list" if here else "see penstock list --available"
