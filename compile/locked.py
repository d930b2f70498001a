"""The lock that captures of CUDA graphs and first runs of compiled code take in turns.

Code that is compiled is timed, and timing waits for the whole device, which spoils a capture in
another thread.
"""

import threading

COMPILING = threading.RLock()
