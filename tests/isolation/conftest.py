"""The venvs that `nox -s isolation` makes, one for each package."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BIN = "Scripts" if os.name == "nt" else "bin"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_in(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run_in(package, command, *arguments)`: runs a command of that package's venv, away from the working tree."""
    if "LOGITLESS_VENVS" not in os.environ:
        pytest.fail("these tests need the venvs that `nox -s isolation` makes")
    venvs = Path(os.environ["LOGITLESS_VENVS"]).resolve()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOGITLESS", "VIRTUAL"))
    }
    clean |= {"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}

    def run(
        package: str, command: str, *arguments: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(venvs / package / BIN / command), *arguments],
            cwd=elsewhere,
            env={**clean, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def python_in(run_in: Run) -> Callable[[str, str], str]:
    """`python_in(package, code)`: what the code printed in that venv; fails where it raised."""

    def python(package: str, code: str) -> str:
        done = run_in(package, "python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return python
