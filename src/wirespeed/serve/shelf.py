"""A folder of model folders, from what a command names: folders on this host, and versions of the repository.

    models/                a folder of model folders, as ever
    models/faces           the folder of one model: served under its own name
    repo:org/faces@prod    a version whose files are one model (``model.toml`` at its top): served as ``faces``
    repo:org/suite@v3      a version that holds several model folders: served under their own names

Versions come from this host's cache where they were warmed (see ``repo.placing``). Where more than one thing is named,
or a version, a temporary folder of links is served and goes when the server does.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.serve.config import FILE_NAME

PREFIX = "repo:"


@contextlib.contextmanager
def open_shelf(
    named: Sequence[str], *, repo: str | None = None, on_news: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """The folder to serve. Raises UsageError where a name is taken twice, DataError where a version holds no model."""
    if len(named) == 1 and not named[0].startswith(PREFIX) and not (Path(named[0]) / FILE_NAME).is_file():
        yield Path(named[0])
        return
    with tempfile.TemporaryDirectory(prefix="wirespeed-models-") as made:
        shelf = Path(made)
        owners: dict[str, str] = {}
        for text in named:
            for name, folder in _models_of(text, repo, on_news):
                if name in owners:
                    raise UsageError(
                        f"got two models named {name!r}, from {owners[name]} and {text}",
                        hint="serve them from two servers, or rename a model's folder",
                    )
                owners[name] = text
                (shelf / name).symlink_to(folder.resolve(), target_is_directory=True)
        yield shelf


def _models_of(text: str, repo: str | None, on_news: Callable[[str], None]) -> list[tuple[str, Path]]:
    if not text.startswith(PREFIX):
        if (Path(text) / FILE_NAME).is_file():
            return [(Path(text).resolve().name, Path(text))]
        found = _folders_in(Path(text))
        if not found:
            raise UsageError(f"{text} holds no models", expected=f"folders with a {FILE_NAME}")
        return found
    try:
        from wirespeed.repo.placing import place
    except ImportError as fault:
        raise MissingCapability(
            f"{text} needs {fault.name}, which is not installed", hint="pip install 'wirespeed[repo]'"
        ) from fault
    placed = place(text.removeprefix(PREFIX), repo=repo)
    label = placed.version.label
    if (placed.folder / FILE_NAME).is_file():
        found = [(placed.version.name.rpartition("/")[2], placed.folder)]
    else:
        found = _folders_in(placed.folder)
    if not found:
        raise DataError(
            f"{label} holds no model that can be served",
            expected=f"a {FILE_NAME} at its top, or folders with one",
            hint="push the model's folder with its model.toml; docs/guides/serve.md says what is in it",
        )
    fetched = placed.store_bytes + placed.peer_bytes
    how = "from this host's cache" if not fetched else f"{placed.store_bytes} bytes read from the store"
    if placed.peer_bytes:
        how += f", {placed.peer_bytes} from other hosts"
    on_news(f"{label} is served as {', '.join(name for name, _ in found)}: {how}")
    return found


def _folders_in(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.parent.name, path.parent) for path in folder.glob(f"*/{FILE_NAME}"))
