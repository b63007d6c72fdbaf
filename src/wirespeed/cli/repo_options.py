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


SignatureOption = Annotated[
    list[str] | None,
    typer.Option(
        "--require-signature",
        help="Refuse versions that this key did not sign; may be repeated, one of them is enough.",
        metavar="KEY.pub",
    ),
]


def open_repository(repo: str | None, *, must_exist: bool = True, signatures: list[str] | None = None) -> Repository:
    """By its URL, else by WIRESPEED_REPO. ``signatures``: public keys of which one must have signed what is read."""
    from wirespeed.repo.repository import Repository

    found = Repository.open(repo, must_exist=must_exist)
    if signatures:
        from wirespeed.repo.signing import trusted_from

        found.trusted = trusted_from(signatures)
    return found


def some_of(items: tuple[str, ...]) -> str:
    """The first few."""
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")
