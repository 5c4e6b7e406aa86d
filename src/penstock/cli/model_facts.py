"""What `penstock list`, `show` and `ps` say: for people as tables, for programs as JSON with these keys (`--json`).

Keys stay; new ones may come (`docs/guides/models-by-name.md` lists them). `X_bytes` are bytes, `X_s` seconds since
1970.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.launch.running import RunningServer
    from penstock.launch.store import ModelStore, NamedModel

Facts = dict[str, Any]


def write_json(facts: Facts) -> None:
    """To standard output. In ASCII, so that no name of a file and no terminal's encoding can be in the way."""
    import json

    print(json.dumps(facts, indent=2))


def listed(record: NamedModel, store: ModelStore) -> Facts:
    """A model that has a name here. `state`: ready, in_use, partial (its pull was cut) or missing (files are gone)."""
    state = "in_use" if store.in_use(record.name) else "ready" if record.whole else "partial"
    if record.whole and record.missing() is not None:
        state = "missing"
    return {
        "name": record.name, "size_bytes": record.num_bytes, "format": record.quantization,
        "pulled_s": record.pulled_s or None, "state": state, "source": source_of(record.name, record),
        "repo": record.repo or None, "commit": record.commit or None, "licence": record.licence or None,
        "path": record.path,
    }  # fmt: skip


def available(name: str, here: bool) -> Facts:
    """A name that can be pulled. `terms`: of use, that it comes under; `here`: whether all of it was pulled."""
    from penstock.launch.aliases import ALIASES

    alias = ALIASES[name]
    return {
        "name": name, "size_bytes": alias.num_bytes, "licence": alias.licence, "terms": alias.terms or None,
        "repo": alias.model.repo, "file": alias.model.file or None, "commit": alias.model.revision or None,
        "sha256": alias.sha256 or None, "here": here,
    }  # fmt: skip


def shown(model: str, record: NamedModel | None) -> Facts:
    """A model that is here, whether it has a name or not: what its headers say. Raises as `open_model`."""
    from penstock.families.registry import open_model
    from penstock.launch.hub import local_path
    from penstock.launch.pull import quantization_of

    path = local_path(model)
    checkpoint = open_model(path)
    spec, template = checkpoint.spec, checkpoint.tokenizer.chat_template
    hub = record if record is not None and record.repo else None
    files = [] if record is None else sorted(record.files.items())
    return {
        "name": model, "here": True, "source": source_of(model, record), "repo": hub.repo if hub else None,
        "commit": hub.commit if hub else None, "path": str(Path(path)), "family": spec.family,
        "num_params": spec.num_params, "num_layers": len(spec.layers), "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size, "context_tokens": spec.max_position, "format": quantization_of(checkpoint),
        "chat_template_chars": None if template is None else len(template),
        "takes_tools": template is not None and "tool" in template,
        "licence": None if record is None else record.licence or None,
        "files": [{"name": name, "size_bytes": file.num_bytes, "digest": file.digest or None} for name, file in files],
    }  # fmt: skip


def source_of(model: str, record: NamedModel | None) -> str:
    """hub, bundled (comes with Penstock), or local: a folder or file of the user's."""
    from penstock.launch.bundled import bundled_model

    if record is None:
        return "local" if bundled_model(model) is None else "bundled"
    return "hub" if record.repo else "local"


def served(entry: RunningServer) -> Facts:
    """A server of this user. `port` is 0 where it listens on a socket, whose path is `where`."""
    from penstock.launch.running import memory_bytes

    return {
        "model": entry.model, "names": entry.names, "where": entry.where, "port": entry.port, "pid": entry.pid,
        "memory_bytes": memory_bytes(entry.pid), "since_s": entry.since_s, "num_requests": entry.num_live,
        "models": entry.models,
    }  # fmt: skip


def not_asked() -> str:
    """A sentence where OLLAMA_HOST is set, which `ollama list`, `ps` and `stop` ask and these do not."""
    import os

    if not os.environ.get("OLLAMA_HOST"):
        return ""
    return (
        "OLLAMA_HOST is not read: this is about this user on this machine; another server answers at /api/ps, "
        "/api/tags and /api/show"
    )
