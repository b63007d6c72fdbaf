"""The page: complete, safe against what stands in a record, and valid figures for every kind of record."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from report_records import make_fabric, make_losses, make_outcome, make_record

from wirespeed.errors import MissingCapability
from wirespeed.report import plots
from wirespeed.report.html import report_page, write_report
from wirespeed.report.summary import make_rows
from wirespeed.spec.comparison import TuneRecord
from wirespeed.spec.payloads import CODECS
from wirespeed.spec.strategy import Strategy
from wirespeed.spec.strategy_file import read_strategy_text

replace = msgspec.structs.replace

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """The page as a browser reads it: tags with attributes, and text outside scripts and styles."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "img"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data.replace("\u00a0", " ")

    @property
    def figures(self) -> dict[str, plots.Figure]:
        return json.loads(self.scripts[0])


def measured_with_nothing() -> TuneRecord:
    """Every field that may be None is None."""
    bare = msgspec.structs.replace(
        make_outcome("int8", predicted_s=0.2, measured_s=None, exposed_s=0.1), prediction=None, predicted_step_s=None
    )
    fabric = replace(make_fabric(), link_bit_per_s=None, declared_bit_per_s=None, rtt_s=None, links={})
    environment = replace(make_record().environment, cpu=None, git_commit=None, nics={}, versions={})
    return make_record(
        strategies=(bare,), fabric=fabric, environment=environment, chosen="", reason="", loss_target=None, warnings=()
    )


def diverging() -> TuneRecord:
    points = tuple(replace(point, loss=math.nan if point.step > 30 else point.loss) for point in make_losses(0.2))
    bad = make_outcome("topk@1%", predicted_s=0.2, measured_s=0.2, exposed_s=0.1, losses=points, final_loss=math.nan)
    gone = replace(bad, name="topk@2%", losses=tuple(replace(point, loss=math.inf) for point in points))
    return make_record(strategies=(make_record().strategies[0], bad, gone), loss_target=math.inf, chosen="dense")


