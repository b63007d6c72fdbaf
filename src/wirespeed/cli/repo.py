"""`wirespeed repo`: versions of models in an object store, and their way onto machines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show, stderr_console
from wirespeed.errors import UsageError

if TYPE_CHECKING:
    from wirespeed.repo.repository import Repository
    from wirespeed.repo.versions import Version

app = typer.Typer(
    help="Push, pull and keep versions of models in an object store (S3, a folder, GCS, Azure).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_Repo = Annotated[
    str | None,
    typer.Option(
        "--repo", "-r", envvar="WIRESPEED_REPO", help="s3://bucket/prefix, gs://, az:// or a folder.", metavar="URL"
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
_Wanted = Annotated[str, typer.Argument(help="NAME, NAME@v12 or NAME@alias.", metavar="NAME[@V]")]


def _open(repo: str | None, *, must_exist: bool = True) -> Repository:
    from wirespeed.repo.repository import Repository

    return Repository.open(repo, must_exist=must_exist)


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
    repair: Annotated[
        bool, typer.Option("--repair", help="Upload everything again: replaces damaged objects of this epoch.")
    ] = False,
    alias: Annotated[str | None, typer.Option("--alias", help="Point this alias at the new version.")] = None,
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Make a folder or a file the next version of a model.

    What the store holds already is not sent again; an interrupted push is gone on with by the next one.

    Examples:

      wirespeed repo push ./llama s3://bucket/models --name llama

      wirespeed repo push ./step-2000 -r s3://bucket/models -n run-7 --parent v12 --alias latest
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.aliases import set_alias

    if alias is not None:
        from wirespeed.repo.names import check_alias

        check_alias(alias)
    repository = _open(url if url is not None else repo, must_exist=False)
    started_s = time.perf_counter()
    with _progress("push") as progress, terminable():
        pushed = repository.push(
            path, name, parent=parent, message=message, is_compressed=compress, is_as_is=as_is, is_repair=repair,
            link_bit_per_s=None if link is None else units.parse_rate(link), progress=progress,
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
    wanted: _Wanted,
    *,
    to: Annotated[
        Path | None, typer.Option("--to", "-o", help="A folder; default: the cache, by links.", metavar="DIR")
    ] = None,
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Have a version on this machine, verified. Prints the folder that holds it.

    Without --to, files go into the cache (WIRESPEED_CACHE, at most WIRESPEED_CACHE_SIZE) and the folder links to them.
    A pull that was interrupted goes on where it was; what the folder or the cache holds of another version is used.

    Examples:

      wirespeed repo pull llama -r s3://bucket/models

      wirespeed repo pull llama@prod --to /srv/llama
    """
    from wirespeed.cli.signals import terminable

    repository = _open(repo)
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
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """List models, or the versions of one.

    Examples:

      wirespeed repo ls -r s3://bucket/models

      wirespeed repo ls llama
    """
    from wirespeed.repo.aliases import list_aliases

    repository = _open(repo)
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
    wanted: _Wanted,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List tensors instead of files.")] = False,
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Show what a version is made of.

    Examples:

      wirespeed repo show llama@prod

      wirespeed repo show llama --tensors
    """
    repository = _open(repo)
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
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Show what changed between two versions, by file and tensor. Exit code 1 where anything did.

    Example:

      wirespeed repo diff llama@v3 v4
    """
    repository = _open(repo)
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
                _some(change.tensors),
            ]
            for change in changes
        ]  # fmt: skip
        show(make_table(["file", "change<", "size", "new", "tensors<"], rows))
    return 1 if changes else 0


def _some(items: tuple[str, ...]) -> str:
    return ", ".join(items[:4]) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


