"""On real rollouts, predicted probabilities can be trusted from the first epoch on; replay tells."""

import json
from collections import Counter
from pathlib import Path

import pytest

from das import PriceBudget, Rollout
from das.analysis import read_log
from das.analysis.replay import replay

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


def pseudo_epochs(log, size):
    """Cut the rollouts of each prompt, in order of training step, into epochs of `size` samples."""
    seen = Counter()
    for rollout in sorted(log, key=lambda rollout: rollout.training_step):
        epoch = seen[rollout.key] // size
        seen[rollout.key] += 1
        yield Rollout(
            prompt_token_ids=rollout.prompt_token_ids,
            response_token_ids=rollout.response_token_ids,
            training_step=epoch,
            reward=rollout.reward,
        )


@pytest.fixture(scope="module")
def replayed():
    log = [record.rollout for record in read_log(EXAMPLE)]
    return replay(pseudo_epochs(log, 8), policy=PriceBudget(min_survival=0.15))


def test_probabilities_can_be_trusted_on_real_rollouts_from_the_first_epoch_on(replayed):
    first, *later = (batch.reliability for batch in replayed.batches)
    assert first.expected_calibration_error <= 0.06
    assert all(one.expected_calibration_error <= 0.03 for one in later)
    for one in (first, *later, replayed.reliability):
        assert one.brier_score < 0.75 * one.base_rate_brier_score
        assert one.num_predictions > 100_000


def test_the_total_is_the_sum_of_the_batches(replayed):
    parts = [batch.reliability for batch in replayed.batches]
    total = replayed.reliability
    num_predictions = sum(part.num_predictions for part in parts)
    assert total.num_predictions == num_predictions
    for name in ("brier_score", "base_rate"):
        weighted = sum(part.num_predictions * getattr(part, name) for part in parts) / num_predictions
        assert getattr(total, name) == pytest.approx(weighted, abs=1e-6)
    told = json.loads(json.dumps(replayed.as_dict()))
    assert told["total"]["reliability"]["num_predictions"] == num_predictions
    assert [len(batch["reliability"]["bins"]) for batch in told["batches"]] == [15] * len(parts)
