"""Runs `logitless` commands in forked children, so that fifty kills do not cost fifty imports of torch.

A line on stdin, `{"jobs": [{"argv", "env", "log", "die_at", "watch"}, ...]}`, starts one child for each job; the answer
is a line `{"pids": [...]}`, and when all have ended a line `{"codes": [...]}`. With `die_at`, a child kills itself just
before its so-manyth change of a file or folder whose path begins with `watch`: a crash between any two of its steps.
matplotlib is not there: the picture of a mismatch takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib import import_module
from itertools import count
from typing import Any

import logitless
from logitless.cli import main

# All that a run imports, on its way or only at the end.
IMPORTED = (
    "logitless_hf.score.runner",
    "logitless_torch",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


def die_at(number: int, watch: str) -> None:
    seen = count()

    def hook(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if (opened or event in CHANGES) and str(args[0]).startswith(watch) and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def child(job: dict[str, Any]) -> int:
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(job["env"])
    sys.argv = ["logitless", *job["argv"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs this behind its back ignores it
    if job["die_at"] is not None:
        die_at(job["die_at"], job["watch"])
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def ended(pids: list[int]) -> list[int]:
    """The exit codes; as under torchrun, a rank that fails ends the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in pids if codes[pid] else ():
            if other not in codes:
                os.kill(other, signal.SIGTERM)
    return [codes[pid] for pid in pids]


def serve() -> None:
    for line in sys.stdin:
        pids = []
        for job in json.loads(line)["jobs"]:
            pids.append(os.fork())
            if pids[-1] == 0:
                code = child(job)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pids": pids}), flush=True)
        print(json.dumps({"codes": ended(pids)}), flush=True)


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    logitless.backends()
    print("ready", flush=True)
    serve()
