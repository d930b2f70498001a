"""Lock held during a CUDA graph capture, or during the first run of compiled code.

Compilation times code, and timing waits for the whole device, which spoils a capture in another
thread.
"""

import threading

COMPILING = threading.RLock()
