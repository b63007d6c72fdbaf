"""`wirespeed repo`: what keeps a repository in order, and its servers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wirespeed import units
from wirespeed.cli.render import make_table, print_json, say, show
from wirespeed.cli.repo_options import JsonOption, RepoOption, WantedArgument, open_repository, some_of
from wirespeed.errors import UsageError

if TYPE_CHECKING:
    from wirespeed.repo.versions import Version


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
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Read every byte of versions in the store (or of a pulled folder) and hold it against its hash.

    Exit code 1 where something is missing or wrong.

    Examples:

      wirespeed repo verify llama

      wirespeed repo verify llama@v3 --folder /srv/llama
    """
    from wirespeed.repo.pull import check_whole
    from wirespeed.repo.repository import Problem

    repository = open_repository(repo)
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
        show(
            make_table(["version", "problem<", "files<"], [[p.version, p.problem, some_of(p.files)] for p in problems])
        )
    else:
        show(f"{len(checked)} versions are whole")
    return 1 if problems else 0


def remove(
    wanted: Annotated[str, typer.Argument(help="NAME@v12.", metavar="NAME@V")],
    *,
    repo: RepoOption = None,
) -> int:
    """Take a version out of sight. Its bytes go with a later `gc`, a day after at the earliest.

    Example:

      wirespeed repo rm llama@v3
    """
    from wirespeed.repo.names import parse_wanted
    from wirespeed.repo.versions import remove as take_away

    if parse_wanted(wanted).number is None:
        raise UsageError(f"got {wanted!r}", expected="a version by its number, such as llama@v3")
    repository = open_repository(repo)
    version: Version = repository.version(wanted)
    take_away(repository.store, version)
    say(f"removed {version.label}; `wirespeed repo gc` gives its bytes back, a day from now at the earliest")
    return 0


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
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Delete objects that no version needs. Safe beside pushes, pulls and other collectors.

    Examples:

      wirespeed repo gc --dry-run

      wirespeed repo gc --wait 10m
    """
    from wirespeed.repo.gc import collect as run

    repository = open_repository(repo)
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
            f"are under way ({some_of(outcome.waiting_for)}): run gc again when they have ended, or with --wait"
        )
    return 0


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
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show or set aliases: names that point at a version, changed as one step, with history.

    Examples:

      wirespeed repo alias llama prod v12

      wirespeed repo alias llama prod --rollback

      wirespeed repo alias llama prod --history
    """
    from wirespeed.repo import aliases
    from wirespeed.repo.names import parse_version

    repository = open_repository(repo)
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


def keygen(
    path: Annotated[Path, typer.Argument(help="Where the secret key goes; the public one beside it.", metavar="FILE")],
) -> int:
    """Make a key to sign versions with: FILE is the secret, FILE.pub what readers are given.

    Example:

      wirespeed repo keygen release
    """
    from wirespeed.repo.signing import make_key

    public = make_key(path)
    say(f"{path} signs: keep it to yourself; {path}.pub is for those who pull")
    show(public)
    return 0


def sign(
    wanted: WantedArgument,
    *,
    key: Annotated[Path, typer.Option("--key", "-k", help="The secret key.", metavar="KEY")],
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Sign a version that is in the repository. What is signed: name, number, and by its digest every byte.

    Example:

      wirespeed repo sign llama@v12 --key release
    """
    from wirespeed.repo.signing import add, read_secret

    secret = read_secret(key)
    repository = open_repository(repo)
    repository.trusted = ()
    signed = add(repository.store, repository.version(wanted), secret)
    if as_json:
        print_json({"version": signed.label, "signatures": [found.key for found in signed.signatures]})
    else:
        show(f"{signed.label} is signed by {', '.join(found.key[:16] + '...' for found in signed.signatures)}")
    return 0


def hub(
    *,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; beyond loopback WIRESPEED_TOKEN is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)] = 8765,
    upstream: Annotated[
        str | None,
        typer.Option(
            "--mirror", help="Fetch what is not here from this hub, once (HF_TOKEN goes there).", metavar="URL"
        ),
    ] = None,
    repo: RepoOption = None,
) -> int:
    """Serve models to Hugging Face clients, and images to docker and skopeo, until interrupted. Only reading.

    Set HF_ENDPOINT to the address that it prints. Images are versions that were pushed as OCI layouts.

    Examples:

      wirespeed repo hub -r s3://bucket/models --port 8765

      wirespeed repo hub -r s3://bucket/models --mirror https://huggingface.co

      skopeo copy --src-tls-verify=false docker://127.0.0.1:8765/team/image:v3 oci:image
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.hub import HubServer
    from wirespeed.repo.mirror import Mirror, Upstream

    token = os.environ.get("WIRESPEED_TOKEN") or None
    try:
        repository = open_repository(repo, must_exist=upstream is None)
        mirror = None
        if upstream is not None:
            mirror = Mirror(repository, Upstream(url=upstream, token=os.environ.get("HF_TOKEN") or None))
        server = HubServer(repository, host=host, port=port, token=token, mirror=mirror)
    except OSError as fault:
        raise UsageError(f"cannot listen on {host}:{port}: {fault.strerror}", hint="choose another --port") from fault
    with server, terminable():
        show(f"HF_ENDPOINT={server.endpoint}")
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.2)
    return 0


def mirror(
    name: Annotated[str, typer.Argument(help="ORG/MODEL, or ORG/MODEL@REVISION.", metavar="NAME[@REV]")],
    *,
    upstream: Annotated[
        str, typer.Option("--from", envvar="HF_ENDPOINT", help="The hub; HF_TOKEN goes there.", metavar="URL")
    ] = "https://huggingface.co",
    repo: RepoOption = None,
    as_json: JsonOption = False,
) -> int:
    """Make what a Hugging Face hub has a version here: fetched once, verified by the hub's own hashes.

    The branch becomes an alias, its commit another (commit-SHA). Nothing is fetched where the commit is here.

    Example:

      wirespeed repo mirror org/model@main -r s3://bucket/models
    """
    from wirespeed.cli.signals import terminable
    from wirespeed.repo.mirror import Mirror, Upstream

    model, _, revision = name.partition("@")
    repository = open_repository(repo, must_exist=False)
    source = Mirror(repository, Upstream(url=upstream, token=os.environ.get("HF_TOKEN") or None))
    with terminable():
        found = source.bring(model, revision or "main")
    if as_json:
        print_json(found)
    else:
        say(f"{model} at {found.commit[:12]}: {units.format_size(found.fetched_bytes)} from {upstream}")
        show(found.version.label)
    return 0


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
