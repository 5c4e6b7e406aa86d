"""Keys of clients: who asks, and what they may.

Once there is a key, every path needs one except `OPEN_PATHS`, whether it exists or not. Keys are compared by their
SHA-256, with all of them every time, so that the time of an answer tells nothing of them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.types import Scope

from penstock.base.clock import Clock
from penstock.base.errors import ConfigError
from penstock.config import ServeConfig
from penstock.config.server import ServerConfig
from penstock.server.call import ANYONE, CLASSES, Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError

log = logging.getLogger("penstock.server")
ADMIN_PATHS = (
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep", "/wake_up", "/is_sleeping",
    "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/pause", "/resume", "/is_paused",
    "/get_weight_version",
)  # fmt: skip
ADMIN_BELOW = ("/admin/", "/v1/fine_tuning/", "/internal/replicas")
"""How other paths for the admin key begin."""
OPEN_PATHS = ("/health", "/ready", "/", "/docs")
"""/, /docs and what is below /page/ are the files of pages: they ask for the key that their requests need."""
CHECK_S = 1.0
FAIR = "fair:burst=1024"
"""What is chosen for several keys: a prompt of usual length of who was away goes before a flood."""
_LIMITS = ("tokens_per_minute", "max_concurrent")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class Key:
    """One key by its SHA-256, and whose it is."""

    digest: bytes
    tenant: Tenant


class Keys:
    """All keys of a server. The file, if there is one, is read again when it changes."""

    def __init__(self, config: ServerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._fixed = _fixed_keys(config)
        self._path = None if config.api_keys_file is None else Path(config.api_keys_file)
        self._stamp = self._look()
        self._checked_s = clock.now()
        self._keys = self._apart(_with_file(self._fixed, self._path))

    @property
    def has_admin(self) -> bool:
        return any(key.tenant.admin for key in self._keys)

    @property
    def has_users(self) -> bool:
        """Whether the ordinary paths need a key."""
        return self._path is not None or any(not key.tenant.admin for key in self._keys)

    @property
    def tenants(self) -> list[Tenant]:
        return [key.tenant for key in self._keys]

    def identify(self, scope: Scope) -> Tenant:
        """Whose request this is. Raises WireError (401)."""
        self._refresh()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        given = _given(scope)
        tenant = self._find(next(iter(given))) if len(given) == 1 else None
        if tenant is not None:
            return tenant
        is_open = path in OPEN_PATHS or path.startswith("/page/")
        if is_open and scope.get("method") in ("GET", "HEAD"):
            return ANYONE
        if not (self.has_users or path.startswith(ADMIN_BELOW) or path in ADMIN_PATHS):
            return ANYONE
        if len(given) > 1:
            raise WireError(401, "Authorization and x-api-key show different keys; send one of them",
                            code="invalid_api_key")  # fmt: skip
        if given:
            raise WireError(401, "the API key is not known here", code="invalid_api_key")
        raise WireError(401, "an API key is needed: send the header Authorization: Bearer KEY", code="invalid_api_key")

    def _find(self, given: bytes) -> Tenant | None:
        found = None
        digest = hashlib.sha256(given).digest()
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key.tenant  # and on: every key takes part in the comparison
        return found

    def _apart(self, keys: list[Key]) -> list[Key]:
        """Tenants with secrets of their own, the same after every start, or stores that outlive the process would find
        nothing; with a single key there is nobody to keep caches apart from."""
        if len(keys) == 1:
            return keys
        return [
            replace(key, tenant=replace(key.tenant, secret=hmac.digest(key.digest, b"kv", "sha256"))) for key in keys
        ]

    def _look(self) -> tuple[int, int, int]:
        if self._path is None:
            return (0, 0, 0)
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _refresh(self) -> None:
        """Read a changed file. One that is missing or wrong leaves the keys as they were."""
        now = self._clock.now()
        if self._path is None or now - self._checked_s < CHECK_S:
            return
        self._checked_s = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._apart(_with_file(self._fixed, self._path))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("the keys file was read again: %d keys", len(self._keys))


def only_tenant(scope: Scope, server: Server) -> str | None:
    """Whose requests and numbers alone this request may be shown; None: everybody's."""
    tenant: Tenant = scope["state"]["tenant"]
    keys: Keys | None = server.parts.get("keys")
    if keys is None or len(keys.tenants) == 1 or tenant.admin or scope["state"].get("probe"):
        return None
    return tenant.name


def _given(scope: Scope) -> set[bytes]:
    """The keys that a request shows: `Authorization: Bearer`, `x-api-key`."""
    out = set()
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            out.add(value[7:].strip())
        elif name == b"x-api-key":
            out.add(value.strip())
    return out


def _fixed_keys(config: ServerConfig) -> list[Key]:
    texts = config.names("api_key")
    keys = [Key(_digest(text), Tenant("default" if len(texts) == 1 else f"key-{n}")) for n, text in enumerate(texts, 1)]
    if config.admin_api_key:
        keys.append(Key(_digest(config.admin_api_key), Tenant("admin", admin=True)))
    _distinct(keys)
    return keys


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode()).digest()


def _with_file(fixed: list[Key], path: Path | None) -> list[Key]:
    keys = fixed + ([] if path is None else read_keys(path))
    _distinct(keys)
    return _shared_out(keys)


def _shared_out(keys: list[Key]) -> list[Key]:
    """Parts of the tiers of KV, if any key has a `kv_share`: one part of each for a key that has none."""
    if not any(key.tenant.kv_share for key in keys):
        return keys
    total = sum(key.tenant.kv_share or 1.0 for key in keys)
    return [replace(k, tenant=replace(k.tenant, kv_share=(k.tenant.kv_share or 1.0) / total)) for k in keys]


