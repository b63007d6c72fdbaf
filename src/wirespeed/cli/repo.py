"""`wirespeed repo`: versions of models in an object store, and their way onto machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from wirespeed import units
from wirespeed.cli import repo_swarm, repo_upkeep
from wirespeed.cli.render import make_table, print_json, say, show, stderr_console
from wirespeed.cli.repo_options import JsonOption, RepoOption, SignatureOption, WantedArgument, open_repository, some_of
from wirespeed.errors import UsageError

if TYPE_CHECKING:
    pass

app = typer.Typer(
    help="Push, pull and keep versions of models in an object store (S3, a folder, GCS, Azure).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    console = stderr_console()
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        "{task.description}", BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console, transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command("push")
def push(
    path: Annotated[Path, typer.Argument(help="A folder or a file.", metavar="PATH")],
    url: Annotated[str | None, typer.Argument(help="The repository; default --repo.", metavar="[URL]")] = None,
    *,
    name: Annotated[str, typer.Option("--name", "-n", help="The model, such as llama-8b or org/llama-8b.")],
    parent: Annotated[
        str | None,
        typer.Option("--parent", "-p", help="Send changed tensors as differences to this version.", metavar="V"),
    ] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="A line about this version.")] = "",
    link: Annotated[
        str | None,
        typer.Option(
            "--link", help="How fast readers are reached; faster links get fewer small forms.", metavar="RATE"
        ),
    ] = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="Byte planes + zstd where it pays: less to store.")
    ] = False,
    as_is: Annotated[bool, typer.Option("--as-is", help="Take .safetensors files as plain bytes.")] = False,
    quantize: Annotated[
        bool,
        typer.Option("--quantize", help="Round the weights' changes to the parent's to 8 bits: smaller, not exact."),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Upload everything again: replaces damaged objects of this epoch.")
    ] = False,
    alias: Annotated[str | None, typer.Option("--alias", help="Point this alias at the new version.")] = None,
    sign: Annotated[
        Path | None, typer.Option("--sign", help="Sign the version with this key (see keygen).", metavar="KEY")
    ] = None,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Make a folder or a file the next version of a model.

    What the store holds already is not sent again; an interrupted push is gone on with by the next one.

    With --quantize the version is not what the files are, but its parent plus their changes in 8 bits, for updates in
    which every weight moves. The next push makes up for what this one rounded.

    Examples:

      wirespeed repo push ./llama s3://bucket/models --name llama

      wirespeed repo push ./step-2000 -r s3://bucket/models -n run-7 --parent v12 --alias latest

      wirespeed repo push ./tuned -r s3://bucket/models -n llama --parent prod --quantize --alias prod
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.aliases import set_alias

    if alias is not None:
        from wirespeed.repo.names import check_alias

        check_alias(alias)
    repository = open_repository(url if url is not None else repo, must_exist=False)
    started_s = time.perf_counter()
    with _progress("push") as progress, terminable():
        pushed = repository.push(
            path, name, parent=parent, message=message, is_compressed=compress, is_as_is=as_is, is_quantized=quantize,
            is_repair=repair, link_bit_per_s=None if link is None else units.parse_rate(link), sign_with=sign,
            progress=progress,
        )  # fmt: skip
    if alias is not None:
        set_alias(repository.store, name, alias, pushed.version.number, message=message)
    if not pushed.has_conditions:
        say(
            f"note: {repository.store.url} does not honour conditional writes; versions are kept apart by listing "
            "instead, and numbers may have gaps"
        )
    if as_json:
        print_json(pushed)
        return 0
    seconds = time.perf_counter() - started_s
    line = (
        f"{pushed.version.label}: {pushed.version.num_files} files, {units.format_size(pushed.version.num_bytes)}; "
        f"sent {units.format_size(pushed.uploaded_bytes)}"
    )
    if pushed.delta_bytes:
        share = units.format_percent(pushed.delta_payload_bytes / pushed.delta_bytes)
        line += f", {units.format_size(pushed.delta_bytes)} of it as differences of {share}"
    show(f"{line}, in {units.format_duration(seconds)}")
    return 0


@app.command("pull")
def pull(
    wanted: WantedArgument,
    *,
    to: Annotated[
        Path | None, typer.Option("--to", "-o", help="A folder; default: the cache, by links.", metavar="DIR")
    ] = None,
    require_signature: SignatureOption = None,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Have a version on this machine, verified. Prints the folder that holds it.

    Without --to, files go into the cache (WIRESPEED_CACHE, at most WIRESPEED_CACHE_SIZE) and the folder links to them.
    A pull that was interrupted goes on where it was; what the folder or the cache holds of another version is used.

    Examples:

      wirespeed repo pull llama -r s3://bucket/models

      wirespeed repo pull llama@prod --to /srv/llama

      wirespeed repo pull llama@prod --require-signature release.pub
    """
    from wirespeed.cli.signals import terminable

    repository = open_repository(repo, signatures=require_signature)
    started_s = time.perf_counter()
    with _progress("pull") as progress, terminable():
        pulled = repository.pull(wanted, to=to, progress=progress)
    if as_json:
        print_json(pulled)
        return 0
    seconds = time.perf_counter() - started_s
    say(
        f"{pulled.name}@v{pulled.number}: {pulled.num_files} files, {units.format_size(pulled.num_bytes)}; "
        f"{units.format_size(pulled.store_bytes)} from the store, {units.format_size(pulled.kept_bytes)} were here, "
        f"in {units.format_duration(seconds)}"
    )
    if pulled.num_damaged:
        say(f"note: {pulled.num_damaged} damaged chunks were found on the way and read again from elsewhere")
    show(pulled.folder)
    return 0


