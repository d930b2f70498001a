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

CACHES = {  # environment variables, and the folder of each
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "XDG_CACHE_HOME": "cache",
    "CUDA_CACHE_PATH": "cuda",
}
MOST_SECONDS = 15.0  # from the loaded model to the first token, cold


def run(context: Context) -> None:
    with tempfile.TemporaryDirectory(prefix="cold-start-") as folder:
        for caches in ("empty", "warm"):
            found = one_start(context, Path(folder))
            context.save(**{caches: found})
            context.say(
                f"caches {caches}: {found['process_s']:.1f} s to the first token, of which imports "
                f"{found['import_s']:.1f}, loading {found['load_s']:.1f}, "
                f"first token {found['first_token_s']:.1f}"
            )
    cold = context.found["empty"]["first_token_s"]
    if not context.dry_run:
        require(
            cold <= MOST_SECONDS, f"first token {cold:.1f} s after load, {MOST_SECONDS:g} wanted"
        )


def one_start(context: Context, folder: Path) -> dict[str, Any]:
    """What a fresh process measures whose caches lie in `folder`."""
    environment = {name: str(folder / place) for name, place in CACHES.items()}
    command = [sys.executable, "-m", "fasteagle.bench.gpu_check.first_token"]
    command += ["--dry-run"] if context.dry_run else []
    begin = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=max(1.0, context.seconds_left - 5),
        env={**os.environ, **environment},
    )
    print(done.stderr, flush=True)
    require(done.returncode == 0, f"first_token failed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": round(time.monotonic() - begin, 2)}