def _distinct(keys: list[Key]) -> None:
    names: dict[bytes, str] = {}
    for key in keys:
        if key.digest in names:
            raise ConfigError(f"the keys of {names[key.digest]} and {key.tenant.name} are the same; change one")
        names[key.digest] = key.tenant.name


def read_keys(path: Path) -> list[Key]:
    """The keys of a TOML file, one table each. Raises ConfigError that names the table and the field."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"api_keys_file: {path} cannot be read: {error.strerror}", field="api_keys_file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_keys_file: {path} is not TOML: {error}", field="api_keys_file") from None
    keys = [_key(path, name, table) for name, table in tables.items()]
    if not keys:
        raise ConfigError(f"api_keys_file: {path} has no keys; write a table [name] with key = ... for each",
                          field="api_keys_file")  # fmt: skip
    return keys


def _key(path: Path, name: str, table: Any) -> Key:
    def wrong(what: str) -> ConfigError:
        return ConfigError(f"api_keys_file: {path}: [{name[:64]}] {what}", field="api_keys_file")

    if not isinstance(table, dict):
        raise wrong("must be a table")
    if not _NAME.fullmatch(name):
        raise wrong("must be named with 1 to 64 letters, digits, dots, dashes or underscores")
    known = {
        "key",
        "key_sha256",
        "weight",
        "tokens_per_minute",
        "max_concurrent",
        "admin",
        "kv_share",
        "kv_group",
        "class",
        "models",
    }
    for field_name in table:
        if field_name not in known:
            raise wrong(f"{field_name}: is unknown; possible are {', '.join(sorted(known))}")
    if ("key" in table) == ("key_sha256" in table):
        raise wrong("needs either key or key_sha256")
    if "key" in table:
        text = table["key"]
        if not isinstance(text, str) or not text.strip():
            raise wrong("key: must be a text")
        digest = _digest(text)
    else:
        text = table["key_sha256"]
        if not isinstance(text, str) or not _HASH.fullmatch(text):
            raise wrong("key_sha256: must be 64 hexadecimal digits")
        digest = bytes.fromhex(text)
    weight, admin = table.get("weight", 1.0), table.get("admin", False)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.01 <= weight <= 100:
        raise wrong("weight: must be a number from 0.01 to 100")
    if not isinstance(admin, bool):
        raise wrong("admin: must be true or false")
    share, group = table.get("kv_share"), table.get("kv_group", "")
    if share is not None and (
        isinstance(share, bool) or not isinstance(share, int | float) or not 0.01 <= share <= 100
    ):
        raise wrong("kv_share: must be a number from 0.01 to 100")
    if not isinstance(group, str) or (group and not _NAME.fullmatch(group)):
        raise wrong("kv_group: must be a name of 1 to 64 letters, digits, dots, dashes or underscores")
    service_class = table.get("class", "")
    if service_class not in ("", *CLASSES):
        raise wrong(f"class: must be one of {', '.join(CLASSES)}")
    limits: dict[str, Any] = {"kv_share": float(share or 0), "kv_group": group, "service_class": service_class}
    limits |= _limits(table, "", wrong)
    models = table.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(one, dict) for one in models.values()):
        raise wrong("models: must be tables, one for each model with limits of its own")
    by_model = []
    for model, own in models.items():
        for field_name in own:
            if field_name not in _LIMITS:
                raise wrong(f"models.{model}: {field_name}: is unknown; possible are {', '.join(_LIMITS)}")
        found = {name: limits[name] for name in _LIMITS} | _limits(own, f"models.{model}: ", wrong, given_only=True)
        by_model.append((model, found["tokens_per_minute"], found["max_concurrent"]))
    limits["by_model"] = tuple(by_model)
    return Key(digest, Tenant(name, weight=float(weight), admin=admin, **limits))


def _limits(
    table: dict[str, Any], where: str, wrong: Callable[[str], ConfigError], *, given_only: bool = False
) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in _LIMITS:
        value = table.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise wrong(f"{where}{name}: must be a whole number from 1")
        if value is not None or not given_only:
            found[name] = value
    return found


def fair_share(config: ServeConfig) -> ServeConfig:
    """With several keys, `fair` in the place of the default policy. Raises ConfigError (a keys file that is wrong).

    `--scheduling-policy fcfs:` (with the colon) keeps first come, first served.
    """
    server = config.server
    keys = _with_file(_fixed_keys(server), None if server.api_keys_file is None else Path(server.api_keys_file))
    if len(keys) < 2 or config.engine.scheduler.scheduling_policy != "fcfs":
        return config
    log.info(
        "there are %d keys: the scheduling policy is %s (fcfs: would keep first come, first served)", len(keys), FAIR
    )
    scheduler = replace(config.engine.scheduler, scheduling_policy=FAIR)
    return replace(config, engine=replace(config.engine, scheduler=scheduler))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def install(server: Server) -> None:
    """`server.parts["keys"]`, if any are configured. Raises ConfigError."""
    keys = Keys(server.config, server.service.clock)
    if keys.tenants:
        server.parts["keys"] = keys
    if not keys.has_users and server.config.uds is None and not is_loopback(server.config.host):
        log.warning(
            "%s can be reached from other machines and asks for no key: give --api-key or --api-keys-file",
            server.config.host,
        )
    limited = [t for t in keys.tenants if t.tokens_per_minute or t.max_concurrent or not math.isclose(t.weight, 1)]
    if limited:
        log.info("keys with limits or weights: %s", ", ".join(sorted(t.name for t in limited)))
