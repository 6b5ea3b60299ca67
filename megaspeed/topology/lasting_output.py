"""Standard output and error that still accept writes after their reader has ended.

With ``deepspeed ... | tee log``, Ctrl-C also ends ``tee``, and a terminal may be closed. Then every
write would raise an exception, and the run would end before it has saved.
"""

import errno
import os
import sys
from typing import Any, TextIO

_READER_GONE = (errno.EPIPE, errno.EIO)


def keep_output_open() -> None:
    """From now on, output is discarded without an error after its reader has ended."""
    sys.stdout = _Lasting(sys.stdout)
    sys.stderr = _Lasting(sys.stderr)


class _Lasting:
    """A text stream that switches to the null device after its reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._turn_away(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._turn_away(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _turn_away(self, error: OSError) -> None:
        if error.errno not in _READER_GONE:
            raise error
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, self._stream.fileno())
        os.close(nobody)
