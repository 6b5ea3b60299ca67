"""Ends the fork server of multiprocessing with the process that started it, even if it is killed.

The server itself looks for this only after its imports, which take seconds. So it imports this
module first. No other process may import it.
"""

import os

from megaspeed.topology.process_end import end_with_parent

end_with_parent(os.getppid())
