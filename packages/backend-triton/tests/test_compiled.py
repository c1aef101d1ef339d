"""The kernels compile for a Hopper, and take no more of it than the tiles' table counts on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED = 227 << 10  # bytes that a program may have; a multiprocessor has 1 KiB more, and keeps one for each program


def test_kernels_compile_for_a_hopper(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert all(kernel["shared"] <= SHARED for kernel in found.values()), found
    two = [kernel for name, kernel in found.items() if name == "forward" or name.startswith("student's")]
    assert len(two) == 7
    assert all(2 * (kernel["shared"] + 1024) <= SHARED + 1024 for kernel in two)  # two programs on a multiprocessor
