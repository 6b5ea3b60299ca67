"""The first import of a fork server, which ends it with its parent, even during further imports."""

import os

from megaspeed.topology.process_end import end_with_parent

end_with_parent(os.getppid())
