"""A test of transformers that is skipped without a reason of ours in exceptions.py fails."""

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    from exceptions import reasons

    report = yield
    case = getattr(item, "cls", None)
    if report.skipped and hasattr(case, "name") and not any(reasons(item.name, case.name, archive=True)):
        report.outcome = "failed"
        report.longrepr = f"skipped, and not in exceptions.py: {call.excinfo}"
    return report
