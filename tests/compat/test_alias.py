"""This package under torchft's name: each test is a process of its own, as what was imported cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchft_ckpt

pytestmark = pytest.mark.processes
REPO = Path(torchft_ckpt.__file__).parents[1]


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, `path` before all other places."""
    places = [*([str(path)] if path else []), str(REPO)]
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"},
    )


def printed(*arguments: str, path: Path | None = None) -> str:
    done = run(*arguments, path=path)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_class_exists_once_whichever_name_is_imported_first() -> None:
    """By the hook for Ray's workers, which takes no arguments and may run twice."""
    program = """
import sys
from torchft_ckpt.compat.torchft import install
install()
install()
assert "torch" not in sys.modules
from torchft.checkpointing.http_transport import HTTPTransport
import torchft, torchft.optim, torchft._torchft
import torchft.local_sgd as local_sgd
from torchft import Manager, Optimizer
import torchft_ckpt
from torchft_ckpt.checkpointing.http_transport import HTTPTransport as Ours
assert HTTPTransport is Ours is torchft_ckpt.HTTPTransport
assert torchft is torchft_ckpt and local_sgd is torchft_ckpt.local_sgd
assert torchft.optim.OptimizerWrapper is Optimizer is torchft_ckpt.Optimizer
assert torchft._torchft.LighthouseServer is torchft_ckpt.LighthouseServer
copies = {name for name, module in sys.modules.items() if name.startswith("torchft.") and module is not sys.modules.get(
    name.replace("torchft", "torchft_ckpt", 1))}
assert not copies, copies
assert torchft_ckpt.__spec__.name == "torchft_ckpt"
"""
    printed("-c", program)


def test_the_import_system_finds_torchft_before_it_is_imported_and_after() -> None:
    program = """
import importlib.util, torchft_ckpt.compat.torchft
assert importlib.util.find_spec("torchft") and importlib.util.find_spec("torchft.manager")
assert importlib.util.find_spec("torchft.no_such_module") is None
import torchft
assert importlib.util.find_spec("torchft")
try:
    import torchft.no_such_module
except ModuleNotFoundError as error:
    assert "torchft.no_such_module" in str(error)
else:
    raise AssertionError
"""
    printed("-c", program)


def test_torchft_itself_beside_us_is_not_imported_and_is_an_error_if_it_was(tmp_path: Path) -> None:
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").write_text("print('torchft itself')\n")
    assert printed("-c", "import torchft_ckpt.compat.torchft, torchft; torchft.Manager", path=tmp_path) == ""
    done = run("-c", "import torchft\nimport torchft_ckpt.compat.torchft", path=tmp_path)
    assert done.returncode != 0
    assert "AliasError: torchft itself was imported before" in done.stderr


SCRIPT = """
import sys, torchft, beside
from torchft.coordination import LighthouseServer
if __name__ == "__main__":
    assert sys.modules["__main__"].LighthouseServer is LighthouseServer
    print(torchft.__name__, beside.NAME, sys.argv[1:], __file__.endswith("script.py"))
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    return tmp_path


def test_a_script_runs_unmodified_with_its_arguments_and_what_lies_beside_it(scripts: Path) -> None:
    expected = "torchft_ckpt beside ['-m', '--steps', '3'] True\n"
    arguments = ["-m", "--steps", "3"]
    assert printed("-m", "torchft_ckpt.compat.torchft", str(scripts / "script.py"), *arguments) == expected
    assert printed("-m", "torchft_ckpt.compat.torchft", "-m", "script", *arguments, path=scripts) == expected


def test_a_script_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    for arguments, said in [
        ([], "usage"),
        (["gone.py"], "gone.py"),
        (["-m", "gone"], "no module gone"),
        (["-x"], "usage"),
    ]:
        done = run("-m", "torchft_ckpt.compat.torchft", *arguments)
        assert done.returncode == 1
        assert said in done.stderr


def test_a_script_exits_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import torchft\nraise SystemExit(7)\n")
    assert run("-m", "torchft_ckpt.compat.torchft", str(tmp_path / "exits.py")).returncode == 7


CHILD = """
import multiprocessing, torchft

def name_of_torchft(queue):
    queue.put((torchft.__name__, __name__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=name_of_torchft, args=(queue,))
    child.start()
    print(*queue.get())
    child.join()
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_processes_that_a_script_spawns_have_the_alias_too(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "spawns.py").write_text(CHILD)
    arguments = ["-m", "spawns"] if as_module else [str(tmp_path / "spawns.py")]
    assert printed("-m", "torchft_ckpt.compat.torchft", *arguments, path=tmp_path) == "torchft_ckpt __mp_main__\n"


@pytest.mark.slow
def test_torchrun_runs_a_script_so(scripts: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    out = printed(*launcher, "-m", "torchft_ckpt.compat.torchft", str(scripts / "script.py"), "--steps", "3")
    assert out == "torchft_ckpt beside ['--steps', '3'] True\n"
