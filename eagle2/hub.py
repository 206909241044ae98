"""A model's files from the Hugging Face hub: what is needed of a repository, fetched once into the hub's own cache.

Only settings, tokenizer and weights are fetched, never code.  Files are compared with the sizes that the hub lists, so a
file that was cut short is fetched again.  Whatever goes wrong is one sentence: no connection, no such model, terms that
have to be accepted, a full disk.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all; both numbers are 0 where they aren't known."""

SETTINGS = re.compile(r"[^/]+\.(json|jinja|model)|merges\.txt|vocab\.txt")
WEIGHTS = (  # the first kind that a repository has
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
)
CONNECT = 5.0  # seconds; the hub's client would try for most of a minute
STALE = 3600.0  # seconds without a new byte after which a half file belongs to a killed process


class ModelError(RuntimeError):
    """A model cannot be had or loaded; the message is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Repo:
    """A model on the hub: ``owner/name`` and a commit, or None for the newest."""

    id: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if not is_id(self.id):
            raise ValueError(f"{self.id!r} is no hub id (owner/name)")
        if self.revision is not None and not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"{self.revision!r} is no commit of 40 hex digits")


@dataclass(frozen=True, slots=True)
class Listing:
    """A snapshot in the cache and the files of it that are needed, with their sizes in bytes."""

    repo: Repo
    folder: Path
    files: dict[str, int]
    online: bool

    @property
    def missing(self) -> list[str]:
        """Files that are not there, or not whole."""
        return [name for name, size in self.files.items() if _size(self.folder / name) != size]

    @property
    def to_fetch(self) -> int:
        return sum(self.files[name] for name in self.missing)


def is_id(text: str) -> bool:
    """Whether ``text`` can be a hub id: ``name`` or ``owner/name``, with the hub's own rules for what they consist of."""
    return (
        re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text, re.ASCII) is not None
        and len(text) <= 96
        and not re.search(r"--|\.\.|[.-](/|$)|\.git$", text)
    )


def look(repo: Repo, *, weights: bool = True) -> Listing:
    """What the model consists of and whether it can be had; only its config.json is downloaded.  Raises `ModelError`."""
    from huggingface_hub import HfApi, constants, get_cached_repo_tree, hf_hub_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    online = not unreachable()
    with _explained(repo):
        config = hf_hub_download(repo.id, "config.json", revision=repo.revision, local_files_only=not online)
        folder = Path(config).parent
        try:
            tree: list[Any] = get_cached_repo_tree(repo.id, revision=folder.name)
        except CachedRepoTreeNotFoundError:
            if not online:
                raise
            tree = list(HfApi().list_repo_tree(repo.id, revision=folder.name))
    sizes = {entry.path: (entry.lfs or entry).size for entry in tree if hasattr(entry, "size")}
    chosen = {name: size for name, size in sizes.items() if SETTINGS.fullmatch(name)}
    if weights:
        kinds = [{name: size for name, size in sizes.items() if kind.fullmatch(name)} for kind in WEIGHTS]
        if not any(kinds):
            raise ModelError(f"{repo.id} on the hub holds no weights that this program reads (safetensors or .bin)")
        chosen |= next(filter(None, kinds))
    found = Listing(repo, folder, chosen, online)
    if found.missing and not online:
        raise ModelError(
            f"{_no_connection()}, and {len(found.missing)} of the {len(chosen)} files of {repo.id} are not in "
            f"{constants.HF_HUB_CACHE} or not whole; connect once to fetch them"
        )
    need, free = found.to_fetch, shutil.disk_usage(constants.HF_HUB_CACHE).free
    if need > free:
        raise _disk_is_full(repo, f"{need / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    return found


def fetch(repo: Repo, report: Progress, *, weights: bool = True) -> Path:
    """The folder that holds the model; what is not in the cache, or is damaged there, is downloaded.  Raises `ModelError`."""
    from huggingface_hub import snapshot_download

    found = look(repo, weights=weights)
    if not found.missing:
        return found.folder
    label, need = f"Downloading {repo.id}", found.to_fetch
    report(label, 0, need)
    with _explained(repo):
        _sweep(found)
        snapshot_download(
            repo.id, revision=found.folder.name, allow_patterns=list(found.files),
            tqdm_class=_bar(lambda done: report(label, min(done, need), need)),
        )  # fmt: skip
    if found.missing:
        raise ModelError(f"the hub sent {found.missing[0]} of {repo.id} in another size than it lists; start again")
    report(label, need, need)
    return found.folder


def unreachable() -> bool:
    """Whether the hub does not answer at all, or must not be asked."""
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return True
    if urllib.request.getproxies():  # the proxy makes the connections
        return False
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=CONNECT).close()
    except (OSError, ValueError):
        return True
    return False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sweep(found: Listing) -> None:
    """Remove files of another size than listed, which the hub's client would take for whole, and halves of killed runs."""
    repository = found.folder.parent.parent
    for name in found.missing:
        path = found.folder / name
        if path.is_symlink():
            blob = Path(os.path.normpath(path.parent / os.readlink(path)))
            if blob.is_relative_to(repository):
                blob.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    for half in (repository / "blobs").glob("*.incomplete"):
        if time.time() - half.stat().st_mtime > STALE:
            half.unlink(missing_ok=True)


