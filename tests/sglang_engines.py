"""Real SGLang engines on a CPU, and what tests ask them."""

import json
import os
import time
from contextlib import contextmanager

from bench import tiny_llama

OPTIONS = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "attention_backend": "torch_verify",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "sleep_on_idle": True,  # else an idle engine keeps a core busy
    "max_running_requests": 16,
    "context_length": 160,
    "log_level": "warning",
}
NUM_SLOTS = 640  # of the cache: less than 12 requests of 64 tokens want with the room their drafts take


def trained_model(cache):
    """The folder of a trained model, made once and kept in pytest's cache."""
    folder = cache.mkdir("das-tiny-llama")
    if not (folder / "config.json").exists():
        tiny_llama.train(folder)
    return folder


@contextmanager
def engine(model, *, settings=None, **options):
    """An engine; with settings of das, if any, in the environment of its processes."""
    import sglang

    if settings is not None:
        os.environ["DAS_SGLANG"] = json.dumps(settings)
    running = None
    try:
        running = sglang.Engine(model_path=str(model), max_total_tokens=NUM_SLOTS, **OPTIONS | options)
        yield running
    finally:
        os.environ.pop("DAS_SGLANG", None)
        if running is not None:
            running.shutdown()


def generate(engine, prompts, sampling, **options):
    """The answers to prompts, under one or each its own sampling parameters."""
    return engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling, **options)


def tokens_of(answers):
    return [answer["output_ids"] for answer in answers]


def num_passes(answers):
    """Verification passes of each request; SGLang counts none of one that ended with its first token, the prefill's."""
    told = [answer["meta_info"] for answer in answers]
    return [0 if meta["completion_tokens"] == 1 else meta["spec_verify_ct"] for meta in told]


def statistics(engine):
    """What das says of itself in the server's information."""
    (state,) = engine.get_server_info()["internal_states"]
    return state["das"]


def call(engine, method, **parameters):
    """Call one of das' methods in the scheduler."""
    engine.collective_rpc(method, **parameters)


def update_weights(engine, model, *, version=None):
    """Load the weights of another folder, as a trainer's update does, under a version or none."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=str(model), weight_version=version, flush_cache=False)
    done = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(request, None))
    assert done[0], done
    for _ in range(100):  # refused until the last pass is processed
        if engine.flush_cache().success:
            return
        time.sleep(0.05)
    raise AssertionError("the cache could not be flushed")