@app.command("verify")
def verify(
    wanted: Annotated[
        str | None, typer.Argument(help="NAME or NAME@V; default: all models.", metavar="[NAME[@V]]")
    ] = None,
    *,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Check a pulled folder instead of the store.", metavar="DIR")
    ] = None,
    shallow: Annotated[
        bool, typer.Option("--shallow", help="Only that objects are there and have their sizes.")
    ] = False,
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Read every byte of versions in the store (or of a pulled folder) and hold it against its hash.

    Exit code 1 where something is missing or wrong.

    Examples:

      wirespeed repo verify llama

      wirespeed repo verify llama@v3 --folder /srv/llama
    """
    from wirespeed.repo.pull import check_whole
    from wirespeed.repo.repository import Problem

    repository = _open(repo)
    problems: list[Problem] = []
    checked: list[str] = []
    if folder is not None:
        if wanted is None:
            raise UsageError("got --folder without a version", expected="NAME@V that the folder holds")
        version = repository.version(wanted)
        wrong = check_whole(folder, repository.manifest(version))
        checked.append(version.label)
        if wrong:
            what = f"{len(wrong)} files in {folder} are missing or wrong"
            problems.append(Problem(version=version.label, problem=what, files=tuple(wrong)))
    else:
        exact = repository.version(wanted) if wanted is not None and "@" in wanted else None
        models = repository.models() if wanted is None else [wanted.split("@")[0]]
        for model in models:
            number = None if exact is None else exact.number
            for version, found in repository.verify(model, number=number, is_deep=not shallow):
                checked.append(version.label)
                problems += found
                say(f"{version.label}: {'whole' if not found else f'{len(found)} problems'}")
        if wanted is not None and not checked:
            raise UsageError(f"there is no version of {wanted} in {repository.store.url}")
    if as_json:
        print_json({"checked": checked, "problems": problems})
    elif problems:
        show(make_table(["version", "problem<", "files<"], [[p.version, p.problem, _some(p.files)] for p in problems]))
    else:
        show(f"{len(checked)} versions are whole")
    return 1 if problems else 0


@app.command("rm")
def remove(
    wanted: Annotated[str, typer.Argument(help="NAME@v12.", metavar="NAME@V")],
    *,
    repo: _Repo = None,
) -> int:
    """Take a version out of sight. Its bytes go with a later `gc`, a day after at the earliest.

    Example:

      wirespeed repo rm llama@v3
    """
    from wirespeed.repo.names import parse_wanted
    from wirespeed.repo.versions import remove as take_away

    if parse_wanted(wanted).number is None:
        raise UsageError(f"got {wanted!r}", expected="a version by its number, such as llama@v3")
    repository = _open(repo)
    version: Version = repository.version(wanted)
    take_away(repository.store, version)
    say(f"removed {version.label}; `wirespeed repo gc` gives its bytes back, a day from now at the earliest")
    return 0


@app.command("gc")
def collect(
    *,
    grace: Annotated[str, typer.Option("--grace", help="Leave alone what is younger.", metavar="DURATION")] = "24h",
    lease: Annotated[
        str, typer.Option("--lease", help="A push that gave no sign for so long is dead.", metavar="DURATION")
    ] = "1h",
    wait: Annotated[
        str, typer.Option("--wait", help="Wait so long for pushes that are under way.", metavar="DURATION")
    ] = "0s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Delete objects that no version needs. Safe beside pushes, pulls and other collectors.

    Examples:

      wirespeed repo gc --dry-run

      wirespeed repo gc --wait 10m
    """
    from wirespeed.repo.gc import collect as run

    repository = _open(repo)
    outcome = run(
        repository.store, grace_s=units.parse_duration(grace), lease_s=units.parse_duration(lease),
        wait_s=units.parse_duration(wait), is_dry_run=dry_run, say=say,
    )  # fmt: skip
    if as_json:
        print_json(outcome)
        return 0
    if dry_run:
        show(
            f"{outcome.num_condemned} objects of {units.format_size(outcome.num_condemned_bytes)} would go; "
            f"{outcome.num_needed} are needed"
        )
        return 0
    show(
        f"deleted {outcome.num_deleted} objects of {units.format_size(outcome.num_deleted_bytes)}; "
        f"{outcome.num_needed} are needed"
    )
    if outcome.broken:
        show(f"pushes that were dead: {', '.join(outcome.broken)}")
    if outcome.waiting_for:
        show(
            f"{outcome.num_condemned} objects of {units.format_size(outcome.num_condemned_bytes)} wait for pushes that "
            f"are under way ({_some(outcome.waiting_for)}): run gc again when they have ended, or with --wait"
        )
    return 0


