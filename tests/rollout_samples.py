"""Small rollouts and requests for the tests of the history, the drafter and plan_step."""

from das import Rollout, RolloutHistory, prompt_key

PROMPT, KEY = [1, 2, 3], prompt_key([1, 2, 3])


def rollout(response, step=None, *, prompt=PROMPT, **fields):
    return Rollout(prompt_token_ids=prompt, response_token_ids=response, training_step=step, **fields)


def filled(*rollouts, **settings):
    """A history that holds these rollouts."""
    history = RolloutHistory(**settings)
    history.add_many(rollouts)
    return history


def stored(history, key=KEY):
    """(training step, response) of the window's rollouts."""
    return [(r.training_step, r.response_token_ids.tolist()) for r in history.rollouts(key)]


def draft(drafter, request_id, max_draft_tokens=16, min_survival=0.0):
    """Draft for one request at a fixed price."""
    return drafter.draft([request_id], max_draft_tokens=[max_draft_tokens], min_survival=[min_survival])[request_id]


def run(drafter, request_id, response, *, prompt=PROMPT, step=None, **finish):
    """Run a whole request in one decode step, and return what it drafted at its start."""
    drafter.start(request_id, prompt_token_ids=prompt, training_step=step)
    drafted = draft(drafter, request_id).draft_token_ids
    drafter.extend(request_id, response)
    drafter.finish(request_id, **finish)
    return drafted


def scored(confidence):
    """How many predictions were right, and how many wrong."""
    num_predictions, num_right, _ = confidence.histogram.sum(axis=0)
    return num_right, num_predictions - num_right


def tree_of(history, key=KEY):
    """The SuffixTree of a prompt that was started and not evicted since."""
    return history.record_for(key).tree.tree


def count(history, context, token, key=KEY):
    """How often the prompt's tree has seen the token after the context, in either class."""
    return sum(tree_of(history, key).child_counts(context, token))
