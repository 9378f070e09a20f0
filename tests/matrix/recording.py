"""A plugin of pytest that writes down what becomes of each test when it is known.

What a run has done is there even if it is broken off. The file is named by `MATRIX_RECORD`.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

VARIABLE = "MATRIX_RECORD"


def pytest_configure(config: pytest.Config) -> None:
    """Write where all reports come together, and not in each worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(os.environ[VARIABLE]))


class _Recorder:
    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test that has been called, or that came to its end without."""
        if report.when == "call" or report.outcome != "passed":
            self._note(report.nodeid, report)

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that cannot be read."""
        if report.failed:
            self._note(report.nodeid, report)

    def _note(self, name: str, report: Any) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr if crash is None else crash.message) if report.failed else ""
        with open(self.path, "a") as record:
            record.write(json.dumps([name, report.outcome, why.partition("\n")[0][:200]]) + "\n")
