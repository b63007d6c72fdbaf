"""The page in a real browser: drawn, without an error or a refused request on its console."""

from __future__ import annotations

import shutil
import subprocess
from html import unescape
from pathlib import Path

import msgspec
import pytest
from report_records import make_record

from wirespeed.report.html import write_report

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE_S = 120

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"),
]


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and the lines of its console."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", f"--user-data-dir={profile}", "--virtual-time-budget=10000", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, encoding="utf-8", errors="replace", timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_report_draws_all_figures_without_errors_or_requests(tmp_path: Path):
    # The page's policy refuses every request, and a refused request is an error on the console.
    page = write_report(tmp_path / "report.html", make_record())
    dom, console = opened(page, tmp_path / "profile")
    assert console == []
    assert 'data-drawn="6"' in dom
    assert dom.count('class="plot-container') == 6
    headline = dom.split('<h1 id="verdict">')[1].split("</h1>")[0]
    assert unescape(headline).replace("\u00a0", " ").startswith("int8 reaches dense's loss in 41 % of the time")


def test_scripts_in_a_record_do_not_run(tmp_path: Path):
    attack = '<img src=x onerror="document.title=1"></script><script>document.title="taken"</script>'
    record = make_record()
    strategies = tuple(msgspec.structs.replace(o, name=attack + o.name) for o in record.strategies)
    page = write_report(
        tmp_path / "report.html",
        msgspec.structs.replace(record, script=attack, reason=attack, strategies=strategies, chosen=attack + "int8"),
    )
    dom, console = opened(page, tmp_path / "profile")
    assert console == []
    assert 'data-drawn="6"' in dom
    assert "<title>taken</title>" not in dom
    assert "<title>1</title>" not in dom


def test_console_lines_of_a_page_that_asks_the_network_are_seen(tmp_path: Path):
    # Shows that the empty console above means something.
    page = tmp_path / "report.html"
    page.write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; script-src 'unsafe-inline'\">"
        "<script>fetch('https://wirespeed.invalid/x')</script>"
    )
    _, console = opened(page, tmp_path / "profile")
    assert any("wirespeed.invalid" in line for line in console)
