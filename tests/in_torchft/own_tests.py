"""torchft's own tests, as its wheel has them, run against this package under torchft's name. Nothing in them is changed.

    python own_tests.py          runs those that are known to pass (own_tests.txt); exit status 1 if one of them does not
    python own_tests.py --all    runs all, prints each file's outcome, and names what own_tests.txt lacks

Each file is a process of its own, with a limit of time. Private names of torchft's that a file imports are there, and raise
when used, so that the tests beside them run. `scripts/test-torchft` runs this in an environment that has torchft.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

KNOWN = Path(__file__).with_suffix(".txt")
REPO = Path(__file__).resolve().parents[2]
TEST_LIMIT_S = 180
FILE_LIMIT_S = 900


def read_known(path: Path = KNOWN) -> dict[str, list[str]]:
    """Return the tests that are known to pass, by file: a line that ends with a colon names it, those below are its tests."""
    known: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.endswith(":"):
            tests = known.setdefault(text.removesuffix(":"), [])
        elif text:
            tests.append(text)
    return known


def copy_tests(wheel: Path, to: Path) -> list[str]:
    """Copy torchft's tests and what they share, and nothing else of it; return the files that hold tests."""
    shared = [wheel / "_test_utils.py", *(wheel / "_test").glob("*.py")]
    tests = sorted(wheel.rglob("*_test.py"))
    for path in {*shared, *tests, *wheel.rglob("*_bench.py")}:
        target = to / path.relative_to(wheel)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return [path.relative_to(wheel).as_posix() for path in tests]


def name_of(node_id: str) -> str:
    """Return `CLASS::TEST`, without the index that `parameterized` puts before a value: some are in a set's order."""
    return re.sub(r"_\d+_", "_", node_id.partition("::")[2], count=1)


def private_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of what a file imports of torchft's private parts."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchft":
            yield from ((node.module, alias.name) for alias in node.names if alias.name.startswith("_"))


class UnderOurName:
    """pytest's plugin: the alias, torchft's tests among our modules, a stand-in for each private name; notes each outcome."""

    def __init__(self, folder: Path, report: Path, only: frozenset[str] | None) -> None:
        import torchft_ckpt.compat.torchft  # before the first test is imported
        from torchft_ckpt import checkpointing
        from torchft_ckpt.compat.names import Absent

        self._report = report
        self._only = only
        torchft_ckpt.__path__.append(str(folder))
        checkpointing.__path__.append(str(folder / "checkpointing"))
        for path in folder.rglob("*.py"):
            for module, name in private_imports(path):
                ours = importlib.import_module(module)
                is_module = hasattr(ours, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
                if not is_module and not hasattr(ours, name):
                    setattr(ours, name, Absent(module, name, "it is private there"))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._only is not None:
            items[:] = [item for item in items if name_of(item.nodeid) in self._only]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """End a test that waits for ever, as long as it waits in Python."""

        def end(*_: object) -> None:
            raise TimeoutError(f"the test took more than {TEST_LIMIT_S} s")

        signal.signal(signal.SIGALRM, end)
        signal.alarm(TEST_LIMIT_S)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome down at once: a later test may hang, or end the process."""
        if report.when == "call" or report.outcome != "passed":
            with self._report.open("a") as file:
                file.write(json.dumps([name_of(report.nodeid), report.outcome]) + "\n")


def run_here(folder: Path, report: Path, file: str, only: frozenset[str] | None) -> NoReturn:
    """Run a file's tests in this process, and end it, whatever threads they have left."""
    os.chdir(folder)
    options = [
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        f"--rootdir={folder}",
        "--import-mode=importlib",
        "-v",
        "--tb=short",
    ]
    pytest.main([*options, file], plugins=[UnderOurName(folder, report, only)])
    sys.stdout.flush()
    os._exit(0)


def run_file(folder: Path, file: str, tests: list[str] | None) -> dict[str, str]:
    """Run a file's tests, or some, in a process of their own; return the outcome of each, by `CLASS::TEST`."""
    report = folder / f"{file.replace('/', '.')}.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:2"}
    with report.with_suffix(".log").open("wb") as log:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--here",
            str(folder),
            str(report),
            file,
            json.dumps(tests),
        ]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            process.wait(FILE_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{file}: ended after {FILE_LIMIT_S} s", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what its tests have started
        process.wait()
    return dict(json.loads(line) for line in report.read_text().splitlines()) if report.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description="torchft's own tests against this package")
    parser.add_argument("--all", action="store_true", help="run all tests, not only those that are known to pass")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="keep what the tests printed there")
    parser.add_argument("files", nargs="*", metavar="FILE", help="of torchft's test files; default: all")
    options = parser.parse_args()
    spec = importlib.util.find_spec("torchft")
    if spec is None or not spec.submodule_search_locations:
        print("own_tests: torchft is not installed", file=sys.stderr)
        return 1
    known = read_known()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for file in copy_tests(Path(spec.submodule_search_locations[0]), folder):
            mine = known.get(file, [])
            if (options.files and file not in options.files) or not (mine or options.all):
                continue
            outcomes = run_file(folder, file, None if options.all else mine)
            if again := [test for test in mine if outcomes.get(test) != "passed"]:
                print(f"{file}: once more, as these wait for fixed times: {again}", flush=True)
                outcomes |= run_file(folder, file, again)
            counts = Counter(outcomes.values())
            missing = [test for test in mine if outcomes.get(test) != "passed"]
            more = [test for test, outcome in outcomes.items() if outcome == "passed" and test not in mine]
            wrong += len(missing)
            print(f"{file}: {len(mine)} known to pass; {dict(counts)}", flush=True)
            for test in missing:
                print(f"    {test}: {outcomes.get(test, 'did not end')}, is known to pass", flush=True)
            if missing and not options.keep:
                print((folder / f"{file.replace('/', '.')}.log").read_text(errors="replace")[-4000:], flush=True)
            for test in more:
                print(f"    {test}: passes, and is not in {KNOWN.name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        known_tests = json.loads(sys.argv[5])
        only = None if known_tests is None else frozenset(known_tests)
        run_here(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], only)
    sys.exit(main())
