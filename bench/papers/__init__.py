"""What papers on speculative decoding in RL report, computed anew with das: one module a paper."""
