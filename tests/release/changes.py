"""The gate: a package that has changed since its last release has a new version and says so in its CHANGELOG.

    python tests/release/changes.py [--base BRANCH] [--root FOLDER]

A release is a tag `DIST-vVERSION`. What counts as a change is what is installed: src/ and pyproject.toml. With --base,
a package that differs from that branch must also differ from it in its CHANGELOG. Where nothing can be compared, in a
shallow clone without tags or outside of git, it says so and only reads the CHANGELOGs. The exit code is 1 if a package
lacks something.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Package", "check", "packages"]

INSTALLED = ("src", "pyproject.toml")


@dataclass(frozen=True)
class Package:
    """One package of the working tree."""

    folder: Path
    name: str
    version: str

    def entry(self) -> str:
        """What its CHANGELOG says of this version; empty if nothing."""
        path = self.folder / "CHANGELOG.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found = re.search(rf"^## {re.escape(self.version)}\b(?!\.)[^\n]*\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        return found[1].strip() if found else ""


class Git:
    """What the gate asks of the repository at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def ask(self, *arguments: str, code: int = 0) -> str | None:
        """What git prints; None if it ends with another code."""
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == code else None

    def last_release(self, name: str) -> Version | None:
        """The highest version among the package's tags that HEAD comes from; in a shallow clone among all of them."""
        merged = [] if self.shallow() else ["--merged", "HEAD"]
        versions = []
        for tag in (self.ask("tag", "--list", f"{name}-v*", *merged) or "").split():
            try:
                versions.append(Version(tag.removeprefix(f"{name}-v")))
            except InvalidVersion:
                continue  # another package's, whose name goes on, or no release
        return max(versions, default=None)

    def shallow(self) -> bool:
        """Whether history, and with it tags, may be lacking."""
        return self.ask("rev-parse", "--is-shallow-repository") == "true"

    def changed(self, since: str, *paths: Path) -> list[str]:
        """Files under `paths` that differ from that commit, in the working tree."""
        names = self.ask("diff", "--name-only", since, "--", *map(str, paths))
        if names is None:
            raise SystemExit(f"changes: git cannot compare with {since}; fetch it, with its tags")
        return names.split("\n") if names else []


def packages(root: Path) -> list[Package]:
    """Every package of the tree."""
    found = []
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        found.append(Package(path.parent, project["name"], project["version"]))
    return found


def check(package: Package, git: Git, base: str | None = None) -> tuple[str, list[str]]:
    """What a package was compared with, and what it lacks."""
    lacks = []
    if not package.entry():
        lacks.append(f"CHANGELOG.md has no entry under a heading `## {package.version}`; write what changed for a user")
    installed = [package.folder / name for name in INSTALLED]
    if base is not None and git.changed(base, *installed) and not git.changed(base, package.folder / "CHANGELOG.md"):
        lacks.append(f"it differs from {base}, and its CHANGELOG.md does not; add a line")
    last = git.last_release(package.name)
    if git.ask("rev-parse", "--git-dir") is None:
        return "not in a git repository, so nothing to compare with", lacks
    if last is None:
        shallow = "; the clone is shallow, so there may be one: git fetch --unshallow --tags" if git.shallow() else ""
        return f"no tag {package.name}-v*, so this is its first release{shallow}", lacks
    tag = f"{package.name}-v{last}"
    changed = git.changed(tag, *installed)
    if changed and Version(package.version) <= last:
        lacks.append(
            f"{len(changed)} of its files differ from {tag} ({changed[0]}, …) and its version is {package.version}; "
            f"give it one above {last} in pyproject.toml"
        )
    if not changed and Version(package.version) < last:
        lacks.append(f"its version is {package.version}, below that of {tag}")
    return f"{len(changed)} files differ from {tag}" if changed else f"as in {tag}", lacks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a branch or commit, such as origin/main")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2])
    asked = parser.parse_args(arguments)
    git, bad = Git(asked.root), 0
    for package in packages(asked.root):
        against, lacks = check(package, git, asked.base)
        print(f"{package.name} {package.version}: {against}")
        for lack in lacks:
            print(f"  {package.folder.name}: {lack}")
        bad += len(lacks)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
