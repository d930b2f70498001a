"""Stage `large`: 33B and 70B at int4, where they fit; if need be with a KV cache in 8 bits."""

from __future__ import annotations

from fasteagle.bench.gpu_check.models import opened, runtime
from fasteagle.bench.gpu_check.speed import measure_rows
from fasteagle.bench.gpu_check.stage import Context
from fasteagle.device import available_bytes
from fasteagle.loading.find_head import head_shape
from fasteagle.loading.memory import Setting, needed_bytes
from fasteagle.quant.scheme import int4_for

MODELS = ("vicuna-33b", "llama2-70b")
ROWS = ("plain", "eagle@5/4/15", "eagle@6/5/31")


def run(context: Context) -> None:
    for name in MODELS:
        model = opened(context, name)
        config = model.checkpoint.config
        length = runtime(context, "int4", 2048).seq_len_for(config.max_seq_len, name)
        head, scheme = head_shape(name, config), int4_for(config)
        kinds = [Setting(scheme, kv, length) for kv in ("auto", "int8")]
        needs = {kind.kv: needed_bytes(config, kind, head) for kind in kinds}
        free = available_bytes(context.device)
        kv = next((kv for kv, need in needs.items() if free is None or need <= free), None)
        if kv is None:
            least = min(needs.values()) / 1e9
            context.say(
                f"{name} is left out: int4 needs {least:.1f} GB, {(free or 0) / 1e9:.1f} free"
            )
            continue
        title = f"{name} int4" + (", kv int8" if kv == "int8" else "")
        measure_rows(context, model, "int4", ROWS, title, kv)
