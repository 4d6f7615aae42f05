"""Samples from the tiny model, for trainers whose own engine needs a GPU: no stop but the model's end."""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM


class Engine:
    """Answers each request with a sample of the model; `requests` is what it was given, in order."""

    def __init__(self, model_folder, *, max_tokens=24):
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self.max_tokens = max_tokens
        self.requests = []

    def sample(self, prompt_token_ids, named):
        """Return the response to a prompt, its end included. `named`: what the request names besides."""
        prompt = torch.tensor([list(prompt_token_ids)])
        with torch.no_grad():
            output = self.model.generate(prompt, do_sample=True, max_new_tokens=self.max_tokens, pad_token_id=31)
        response = output[0, prompt.shape[1] :].tolist()
        self.requests.append((list(prompt_token_ids), response, named))
        return response


class OpenRLHFEngine(Engine):
    """As OpenRLHF's RolloutRayActor answers its executors."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        response = self.sample(prompt_token_ids, sampling_params.extra_args)
        output = SimpleNamespace(token_ids=response, text="", finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])
