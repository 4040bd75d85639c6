"""scripts/demo and scripts/test on a small project of the same shape: real pip, real virtual
environments, no network.

The project builds itself (an in-tree build back end), has no dependencies, notes every build in
builds.log, and brings a stand-in for pytest that prints its arguments.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BACKEND = """
import os, pathlib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    root = pathlib.Path.cwd()
    with open("builds.log", "a") as log:
        print("build", file=log)
    files = {
        "small.pth": f"{root}\\n",
        "small-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: small\\nVersion: 1\\n"
        "Provides-Extra: docs\\nProvides-Extra: examples\\nProvides-Extra: test\\n",
        "small-1.dist-info/WHEEL": "Wheel-Version: 1.0\\n"
        "Generator: backend\\nRoot-Is-Purelib: true\\n"
        "Tag: py3-none-any\\n",
        "small-1.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(os.path.join(wheel_directory, "small-1-py3-none-any.whl"), "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return "small-1-py3-none-any.whl"
"""
WORKERS = ["-n", "2", "--dist", "loadfile"]
PRINT_ARGUMENTS = "import os, sys\nprint(os.path.realpath(sys.prefix), *sys.argv[1:], sep='|')\n"


class Project:
    """A checkout in a folder whose name has a space, and a PATH on which pyenv's kind of
    broken shim comes first.
    """

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.elsewhere = folder / "elsewhere"
        tools = folder / "tools"
        for path in (self.root / "examples", self.elsewhere, tools):
            path.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        (self.root / "setup.cfg").write_text("[metadata]\nname = small\n")
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pytest.py").write_text(PRINT_ARGUMENTS)
        (self.root / "examples" / "private_bnn.py").write_text(PRINT_ARGUMENTS)
        self.interpreter = Path(
            sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"
        )
        self.tool(tools / "python3.13", "echo 'python3.13: command not found' >&2; exit 127")
        self.tool(tools / "python3.12", f'exec "{self.interpreter}" "$@"')
        self.environment = {
            "PATH": f"{tools}:{os.defpath}",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PIP_NO_INDEX": "1",
        }

    @staticmethod
    def tool(path: Path, command: str) -> None:
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)

    def start(self, script: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.root / "scripts" / script, *arguments],
            cwd=self.elsewhere,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str) -> list[str]:
        return self.finish(self.start(script, *arguments))

    def finish(self, process: subprocess.Popen) -> list[str]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        prefix, *seen = out.rstrip("\n").split("|")
        assert prefix == os.path.realpath(self.root / ".venv")
        return seen

    @property
    def builds(self) -> int:
        log = self.root / "builds.log"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.slow
def test_two_at_once_install_once_and_later_runs_install_nothing(tmp_path):
    project = Project(tmp_path)
    both = [project.start("demo", "--dataset", "two words"), project.start("test", "-k", "sgld")]
    assert [project.finish(process) for process in both] == [
        ["--dataset", "two words"],
        [*WORKERS, "-k", "sgld"],
    ]
    assert project.builds == 1

    with_python = project.environment["PATH"]
    project.environment["PATH"] = os.defpath
    assert project.run("demo") == []
    assert project.run("test", "-m", "slow") == [*WORKERS, "-m", "slow"]
    assert project.builds == 1

    project.environment["PATH"] = with_python
    with (project.root / "setup.cfg").open("a") as setup:
        setup.write("version = 2\n")
    assert project.run("test") == WORKERS
    assert project.builds == 2
