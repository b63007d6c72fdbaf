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
from typing import TYPE_CHECKING

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.serve.config import FILE_NAME

if TYPE_CHECKING:
    from wirespeed.repo.repository import Repository

PREFIX = "repo:"


class Followed:
    """Something on the shelf whose version may change: an alias, or the newest. ``names``: the models that it gave."""

    def __init__(self, text: str, label: str, names: Sequence[str]) -> None:
        self.text = text
        self.label = label
        self.names = tuple(names)


class Shelf:
    """The folder to serve, and what in it can be brought up to date."""

    def __init__(self, folder: Path, *, repo: str | None = None) -> None:
        self.folder = folder
        self.followed: list[Followed] = []
        self.labels: dict[str, str] = {}
        """The version that each model is of, where it is of one."""
        self._repo = repo
        self._repository: Repository | None = None
        """Opened by the first question, and kept: it is asked every few seconds."""
        self._owners: dict[str, str] = {}

    def add(self, text: str, *, on_news: Callable[[str], None]) -> None:
        """Put what ``text`` names on the shelf. Raises UsageError where a name is taken."""
        found, label = _models_of(text, self._repo, on_news)
        for name, folder in found:
            self._place(name, folder, text, label)
        if label and "@v" not in text:
            self.followed.append(Followed(text, label, [name for name, _ in found]))

    def newest(self, followed: Followed) -> str:
        """The label of the version that it should be now, asked of the store. Raises what the store raises."""
        from wirespeed.repo.names import parse_wanted
        from wirespeed.repo.repository import Repository
        from wirespeed.repo.versions import resolve

        if self._repository is None:
            self._repository = Repository.open(self._repo)
        # Not Repository.version: what an alias meant before is no news.
        return resolve(self._repository.store, parse_wanted(followed.text.removeprefix(PREFIX))).label

    def bring(self, followed: Followed, label: str, *, on_news: Callable[[str], None]) -> tuple[list[str], list[str]]:
        """Have ``label`` on the shelf in place of what it was: models to load, and models that are gone.

        Raises UsageError where a new name is taken, and what placing a version raises.
        """
        found, _ = _models_of(PREFIX + label, self._repo, on_news)
        for name, _folder in found:
            if self._owners.get(name, followed.text) != followed.text:
                raise UsageError(f"{label} has a model named {name!r}, as {self._owners[name]} has")
        names = [name for name, _ in found]
        gone = [name for name in followed.names if name not in names]
        for name, folder in found:
            self._place(name, folder, followed.text, label)
        for name in gone:
            (self.folder / name).unlink(missing_ok=True)
            self._owners.pop(name, None)
            self.labels.pop(name, None)
        followed.names = tuple(names)
        followed.label = label
        return names, gone

    def _place(self, name: str, folder: Path, text: str, label: str) -> None:
        if self._owners.get(name, text) != text:
            raise UsageError(
                f"got two models named {name!r}, from {self._owners[name]} and {text}",
                hint="serve them from two servers, or rename a model's folder",
            )
        self._owners[name] = text
        self.labels[name] = label
        # Moved into place from beside the shelf: a load that reads meanwhile finds the old one or the new one.
        link = self.folder.with_name(f"next-{name}")
        link.symlink_to(folder.resolve(), target_is_directory=True)
        link.rename(self.folder / name)


@contextlib.contextmanager
def open_shelf(
    named: Sequence[str], *, repo: str | None = None, on_news: Callable[[str], None] = lambda _: None
) -> Iterator[Shelf]:
    """What is to be served. Raises UsageError where a name is taken twice, DataError where a version holds no model."""
    if len(named) == 1 and not named[0].startswith(PREFIX) and not (Path(named[0]) / FILE_NAME).is_file():
        yield Shelf(Path(named[0]))
        return
    with tempfile.TemporaryDirectory(prefix="wirespeed-models-") as made:
        shelf = Shelf(Path(made) / "models", repo=repo)
        shelf.folder.mkdir()
        for text in named:
            shelf.add(text, on_news=on_news)
        yield shelf


def _models_of(text: str, repo: str | None, on_news: Callable[[str], None]) -> tuple[list[tuple[str, Path]], str]:
    """Names and folders of models, and the label of their version where they are of one."""
    if not text.startswith(PREFIX):
        if (Path(text) / FILE_NAME).is_file():
            return [(Path(text).resolve().name, Path(text))], ""
        found = _folders_in(Path(text))
        if not found:
            raise UsageError(f"{text} holds no models", expected=f"folders with a {FILE_NAME}")
        return found, ""
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
    return found, label


def _folders_in(folder: Path) -> list[tuple[str, Path]]:
    return sorted((path.parent.name, path.parent) for path in folder.glob(f"*/{FILE_NAME}"))
