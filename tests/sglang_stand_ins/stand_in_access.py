"""Ways to look at das inside a running scheduler, and to break it, from a test: by `engine.collective_rpc`."""

import json
import sys
from pathlib import Path


def register():
    """Entry point of SGLang's plugins: gives the scheduler two methods, where there is a scheduler."""
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is not None:
        scheduler.Scheduler.break_das = _break_das
        scheduler.Scheduler.show_das_history = _show_das_history


def _break_das(scheduler, kind):
    """Let the drafter's next call of a kind raise; `das_forget` brings a new drafter, which is whole."""
    drafter = scheduler.draft_worker.drafting._drafter
    names = {"plan": "draft", "extend": "extend_batch", "finish": "finish"}

    def raising(*args, **options):
        raise RuntimeError("broken on purpose")

    setattr(drafter, names[kind], raising)


def _show_das_history(scheduler, path):
    """Write the prompt and the response of every rollout in the history."""
    history = scheduler.draft_worker.drafting.history
    rollouts = [
        [rollout.prompt_token_ids.tolist(), rollout.response_token_ids.tolist()]
        for key in history.prompt_keys()
        for rollout in history.rollouts(key)
    ]
    Path(path).write_text(json.dumps(rollouts), encoding="utf-8")
