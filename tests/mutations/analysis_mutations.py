# ruff: noqa: E501  a table
"""What is broken on purpose in logs and reports: one place each, and why it is wrong."""

from mutation import Mutation
from targets import (
    CONVERSATIONS,
    FORMATS,
    LOGGED,
    LOGS,
    ORIGINS,
    RECORDING,
    REPORT_HEADLINE,
    REPORT_PAGE,
    REPORT_TIMES,
    REPORT_TOKENS,
    SEQUENCE_LOGS,
    TORCH_ARCHIVE,
)

# fmt: off
ANALYSIS_MUTATIONS = [
    # ------------------------------------------------------------------------------------------------ logs
    Mutation(LOGS, "mixed-formats-read", "if found is not None and found is not own:", "if found is None:",
             "a row of another format is an error, not a guess"),
    Mutation(LOGS, "key-of-later-turns-lost", "rollout = with_changes(rollout, prompt_key=key)", "pass",
             "a later turn has the key of its conversation"),
    Mutation(FORMATS, "detection-in-another-order", "(DAS, OPEN_INSTRUCT, SLIME, NEMO_RL, PRIME_RL, VERL, OPENRLHF, AREAL, TRL)",
             "(DAS, OPEN_INSTRUCT, SLIME, NEMO_RL, PRIME_RL, VERL, OPENRLHF, TRL, AREAL)", "AReaL's rows have TRL's fields, too"),
    Mutation(SEQUENCE_LOGS, "padding-kept", "split_sequence(ids[:length], generated[:length]", "split_sequence(ids, generated",
             "what pads a batch was never said"),
    Mutation(TORCH_ARCHIVE, "values-of-earlier-samples-kept", "if type(value) is not str or len(value) > _MAX_SHARED_CHARACTERS:",
             "if False:", "one sample is in memory"),
    Mutation(TORCH_ARCHIVE, "samples-without-bound", "        self._num_values += num_values\n", "",
             "a file cannot ask for any amount of memory"),
    Mutation(CONVERSATIONS, "shortest-prefix", "number, start = self._numbers.get((length, read.digest()), number), length",
             "number, start = number or self._numbers.get((length, read.digest())), length", "the longest known prompt counts"),
    Mutation(LOGGED, "turns-side-by-side", "turns.setdefault(turn, {})", "turns.setdefault(0, {})",
             "a later turn's prompt tells how the earlier one goes on"),
    # ------------------------------------------------------------------------------------------------ the report
    Mutation(ORIGINS, "shortest-context", "range(len(tree.continuations(sequence, before)), 0, -1)",
             "range(1, len(tree.continuations(sequence, before)) + 1)", "the longest context that knows the token is told"),
    Mutation(ORIGINS, "path-ignored", "before = paths[parent] if parent >= 0 else []", "before = []",
             "a draft token follows those before it on its branch"),
    Mutation(RECORDING, "end-without-bonus-missed", "may_lack_bonus = num_emitted == len(draft) or request.position == request.pause",
             "may_lack_bonus = num_emitted == len(draft)", "the last token of a response may be a draft's"),
    Mutation(RECORDING, "padding-not-noted", "drafts.width * len(requests) - num_drafted", "0",
             "padding is computed, too"),
    Mutation(RECORDING, "part-of-a-pass", "if self._pass[0] >= num_running:", "if True:",
             "in lockstep a pass is made of many calls"),
    Mutation(RECORDING, "context-after-the-pass", "        num_context -= sum(map(len, emitted.values()))\n", "",
             "a pass reads what was there before it"),
    Mutation(REPORT_PAGE, "markup-in-scripts", '.replace("<", "\\\\u003c")', "", "no text of a log ends a script"),
    Mutation(REPORT_PAGE, "names-not-escaped", "first, *others = map(escape, cells)", "first, *others = cells",
             "a prompt's name is text"),
    Mutation(REPORT_TOKENS, "tokens-not-escaped", "escape(decode(token_id))", "decode(token_id)", "a token's text is text"),
    Mutation(REPORT_TIMES, "engine-price-without-drafts", "num_context_tokens=context, speculating=False)",
             "num_context_tokens=context)", "c_engine is not paid with speculation off"),
    Mutation(REPORT_HEADLINE, "any-gain-is-a-yes", "speedup * (1.0 - LEAST_GAIN) >= 1.0", "speedup >= 1.0",
             "less than a percent is within the error of a latency model"),
]
# fmt: on
