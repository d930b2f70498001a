"""Trial of an untrusted text, in a process of its own that can be ended.

What reads it there may take hours or all memory, or recurse until its process crashes. Imports no
torch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

LONGEST_TRIAL = 60  # seconds of a trial that ends by itself: the machine may be busy
TRIAL_MEMORY = 2**31
TRIAL_STACK = 2**21  # less than a thread's, where tried texts then recurse safely
# Of Python's own path, and not of the folder in which the person is, whose files would be run.
PACKAGE = str(Path(__file__).resolve().parents[1])


def run_trial(module: str, values: list[Any], seconds: float) -> str | None:
    """Return what `main` of `module` prints in a process that reads `values` as JSON from stdin.

    Returns None where the process ended by an error; raises `subprocess.TimeoutExpired`.
    """
    code = f"import sys; sys.path.append({PACKAGE!r}); import {module} as trial; trial.main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=json.dumps(values).encode(), capture_output=True,
        timeout=seconds,
    )  # fmt: skip
    return None if done.returncode else done.stdout.decode(errors="replace")


def limit_process(seconds: int) -> None:
    """Lower the limits of this process, which may take `seconds` of a CPU.

    Hard limits that are less stay.
    """
    most_of = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: TRIAL_MEMORY,
        resource.RLIMIT_STACK: TRIAL_STACK,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in most_of.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
