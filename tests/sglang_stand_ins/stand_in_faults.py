"""A way to break das inside a running scheduler, from a test: `engine.collective_rpc("break_das", kind="plan")`."""

import sys


def register():
    """Entry point of SGLang's plugins: gives the scheduler a method, where there is a scheduler."""
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is not None:
        scheduler.Scheduler.break_das = _break_das


def _break_das(scheduler, kind):
    """Let the drafter's next call of a kind raise; a new history brings a new drafter, which is whole."""
    drafter = scheduler.draft_worker.drafting._drafter
    names = {"plan": "draft", "extend": "extend_batch", "finish": "finish"}

    def raising(*args, **options):
        raise RuntimeError("broken on purpose")

    setattr(drafter, names[kind], raising)
