"""The command `wirespeed`: joins the commands and turns errors into messages and exit codes.

Commands import what is heavy (torch, plotly, pyroute2) inside their functions, so that ``--help`` is quick. Of the
command that is asked for only the module is imported, and only its options are read: all of them take a quarter of a
second. ``app`` holds every command, and is made when somebody asks for it (``--help``, a name that is not known).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

import wirespeed
from wirespeed.errors import WirespeedError

# Options of ours may stand before or after the script; what we do not know is the script's, and so is all after "--".
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_BEFORE = {"ignore_unknown_options": True, "allow_interspersed_args": False}

# By name, in the order of --help: the module in this package, what of it (a group's ``app``, or a function), settings.
_COMMANDS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "tune": ("tune", "tune", _PASS_ON),
    "profile": ("tune", "profile", _PASS_ON),
    "lab": ("lab", "app", None),
    "bench": ("bench", "app", None),
    "fabric": ("fabric", "app", None),
    "plan": ("plan", "app", None),
    "doctor": ("doctor", "app", None),
    "why": ("doctor_logs", "why", None),
    "repo": ("repo", "app", None),
    "report": ("report", "report", None),
    "serve": ("serve", "serve", None),
    "load": ("serve", "load", None),
    "infer": ("infer", "infer", None),
    "launch": ("launch", "launch_program", _BEFORE),
}


@functools.cache
def _complete(module: str) -> Any:
    """A module of this package, with the commands that other modules add to its group."""
    held = importlib.import_module(f"wirespeed.cli.{module}")
    if module == "doctor":
        from wirespeed.cli import doctor_hosts, doctor_logs

        held.app.command("drift")(doctor_hosts.drift_of)
        held.app.command("path")(doctor_hosts.path_to)
        held.app.command("verdict")(doctor_logs.why)
        held.app.command("logs")(doctor_logs.logs)
        held.app.command("fabric")(doctor_logs.fabric)
    return held


@functools.cache
def _app_with(*names: str) -> typer.Typer:
    """The command line with these commands."""
    made = typer.Typer(
        name="wirespeed",
        help="Find, predict and remove the network bottleneck of distributed AI.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_options)
    for name in names:
        module, part, settings = _COMMANDS[name]
        held = getattr(_complete(module), part)
        if isinstance(held, typer.Typer):
            made.add_typer(held, name=name)
        else:
            made.command(name, context_settings=settings)(held)
    return made


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return _app_with(*_COMMANDS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _app_for(arguments: list[str]) -> Callable[..., Any]:
    """What has the command that the arguments begin with; everything where they begin with none."""
    if arguments and arguments[0] in _COMMANDS:
        return _app_with(arguments[0])
    everything: Callable[..., Any] = sys.modules[__name__].app
    return everything


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"wirespeed {wirespeed.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find, predict and remove the network bottleneck of distributed AI.

    Exit codes: 0 fine, 1 findings or a failed comparison, 2 usage, 3 the host lacks something, 4 a peer or link failed.
    """


def run() -> None:
    """Entry point: run the command line and exit."""
    sys.exit(main())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and give its exit code."""
    try:
        given = sys.argv[1:] if arguments is None else arguments
        result = _app_for(given)(args=given, standalone_mode=False)
        sys.stdout.flush()
    except WirespeedError as fault:
        print(f"wirespeed: {fault}", file=sys.stderr)
        if os.environ.get("WIRESPEED_TRACEBACK") == "1":
            traceback.print_exc()
        return fault.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("wirespeed: interrupted", file=sys.stderr)
        return 130
    except (BrokenPipeError, SystemExit) as end:
        # SystemExit is what click and rich make of a broken pipe.
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        return _end_without_reader()
    except Exception as fault:  # click's usage errors carry their own exit code and text
        if hasattr(fault, "exit_code") and hasattr(fault, "show"):
            fault.show()
            return int(fault.exit_code)
        traceback.print_exc()
        print(
            f"wirespeed: a bug of wirespeed's own ({type(fault).__name__}); hint: please report the lines above",
            file=sys.stderr,
        )
        return 70
    return result if isinstance(result, int) else 0


def _end_without_reader() -> int:
    # Python flushes stdout once more at its end, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
