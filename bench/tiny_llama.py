"""A Llama of 0.1 M parameters that adds up digits aloud, trained here in seconds: text that is worth drafting.

"3+5+7=" is answered by "3+5=8,8+7=15!" and an end token. It learns the form well and the sums badly, so rollouts of a
prompt share much, and sampling has something to choose.
"""

import random
from pathlib import Path

CHARACTERS = "\n0123456789+-*/=>:, x!()"
PAD, END = 24, 25
VOCABULARY = 26


def encode(text):
    return [CHARACTERS.index(character) for character in text]


def prompt(numbers):
    return encode("+".join(map(str, numbers)) + "=")


def response(numbers):
    total, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{total}+{number}={total + number}")
        total += number
    return [*encode(",".join(lines) + "!"), END]


def some_numbers(source):
    return [source.randint(1, 9) for _ in range(source.randint(2, 7))]


def prompts(count, *, seed=1):
    source = random.Random(seed)
    return [prompt(some_numbers(source)) for _ in range(count)]


def train(path: Path, *, num_steps=150, seed=0) -> Path:
    """Write a trained model in the format of transformers, and return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    source = random.Random(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / num_steps)
        rows = [prompt(numbers) + response(numbers) for numbers in (some_numbers(source) for _ in range(16))]
        tokens = torch.full((len(rows), max(map(len, rows))), PAD)
        for row, content in enumerate(rows):
            tokens[row, : len(content)] = torch.tensor(content)
        labels = tokens.masked_fill(tokens == PAD, -100)
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of single characters beside the model."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTERS, "<pad>", "<end>"]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>").save_pretrained(path)


def next_token_probabilities(path: Path):
    """Return a function from rows of token ids, of one length, to the model's distributions after each."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def probabilities(rows):
        with torch.no_grad():
            return torch.softmax(model(torch.tensor(rows)).logits[:, -1].double(), dim=-1).numpy()

    return probabilities


def update(path: Path, updated: Path, *, size=0.02, seed=1) -> Path:
    """Write the model of one folder into another after an update: each weight moves by `size` spreads of its matrix."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(updated)
    save_tokenizer(updated)
    return updated