KINDS = {
    "usual": make_record(),
    "one strategy": make_record(strategies=make_record().strategies[:1], chosen="dense"),
    "no losses": make_record(
        strategies=tuple(replace(o, losses=(), final_loss=None, time_to_loss_s=None) for o in make_record().strategies),
        loss_kind="none",
        loss_target=None,
    ),
    "stopped": make_record(is_complete=False, strategies=make_record().strategies[:2], chosen="", reason=""),
    "nothing ran": make_record(strategies=(), chosen="", fabric=make_fabric(1)),
    "nothing known": measured_with_nothing(),
    "diverging": diverging(),
    "sixteen hosts": make_record(fabric=make_fabric(16)),
    "predicted only": make_record(
        strategies=(make_outcome("int8", predicted_s=0.2, measured_s=None, exposed_s=0.1, chosen=True),)
    ),
    "a codec of a later version's colours": make_record(
        strategies=tuple(
            make_outcome(f"topk@{n}%", predicted_s=0.2, measured_s=0.2, exposed_s=0.1) for n in range(1, 9)
        )
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_page_is_well_formed_and_its_figures_are_valid_plotly(kind: str):
    import plotly.graph_objects as go

    page = Page(report_page(KINDS[kind]))
    places = {attributes.get("id") for _, attributes in page.tags}
    for name, figure in page.figures.items():
        assert name in places
        # Colours "ink" and "paper" are set by the page; for the validation any colour does.
        text = json.dumps(figure).replace('"ink"', '"#000"').replace('"paper", "line"', '"#fff", "line"')
        text = text.replace('"color": "paper"', '"color": "#fff"')
        go.Figure(json.loads(text))


def test_usual_page_holds_verdict_table_figures_and_how_to_use_it():
    page = Page(report_page(make_record()))
    assert "int8 reaches dense's loss in 41 % of the time; communication was 72 % of dense's step." in page.text
    assert "fastest to dense's loss of those allowed" in page.text
    assert "Hosts share 2 cores" in page.text
    assert "wirespeed tune examples/char_gpt.py --lab 4x1gbit --fidelity compressed --out out/demo" in page.text
    assert 'attach(model, strategy="strategy.toml")' in page.text
    assert list(page.figures) == ["step-breakdown", "loss-time", "loss-step", "prediction", "bytes", "links"]


def test_strategy_file_on_the_page_is_read_back_as_the_chosen_strategy():
    markup = report_page(make_record())
    text = re.search(r"<h3>strategy.toml</h3><pre>(.*?)</pre>", markup, re.DOTALL).group(1).replace("&quot;", '"')
    assert read_strategy_text(text, source="page") == Strategy.parse("int8")


def test_text_of_a_record_never_becomes_markup():
    record = make_record()
    strategies = tuple(replace(o, name=HOSTILE + o.name, verdict=HOSTILE) for o in record.strategies)
    fabric = replace(
        record.fabric, description=HOSTILE, hosts=(HOSTILE,), links={HOSTILE: {"b": 1e9}, "b": {HOSTILE: 1e9}}
    )
    environment = replace(record.environment, command=HOSTILE, nics={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    hostile = replace(
        record,
        script=HOSTILE,
        arguments=(HOSTILE,),
        fabric=fabric,
        environment=environment,
        reason=HOSTILE,
        warnings=(HOSTILE,),
        strategies=strategies,
        chosen=HOSTILE + "int8",
        created=HOSTILE,
    )
    page = Page(report_page(hostile))
    assert len(page.scripts) == 3
    assert all(tag != "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("alert(1)") > 10
    # plotly reads a little HTML in labels: there the name has to be escaped once more.
    assert "<script>" not in json.dumps(page.figures)


def test_page_forbids_itself_every_request():
    page = Page(report_page(make_record()))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "http" not in policy
    links = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href")]
    assert links == ["data:,"]


def test_same_record_gives_the_same_page():
    assert report_page(make_record()) == report_page(make_record())


def test_page_is_written_where_asked_and_folders_are_made(tmp_path: Path):
    target = write_report(tmp_path / "a" / "report.html", make_record())
    assert target.read_text().startswith("<!doctype html>")


def test_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingCapability, match=r"cannot write .*report\.html"):
        write_report(tmp_path / "file" / "report.html", make_record())


def test_codec_keeps_its_colour_and_strategies_of_one_codec_differ_without_colour():
    looks = plots.styles([("dense", "dense"), ("topk@1%", "topk"), ("topk@2%", "topk")])
    assert looks["topk@1%"]["color"] == looks["topk@2%"]["color"] != looks["dense"]["color"]
    assert looks["topk@1%"]["dash"] != looks["topk@2%"]["dash"]
    assert looks["topk@1%"]["symbol"] != looks["topk@2%"]["symbol"]


def test_every_codec_has_a_colour_of_its_own():
    assert len({plots.CODEC_COLOURS[codec] for codec in CODECS}) == len(CODECS)


def test_stacked_parts_are_those_of_the_record_in_milliseconds():
    record = make_record()
    figure = plots.step_breakdown(record, make_rows(record))
    assert figure is not None
    exposed = next(trace for trace in figure["data"] if trace["name"] == "exposed communication")
    assert exposed["x"] == [pytest.approx(337), pytest.approx(155), pytest.approx(55), pytest.approx(90), 28.0, None]
    predicted = next(trace for trace in figure["data"] if trace["name"] == "predicted step")
    assert predicted["x"] == [pytest.approx(x) for x in (451, 271, 201, 190, 158, 460)]


def test_points_that_are_not_finite_are_left_out_of_curves():
    figure = plots.loss_curves(diverging(), against="step")
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["dense", "topk@1%"]
    assert figure["data"][1]["x"] == [0, 10, 20, 30]


def test_slow_link_stands_out_and_missing_pairs_are_blank():
    fabric = replace(make_fabric(3), links={"host00": {"host01": 1e9, "host02": 0.25e9}})
    figure = plots.link_matrix(fabric)
    assert figure is not None
    assert figure["data"][0]["z"] == [[None, 1.0, 0.25], [None, None, None], [None, None, None]]
    assert (figure["data"][0]["zmin"], figure["data"][0]["zmax"]) == (0, 1.0)


def test_strategies_beyond_the_fastest_predicted_are_folded_away():
    predicted = tuple(
        make_outcome(f"dense/{n}MiB", predicted_s=0.299 + n / 1e3, measured_s=None, exposed_s=0.1) for n in range(1, 20)
    )
    page = Page(report_page(make_record(strategies=(*make_record().strategies[:5], *predicted))))
    assert "15 more strategies that were only predicted" in page.text
    assert len(page.figures["step-breakdown"]["data"][0]["y"]) == 9
