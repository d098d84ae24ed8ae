"""Runs in the peers' environment: transformers on the same jobs, in each of these dtypes, one JSON object.

`python torch_steps.py DIRECTORY THREADS DTYPE...`: the figures are those of the fastest dtype, job by job.
"""

import json
import sys
import time
from typing import Any

PROMPT, STEPS, BATCH = 512, 64, 16


def main(directory: str, threads: int, dtypes: list[str]) -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]
    import transformers  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(threads)
    kind: Any = transformers
    found: dict[str, dict[str, float]] = {}
    for name in dtypes:
        model = kind.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, name)).eval()
        with torch.inference_mode():
            found[name] = measured(torch, model)
    best: dict[str, float] = {}
    for key in found[dtypes[0]]:
        values = [row[key] for row in found.values()]
        best[key] = min(values) if key.endswith("_ms") else max(values)
    print(json.dumps(best))


def measured(torch: Any, model: Any) -> dict[str, float]:
    def ids(rows: int, columns: int) -> Any:
        return torch.randint(3, model.config.vocab_size, (rows, columns))

    prompt = ids(1, PROMPT)
    model(prompt[:, :64])
    start = time.perf_counter()
    model(prompt, logits_to_keep=1)
    row = {f"pp{PROMPT}_tok_s": PROMPT / (time.perf_counter() - start)}
    for batch, key in ((1, f"tg{STEPS}"), (BATCH, f"tg{STEPS}_b{BATCH}")):
        cache = model(ids(batch, STEPS), use_cache=True, logits_to_keep=1).past_key_values
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            cache = model(ids(batch, 1), past_key_values=cache, use_cache=True).past_key_values
            times.append(time.perf_counter() - start)
        row[f"{key}_tok_s"] = batch * STEPS / sum(times)
        if batch == 1:
            times.sort()
            row["spread_ms"] = (times[-1 - STEPS // 100] - times[STEPS // 2]) * 1e3
    return row


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
