"""Everything that wants a GPU, in one run of at most 30 minutes.

python scripts/gpu_check.py --out DIR
python scripts/gpu_check.py --out DIR --stages start,kernels,profile --minutes 8
python scripts/gpu_check.py --out DIR --dry-run          # on the CPU, with tiny shapes

DIR/gpu_check.json is rewritten after every stage, and keeps the stages of an earlier run that are
not run again; DIR/gpu_check.md is the same for BENCHMARKS.md, DIR/gpu_check.log what was printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def use_checkout() -> None:
    """Let this process and those it starts import the package from here, installed or not."""
    root = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, root)
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([root, others] if others else [root])


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every stage ended well, 1 if one did not, 2 for wrong arguments."""
    from fasteagle.bench.gpu_check.check import run_check
    from fasteagle.bench.gpu_check.plan import STAGE_NAMES, STAGES, CheckOptions
    from fasteagle.bench.gpu_check.report import summary
    from fasteagle.errors import FasteagleError

    stages = "\n".join(f"  {stage.name:<11} {stage.what}" for stage in STAGES)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nstages:\n{stages}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--stages", default=",".join(STAGE_NAMES), help="comma list")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it  [30]")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--model", help="of the stage head  [the default model]")
    given = parser.parse_args(arguments)
    try:
        options = CheckOptions(
            out=given.out,
            stages=tuple(name.strip() for name in given.stages.split(",") if name.strip()),
            minutes=given.minutes,
            dry_run=given.dry_run,
            model=given.model,
        )
        record = run_check(options)
    except FasteagleError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print("\n".join(summary(record)))
    print(f"record: {options.out / 'gpu_check.json'}")
    return int(any(entry["error"] for entry in record["stages"]))


if __name__ == "__main__":
    use_checkout()
    sys.exit(main())
