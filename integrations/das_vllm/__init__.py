"""das in vLLM: a proposer for `speculative_config`, and a general plugin that connects it to its model runner.

    speculative_config={"method": "custom_class", "model": "das_vllm.DasProposer", "num_speculative_tokens": 16}

Installed, but not selected there, it does nothing. Importing it imports neither vLLM nor torch.
"""

from das_vllm.proposer import DasProposer
from das_vllm.settings import Settings, read_settings

__all__ = ["DasProposer", "Settings", "read_settings"]
