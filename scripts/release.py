"""Builds the wheel and the source distribution in dist/, and tries both.

    python scripts/release.py                              # builds, and looks into the archives
    python scripts/release.py --install                    # and runs smoke.py with each, installed
    python scripts/release.py --url https://HOST/PROJECT   # with project URLs and absolute links

Each archive is installed into a fresh environment with what pip finds for it. ``--url`` is the
repository's address; without it, the package's page has relative links and no project URLs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which setuptools replaces
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
EXPLAINED_BY = ("README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "LICENSE")


def run(*command: str | Path, cwd: Path | None = None, quiet: bool = False) -> None:
    output = subprocess.DEVNULL if quiet else None
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, stdout=output)


def copy_tree(folder: Path) -> None:
    """The files of the repository as they are, without those that git ignores."""
    listed = "git ls-files -z --cached --others --exclude-standard".split()
    names = subprocess.run(listed, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def with_addresses(text: str, url: str, tag: str) -> str:
    """A page whose pictures and links to files of the repository are absolute."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!http)", rf"\g<1>{url}/raw/{tag}/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!http|#)", rf"\g<1>{url}/blob/{tag}/", text)


def state_addresses(tree: Path, url: str, version: str) -> None:
    """Project URLs in setup.cfg, and absolute links in the README, of an unpacked tree."""
    readme, setup = tree / "README.md", tree / "setup.cfg"
    readme.write_text(with_addresses(readme.read_text(), url, f"v{version}"))
    pages = {
        "Source": url,
        "Documentation": f"{url}/tree/v{version}/docs",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Security": f"{url}/security/advisories",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f"    {name} = {page}\n" for name, page in pages.items())
    text = setup.read_text()
    setup.write_text(text.replace("\n[options]\n", f"project_urls =\n{lines}\n[options]\n", 1))


def checked(folder: Path, version: str) -> list[Path]:
    """The two archives, once they hold what they should and nothing else."""
    wheel = folder / f"torch_dpbayes-{version}-py3-none-any.whl"
    source = folder / f"torch_dpbayes-{version}.tar.gz"
    modules = {path.relative_to(ROOT) for path in (ROOT / "torch_dpbayes").rglob("*.py")}
    with zipfile.ZipFile(wheel) as file:
        names = {Path(name) for name in file.namelist() if ".dist-info/" not in name}
        metadata = file.read(f"torch_dpbayes-{version}.dist-info/METADATA").decode()
    assert names == modules | {Path("torch_dpbayes/py.typed")}, names ^ modules
    assert f"\nVersion: {version}\n" in metadata
    with tarfile.open(source) as file:
        inside = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    pages = {path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")}
    wanted = modules | pages | {Path(name) for name in EXPLAINED_BY} | {Path("scripts/smoke.py")}
    assert wanted <= inside, wanted - inside
    assert not [path for path in inside if path.parts[:1] == ("tests",)]
    return [wheel, source]


def try_installed(archive: Path) -> None:
    """In an environment of its own, outside of the repository."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", "venv", cwd=Path(folder))
        python = Path(folder) / "venv/bin/python"
        run(python, "-m", "pip", "install", "--quiet", archive)
        run(python, "-W", "ignore", ROOT / "scripts/smoke.py", cwd=Path(folder))
    print(f"{archive.name}: installed and tried")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="the address of the repository")
    parser.add_argument("--install", action="store_true", help="install each and run smoke.py")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder for the archives")
    given = parser.parse_args()
    text = (ROOT / "torch_dpbayes/__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    given.to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        if given.url:
            state_addresses(tree, given.url.rstrip("/"), version)
        run(sys.executable, "-c", BUILD, given.to.resolve(), cwd=tree, quiet=True)
    for archive in checked(given.to.resolve(), version):
        print(archive.name)
        if given.install:
            try_installed(archive)


if __name__ == "__main__":
    main()
