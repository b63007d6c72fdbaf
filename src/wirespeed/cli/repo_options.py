"""What the commands of `wirespeed repo` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wirespeed.repo.repository import Repository

RepoOption = Annotated[
    str | None,
    typer.Option(
        "--repo", "-r", envvar="WIRESPEED_REPO", help="s3://bucket/prefix, gs://, az:// or a folder.", metavar="URL"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
WantedArgument = Annotated[str, typer.Argument(help="NAME, NAME@v12 or NAME@alias.", metavar="NAME[@V]")]


def open_repository(repo: str | None, *, must_exist: bool = True) -> Repository:
    """By its URL, else by WIRESPEED_REPO."""
    from wirespeed.repo.repository import Repository

    return Repository.open(repo, must_exist=must_exist)


def some_of(items: tuple[str, ...]) -> str:
    """The first few."""
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")
