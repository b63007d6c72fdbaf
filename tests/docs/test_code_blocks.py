"""What README and docs show is what happens: commands run, files parse, names exist, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from code_blocks import Block, missing_line, read_blocks, shape

from wirespeed.fabric.files import read_fabric
from wirespeed.lab import why_unavailable
from wirespeed.spec.strategy_file import read_strategy_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCKS = [block for page in PAGES for block in read_blocks(page)]
PATIENCE_S = 600


def name_of(item: Block | Path) -> str:
    path = item.path if isinstance(item, Block) else item
    return f"{path.relative_to(ROOT)}:{item.line}" if isinstance(item, Block) else str(path.relative_to(ROOT))


def pages_with(language: str) -> list[Path]:
    return [
        page for page in PAGES if any(b.language == language and b.not_run is None for b in BLOCKS if b.path == page)
    ]


@pytest.mark.parametrize("page", pages_with("console"), ids=name_of)
def test_commands_of_the_page_do_what_it_shows(page: Path, tmp_path: Path):
    needs_lab = any(block.needs_lab for block in read_blocks(page))
    if needs_lab and (reason := why_unavailable()) is not None:
        pytest.skip(f"no lab can be made here: {reason}")
    # One folder per page: a later block may use what an earlier one wrote, as a reader would.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    environment.pop("FORCE_COLOR", None)
    environment["WIRESPEED_STATE_DIR"] = str(tmp_path / "state")
    try:
        for block in read_blocks(page):
            if block.language == "console" and block.not_run is None:
                run_block(block, tmp_path, environment)
    finally:
        if needs_lab:  # where a command before `lab down` failed
            run_command("wirespeed lab down", tmp_path, environment)


def run_block(block: Block, folder: Path, environment: dict[str, str]) -> None:
    for index, command in enumerate(block.commands, start=1):
        where = f"{name_of(block)}: {command.text}"
        done = run_command(command.text, folder, environment)
        expected = block.exit_code if index == len(block.commands) else 0
        assert done.returncode == expected, f"{where}\n{done.stdout}\n{done.stderr}"
        missing = missing_line(command.shown, done.stdout)
        assert missing is None, f"{where}\nshown but not printed: {missing}\nprinted:\n{done.stdout}"


def run_command(text: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "console"], ids=name_of)
def test_console_block_holds_a_command(block: Block):
    assert block.commands, "a console block needs a line that begins with `$ `"


def test_commands_stand_in_console_blocks_so_that_they_are_run():
    assert [name_of(block) for block in BLOCKS if block.language in ("bash", "sh", "shell")] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=name_of)
def test_python_compiles_and_the_names_that_it_imports_exist(block: Block):
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "wirespeed":
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wirespeed":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("toml", "json")], ids=name_of)
def test_data_parses_and_strategies_and_fabrics_in_it_can_be_read(block: Block, tmp_path: Path):
    document = json.loads(block.text) if block.language == "json" else tomllib.loads(block.text)
    if "strategy" in document:
        read_strategy_text(block.text, source=name_of(block))
    if "hosts" in document:
        (tmp_path / "fabric.toml").write_text(block.text)
        read_fabric(tmp_path / "fabric.toml")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_page_lead_to_files(page: Path):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    broken = [
        target
        for target in targets
        if target and not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]
    assert broken == []


# The reader itself: what it takes for equal, and what it must not.


def test_numbers_and_their_units_are_ignored_and_words_are_not():
    assert shape("int8   192 ms ±3 %  +4.7 %  10.83 MiB  2.44x") == shape("int8 1.2 s ±11 % -4 % 9 KiB 12x")
    assert shape("int8 reaches it") != shape("half reaches it")
    assert shape("gloo on host01") != shape("gloo at host01")


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ((), "anything", None),
        (("a 1",), "a 2\nb", None),
        (("b",), "a\nb", "b"),
        (("...", "b"), "a\nb", None),
        (("a", "...", "c"), "a\nb\nc\nd", None),
        (("a", "c"), "a\nb\nc", "c"),
        (("a", "...", "x"), "a\nb", "x"),
        (("a", "", "b"), "a\n\n\nb", None),
        (("a",), "", "a"),
    ],
)
def test_shown_lines_are_the_first_of_the_output_but_for_dots(
    shown: tuple[str, ...], printed: str, missing: str | None
):
    assert missing_line(shown, printed) == missing


def test_blocks_are_read_with_their_comments_commands_and_output(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n<!-- not-run: needs a cluster -->\n\n```console\n$ srun x\n```\n\ntext\n"
        "<!-- exit: 1 -->\n```console\n$ echo a \\\n>   b\na b\n$ false\n```\n\n- item\n  ```toml\n  x = 1\n  ```\n"
    )
    cluster, local, toml = read_blocks(page)
    assert (cluster.not_run, cluster.exit_code) == ("needs a cluster", 0)
    assert (local.not_run, local.exit_code) == (None, 1)
    assert [(command.text, command.shown) for command in local.commands] == [("echo a   b", ("a b",)), ("false", ())]
    assert (toml.language, toml.text, toml.line) == ("toml", "x = 1", 19)
