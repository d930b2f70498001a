"""A process that loads 7B int4 and answers: prints its times as one line of JSON.

What a person waits for behind the loaded weights is the first token's: kernels are compiled and
cycles captured in that time. Inductor's code is not waited for: a chat compiles it meanwhile.
Started by the stage `cold_start`; with --dry-run a tiny model on the CPU.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

BEGIN = time.perf_counter()


def main() -> None:
    # Their imports are part of what is measured.
    import torch

    from fasteagle.bench.gpu_check.models import opened, replaying_engine, runtime, use_tree
    from fasteagle.bench.gpu_check.stage import Context
    from fasteagle.options import SamplingParams

    imported = time.perf_counter()
    context = Context(Path("unused"), Path("unused"), 600, dry_run="--dry-run" in sys.argv)
    prepared = opened(context, "llama2-7b").prepared(runtime(context, "int4"), lambda line: None)
    engine = replaying_engine(context, prepared)
    use_tree(engine, prepared)
    if not engine.on_cpu:
        torch.cuda.synchronize(engine.device)
    loaded = time.perf_counter()
    engine.compile_ahead()  # as a chat does when it has loaded
    compiled = time.perf_counter()
    cycles = engine.generate(list(range(5, 69)), SamplingParams(), 32)
    next(cycles)
    first = time.perf_counter()
    n_later = sum(map(len, cycles))
    times = {
        "import_s": imported - BEGIN,
        "load_s": loaded - imported,
        "first_token_s": first - loaded,  # kernels included
        "compile_s": compiled - loaded,  # of these, ahead
        "later_ms_a_token": 1e3 * (time.perf_counter() - first) / max(1, n_later),
    }
    print(json.dumps({name: round(value, 3) for name, value in times.items()}))


if __name__ == "__main__":
    main()
