"""What sharing is for: four workers draft nearly as one that sees everything, and better than each by itself."""

from bench.rollouts import EXAMPLE
from bench.sharing_lag import epochs_of, lagged


def test_four_workers_that_share_reach_95_percent_of_one_process():
    """Of the example log every fourth prompt: 80 requests an epoch, of each prompt two on every worker."""
    epochs = [prompts[::4] for prompts in epochs_of(EXAMPLE)]
    one = lagged(epochs, num_workers=1, lag_steps=0)
    shared = lagged(epochs, num_workers=4, lag_steps=5)
    siloed = lagged(epochs, num_workers=4, lag_steps=None)
    assert [sums.num_emitted for sums in shared] == [sums.num_emitted for sums in one]
    shares = [
        [sums.tokens_per_step / of_one.tokens_per_step for sums, of_one in zip(side, one, strict=True)]
        for side in (shared, siloed)
    ]
    assert min(shares[0]) >= 0.95
    assert max(shares[1]) < 0.95