@app.command("ls")
def list_(
    name: Annotated[str | None, typer.Argument(help="A model; default: all of them.")] = None,
    *,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """List models, or the versions of one.

    Examples:

      wirespeed repo ls -r s3://bucket/models

      wirespeed repo ls llama
    """
    from wirespeed.repo.aliases import list_aliases

    repository = open_repository(repo)
    names = repository.models() if name is None else [name]
    found = {model: repository.versions(model) for model in names}
    if name is not None and not found[name]:
        raise UsageError(
            f"there is no version of {name} in {repository.store.url}", hint="`wirespeed repo ls` lists the models"
        )
    aliases = {model: list_aliases(repository.store, model) for model in names}
    if as_json:
        print_json(
            {
                "models": [
                    {
                        "name": model,
                        "versions": versions,
                        "aliases": {entry.alias: entry.number for entry in aliases[model]},
                    }
                    for model, versions in found.items()
                ]
            }
        )
        return 0
    rows = []
    for model, versions in found.items():
        shown = versions if name is not None else versions[-1:]
        for version in shown:
            labels = [e.alias for e in aliases[model] if e.number == version.number]
            others = (
                [f"{e.alias} -> v{e.number}" for e in aliases[model] if e.number != version.number]
                if name is None
                else []
            )
            rows.append(
                [
                    model, f"v{version.number}", units.format_size(version.num_bytes), str(version.num_files),
                    version.created.replace("+00:00", "Z"), ", ".join([*labels, *others]), version.message,
                ]
            )  # fmt: skip
    headings = ["model", "version" if name else "newest", "size", "files", "created", "aliases<", "message<"]
    show(make_table(headings, rows))
    return 0


@app.command("show")
def show_version(
    wanted: WantedArgument,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List tensors instead of files.")] = False,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show what a version is made of.

    Examples:

      wirespeed repo show llama@prod

      wirespeed repo show llama --tensors
    """
    repository = open_repository(repo)
    version = repository.version(wanted)
    manifest = repository.manifest(version)
    used = {index for file in manifest.files for index in file.chunks}
    stored_bytes = sum(ref.size_bytes for ref in manifest.objects)
    num_deltas = sum(manifest.chunks[index].base >= 0 for index in used)
    deepest = max((manifest.depth(index) for index in used), default=0)
    if as_json:
        files = [
            {
                "path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256.hex() or None,
                "content_id": manifest.content_id(file), "num_chunks": len(file.chunks),
                "tensors": [msgspec.structs.asdict(t) for t in file.tensors],
            }
            for file in manifest.files
        ]  # fmt: skip
        print_json({"version": version, "stored_bytes": stored_bytes, "delta_depth": deepest, "files": files})
        return 0
    parent = "" if version.parent is None else f", parent v{version.parent}"
    show(
        f"{version.label}: {version.num_files} files, {units.format_size(version.num_bytes)} in "
        f"{units.format_size(stored_bytes)} of objects, {len(used)} chunks, {num_deltas} of them differences "
        f"(at most {deepest} deep){parent}"
    )
    if tensors:
        rows = [
            [t.name, t.dtype, "x".join(map(str, t.shape)), units.format_size(t.num_bytes), file.path]
            for file in manifest.files
            for t in file.tensors
        ]
        show(make_table(["tensor", "type<", "shape<", "size", "file<"], rows))
    else:
        rows = [
            [
                file.path, units.format_size(file.size_bytes), str(len(file.chunks)), str(len(file.tensors)),
                file.sha256.hex()[:16] or "-",
            ]
            for file in manifest.files
        ]  # fmt: skip
        show(make_table(["file", "size", "chunks", "tensors", "sha256<"], rows))
    return 0


@app.command("diff")
def diff(
    old: Annotated[str, typer.Argument(help="NAME@V, the older.", metavar="OLD")],
    new: Annotated[str, typer.Argument(help="NAME@V, or only V of the same model.", metavar="NEW")],
    *,
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show what changed between two versions, by file and tensor. Exit code 1 where anything did.

    Example:

      wirespeed repo diff llama@v3 v4
    """
    repository = open_repository(repo)
    second = new if "@" in new else f"{old.split('@')[0]}@{new}"
    changes = repository.diff(old, second)
    if as_json:
        print_json(
            {"old": str(repository.version(old).label), "new": repository.version(second).label, "changes": changes}
        )
    elif not changes:
        show("no difference")
    else:
        rows = [
            [
                change.path, change.change, units.format_size(change.size_bytes), units.format_size(change.new_bytes),
                some_of(change.tensors),
            ]
            for change in changes
        ]  # fmt: skip
        show(make_table(["file", "change<", "size", "new", "tensors<"], rows))
    return 1 if changes else 0


app.command("verify")(repo_upkeep.verify)
app.command("rm")(repo_upkeep.remove)
app.command("gc")(repo_upkeep.collect)
app.command("alias")(repo_upkeep.alias)
app.command("keygen")(repo_upkeep.keygen)
app.command("sign")(repo_upkeep.sign)
app.command("warm")(repo_swarm.warm)
app.command("peer")(repo_swarm.peer)
app.command("tracker")(repo_swarm.tracker)
app.command("hub")(repo_upkeep.hub)
app.command("mirror")(repo_upkeep.mirror)
app.command("dev-store")(repo_upkeep.dev_store)
