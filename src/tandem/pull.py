"""Downloads a model from the Hugging Face hub: which files, room for them, transfer, checksum, catalogue entry.

In: `ORG/REPO[:QUANT or file]`. Out: a CatalogEntry; RequestError in plain words for everything that can go wrong.
The hub's library lists, names and authorises; the transfer is our own, since the library's starts anew after a break.
"""

import fcntl
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from tandem.catalog import CatalogEntry, add, find, models_dir, valid_name
from tandem.errors import RequestError, nearest
from tandem.settings import hub_endpoint
from tandem.show import size

_SOURCE = re.compile(r"([\w][\w.-]{0,95}/[\w][\w.-]{0,95})(?::(.+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_CHUNK_BYTES = 1 << 20
_KEPT_FREE_BYTES = 1 << 30  # of the disk, after the download
_ATTEMPTS = 5  # without a new byte
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HubFile:
    """One file of a repository, as the hub describes it."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Choice:
    """One model among the files of a repository: all its parts, in order."""

    stem: str
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def pull(source: str, *, name: str | None = None, revision: str | None = None, quiet: bool = False) -> CatalogEntry:
    """Downloads what is not there yet, checks it, and enters it into the catalogue. Raises RequestError."""
    found = _SOURCE.fullmatch(source)
    if not found or ".." in found[1]:
        raise RequestError(
            f"{source!r} is not of the form ORG/REPO[:QUANT], such as unsloth/Qwen3.5-35B-A3B-GGUF:Q4_K_M"
        )
    repo, wanted = found[1], found[2]
    hub = _Hub(repo, revision)
    choice = choose(choices(hub.files), wanted, repo)
    name = _entry_name(name or _short_name(choice.stem), repo)
    folder = models_dir()
    places = [folder / repo / _safe(file.path) for file in choice.files]
    missing = [(file, place) for file, place in zip(choice.files, places, strict=True) if not _have(file, place)]
    _check_room(folder, missing)
    for file, place in missing:
        _fetch(hub, file, place, quiet)
    entry = CatalogEntry(
        name=name,
        repo=repo,
        revision=hub.commit,
        files=tuple(str(place.relative_to(folder)) for place in places),
        sha256=tuple(file.sha256 for file in choice.files),
        sizes_bytes=tuple(file.size_bytes for file in choice.files),
    )
    add(entry)
    return entry


def choices(files: Iterable[HubFile]) -> list[Choice]:
    """The models among the files: GGUF files, the parts of a split one together. Raises RequestError if parts lack."""
    groups: dict[str, list[HubFile]] = {}
    for file in files:
        if file.path.lower().endswith(".gguf"):
            groups.setdefault(_PART.sub("", file.path[: -len(".gguf")]), []).append(file)
    made = []
    for stem, group in sorted(groups.items()):
        parts = {int(m[1]): (file, int(m[2])) for file in group if (m := _PART.search(file.path[:-5]))}
        if parts:
            totals = {total for _, total in parts.values()}
            total = max(totals)
            if len(totals) > 1 or set(parts) != set(range(1, total + 1)):
                raise RequestError(f"{stem}: the repository has parts {sorted(parts)} of {total}: it is not complete")
            group = [parts[at][0] for at in range(1, total + 1)]
        made.append(Choice(stem, tuple(group)))
    return made


def choose(found: list[Choice], wanted: str | None, repo: str) -> Choice:
    """The one that is meant: the only one, the file of that path, or the only one with that word in its name."""
    if not found:
        raise RequestError(f"{repo} has no .gguf file: look for a repository with GGUF in its name")
    if wanted is None:
        fitting = found
    else:
        plain = _PART.sub("", wanted.removesuffix(".gguf"))
        fitting = [one for one in found if one.stem == plain]
        word = re.compile(rf"(?<![a-z0-9_]){re.escape(wanted.lower())}(?![a-z0-9_])")
        fitting = fitting or [one for one in found if word.search(one.stem.lower())]
        fitting = [one for one in fitting if not _is_projector(one)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    listed = "\n".join(f"  {one.stem}  {size(one.size_bytes)}" for one in fitting or found)
    if not fitting:
        words = {part for one in found for part in re.split(r"[/.-]", one.stem)}
        raise RequestError(f"{repo} has nothing named {wanted!r}{nearest(wanted, words)}; it has\n{listed}")
    raise RequestError(f"{repo} has several models, name one as {repo}:QUANT\n{listed}")


class _Hub:
    """One repository at one commit. Raises RequestError if it cannot be read."""

    def __init__(self, repo: str, revision: str | None):
        from huggingface_hub import HfApi

        self.endpoint, self.repo = hub_endpoint(), repo
        with _hub_errors(repo, revision, self.endpoint):
            about = HfApi(endpoint=self.endpoint).model_info(
                repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
            )
        if not re.fullmatch(r"[0-9a-f]{40}", about.sha or ""):
            raise RequestError(f"{self.endpoint} gave {about.sha!r} as the commit of {repo}: is it a model hub?")
        self.commit = about.sha
        self.files = [
            _described(sibling) for sibling in about.siblings or () if sibling.rfilename.endswith((".gguf", ".GGUF"))
        ]

    @contextmanager
    def open(self, file: HubFile, start: int) -> Iterator[Any]:
        """The response with the file's bytes from `start` on."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hf_hub_url(self.repo, file.path, revision=self.commit, endpoint=self.endpoint)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as response:
            if response.status_code != 416:
                hf_raise_for_status(response)
            yield response


def _described(sibling: Any) -> HubFile:
    digest = sibling.lfs.sha256 if sibling.lfs else ""
    if not re.fullmatch(r"[0-9a-f]{64}", digest or "") or not sibling.size:
        raise RequestError(
            f"{sibling.rfilename}: the hub states no size and SHA-256 for it, so it could not be checked"
        )
    return HubFile(sibling.rfilename, sibling.size, digest)


@contextmanager
def _hub_errors(repo: str, revision: str | None, endpoint: str) -> Iterator[None]:
    """Errors of the hub's library and of the connection, in our words."""
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise RequestError(f"{repo} is closed: ask for access on {endpoint}/{repo}, then set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        raise RequestError(f"{endpoint} has no repository {repo}, or HF_TOKEN gives no access to it") from None
    except errors.RevisionNotFoundError:
        raise RequestError(f"{repo} has no revision {revision!r}: leave --revision out for the newest") from None
    except errors.EntryNotFoundError:
        raise RequestError(f"{repo}: the file is gone from the hub; pull again to see what is there") from None
    except errors.OfflineModeIsEnabled:
        raise RequestError("HF_HUB_OFFLINE is set: unset it to download") from None
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no")
        raise RequestError(f"{endpoint} answered status {code} for {repo}: try again later") from None
    except httpx2.HTTPError as error:
        raise RequestError(
            f"{endpoint} cannot be reached ({type(error).__name__}): check the network or HF_ENDPOINT"
        ) from None


def _fetch(hub: _Hub, file: HubFile, place: Path, quiet: bool) -> None:
    """The file at its place, whole and checked; what an earlier call got is used. Raises RequestError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f"{place.name}.{file.sha256[:12]}.part")  # another content is another part
    with part.open("a+b") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RequestError(f"{part.name} is being downloaded by another process") from None
        digest = _digest_of(out)
        with _progress(file, out.tell(), quiet) as bar, _hub_errors(hub.repo, hub.commit, hub.endpoint):
            _receive(hub, file, out, digest, bar)
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise RequestError(
                f"{file.path} arrived with SHA-256 {digest.hexdigest()[:12]}..., the hub states {file.sha256[:12]}...: "
                "it was deleted; pull it again"
            )
        part.replace(place)


def _receive(hub: _Hub, file: HubFile, out: BinaryIO, digest: "_Digest", bar: Any) -> None:
    """Appends what is missing; a connection that breaks is taken up again until it gives no new byte five times."""
    import httpx2

    failures = 0
    while (start := out.tell()) < file.size_bytes:
        try:
            with hub.open(file, start) as response:
                if start and not _continues(response, start):
                    out.seek(0)
                    out.truncate()
                    digest.reset()
                    bar.reset()
                    continue
                for chunk in response.iter_bytes():  # as they come: nothing is lost when the connection breaks
                    out.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
                    if out.tell() > file.size_bytes:
                        return  # the checksum will say so
        except (httpx2.TransportError, httpx2.StreamError):
            failures = failures + 1 if out.tell() == start else 1
            if failures >= _ATTEMPTS:
                raise
            out.flush()
            time.sleep(min(2.0**failures, 30.0) / 4)
        else:
            failures = failures + 1 if out.tell() == start else 0
            if failures >= _ATTEMPTS:
                raise RequestError(f"{file.path}: the hub sends nothing beyond byte {start} of {file.size_bytes}")
    out.flush()


def _continues(response: Any, start: int) -> bool:
    """Whether the response begins at that byte; servers may send all of a file whatever was asked for."""
    return response.status_code == 206 and response.headers.get("content-range", "").startswith(f"bytes {start}-")


class _Digest:
    """SHA-256 that can begin anew."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, data: bytes) -> None:
        self._sha.update(data)

    def hexdigest(self) -> str:
        return self._sha.hexdigest()


def _digest_of(file: BinaryIO) -> "_Digest":
    """The digest of what the file holds; leaves it at its end."""
    digest = _Digest()
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest


def _have(file: HubFile, place: Path) -> bool:
    """Whether the whole file is there with the right content."""
    if not place.is_file() or place.stat().st_size != file.size_bytes:
        return False
    with place.open("rb") as existing:
        return _digest_of(existing).hexdigest() == file.sha256


def _check_room(folder: Path, missing: list[tuple[HubFile, Path]]) -> None:
    needed = 0
    for file, place in missing:
        part = place.with_name(f"{place.name}.{file.sha256[:12]}.part")
        needed += file.size_bytes - (part.stat().st_size if part.exists() else 0)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed and needed + _KEPT_FREE_BYTES > free:
        raise RequestError(
            f"{size(needed)} to come and {size(_KEPT_FREE_BYTES)} to stay free, {folder} has room for {size(free)}: "
            "make room, or name another folder in TANDEM_MODELS_DIR"
        )


def _progress(file: HubFile, done: int, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(
        total=file.size_bytes,
        initial=done,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc=PurePosixPath(file.path).name[-40:],
        disable=quiet,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    )


def _safe(path: str) -> PurePosixPath:
    """A repository's path as a path below a folder. Raises RequestError if it would lead out of it."""
    made = PurePosixPath(path)
    parts_fit = all(re.fullmatch(r"[\w(][\w.()+ @=-]*", part) for part in made.parts)
    if made.is_absolute() or not made.parts or not parts_fit or ".." in path:
        raise RequestError(f"the repository has a file named {path!r}: it is not downloaded under such a name")
    return made


def _is_projector(choice: Choice) -> bool:
    return PurePosixPath(choice.stem).name.lower().startswith("mmproj")


def _short_name(stem: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", PurePosixPath(stem).name.lower()).strip("-._").replace("..", ".")


def _entry_name(name: str, repo: str) -> str:
    if not valid_name(name):
        raise RequestError(f"{name!r} cannot be a model's name: use lower-case letters, digits and . _ -")
    other = find(name)
    if other and other.repo != repo:
        raise RequestError(f"the name {name} belongs to a model of {other.repo}: choose another by --name")
    return name
