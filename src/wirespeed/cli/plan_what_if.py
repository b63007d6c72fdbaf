"""`wirespeed plan place`, `compare` and `sweep`: rank order, other networks, other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from wirespeed.errors import UsageError
from wirespeed.units import format_duration, format_percent, format_size, parse_size

if TYPE_CHECKING:
    from wirespeed.plan.question import Answer

_FABRIC = typer.Option("--fabric", "-f", help="fabric.toml, or one line of words.", metavar="FABRIC")
_JSON = typer.Option("--json", help="One JSON document on stdout.")
_HTML = typer.Option("--html", help="Write a page with plots.", metavar="FILE")


def register(app: typer.Typer) -> None:
    """Add the commands to `wirespeed plan`."""
    app.command("place")(place_ranks)
    app.command("compare")(compare)
    app.command("sweep")(sweep_sizes)


def place_ranks(
    *,
    fabric: Annotated[str, _FABRIC],
    size: Annotated[str, typer.Option("--size", help="Of the gradient, to say what the order is worth.")] = "100 MiB",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for hostfile, ranks.json, affinity.yaml.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Split this model's layers into --stages.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="Pipeline stages, split by exact search.")] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="Accelerator of the stages.")] = "a100",
    batch: Annotated[int, typer.Option("--batch", help="Micro-batch of the stages.")] = 1,
    is_inference: Annotated[
        bool, typer.Option("--inference", help="Split for inference; --out then holds a model.toml of the stages too.")
    ] = False,
    port: Annotated[int, typer.Option("--port", help="Of the nodes in model.toml.", min=1, max=65535)] = 7000,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Order ranks so that neighbours share a host, a rack, a switch; say what it is worth; write what launchers take.

    With --model and --stages the model's layers are split into pipeline stages by exact dynamic programming: for
    training, or with --inference for `wirespeed serve` (forward passes only, weights in memory, results sent one way).

    Examples:

      wirespeed plan place --fabric fabric.toml --out placement/

      wirespeed plan place --fabric "tree hosts=32 rack=8 nic=25g oversubscription=4" --model vgg16 --stages 4

      wirespeed plan place --fabric fabric.toml --model llama3-70b --stages 4 --inference --out models/llama3-70b
    """
    from wirespeed.cli.render import make_table, print_json, say, show
    from wirespeed.fabric.placement import place
    from wirespeed.fabric.words import load_fabric
    from wirespeed.plan.placement import kubernetes_affinity, order_gain, rank_map, slurm_hostfile

    network = load_fabric(fabric)
    placed = place(network)
    if (model is None) != (stages is None):
        raise UsageError("got only one of --model and --stages", expected="both, or neither")
    if is_inference and stages is None:
        raise UsageError("got --inference without stages", expected="--model and --stages, to say what is split")
    worth = order_gain(network, parse_size(size))
    split = stages_toml = None
    if model is not None and stages is not None:
        from wirespeed.plan.stage_plan import split_model, stages_config

        split = split_model(model, device, stages, batch, network, is_inference=is_inference)
        if is_inference:
            stages_toml = stages_config(model, split, network, placed, batch=batch, port=port)
    if out is not None:
        from wirespeed.records import write_bytes

        files = {
            "hostfile": slurm_hostfile(network, placed),
            "ranks.json": rank_map(network, placed),
            "affinity.yaml": kubernetes_affinity(network, placed),
        }
        if stages_toml is not None:
            files["model.toml"] = stages_toml
        for name, text in files.items():
            say(f"wrote {write_bytes(out / name, text.encode())}")
    if as_json:
        document: dict[str, object] = {"schema": 1, "kind": "placement", "order": msgspec.to_builtins(worth)}
        document["hosts"] = list(dict.fromkeys(network.hosts[index].name for index in placed.host.tolist()))
        if split is not None:
            document["stages"] = msgspec.to_builtins(split)
        print_json(document)
        return
    rows = [
        ["rack by rack", format_duration(worth.racks_s), "-", "-"],
        ["as listed", format_duration(worth.listed_s), f"{worth.listed_s / worth.racks_s:.2f} x", worth.binding_listed],
        [
            "shuffled",
            format_duration(worth.shuffled_s),
            f"{worth.shuffled_s / worth.racks_s:.2f} x",
            worth.binding_shuffled,
        ],
    ]
    title = f"ring all_reduce of {format_size(worth.size_bytes)} over {placed.num_ranks} ranks"
    show(make_table(["order of hosts", "time", "of the best", "busiest link<"], rows, title=title))
    if worth.listed_s <= worth.racks_s * 1.01:
        print("change nothing: the hosts are listed in a good order already")
    else:
        print(f"use the order rack by rack: {format_percent(1 - worth.racks_s / worth.listed_s)} less than as listed")
    if split is not None:
        rows = [
            [str(stage), f"{start} to {start + count - 1}", str(count), format_duration(seconds)]
            for stage, (start, count, seconds) in enumerate(zip(split.bounds, split.sizes, split.stage_s, strict=True))
        ]
        what = "forward" if is_inference else "forward and backward"
        show(make_table(["stage", "layers", "number", what], rows, title=f"{model} in {stages} stages"))
        less = format_percent(1 - split.slowest_s / split.even_slowest_s)
        print(f"slowest stage {format_duration(split.slowest_s)}, {less} less than with equal numbers of layers")


