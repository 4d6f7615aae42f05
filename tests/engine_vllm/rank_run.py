"""One rank of an engine that schedules on each rank, by torchrun: rank_run.py MODEL OUT; the second rank is slowed."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from engine_runs import counters, engine, generate, recorded_drafts, runner_of, set_environment, token_ids, workload


def slow_down(drafter: Any) -> None:
    """Let the drafter take two milliseconds longer a step."""
    propose = drafter.propose

    def slowed(*args: object, **kwargs: object) -> Any:
        time.sleep(0.002)
        return propose(*args, **kwargs)

    drafter.propose = slowed


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    set_environment()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    cases = [case for case in workload() if case.parameters["temperature"] == 0.0]
    with engine(model, tensor_parallel_size=2, distributed_executor_backend="external_launcher") as llm:
        drafter = runner_of(llm).drafter
        if rank == 1:
            slow_down(drafter)
        with recorded_drafts(llm) as drafts:
            outputs = [generate(llm, cases) for _ in range(2)]
        found = {
            "outputs": [{name: token_ids(output) for name, output in epoch.items()} for epoch in outputs],
            "drafts": drafts,
            "fault": drafter.fault,
            "policy": repr(drafter.policy),
            "accepted": counters(llm)["accepted"],
        }
    (out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
