"""What DSCP a session is asked for; that it is on the right connections is tests/lab/test_traffic_classes_lab.py's."""

import pytest

pytest.importorskip("torch")

from wirespeed.errors import UsageError
from wirespeed.train.traffic import wanted_dscp

pytestmark = pytest.mark.torch


def test_the_argument_outranks_the_environment_and_nothing_is_asked_for_by_default(monkeypatch):
    monkeypatch.delenv("WIRESPEED_DSCP", raising=False)
    assert wanted_dscp(None) is None
    assert wanted_dscp(0) == 0
    monkeypatch.setenv("WIRESPEED_DSCP", "26")
    assert wanted_dscp(None) == 26
    assert wanted_dscp(0) == 0
    assert wanted_dscp(46) == 46


@pytest.mark.parametrize(("argument", "variable"), [(64, ""), (-1, ""), (None, "64"), (None, "af31"), (None, "-1")])
def test_what_is_no_dscp_is_refused(monkeypatch, argument, variable):
    monkeypatch.setenv("WIRESPEED_DSCP", variable)
    with pytest.raises(UsageError, match="0 to 63"):
        wanted_dscp(argument)
