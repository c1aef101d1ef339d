"""One run at a time: a lock on a file that ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO

__all__ = ["hold"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def hold(path: Path) -> IO[bytes] | None:
    """Lock the file at `path` until the returned file is closed; None if another run holds it.

    Where there are no such locks, on Windows and some network file systems, nothing is held and every call succeeds.
    """
    while True:
        file = path.open("ab")
        try:
            if not _lock(file):
                file.close()
                return None
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()  # the run that held it ended between our steps and took it away: lock the one there now


def _lock(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
