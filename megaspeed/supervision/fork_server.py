"""The first import of a fork server: ends it with its parent, even during its other imports."""

import os

from megaspeed.supervision.process_end import end_with_parent

end_with_parent(os.getppid())
