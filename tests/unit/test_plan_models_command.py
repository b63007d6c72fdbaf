"""`wirespeed plan` for models of the catalogue, as it is typed."""

from __future__ import annotations

import json

import pytest

from wirespeed.cli.main import main
from wirespeed.serve.config import read_config

GPT = ["--model", "gpt3-6.7b", "--fabric", "star hosts=4 nic=100g-ib nics=8 island=nvlink3", "--batch", "64"]
SCENARIO = 'schema = 1\nmodel = "resnet50"\ndevice = "v100"\ndtype = "fp32"\nprice_per_host_hour = 3.0\n'


def run_json(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_train_lays_a_transformer_out(capsys):
    out = run_json(capsys, "plan", "train", *GPT)
    assert out["num_ranks"] == 32
    steps_s = [one["step_s"] for one in out["layouts"]["predictions"]]
    assert steps_s == sorted(steps_s)
    assert out["layouts"]["chosen"] in [one["name"] for one in out["layouts"]["predictions"]]
    first = out["layouts"]["predictions"][0]
    assert first["lower_bound_s"] <= first["step_s"]
    assert first["is_in_range"] is False
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_s"])


def test_train_ranks_strategies_of_what_is_no_transformer(capsys):
    out = run_json(
        capsys, "plan", "train", "-m", "resnet50", "-f", "star hosts=8 nic=10g", "-d", "v100", "--dtype", "fp32",
        "--fidelity", "compressed",
    )  # fmt: skip
    assert "layouts" not in out
    assert {one["strategy"]["codec"] for one in out["strategies"]["predictions"]} >= {"dense", "half", "int8"}
    assert out["links"]["all_reduce"].startswith("NIC of host")
    steps = {name: one["step_s"] for name, one in out["cadences"].items()}
    assert steps["delayed by a step"] <= steps["every step"] <= steps["accumulated over 4"]


def test_train_says_change_nothing_of_a_good_layout(capsys):
    best = run_json(capsys, "plan", "train", *GPT)["layouts"]["predictions"][0]["name"]
    assert main(["plan", "train", *GPT, "--current", best]) == 0
    assert "change nothing:" in capsys.readouterr().out


def test_train_writes_a_page_with_plots(capsys, tmp_path):
    page = tmp_path / "plan.html"
    assert main(["plan", "train", *GPT, "--html", str(page)]) == 0
    text = page.read_text()
    assert "Content-Security-Policy" in text
    assert '"type": "bar"' in text
    assert "gpt3-6.7b" in text


def test_explain_answers_in_words(capsys):
    assert main(["plan", "explain", "-m", "llama3-8b", "-f", "star hosts=4 nic=100g devices=8 island=nvlink3"]) == 0
    out = capsys.readouterr().out
    assert "bandwidth-bound" in out or "latency-bound" in out
    assert "RDMA at the same line rate (100g-roce)" in out
    assert "no network can give more than" in out
    assert "outside the calibrated range" in out


def test_explain_explains_a_strategy_of_a_model(capsys):
    command = ["plan", "explain", "-m", "resnet50", "-f", "star hosts=8 nic=1g", "-d", "v100", "--dtype", "fp32"]
    assert main([*command, "-s", "half"]) == 0
    assert "twice the bandwidth" in capsys.readouterr().out


def test_infer_answers_three_kinds_of_question(capsys):
    star = ["--fabric", "star hosts=4 nic=10g"]
    model = run_json(
        capsys,
        "plan",
        "infer",
        "-m",
        "llama3-8b",
        "-f",
        "star hosts=2 nic=100g-ib devices=8 island=nvlink4",
        "-d",
        "h100",
    )
    assert model["options"][0]["tokens_per_s"] >= model["options"][-1]["tokens_per_s"]
    job = run_json(capsys, "plan", "infer", "--items", "100", *star)["options"]
    assert job["overlapped in chunks"]["total_s"] <= job["scatter, compute, gather"]["total_s"]
    queue = run_json(capsys, "plan", "infer", "--rate", "100", "--batch", "4", *star)["options"]
    assert set(queue) == {"1", "2", "4"}


def test_distribute_ranks_schemes(capsys):
    out = run_json(
        capsys, "plan", "distribute", "--size", "140GB", "--fabric", "tree hosts=16 rack=4 nic=100g oversubscription=2"
    )
    totals = [one["total_s"] for one in out["schemes"]]
    # Ranked to three digits; equal ones by what they send over uplinks.
    assert totals[0] <= 1.01 * min(totals)
    assert {one["scheme"] for one in out["schemes"]} >= {"store", "chain", "rack-chain"}


def test_place_writes_what_launchers_take(capsys, tmp_path):
    fabric = ["--fabric", "tree hosts=8 rack=4 nic=25g oversubscription=4"]
    out = run_json(capsys, "plan", "place", *fabric, "--out", str(tmp_path), "-m", "vgg16", "--stages", "2")
    assert out["order"]["shuffled_s"] > out["order"]["racks_s"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["affinity.yaml", "hostfile", "ranks.json"]
    assert len(out["stages"]["bounds"]) == 2


def test_a_split_for_inference_is_written_as_what_serve_reads(capsys, tmp_path):
    fabric = ["--fabric", "star hosts=4 nic=25g"]
    asked = ["plan", "place", *fabric, "-m", "llama3-70b", "-d", "h100", "--stages", "3", "--batch", "2"]
    out = run_json(capsys, *asked, "--inference", "--out", str(tmp_path))
    config = read_config(tmp_path)
    assert [(stage.model, stage.node) for stage in config.stages] == [
        (f"llama3-70b-{stage + 1}", f"{host}:7000") for stage, host in enumerate(out["hosts"][:3])
    ]
    assert config.micro_rows == 2
    # In training the weights alone, with gradients and optimizer state, are 18 bytes an element: more than three hold.
    assert main(asked) == 2
    assert "fits the memory" in capsys.readouterr().err


def test_a_split_for_inference_moves_to_where_little_is_sent_one_way(capsys):
    asked = ["plan", "place", "--fabric", "star hosts=4 nic=1g", "-m", "resnet50", "-d", "v100", "--stages", "4"]
    training = run_json(capsys, *asked)["stages"]
    inference = run_json(capsys, *asked, "--inference")["stages"]
    assert inference["slowest_s"] < 0.6 * training["slowest_s"]


def test_compare_sets_scenarios_side_by_side(capsys, tmp_path):
    paths = []
    for name, nic in {"tcp": "10g", "ib": "100g-ib"}.items():
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(SCENARIO + f'fabric = "star hosts=8 nic={nic}"\n')
    out = run_json(capsys, "plan", "compare", *map(str, paths))
    first, second = out["scenarios"]
    assert (first["name"], second["name"]) == ("tcp", "ib")
    assert second["step_s"] < first["step_s"]
    # 8 hosts at 3.00 an hour.
    assert first["cost_per_step"] == pytest.approx(24 * first["step_s"] / 3600)
    assert "ib gives each device" in out["verdict"]
    page = tmp_path / "page.html"
    assert main(["plan", "compare", *map(str, paths), "--upgrade", "100g-ib", "--html", str(page)]) == 0
    assert "move to 100g-ib" in capsys.readouterr().out
    assert page.exists()


def test_compare_of_the_same_changes_nothing(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(SCENARIO + 'fabric = "star hosts=2 nic=100g-ib"\n')
    assert main(["plan", "compare", str(path), str(path)]) == 0
    assert "change nothing" in capsys.readouterr().out


def test_sweep_shows_scaling_and_says_where_nothing_is_legal(capsys, tmp_path):
    page = tmp_path / "scaling.html"
    out = run_json(
        capsys, "plan", "sweep", "-m", "resnet50", "-f", "star hosts=1 nic=10g", "-d", "v100", "--dtype", "fp32",
        "--hosts", "1,4,16", "--html", str(page),
    )  # fmt: skip
    efficiencies = [one["efficiency"] for one in out["points"]]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert page.exists()
    small = run_json(
        capsys, "plan", "sweep", "-m", "gpt3-175b", "-f", "star hosts=1 nic=400g-ib nics=8 island=nvlink4", "-d", "h100",
        "--hosts", "1,16",
    )["points"]  # fmt: skip
    assert small[0]["step_s"] is None
    assert "memory" in small[0]["trouble"]
    assert small[1]["step_s"] > 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["train", "-m", "gpt5", "-f", "star hosts=2 nic=10g"], "got model 'gpt5'"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=10g", "-d", "z80"], "got device 'z80'"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=10g", "--dtype", "fp8"], "got dtype 'fp8' for a100"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=warp"], "unknown NIC 'warp'"),
        (["train", "-f", "star hosts=2 nic=10g"], "--model and --workload"),
        (["train", "-m", "gpt3-175b", "-f", "star hosts=2 nic=10g"], "need more than the memory of a100"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=10g", "--current", "tp4 pp1 dp1"], "a fabric of 2"),
        (["train", "-m", "resnet50", "-f", "star hosts=2 nic=10g", "--current", "tp2"], "got a layout for resnet50"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=10g", "--batch", "0"], "global batch of 0"),
        (["train", "-m", "gpt2", "-f", "star hosts=2 nic=10g", "--slowdown", "0.5"], "slowdown"),
        (["infer", "-f", "star hosts=2 nic=10g"], "one kind of inference"),
        (["infer", "-m", "resnet50", "-f", "star hosts=2 nic=10g"], "a language model"),
        (["distribute", "-f", "star hosts=2 nic=10g"], "a size and a model"),
        (["distribute", "--size", "1GB", "-f", "star hosts=2 nic=10g", "--store", "0 Gbit/s"], "above zero"),
        (["sweep", "-m", "resnet50", "-f", "star nic=10g", "--hosts", "2"], "hosts=... in it"),
        (["sweep", "-m", "resnet50", "-f", "star hosts=2 nic=10g", "--hosts", "0,x"], "numbers of hosts"),
        (["place", "-f", "star hosts=2 nic=10g", "--stages", "2"], "only one of --model and --stages"),
        (["place", "-f", "star hosts=2 nic=10g", "--inference"], "without stages"),
        (
            ["place", "-f", "star hosts=2 nic=10g", "-m", "vgg16", "--stages", "3", "--inference"],
            "3 stages for 2 devices",
        ),
    ],
)
def test_bad_input_names_what_is_wrong_and_prints_no_result(wrong, words, capsys):
    assert main(["plan", *wrong]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 2\n", "has schema 2"),
        ("model = 'x'\n", "has no schema"),
        ("schema = 1\nmodel = 'resnet50'\n", "missing required field `fabric`"),
        ("schema = 1\nmodel = 'resnet50'\nfabric = 'star hosts=2 nic=10g'\ncolour = 1\n", "colour"),
        ("schema = 1\nmodel = 'none'\nfabric = 'star hosts=2 nic=10g'\n", "got model 'none'"),
        ("not toml", "cannot read the scenario"),
    ],
)
def test_bad_scenarios_name_file_and_field(text, words, capsys, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    assert main(["plan", "compare", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "wrong.toml" in error
