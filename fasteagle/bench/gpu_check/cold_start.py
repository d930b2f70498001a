"""Stage `cold_start`: seconds from a fresh process to the first token, caches empty and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.errors import FasteagleError

CACHES = {  # environment variables, and the folder of each
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "cache",
    "CUDA_CACHE_PATH": "cuda",
}
MOST_SECONDS = 15.0  # from loaded weights to the first token, kernels compiled in between


def run(context: Context) -> None:
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        for caches in ("empty", "warm"):
            found = one_start(context, Path(folder), caches)
            context.save(**{caches: found})
            context.say(
                f"caches {caches}: {found['process_s']:.1f} s in all: imports "
                f"{found['import_s']:.1f}, loading {found['load_s']:.1f}, then to the first token "
                f"{found['first_token_s']:.1f}, of which kernels compiled ahead "
                f"{found['compile_s']:.1f}"
            )
    cold = context.found["empty"]["first_token_s"]
    context.say(f"first token {cold:.1f} s after load with empty caches, asked <= {MOST_SECONDS:g}")
    if not context.dry_run:
        require(
            cold <= MOST_SECONDS, f"first token {cold:.1f} s after load, {MOST_SECONDS:g} wanted"
        )


def one_start(context: Context, folder: Path, caches: str) -> dict[str, Any]:
    """What a fresh process measures whose caches lie in `folder`.

    Raises `FasteagleError` where it fails or the time is over.
    """
    environment = {name: str(folder / place) for name, place in CACHES.items()}
    command = [sys.executable, "-m", "fasteagle.bench.gpu_check.first_token"]
    command += ["--dry-run"] if context.dry_run else []
    begin = time.monotonic()
    limit = max(1.0, context.seconds_left - 5)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired as error:
        held = error.stderr or b""  # bytes, although text was asked for
        said = (held if isinstance(held, str) else held.decode(errors="replace")).strip()
        print(said, flush=True)
        last = f": {said.splitlines()[-1][:200]}" if said else ""
        raise FasteagleError(f"caches {caches}: not done after {limit:.0f} s{last}") from None
    print(done.stderr, flush=True)
    require(done.returncode == 0, f"first_token failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": round(time.monotonic() - begin, 2)}
