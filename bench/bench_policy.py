"""What a budget policy itself costs a decode step: CPU time of its calls for 256 running requests. No peers.

    python -m bench.bench_policy [--log FILE] [--policies length-aware ...]

A real replay: prompts with 16 rollouts of history, places refilled, the latency learned from the times of the decode
steps where a policy learns it. What `plan_step` asks of a policy is timed by the thread's own CPU clock.
"""

import argparse
from time import perf_counter, thread_time_ns
from typing import Any

import das
from bench.decode import Decode
from bench.harness import Job, Row, measure_all, parser, percentile, print_table
from bench.policies import FAMILIES
from bench.rollouts import prompts_of_size, shuffled_targets
from bench.sides import Das
from das.budget import FinishedRollouts, FloatArray, IntArray, RunningRequests

POLICIES = [name for name, family in FAMILIES.items() if not family.is_ceiling]
BAR_US = 150
LATENCY = das.LatencyModel(c_base_ms=9.281, c_tok_ms=0.04558, c_kv_ms=1.77e-5)


class TimedPolicy:
    """A policy, and the CPU time of its calls since the last decode step."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._observe_finished = getattr(policy, "observe_finished", None)
        self._before_s = perf_counter()
        self.spent_us = 0.0

    def _timed(self, call: Any, *arguments: Any, **named: Any) -> Any:
        start_ns = thread_time_ns()
        found = call(*arguments, **named)
        self.spent_us += (thread_time_ns() - start_ns) / 1000
        return found

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """As the policy does."""
        caps_and_prices: tuple[IntArray, FloatArray] = self._timed(self._policy.budgets, requests)
        return caps_and_prices

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """As the policy does, told how long the decode step took."""
        now_s = perf_counter()
        self._timed(self._policy.observe, drafted, accepted, step_ms=1000 * (now_s - self._before_s))
        self._before_s = now_s

    def observe_finished(self, finished: FinishedRollouts) -> None:
        """As the policy does, if it cares."""
        if self._observe_finished is not None:
            self._timed(self._observe_finished, finished)

    def state(self) -> dict[str, Any]:
        """Not timed."""
        state: dict[str, Any] = self._policy.state()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Not timed."""
        self._policy.load_state(state)

    def __repr__(self) -> str:
        return repr(self._policy)


def measure(job: Job) -> Row:
    """One policy, at the first of its settings."""
    family = FAMILIES[job["policy"]]
    policy = TimedPolicy(family.make(family.settings[0], latency=LATENCY))
    prompts = prompts_of_size(job["log"], num_tokens=job["tokens"])
    side = Das(policy)
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, shuffled_targets(prompts, job["seed"]), max_running=job["running"])
    spent_us: list[float] = []
    while decode.num_running == job["running"] and len(spent_us) < job["steps"]:
        policy.spent_us = 0.0
        decode.step()
        spent_us.append(policy.spent_us)
    if not spent_us:
        raise ValueError(f"the log has too few rollouts for {job['running']} to run at once")
    return {"settings": side.settings(), "num_steps": len(spent_us), "us_per_step": spent_us}


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Each policy once."""
    return [
        {
            "policy": policy,
            "tokens": 60_000 if options.smoke else 1_000_000,
            "running": 32 if options.smoke else options.running,
            "steps": options.steps,
            "seed": options.seed,
            "log": str(options.log.resolve()),
        }
        for policy in options.policies
    ]


def print_costs(rows: list[Row]) -> None:
    """A line a policy."""
    print_table(
        f"CPU time of the policy, us a decode step (bar: {BAR_US} at 256 running)",
        ["policy", "running", "steps", "p50", "p90", "p99", "mean"],
        [
            [
                row["job"]["policy"],
                row["job"]["running"],
                row["num_steps"],
                *(percentile(row["us_per_step"], percent) for percent in (50, 90, 99)),
                sum(row["us_per_step"]) / row["num_steps"],
            ]
            for row in rows
            if "us_per_step" in row
        ],
    )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.split("\n", 1)[0])
    options.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    options.add_argument("--running", type=int, default=256, help="requests at once (%(default)s)")
    options.add_argument("--steps", type=int, default=500, help="decode steps (%(default)s)")
    chosen = options.parse_args()
    print_costs(measure_all("bench_policy", jobs_of(chosen), chosen))


if __name__ == "__main__":
    main()
