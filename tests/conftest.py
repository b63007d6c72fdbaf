"""What all tests share: assertions in the modules that tests import say their values, as those in tests do."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytest.register_assert_rewrite(
    *(
        path.stem
        for folder in (HERE, *(found for found in HERE.iterdir() if found.is_dir() and found.name != "data"))
        for path in folder.glob("*.py")
        if not path.name.startswith(("test_", "conftest", "__"))
    )
)
