"""Standard output and error that outlive their readers.

``deepspeed ... | tee log``: Ctrl-C ends ``tee`` too, and a terminal may close. Without a reader
every line that is written raises an exception, and the run would die before it has saved.
"""

import errno
import os
import sys
from typing import Any, TextIO

_READER_GONE = (errno.EPIPE, errno.EIO)


def keep_output_open() -> None:
    """From now on, what nobody reads any more is lost in silence."""
    sys.stdout = _Lasting(sys.stdout)
    sys.stderr = _Lasting(sys.stderr)


class _Lasting:
    """A text stream that turns to the null device once its reader has gone."""

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
