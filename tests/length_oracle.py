"""Forecasts of lengths the slow way: plain Python, one rollout, one bin, one token at a time."""

from itertools import pairwise

EDGES = list(range(8)) + [quarter << octave for octave in range(1, 18) for quarter in (4, 5, 6, 7)] + [1 << 20]
BINS = list(pairwise(EDGES))


def bin_of(length):
    return next((number for number, (_, end) in enumerate(BINS) if length <= end), len(BINS) - 1)


def line(x, start, end, before, after):
    return before + (after - before) * (x - start) / (end - start)


def longer_than(above, x):
    """Value at x of what is known at the edges."""
    if x >= EDGES[-1]:
        return above[-1]
    number = next(number for number, (start, end) in enumerate(BINS) if start <= x < end)
    return line(x, *BINS[number], above[number], above[number + 1])


class Oracle:
    """What LengthModel says, with everything counted anew for each question."""

    def __init__(self, rollouts, running=(), *, window=2048, prompt_window=32, shrinkage=16.0):
        self.overall = self._overall([length for _, length in rollouts][-window:], running, window)
        self.of_prompt, self.counted = {}, {}
        for key, length in rollouts:
            self.of_prompt.setdefault(key, []).append(length)
        self.prompt_window, self.shrinkage = prompt_window, shrinkage

    @staticmethod
    def _overall(lengths, running, window):
        bins = [bin_of(length) for length in lengths]
        mean = (1024 + sum(sum(BINS[its_bin]) / 2 for its_bin in bins)) / (1 + len(lengths))
        unseen = [(1 + edge / mean) ** -2 for edge in EDGES[:-1]] + [0.0]
        survival = [1.0]
        for number, (start, end) in enumerate(BINS):
            ending = bins.count(number) + unseen[number] - unseen[number + 1]
            entering = sum(its_bin >= number for its_bin in bins) + unseen[number]
            if len(lengths) < window:
                for so_far in running:
                    so_far = min(so_far, EDGES[-2])
                    entering += 1.0 if so_far >= end else max(0.0, (so_far - start) / (end - start))
            survival.append(survival[-1] * (1 - ending / entering))
        return survival

    def above(self, key):
        """Rollouts above each edge that a request of this prompt is compared with."""
        if key not in self.counted:
            bins = [bin_of(length) for length in self.of_prompt.get(key, [])[-self.prompt_window :]]
            self.counted[key] = [
                sum(edge <= BINS[its_bin][0] for its_bin in bins) + self.shrinkage * share
                for edge, share in zip(EDGES, self.overall, strict=True)
            ]
        return self.counted[key]

    def survival(self, key, so_far, x):
        above = self.above(key)
        return longer_than(above, max(x, so_far)) / longer_than(above, so_far)

    def expected_remaining_tokens(self, key, so_far):
        """Sum over all tokens x >= so_far of P(length > x): an arithmetic series in each bin."""
        above, total = self.above(key), 0.0
        for number, (start, end) in enumerate(BINS):
            first = max(start, so_far)
            if first < end:
                last = longer_than(above, end - 1)
                total += (end - first) * (line(first, start, end, above[number], above[number + 1]) + last) / 2
        return total / longer_than(above, so_far)
