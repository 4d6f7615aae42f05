"""Writes slime_rollout_7.pt, a dump as slime writes it: `torch.save({"rollout_id", "samples"})` of `Sample.to_dict()`.

Field names and kinds of values are those of slime/utils/types.py (THUDM/slime, 0d234f3e); torch 2 is needed.
"""

from pathlib import Path

import numpy as np
import torch


def sample(index, prompt_ids, response_ids, **changes):
    fields = {
        "group_index": index // 2,
        "index": index,
        "prompt": "what is it",
        "tokens": [*prompt_ids, *response_ids],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "it is",
        "response_length": len(response_ids),
        "label": "it",
        "reward": 1.0,
        "loss_mask": None,
        "weight_versions": ["7"],
        "rollout_log_probs": [-0.5] * len(response_ids),
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": "completed",
        "metadata": {"samples": [{"tokens": [1, 2], "response_length": 1}], "n": 2**40},
        "generate_function_path": None,
        "train_metadata": None,
        "session_id": f"session-{index}",
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2},
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 3},
    }
    return fields | changes


SAMPLES = [
    sample(0, [1, 2, 3], [3, 300, 70_000]),
    sample(1, [1, 2, 3], [3, 1, 9, 9, 4], loss_mask=[1, 1, 0, 0, 1], status="truncated", reward=np.float64(0.5)),
    sample(2, [5, 6], [7], reward={"accuracy": 1.0}, rollout_routed_experts=np.zeros((3, 2, 2), np.int32)),
    sample(3, [5, 6], [8, 8], rollout_log_probs=torch.zeros(2), status="aborted"),
    sample(4, [5], list(range(2500))),
]

if __name__ == "__main__":
    torch.save({"rollout_id": 7, "samples": SAMPLES}, Path(__file__).parent / "slime_rollout_7.pt")