@app.command("alias")
def alias(
    name: Annotated[str, typer.Argument(help="The model.")],
    alias: Annotated[str | None, typer.Argument(help="The alias, such as prod; default: list them.")] = None,
    version: Annotated[str | None, typer.Argument(help="Where it is to point, such as v12 or another alias.")] = None,
    *,
    expect: Annotated[str | None, typer.Option("--expect", help="Only where it points here now.", metavar="V")] = None,
    history: Annotated[bool, typer.Option("--history", help="Show where it pointed before.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Back to where it pointed before.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Take the alias away.")] = False,
    message: Annotated[str, typer.Option("--message", "-m", help="A line about this change.")] = "",
    repo: _Repo = None,
    as_json: _Json = False,
) -> int:
    """Show or set aliases: names that point at a version, changed as one step, with history.

    Examples:

      wirespeed repo alias llama prod v12

      wirespeed repo alias llama prod --rollback

      wirespeed repo alias llama prod --history
    """
    from wirespeed.repo import aliases
    from wirespeed.repo.names import parse_version

    repository = _open(repo)
    store = repository.store
    if sum((version is not None, history, rollback, delete)) > 1:
        raise UsageError("got more than one of VERSION, --history, --rollback and --delete", expected="one")
    if alias is None:
        if history or rollback or delete:
            raise UsageError("got no alias", expected="the alias, such as prod")
        entries = aliases.list_aliases(store, name)
    elif history or (version is None and not rollback and not delete):
        entries = aliases.history(store, name, alias)
        if not entries:
            raise UsageError(f"{name} has no alias {alias!r}", hint=f"`wirespeed repo alias {name}` lists its aliases")
        entries = entries if history else entries[:1]
    else:
        expected = None if expect is None else parse_version(name, expect).number
        if rollback:
            entry = aliases.rollback(store, name, alias)
        else:
            number = None if delete or version is None else repository.version(parse_version(name, version)).number
            entry = aliases.set_alias(store, name, alias, number, expect=expected, message=message)
        say(f"{name}@{alias} now points at {'nothing' if entry.number is None else f'v{entry.number}'}")
        entries = [entry]
    if as_json:
        print_json({"name": name, "entries": entries})
    elif alias is None or history or (version is None and not rollback and not delete):
        rows = [
            [e.alias, "-" if e.number is None else f"v{e.number}", e.created.replace("+00:00", "Z"), e.who, e.message]
            for e in entries
        ]
        show(make_table(["alias", "version", "set", "by<", "message<"], rows))
    return 0


@app.command("hub")
def hub(
    *,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback WIRESPEED_TOKEN is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)] = 8765,
    repo: _Repo = None,
) -> int:
    """Serve models to Hugging Face clients until interrupted: set HF_ENDPOINT to the address it prints.

    Example:

      wirespeed repo hub -r s3://bucket/models --port 8765
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.hub import HubServer

    token = os.environ.get("WIRESPEED_TOKEN") or None
    try:
        server = HubServer(_open(repo), host=host, port=port, token=token)
    except OSError as fault:
        raise UsageError(f"cannot listen on {host}:{port}: {fault.strerror}", hint="choose another --port") from fault
    with server, terminable():
        show(f"HF_ENDPOINT={server.endpoint}")
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.2)
    return 0


@app.command("dev-store")
def dev_store(
    *,
    data: Annotated[Path, typer.Option("--data", help="Where its data goes.", metavar="DIR")] = Path("dev-store"),
    bucket: Annotated[str, typer.Option("--bucket", help="The bucket to make.")] = "models",
) -> int:
    """Run a real S3 server (SeaweedFS) on loopback until interrupted, for trying things out.

    Prints what a shell needs to use it. Its keys are new each time.

    Example:

      wirespeed repo dev-store --data /tmp/s3
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.devstore import dev_store as run

    with terminable(), run(data.absolute(), bucket=bucket) as store:
        for key, value in {**store.environment, "WIRESPEED_REPO": store.url}.items():
            sys.stdout.write(f"export {key}={value}\n")
        sys.stdout.flush()
        say("running; Ctrl-C ends it")
        while True:
            time.sleep(3600)
