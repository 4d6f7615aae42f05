"""A small Llama in plain torch: weights under the names that engines load, forward passes, and sampling in batches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from task import CHARACTERS, END, MAX_RESPONSE_TOKENS, NUM_TOKENS
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]
Keys = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [requests, heads, tokens, 32]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": NUM_TOKENS,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,  # 32 wide: engines' CPU attention takes nothing narrower
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": END,
    "torch_dtype": "bfloat16",
}
_HIDDEN, _FEED, _HEADS, _LAYERS = 96, 256, 3, 3
_HEAD = _HIDDEN // _HEADS


def random_weights(seed: int) -> Weights:
    """Return weights to begin training with."""
    source = torch.Generator().manual_seed(seed)
    shapes = {"q": (_HIDDEN, _HIDDEN), "k": (_HIDDEN, _HIDDEN), "v": (_HIDDEN, _HIDDEN), "o": (_HIDDEN, _HIDDEN)}
    weights = {"model.embed_tokens.weight": torch.randn(NUM_TOKENS, _HIDDEN, generator=source) * 0.02}
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in shapes.items():
            weights[f"{at}self_attn.{name}_proj.weight"] = torch.randn(shape, generator=source) / math.sqrt(_HIDDEN)
        for name, shape in {"gate": (_FEED, _HIDDEN), "up": (_FEED, _HIDDEN), "down": (_HIDDEN, _FEED)}.items():
            weights[f"{at}mlp.{name}_proj.weight"] = torch.randn(shape, generator=source) / math.sqrt(shape[1])
        for name in ("o_proj", "down_proj"):  # residual branches begin small
            part = "self_attn" if name == "o_proj" else "mlp"
            weights[f"{at}{part}.{name}.weight"] *= 0.3
        for name in ("input", "post_attention"):
            weights[f"{at}{name}_layernorm.weight"] = torch.ones(_HIDDEN)
    weights["model.norm.weight"] = torch.ones(_HIDDEN)
    weights["lm_head.weight"] = torch.randn(NUM_TOKENS, _HIDDEN, generator=source) * 0.02
    return weights


def logits(weights: Weights, token_ids: Tensor, keys: Keys | None = None) -> Tensor:
    """Return the logits after each token.

    Args:
        token_ids: [requests, tokens]; all requests are equally long.
        keys: of the tokens before these, extended in place; None: there are none, and none are kept.
    """
    past = keys[0][0].shape[2] if keys else 0
    cosines, sines = _rotation(past, token_ids.shape[1])
    hidden = functional.embedding(token_ids, weights["model.embed_tokens.weight"])
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        normed = _norm(hidden, weights[f"{at}input_layernorm.weight"])
        query, key, value = (_heads(normed, weights[f"{at}self_attn.{name}_proj.weight"]) for name in "qkv")
        query, key = _rotate(query, cosines, sines), _rotate(key, cosines, sines)
        if keys is not None:
            if past:
                key, value = torch.cat((keys[layer][0], key), 2), torch.cat((keys[layer][1], value), 2)
                keys[layer] = key, value
            else:
                keys.append((key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=past == 0)
        mixed = mixed.transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ weights[f"{at}self_attn.o_proj.weight"].T
        normed = _norm(hidden, weights[f"{at}post_attention_layernorm.weight"])
        gate = functional.silu(normed @ weights[f"{at}mlp.gate_proj.weight"].T)
        up = normed @ weights[f"{at}mlp.up_proj.weight"].T
        hidden = hidden + (gate * up) @ weights[f"{at}mlp.down_proj.weight"].T
    return _norm(hidden, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def sample(weights: Weights, prompts: Sequence[Sequence[int]], source: torch.Generator) -> list[list[int]]:
    """Sample a response to each prompt at temperature 1; prompts are equally long. The end belongs to the response."""
    keys: Keys = []
    token_ids = torch.tensor(prompts)
    running = torch.arange(len(prompts))
    responses: list[list[int]] = [[] for _ in prompts]
    for _ in range(MAX_RESPONSE_TOKENS):
        with torch.no_grad():
            last = logits(weights, token_ids, keys)[:, -1].softmax(-1)
        token_ids = torch.multinomial(last, 1, generator=source)
        for request, token in zip(running.tolist(), token_ids[:, 0].tolist(), strict=True):
            responses[request].append(token)
        goes_on = token_ids[:, 0] != END
        if not goes_on.any():
            break
        if not goes_on.all():
            token_ids, running = token_ids[goes_on], running[goes_on]
            keys[:] = [(key[goes_on], value[goes_on]) for key, value in keys]
    return responses


def save(weights: Weights, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a folder that an engine loads: configuration, tokenizer of single characters, weights."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    names = [*CHARACTERS, "<end>", *(f"<unused{i}>" for i in range(NUM_TOKENS - END - 1))]
    tokenizer = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unused0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file(
        {name: tensor.detach().to(dtype).contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def load(file: Path) -> Weights:
    """Return the weights of a safetensors file, as float32."""
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(file).items()}


def _norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _heads(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).unflatten(2, (_HEADS, _HEAD)).transpose(1, 2)


def _rotation(start: int, length: int) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, _HEAD, 2) / _HEAD)
    angles = torch.arange(start, start + length)[:, None] * frequencies
    angles = torch.cat((angles, angles), 1)
    return angles.cos(), angles.sin()


def _rotate(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = vectors.chunk(2, -1)
    return vectors * cosines + torch.cat((-second, first), -1) * sines
