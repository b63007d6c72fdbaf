"""The command `wirespeed`: joins the commands and turns errors into messages and exit codes.

Commands import what is heavy (torch, plotly, pyroute2) inside their functions, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

import wirespeed
from wirespeed.cli import bench, doctor, doctor_hosts, doctor_logs, fabric, lab, launch, plan, repo, report, serve, tune
from wirespeed.errors import WirespeedError

app = typer.Typer(
    name="wirespeed",
    help="Find, predict and remove the network bottleneck of distributed AI.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Options of ours may stand before or after the script; what we do not know is the script's, and so is all after "--".
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command("tune", context_settings=_PASS_ON)(tune.tune)
app.command("profile", context_settings=_PASS_ON)(tune.profile)
app.add_typer(lab.app, name="lab")
app.add_typer(bench.app, name="bench")
app.add_typer(fabric.app, name="fabric")
app.add_typer(plan.app, name="plan")
app.add_typer(doctor.app, name="doctor")
doctor.app.command("drift")(doctor_hosts.drift_of)
doctor.app.command("path")(doctor_hosts.path_to)
doctor.app.command("verdict")(doctor_logs.why)
doctor.app.command("logs")(doctor_logs.logs)
doctor.app.command("fabric")(doctor_logs.fabric)
app.command("why")(doctor_logs.why)
app.add_typer(repo.app, name="repo")
app.command("report")(report.report)
app.command("serve")(serve.serve)
app.command("load")(serve.load)
app.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    launch.launch_program
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"wirespeed {wirespeed.__version__}")
        raise typer.Exit


@app.callback()
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
        result = app(args=arguments, standalone_mode=False)
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