def compare(
    scenarios: Annotated[list[Path], typer.Argument(help="Scenario files.", metavar="SCENARIO.toml...")],
    *,
    upgrade: Annotated[
        str | None, typer.Option("--upgrade", help="Which hosts of the first scenario get this NIC first?")
    ] = None,
    centre: Annotated[
        list[str] | None, typer.Option("--centre", help="Parameter server or aggregator; may be repeated.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    html: Annotated[Path | None, _HTML] = None,
) -> None:
    """Set questions side by side: another network, more hosts, another codec; with time and cost of a step.

    A scenario names model and fabric, and what else `plan train` takes:

      schema = 1
      model = "bert-large"
      fabric = "star hosts=8 nic=100g-roce devices=8 island=nvlink3"
      device = "a100"
      price_per_host_hour = 20.0

    With --upgrade NIC the hosts of the first scenario's fabric are ranked by what moving them to that NIC saves; with
    --centre HOST the traffic is that of parameter servers or aggregators instead of a ring.

    Examples:

      wirespeed plan compare tcp.toml roce.toml infiniband.toml

      wirespeed plan compare mixed.toml --upgrade 200g-ib --centre h0 --centre h1
    """
    from wirespeed.cli.render import make_table, print_json, say, show
    from wirespeed.plan.question import ask, read_scenario
    from wirespeed.plan.search import MARGIN

    questions = [read_scenario(path) for path in scenarios]
    answers = [ask(question) for question in questions]
    steps = _upgrades(answers[0], upgrade, centre)
    first = answers[0]
    headings = ["scenario<", "devices", "step", "samples/s", "per device", "against the first", "cost per step", "use<"]
    rows = []
    for answer in answers:
        question = answer.question
        speed = answer.samples_per_s / question.num_ranks
        cost = answer.cost_per_step
        rows.append(
            [
                question.name,
                str(question.num_ranks),
                format_duration(answer.step_s),
                f"{answer.samples_per_s:,.4g}",
                f"{speed:,.4g}",
                f"{answer.samples_per_s / first.samples_per_s:.2f} x",
                "unknown" if cost is None else f"{cost:.3g}",
                _advised(answer),
            ]
        )
    best = max(answers, key=lambda one: one.samples_per_s / one.question.num_ranks)
    each = first.samples_per_s / first.question.num_ranks
    gain = best.samples_per_s / best.question.num_ranks / each - 1
    if len(answers) == 1:
        verdict = ""
    elif gain <= MARGIN:
        verdict = (
            f"change nothing: no scenario gives a device more than {format_percent(max(0.0, gain))} over the first"
        )
    else:
        verdict = f"{best.question.name} gives each device {format_percent(gain)} more than {first.question.name}"
    if html is not None:
        from wirespeed.report.plan_page import stacked_bars, write_plan

        bars = stacked_bars([one.question.name for one in answers], [_parts(one) for one in answers])
        path = write_plan(
            html,
            title="Scenarios",
            lead=verdict,
            figures=[("Where a step's time goes", bars)],
            tables=[("Scenarios", headings, rows)],
        )
        say(f"wrote {path}")
    if as_json:
        print_json(
            {
                "schema": 1,
                "kind": "comparison_of_plans",
                "verdict": verdict,
                "scenarios": [
                    {
                        "name": one.question.name,
                        "num_ranks": one.question.num_ranks,
                        "global_batch": one.question.global_batch,
                        "step_s": one.step_s,
                        "samples_per_s": one.samples_per_s,
                        "cost_per_step": one.cost_per_step,
                        "use": _advised(one),
                        "parts_s": _parts(one),
                    }
                    for one in answers
                ],
                "upgrades": [msgspec.to_builtins(step) for step in steps],
            }
        )
        return
    show(make_table(headings, rows))
    if verdict:
        print(verdict)
    _show_upgrades(steps, upgrade)


def _upgrades(answer: Answer, upgrade: str | None, centre: list[str] | None) -> tuple[msgspec.Struct, ...]:
    if upgrade is None:
        if centre:
            raise UsageError("got --centre without --upgrade", expected="both")
        return ()
    from wirespeed.fabric.timing import prepare
    from wirespeed.plan.upgrades import star_traffic_s, upgrade_order

    question = answer.question
    size_bytes = 4.0 * question.model.num_parameters
    if centre:
        return upgrade_order(
            question.fabric,
            upgrade,
            lambda fabric: max(star_traffic_s(fabric, centre, size_bytes)),
            load=lambda fabric: star_traffic_s(fabric, centre, size_bytes),
        )
    return upgrade_order(
        question.fabric,
        upgrade,
        lambda fabric: prepare(fabric, "all_reduce", question.placement).cost(size_bytes).seconds,
    )


def _show_upgrades(steps: tuple[msgspec.Struct, ...], upgrade: str | None) -> None:
    from wirespeed.cli.render import make_table, show
    from wirespeed.plan.upgrades import Upgrade

    if upgrade is None:
        return
    rows = []
    for place, step in enumerate(steps, start=1):
        assert isinstance(step, Upgrade)
        names = ", ".join(step.hosts[:6]) + (f" and {len(step.hosts) - 6} more" if len(step.hosts) > 6 else "")
        price = "unknown" if step.price is None else f"{step.price:,.0f}"
        rows.append([str(place), names, format_duration(step.seconds), format_percent(step.gain), price])
    if not rows:
        print(f"change nothing: moving hosts to {upgrade} saves nothing here")
        return
    show(make_table(["", f"move to {upgrade}<", "exchange then", "saved", "price"], rows))


def sweep_sizes(
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="A model of the catalogue.")],
    fabric: Annotated[str, _FABRIC],
    hosts: Annotated[str, typer.Option("--hosts", help="Numbers of hosts, such as 2,4,8,16.")] = "1,2,4,8,16",
    device: Annotated[str, typer.Option("--device", "-d", help="Accelerator.")] = "a100",
    batch_per_device: Annotated[
        int | None, typer.Option("--batch-per-device", help="Samples per device (weak).")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Samples per step, kept at every size (strong).")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Arithmetic.")] = "bf16",
    fidelity: Annotated[str, typer.Option("--fidelity", help="exact, half, compressed or lossy.")] = "half",
    samples_per_s: Annotated[
        float | None, typer.Option("--samples-per-s", help="Of one device alone, measured.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
    html: Annotated[Path | None, _HTML] = None,
) -> None:
    """Predict scaling: step, throughput and efficiency over numbers of hosts.

    Weak scaling keeps the batch per device, strong scaling (--batch) the batch of all. A size at which nothing is legal
    says why.

    Examples:

      wirespeed plan sweep --model resnet50 --fabric "star hosts=16 nic=10g" -d v100 --dtype fp32 --hosts 1,2,4,8,16

      wirespeed plan sweep -m llama3-8b -f "fat-tree hosts=64 nic=400g-ib nics=8 island=nvlink4" -d h100 --html s.html
    """
    from wirespeed.cli.plan import _fidelity
    from wirespeed.cli.render import make_table, print_json, say, show
    from wirespeed.plan.question import make_question
    from wirespeed.plan.sweep import resized, sweep

    if batch is not None and batch_per_device is not None:
        raise UsageError("got both --batch and --batch-per-device", expected="one of them")
    sizes = _sizes(hosts)
    question = make_question(
        model=model,
        fabric=resized(fabric, sizes[0]),
        device=device,
        global_batch=batch,
        batch_per_device=batch_per_device,
        dtype=dtype,
        fidelity=_fidelity(fidelity),
        samples_per_s=samples_per_s,
    )
    points = sweep(question, fabric, sizes, is_strong=batch is not None)
    if html is not None:
        from wirespeed.report.plan_page import lines, write_plan

        good = [one for one in points if one.samples_per_s is not None]
        series = {"predicted": [one.samples_per_s or 0.0 for one in good]}
        if good and good[0].samples_per_s is not None:
            per = good[0].samples_per_s / good[0].num_ranks
            series["linear"] = [per * one.num_ranks for one in good]
        ranks = [float(one.num_ranks) for one in good]
        plot = lines(ranks, series, x_title="devices", y_title="samples/s", is_log=True)
        path = write_plan(html, title=f"Scaling of {model}", lead=fabric, figures=[("Throughput", plot)])
        say(f"wrote {path}")
    if as_json:
        print_json(
            {"schema": 1, "kind": "sweep", "model": model, "points": [msgspec.to_builtins(one) for one in points]}
        )
        return
    rows = [
        [
            str(one.num_hosts),
            str(one.num_ranks),
            str(one.global_batch),
            "-" if one.step_s is None else format_duration(one.step_s),
            "-" if one.samples_per_s is None else f"{one.samples_per_s:,.4g}",
            "-" if one.efficiency is None else format_percent(float(f"{one.efficiency:.3g}")),
            "-" if one.exposed_share is None else format_percent(float(f"{one.exposed_share:.2g}")),
            one.what or one.trouble,
        ]
        for one in points
    ]
    headings = ["hosts", "devices", "batch", "step", "samples/s", "efficiency", "exposed", "use<"]
    show(make_table(headings, rows, title=f"{model}, {'strong' if batch is not None else 'weak'} scaling"))


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise UsageError(f"got --hosts {text!r}", expected="numbers of hosts, such as 2,4,8")
    return sorted({int(part) for part in parts})


def _advised(answer: Answer) -> str:
    if answer.layouts is not None and answer.layouts.chosen.step_s == answer.step_s:
        return answer.layouts.chosen.layout.name
    assert answer.choice is not None
    return answer.choice.strategy.name


def _parts(answer: Answer) -> dict[str, float]:
    if answer.layouts is not None and answer.layouts.chosen.step_s == answer.step_s:
        return dict(answer.layouts.chosen.parts_s)
    assert answer.choice is not None
    prediction = answer.choice.prediction
    return {"compute": prediction.compute_s, "exposed communication": prediction.exposed_s}
