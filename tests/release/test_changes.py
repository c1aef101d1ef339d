"""The gate on made-up repositories."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import changes

Git = Callable[..., None]


def write(root: Path, name: str, version: str = "0.1.0", entry: str = "- It is there.", source: str = "x = 1") -> Path:
    folder = root / "packages" / name
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {version}\n\n{entry}\n\n## 0.0.1\n\n- Before.\n")
    (folder / "src/module.py").write_text(source + "\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of two packages, the name of one the beginning of the other's; committed."""
    root = tmp_path / "repository"
    write(root, "lib")
    write(root, "lib-more")
    commit(root, "init", "-q", "-b", "main")
    return root


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path, *before: str) -> None:
    if before:
        git(root, *before)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")


def gate(root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = changes.main(["--root", str(root), *arguments])
    return code, capsys.readouterr().out


def test_the_first_release(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = gate(root, capsys)
    assert code == 0
    assert "lib 0.1.0: no tag lib-v*, so this is its first release\n" in said
    write(root, "lib", entry="")
    code, said = gate(root, capsys)
    assert code == 1
    assert "lib: CHANGELOG.md has no entry under a heading `## 0.1.0`" in said
    assert "lib-more:" not in said


def test_a_changed_package_needs_a_new_version(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "tag", "lib-v0.1.0")
    git(root, "tag", "lib-more-v0.1.0")
    code, said = gate(root, capsys)
    assert (code, "lib 0.1.0: as in lib-v0.1.0" in said) == (0, True)
    write(root, "lib", source="x = 2")  # uncommitted counts too
    code, said = gate(root, capsys)
    assert code == 1
    assert "lib: 1 of its files differ from lib-v0.1.0 (packages/lib/src/module.py, …) and its version is 0.1.0" in said
    assert "lib-more 0.1.0: as in lib-more-v0.1.0" in said
    write(root, "lib", "0.1.1", source="x = 2", entry="")
    assert gate(root, capsys)[0] == 1
    write(root, "lib", "0.1.1", source="x = 2")
    commit(root)
    code, said = gate(root, capsys)
    assert (code, "lib 0.1.1: 2 files differ from lib-v0.1.0" in said) == (0, True)


def test_tests_and_papers_need_no_release(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "tag", "lib-v0.1.0")
    (root / "packages/lib/README.md").write_text("more\n")
    assert gate(root, capsys)[0] == 0


def test_the_highest_tag_counts_and_strange_ones_do_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tag in ("lib-v0.9.0", "lib-v0.10.0", "lib-vnext", "lib-v0.11.0-notes"):
        git(root, "tag", tag)
    code, said = gate(root, capsys)
    assert code == 1
    assert "lib: its version is 0.1.0, below that of lib-v0.10.0" in said


def test_a_tag_of_another_branch_is_not_this_ones(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "checkout", "-qb", "other")
    write(root, "lib", "0.2.0")
    commit(root)
    git(root, "tag", "lib-v0.2.0")
    git(root, "checkout", "-q", "main")
    assert "no tag lib-v*" in gate(root, capsys)[1]


def test_against_a_branch(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "checkout", "-qb", "mine")
    write(root, "lib", source="x = 2")
    commit(root)
    code, said = gate(root, capsys, "--base", "main")
    assert code == 1
    assert "lib: it differs from main, and its CHANGELOG.md does not" in said
    write(root, "lib", source="x = 2", entry="- It is two.")
    assert gate(root, capsys, "--base", "main")[0] == 0
    with pytest.raises(SystemExit, match="git cannot compare with elsewhere"):
        gate(root, capsys, "--base", "elsewhere")


def test_a_shallow_clone_says_so(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "tag", "lib-v0.1.0")
    write(root, "lib", source="x = 2")
    commit(root)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-tags", root.as_uri(), str(shallow))
    code, said = gate(shallow, capsys)
    assert code == 0
    assert "the clone is shallow, so there may be one: git fetch --unshallow --tags" in said
    git(shallow, "fetch", "-q", "--unshallow", "--tags")
    assert gate(shallow, capsys)[0] == 1


def test_outside_of_git_it_reads_the_changelogs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # which may be in a repository, as nox's is
    write(tmp_path, "lib")
    code, said = gate(tmp_path, capsys)
    assert (code, said) == (0, "lib 0.1.0: not in a git repository, so nothing to compare with\n")


def test_this_repository(capsys: pytest.CaptureFixture[str]) -> None:
    code = changes.main([])
    assert code == 0, capsys.readouterr().out
