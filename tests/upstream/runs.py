"""One suite, run on plain torch and with us, and compared test by test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .sources import CACHE, install, unpacked
from .suites import BUDGETS, Suite

#: One test may take so long, and one run of a suite, or of a long one, in seconds.
TEST_S, RUN_S, LONG_RUN_S = 120, 1500, 7200
PLUGINS = Path(__file__).parent / "plugins"


@dataclass
class Outcomes:
    """What became of the tests of one run, by their names."""

    by_test: dict[str, str] = field(default_factory=dict)
    #: The first line of what failed.
    why: dict[str, str] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.by_test.values())


@dataclass
class Compared:
    """One suite on plain torch, and by the name of a budget with us."""

    suite: Suite
    plain: Outcomes
    ours: dict[str, Outcomes]

    def differences(self, budget: str) -> dict[str, str]:
        """What became something else with us, in words."""
        found = {}
        ours = self.ours[budget]
        for test in sorted({*self.plain.by_test, *ours.by_test}):
            before, after = self.plain.by_test.get(test, "none"), ours.by_test.get(test, "none")
            if before != after:
                found[test] = f"{before} became {after}: {ours.why.get(test, '')}"
        return found


def compare(suite: Suite) -> Compared:
    """Run a suite three times; what differs is run again, both ways, since tests draw numbers."""
    source = unpacked(suite.requirement) / suite.folder
    site = install((suite.requirement, *suite.needs))
    plain = run(suite, source, site, None)
    compared = Compared(suite, plain, {})
    for budget, size in BUDGETS.items():
        compared.ours[budget] = ours = run(suite, source, site, size)
        again = [test for test in compared.differences(budget) if test in plain.by_test]
        for outcomes, given in ((plain, None), (ours, size)) if again else ():
            files = tuple(dict.fromkeys(f"{test.partition('::')[0]}.py" for test in again))
            second = run(suite, source, site, given, files)
            for test in again:
                if test in second.by_test:
                    outcomes.by_test[test] = second.by_test[test]
                    outcomes.why[test] = second.why.get(test, "")
    return compared


def run(
    suite: Suite,
    source: Path,
    site: Path,
    budget: str | None,
    tests: tuple[str, ...] = (),
) -> Outcomes:
    """Run a suite once: on plain torch, or with us within a budget."""
    # A library without settings of pytest's is not to be run with ours, which pytest finds above.
    (CACHE / "pytest.ini").touch()
    report = CACHE / f"{suite.name.replace(':', '-')}-{budget or 'plain'}.xml"
    report.unlink(missing_ok=True)
    before = [] if budget is None else [
        "-m", "torchTensorRef", "run", "--device", "sim", "--strategy", "lru",
        "--budget", budget, "--report", "none",
    ]  # fmt: skip
    options = [
        "-q",
        "--rootdir=.",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        f"--timeout={TEST_S}",
    ]
    if suite.matching:
        options += ["-k", suite.matching]
    if suite.plugin:
        options += ["-p", suite.plugin]
    existing = [path for path in tests or suite.tests if (source / path).exists()]
    for folder in suite.packages:
        (source / folder / "__init__.py").touch()
    command = [sys.executable, *before, "-m", "pytest", *options, f"--junitxml={report}"]
    environ = {
        **os.environ,
        **suite.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (site, source, PLUGINS))),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TTR_TRACEBACKS": "short",
    }
    most_s = LONG_RUN_S if suite.is_long else RUN_S
    started = time.perf_counter()
    with (CACHE / f"{report.stem}.log").open("wb") as log:
        try:
            subprocess.run(
                [*command, *existing],
                cwd=source,
                env=environ,
                stdout=log,
                stderr=log,
                timeout=most_s,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{suite.name} took more than {most_s} s: select less of it"
            ) from None
    outcomes = read(report)
    outcomes.took_s = time.perf_counter() - started
    return outcomes


def read(report: Path) -> Outcomes:
    """Read what pytest has written: the outcome of each test, and why it failed."""
    outcomes = Outcomes()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        # A class of tests stands behind its file, as pytest writes it.
        parts = case.get("classname", "").split(".")
        place = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts))
        test = "::".join(("/".join(parts[:place]), *parts[place:], case.get("name", "")))
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes.by_test[test] = kinds[0].tag if kinds else "passed"
        if kinds:
            outcomes.why[test] = (kinds[0].get("message") or "").strip().split("\n")[0][:160]
    return outcomes
