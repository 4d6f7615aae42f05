"""Requests as the plugin reads SGLang's, and a decode loop as SGLang runs it, without SGLang."""

from array import array
from types import SimpleNamespace

END = 9


class EngineRequest:
    """The attributes of SGLang's `Req` that `das_sglang.engine_request` reads."""

    def __init__(self, rid, prompt, *, max_new_tokens=64, **sampling):
        self.rid = rid
        self.origin_input_ids_unpadded = self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.finished_len = None
        self.finished_reason = None
        self.extra_key = self.lora_id = self.custom_logit_processor = self.tokenizer = None
        self.eos_token_ids = {END}
        defaults = {
            "custom_params": None,
            "ignore_eos": False,
            "stop_token_ids": None,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": 0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
        self.sampling_params = SimpleNamespace(**defaults | sampling)

    @property
    def output_ids_through_stop(self):
        return self.output_ids[: self.finished_len]

    def finish(self, length=None):
        self.finished_len = len(self.output_ids) if length is None else length
        self.finished_reason = type("FINISH_LENGTH", (), {})()


def decode(drafting, requests, responses, *, overlap, weight_version="default"):
    """Run requests to the end of their responses, and return how many steps that took.

    As SGLang does: the first token comes from the prefill, a step emits what it accepts of a draft and one token more,
    ends are found when results are processed, which with `overlap` is a step later.
    """
    drafting.prefill(requests)
    emitted = [[response[0]] for response in responses]  # of the last step, not processed yet
    running = list(range(len(requests)))
    lengths = [1] * len(requests)
    num_steps = 0

    def process(row):
        request = requests[row]
        request.output_ids.extend(emitted[row])
        if len(request.output_ids) >= len(responses[row]):
            request.finish(len(responses[row]))
            drafting.finish(request.rid)
            return True
        return False

    while running:
        if not overlap:
            running = [row for row in running if not process(row)]
            if not running:
                break
        tails = [list(emitted[row]) if overlap else [] for row in running]
        plan = drafting.plan([requests[row] for row in running], tails, weight_version=weight_version)
        num_steps += 1
        before = {row: list(emitted[row]) for row in running}
        for row, draft in zip(running, plan.drafts, strict=True):
            # What follows the response is whatever an engine samples before it finds the end.
            future = [*responses[row][lengths[row] :], 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]
            assert draft is None or len(draft) <= plan.width
            accepted, last = 0, -1
            for node, (token, parent) in enumerate(
                zip(draft.draft_token_ids, draft.parents, strict=True) if draft is not None else ()
            ):
                if parent == last and token == future[accepted]:
                    accepted, last = accepted + 1, node
            emitted[row] = future[: accepted + 1]
            lengths[row] += accepted + 1
        if overlap:
            after = {row: emitted[row] for row in running}
            still = []
            for row in running:
                emitted[row] = before[row]
                if not process(row):
                    still.append(row)
                emitted[row] = after[row]
            running = still
    return num_steps