def _bar(report: Callable[[int], None]) -> Any:
    """A tqdm class that draws nothing and reports the bytes of the bar that counts them."""
    import io

    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "disable": False}))

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B" and str(self.desc).startswith("Reconstruct"):  # bytes on the disk, not on the wire
                report(int(self.n))

    return Bar


@contextmanager
def _explained(repo: Repo) -> Iterator[None]:
    """Errors of the hub's client within the block become `ModelError`s of one sentence."""
    try:
        yield
    except Exception as error:  # the client's own, those of the network and the disk, and hf_xet's
        raise _explain(repo, error) from error


def _explain(repo: Repo, error: BaseException) -> ModelError:
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{repo.id}"
    token = get_token()
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(
        error.__cause__, errors.HfHubHTTPError | errors.FileMetadataError
    ):
        error = error.__cause__  # the hub did answer
    if isinstance(error, errors.GatedRepoError) and token:
        return ModelError(
            f"{repo.id} is gated, and the account of the token given has no access to it: ask for it on {page}"
        )
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repo.id} is gated: accept its terms on {page}, then give a token of that account in HF_TOKEN "
            "(or with `hf auth login`)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        why = "the token given does not open it" if token else "no token was given in HF_TOKEN"
        return ModelError(f"there is no model {repo.id} on {constants.ENDPOINT}, or it is private and {why}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{repo.id} on the hub has no revision {repo.revision}")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelError(f"{repo.id} on the hub holds no config.json, so it is no model that this program runs")
    if isinstance(error, errors.HfHubHTTPError):
        code = error.response.status_code
        if code in (401, 403):
            what = "does not accept the token given" if token else "wants a token in HF_TOKEN"
            return ModelError(f"the hub {what} for {repo.id} (HTTP status {code})")
        return ModelError(f"the hub cannot give {repo.id} now (HTTP status {code}); try again later")
    if isinstance(
        error, errors.LocalEntryNotFoundError | errors.CachedRepoTreeNotFoundError | errors.OfflineModeIsEnabled
    ):
        return ModelError(
            f"{_no_connection()}, and {repo.id} is not in {constants.HF_HUB_CACHE}; connect once to fetch it, or give "
            "a local folder"
        )
    if disk_full(error):
        return _disk_is_full(repo, first_line(error))
    unusable = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
    if isinstance(error, OSError) and error.errno in unusable:
        return ModelError(
            f"{repo.id} cannot be put into the hub's cache {constants.HF_HUB_CACHE} ({first_line(error)}); "
            "set HF_HOME to another folder"
        )
    return ModelError(
        f"{repo.id} could not be fetched from the hub ({first_line(error)}); start again, files that are whole are kept"
    )


def _no_connection() -> str:
    from huggingface_hub import constants, is_offline_mode

    return "HF_HUB_OFFLINE is set" if is_offline_mode() else f"the hub ({constants.ENDPOINT}) cannot be reached"


def _disk_is_full(repo: Repo, why: str) -> ModelError:
    from huggingface_hub import constants

    return ModelError(
        f"the disk of {constants.HF_HUB_CACHE} is too full for {repo.id} ({why}); make room or set HF_HOME to another folder"
    )


def disk_full(error: BaseException | str) -> bool:
    """Whether a full disk or quota is behind an error; safetensors and pip only say so in their text."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error) or "os error 28" in str(error)


def first_line(error: BaseException | str) -> str:
    """The first line of an error, without its full stop, to stand within a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).rstrip(".:")
    return text if len(text) <= 240 else text[:239] + "…"


__all__ = [
    "Listing",
    "ModelError",
    "Progress",
    "Repo",
    "disk_full",
    "fetch",
    "first_line",
    "is_id",
    "look",
    "unreachable",
]
