"""What LMCache's words set in kvtiers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtiers.connector import config_lmcache_values as kinds
from kvtiers.connector import config_lmcache_words as lmcache
from kvtiers.connector.config_lmcache_values import Reader, Use, Word
from kvtiers.policies import POLICIES
from kvtiers.tiers.spelling import did_you_mean

# Whoever writes one of these has said where KV lies, and it lies nowhere else.
_STORAGE = (
    "local_cpu",
    "max_local_cpu_size",
    "local_disk",
    "max_local_disk_size",
    "remote_url",
    "remote_storage_plugins",
)
_SETS: Mapping[str, tuple[str, ...]] = {
    "tiers": (*_STORAGE, "blocking_timeout_secs", "extra_config"),
    "policy": ("cache_policy",),
    "chunk_size": ("chunk_size",),
    "blocks_per_chunk": ("chunk_size",),
    "offload_prompt_only": ("save_decode_cache",),
}
# LMCache has three clients for one protocol.
_REDIS_SCHEMES: Mapping[str, str] = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "resp": "redis",
    "valkey": "redis",
}
# What LMCache takes for a word that is not there.
_NOT_SET: tuple[object, ...] = (None, "", [])
# Words with a counterpart in what another word sets -> what is said where none does.
_NOT_WITHOUT: Mapping[str, str] = {
    "blocking_timeout_secs": "it bounds loads from a remote backend, and there is none",
}
_NO_OPTION = "an option of LMCache's own storage"
_DEFAULT_REDIS = "redis://localhost:6379"
# By scheme: keys in extra_config -> options of the redis tier.
_REDIS_OPTIONS: Mapping[str, Mapping[str, tuple[str, Reader]]] = {
    "resp": {"username": ("username", kinds.TEXT), "password": ("password", kinds.TEXT)},
    "valkey": {
        "valkey_username": ("username", kinds.TEXT),
        "valkey_password": ("password", kinds.TEXT),
        "valkey_database": ("database", kinds.WHOLE),
    },
}
# Keys in extra_config -> where s3fs has them: an option, or a key in one.
_S3_OPTIONS: Mapping[str, tuple[str, str]] = {
    "aws_access_key_id": ("key", ""),
    "aws_secret_access_key": ("secret", ""),
    "s3_region": ("client_kwargs", "region_name"),
}
# LMCache names a bucket by its host.
_BUCKET_HOST = re.compile(r"(?P<bucket>[^/]+)\.s3[.-][a-z0-9-]+\.amazonaws\.com/?")


class Translator:
    """Turns LMCache's words into values of kvtiers' keys.

    Args:
        words: by their spelling in the tables.

    Attributes:
        values: of kvtiers' top-level keys.
        places: path of each value -> where the word stands that set it.
        folder: relative paths in ``values`` are relative to it.
        uses: what became of each word.
        problems: one paragraph for each word that cannot be read.

    """

    def __init__(self, words: Mapping[str, Word]) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.uses: list[Use] = []
        self.problems: list[str] = []
        self._words = {name: word for name, word in words.items() if word.value not in _NOT_SET}
        disk = self._words.get("local_disk")
        self.folder = Path.cwd() if disk is None else disk.folder
        self._extra: dict[str, Any] = self._read("extra_config", kinds.OPTIONS) or {}
        self._timeout: int | None = self._read("blocking_timeout_secs", kinds.WHOLE)
        self._settings()
        if any(name in self._words for name in _STORAGE):
            self._tiers()
        self._tell_the_rest()

    def words_for(self, key: str) -> list[Word]:
        """The words that say what kvtiers' ``key`` says."""
        return [self._words[name] for name in _SETS[key] if name in self._words]

    def _settings(self) -> None:
        if (tokens := self._read("chunk_size", kinds.WHOLE)) is not None:
            self._set("chunk_size", tokens, "chunk_size")
        if (decoded := self._read("save_decode_cache", kinds.TRUTH)) is not None:
            self._set("offload_prompt_only", not decoded, "save_decode_cache")
        policy = self._read("cache_policy", kinds.POLICY)
        if policy in POLICIES.names():
            self._set("policy", policy, "cache_policy")
        elif policy is not None:
            there = ", ".join(POLICIES.names())
            why = f"there is no policy {policy}; 'policy' may be {there}"
            self._leave("cache_policy", why)

    # Tiers ------------------------------------------------------------------

    def _tiers(self) -> None:
        self.values["tiers"] = []
        self._add_tier("cpu", self.words_for("tiers")[0])
        if size := self._read("max_local_cpu_size", kinds.SOME_GIB):
            self._option("capacity", size, "max_local_cpu_size")
        if self._read("local_cpu", kinds.TRUTH):
            self._used("local_cpu", "tiers[0]")
        else:
            self._leave("local_cpu", "the cpu tier is always there, as all KV goes through it")
        self._disk()
        for name, url in self._remotes():
            self._remote(self._words[name], url)

    def _disk(self) -> None:
        folders = self._read("local_disk", kinds.FOLDERS)
        size = self._read("max_local_disk_size", kinds.GIB)
        if not folders or not size:
            self._leave("local_disk", "LMCache has no disk without max_local_disk_size above 0")
            self._leave("max_local_disk_size", "there is no disk without local_disk")
            return
        self._add_tier("fs", self._words["local_disk"])
        self._option("path", folders[0], "local_disk")
        self._option("capacity", size, "max_local_disk_size")
        self._extra_option("use_odirect", "direct", kinds.TRUTH)
        self._extra_option("disk_io_threads", "threads", kinds.WHOLE)
        if len(folders) > 1:
            self._leave("local_disk", f"a tier has one folder, and of {len(folders)} got the first")

    def _remotes(self) -> Iterator[tuple[str, str]]:
        """The name of the word and the URL, for each remote backend."""
        if url := self._read("remote_url", kinds.TEXT):
            yield "remote_url", url
        for plugin in self._read("remote_storage_plugins", kinds.NAMES) or ():
            yield "remote_storage_plugins", self._plugin_url(plugin)

    def _plugin_url(self, plugin: str) -> str:
        """LMCache's plugins ``redis`` and ``fs`` as URLs; others keep their name."""
        kind = plugin.partition(".")[0]
        common = self._extra.pop({"redis": "redis_url", "fs": "fs_base_path"}.get(kind, ""), None)
        if kind == "redis":
            own = self._extra.pop("remote_storage_plugin.redis.redis_url", None)
            return str(own or common or _DEFAULT_REDIS)
        own = self._extra.pop(f"remote_storage_plugin.{plugin}.base_path", None)
        if kind != "fs" or not (own or common):
            return f"plugin://{plugin}"
        return f"fs://{self._words['remote_storage_plugins'].folder / str(own or common)}"

    def _remote(self, word: Word, url: str) -> None:
        scheme, _, rest = url.partition("://")
        if scheme in _REDIS_SCHEMES:
            self._redis(word, scheme, rest)
        elif scheme == "fs" and (folder := rest.partition("/")[2]):
            self._add_tier("fs", word)
            # Before the path stands a host, which LMCache demands and ignores.
            self._option("path", "/" + folder.partition(",")[0], word.name)
            self._extra_option("fs_connector_use_odirect", "direct", kinds.TRUTH)
        elif scheme == "s3" and (host := _BUCKET_HOST.fullmatch(rest)):
            self._bucket(word, host["bucket"])
        elif scheme in lmcache.REMOTE_SCHEMES:
            self._leave(word.name, f"{scheme}: {lmcache.REMOTE_SCHEMES[scheme]}")
            return
        else:
            known = [*_REDIS_SCHEMES, "fs", "s3"]
            guess = "" if scheme in known else did_you_mean(scheme, known)
            shapes = ", ".join(f"{each}://..." for each in known)
            self._refuse(word, f"it must be a URL of the form {shapes}{guess or '.'}")
            return
        if self._timeout is not None:
            self._option("deadline", float(self._timeout), "blocking_timeout_secs")

    def _redis(self, word: Word, scheme: str, rest: str) -> None:
        self._add_tier("redis", word)
        tls = scheme == "valkey" and self._extra_value("tls_enable", kinds.TRUTH)
        self._option("url", f"{'rediss' if tls else _REDIS_SCHEMES[scheme]}://{rest}", word.name)
        for inner, (key, kind) in _REDIS_OPTIONS.get(scheme, {}).items():
            self._extra_option(inner, key, kind)

    def _bucket(self, word: Word, bucket: str) -> None:
        self._add_tier("fs", word)
        self._option("path", f"s3://{bucket}", word.name)
        options: dict[str, Any] = {}
        for inner, (key, nested) in _S3_OPTIONS.items():
            if value := self._extra_value(inner, kinds.TEXT):
                options |= {key: {nested: value} if nested else value}
                self._option("storage_options", options, "extra_config", inner)

    # Values -----------------------------------------------------------------

    def _read(self, name: str, kind: Reader) -> Any:
        """The value of a word; None if it is not there, or not what it must be."""
        word = self._words.get(name)
        if word is None:
            return None
        try:
            return kind.read(word.value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            guess = str(error) if kind is kinds.POLICY else ""
            self._refuse(word, f"{kind.wanted}.{guess}")
            return None

    def _refuse(self, word: Word, why: str) -> None:
        # A URL or an option may hold a password.
        shown = "" if word.name in ("remote_url", "extra_config") else f" is {word.value!r:.200}"
        problem = f"{word.key}{shown} (from {word.origin}): {why}"
        if problem not in self.problems:
            self.problems.append(problem)

    def _add_tier(self, kind: str, word: Word) -> None:
        tiers: list[dict[str, Any]] = self.values["tiers"]
        same = sum(tier["type"] == kind for tier in tiers)
        tiers.append({"type": kind, **({"name": f"{kind}-{same + 1}"} if same else {})})
        self.places[f"tiers[{len(tiers) - 1}]"] = word.use().place

    def _option(self, key: str, value: object, name: str, inner: str = "") -> None:
        """Set an option of the tier that was added last."""
        tiers: list[dict[str, Any]] = self.values["tiers"]
        tiers[-1][key] = value
        self._used(name, f"tiers[{len(tiers) - 1}].{key}", inner)

    def _extra_option(self, inner: str, key: str, kind: Reader) -> None:
        """Set an option of that tier to what ``extra_config`` says under ``inner``."""
        value = self._extra_value(inner, kind)
        if value is not None:
            self._option(key, value, "extra_config", inner)

    def _extra_value(self, inner: str, kind: Reader) -> Any:
        """What ``extra_config`` says under ``inner``; None if nothing, or nothing readable."""
        value = self._extra.pop(inner, None)
        if value is None:
            return None
        try:
            return kind.read(value)
        except (ValueError, TypeError):
            word = self._words["extra_config"]
            shown = "" if "password" in inner or "key" in inner else f" is {value!r}"
            where = f"{word.key}.{inner}{shown} (from {word.origin})"
            self.problems.append(f"{where}: {kind.wanted}.")
            return None

    def _set(self, key: str, value: object, name: str) -> None:
        self.values[key] = value
        self._used(name, key)

    # What became of each word -----------------------------------------------

    def _used(self, name: str, path: str, inner: str = "") -> None:
        use = self._words[name].use(sets=path, option=inner)
        self.places.setdefault(path, use.place)
        self.uses.append(use)

    def _leave(self, name: str, why: str) -> None:
        if word := self._words.get(name):
            self.uses.append(word.use(why_not=why))

    def _tell_the_rest(self) -> None:
        told = {use.word for use in self.uses}
        for name, word in self._words.items():
            if name == "extra_config":
                self.uses += [
                    word.use(why_not=lmcache.EXTRA_JOBS.get(key, _NO_OPTION), option=key)
                    for key in self._extra
                ]
            elif word.key not in told:
                self._leave(name, lmcache.job_of(name) or _NOT_WITHOUT.get(name, ""))
        order = [word.key for word in self._words.values()]
        self.uses.sort(key=lambda use: order.index(use.of))
